"""What share of the backward pass of two consecutive units was spent on what: the paper's Figure 3 in
figures, from a trace that `tagc train --trace` wrote. tagc.report.traces, which draws the same windows, does
the work."""

import dataclasses
import sys

from common import ROOT, LabError

sys.path.insert(0, str(ROOT / "python"))
from tagc.report import reading, traces


def shares(path, units):
    """Shares of all windows together, on all ranks. Compressing counts as computing, as in the paper. "shown"
    are the two units whose window is of middle length on rank 0: those to draw."""
    try:
        trace = traces.read_trace(
            reading.parse(reading.read_text(str(path)), str(path)), str(path), str(path)
        )
        found, shown = traces.pair_shares(trace, units)
    except reading.ReportError as error:
        raise LabError(str(error)) from None
    made = dataclasses.asdict(found)
    made.pop("overlapped")
    return {
        "units": list(units),
        "shown": shown,
        "n_windows": made.pop("n"),
        "window_s": made.pop("length_s"),
        **made,
    }
