"""tagc-report: measurements as one page, as pictures, and as text."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tagc.commands.parser import Parser, UsageError, meant
from tagc.report import inputs, summary
from tagc.report.model import Report, Units
from tagc.report.reading import ReportError, clean
from tagc.report.traces import backward_shares

_FIGURES = (
    "loss, loss-time, loss-bits, gap, pareto, pareto-all, levels, time, bits, "
    "timeline, window, memory, codec, link"
)
_EXAMPLES = """examples:
  # Folders of runs, timelines, results of tagc bench and the lab; their content tells which.
  tagc-report --out report.html runs/fsdp runs/packed runs/*.trace.json bench.json
  tagc-report --svg loss=loss.svg,time=time.svg runs/fsdp runs/packed
"""
_OK, _FAILED, _USAGE = 0, 1, 2


def _parser() -> Parser:
    parser = Parser(
        prog="tagc-report", usage="%(prog)s [--out report.html] PATH...", epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="A page and pictures of measurements. All arms are compared with the first.")  # fmt: skip
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="a run's folder, metrics.jsonl, a trace, or a result file"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write one self-contained HTML page, which needs no network"
    )
    parser.add_argument("--svg", metavar="FIGURE=FILE", action="append", default=[],
                        help=f"draw one figure as a picture, or several separated by commas; "
                        f"a FILE that ends in .png is a PNG. Figures: {_FIGURES}")  # fmt: skip
    parser.add_argument(
        "--svg-dir",
        metavar="DIR",
        help="draw every figure that has data as DIR/FIGURE.svg; DIR is made if it is missing",
    )
    parser.add_argument(
        "--dark",
        action="store_true",
        help="draw pictures in dark colours (an SVG follows its page without this)",
    )
    parser.add_argument("--title", metavar="TEXT", help='heading of the page. Default: "tagc: measurements"')
    parser.add_argument(
        "--units",
        metavar="NAMES",
        help="neighbouring units whose backward pass the timeline shows larger, as in "
        "h.5,h.6. "
        "Default: two in the middle",
    )
    parser.add_argument("--quiet", action="store_true", help="no summary on the terminal")
    return parser


def _pictures(lists: Sequence[str]) -> list[tuple[str, str]]:
    """Returns (figure, file) of each FIGURE=FILE."""
    known = _FIGURES.split(", ")
    pairs = []
    for item in (item for each in lists for item in each.split(",")):
        name, equals, path = item.partition("=")
        if not equals or not path:
            raise UsageError(f'--svg: "{item}" is not of the form FIGURE=FILE')
        if name not in known:
            raise UsageError(f'--svg: "{name}" is not a figure, allowed: {_FIGURES}{meant(name, known)}')
        if not path.lower().endswith((".svg", ".png")):
            raise UsageError(f'--svg: "{path}" ends in neither .svg nor .png')
        pairs.append((name, path))
    return pairs


def _check_units(report: Report, units: Units) -> None:
    """Refuses units that are in no timeline."""
    if units is None:
        return
    if not report.traces:
        raise UsageError("--units needs a timeline among the files: tagc train --trace makes one")
    if not any(backward_shares(trace, units).n for trace in report.traces):
        known = ", ".join(report.traces[0].units)
        raise UsageError(
            f'--units: no backward pass of "{",".join(units)[:100]}" in a timeline; they hold {known[:200]}'
        )


def _draw_all(report: Report, units: Units, folder: str, is_dark: bool) -> None:
    from tagc.report import figures, pictures

    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ReportError(f"{folder}: {error.strerror}") from None
    for figure in figures.FIGURES:
        drawings = figure.draw(report, units)
        if drawings:
            pictures.write_file(
                os.path.join(folder, f"{figure.name}.svg"), pictures.render(drawings, figure, False, is_dark)
            )


def _make(arguments: argparse.Namespace) -> None:
    wanted = _pictures(arguments.svg)
    units = [name for name in arguments.units.split(",") if name] if arguments.units is not None else None
    if not arguments.paths:
        raise UsageError("no input: name runs, timelines or results")
    if arguments.out or wanted or arguments.svg_dir:
        _need_charts()
    report = inputs.read_report(arguments.paths)
    _check_units(report, units)
    if not arguments.quiet:
        sys.stdout.write(summary.text(report, units))
    if arguments.out:
        from tagc.report import page, pictures

        pictures.write_file(arguments.out, page.render(report, units, arguments.title).encode())
    if wanted:
        from tagc.report import figures, pictures

        for name, path in wanted:
            pictures.write(report, units, figures.find(name), path, arguments.dark)
    if arguments.svg_dir:
        _draw_all(report, units, arguments.svg_dir, arguments.dark)
    if arguments.out and not arguments.quiet:
        print(f"page: {clean(arguments.out)}")


def _need_charts() -> None:
    try:
        import altair
        import vl_convert  # noqa: F401

        del altair
    except ImportError as error:
        raise UsageError(
            f"a page and pictures need altair and vl-convert-python ({error}): "
            'pip install "tagc-train[report]"'
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 1 for files that cannot be read or written; 2 for a mistake in the
    command."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(encoding="utf-8", errors="replace")
    try:
        _make(_parser().parse_args(arguments))
        sys.stdout.flush()
        return _OK
    except UsageError as error:
        print(f"tagc-report: {clean(str(error))}\ntagc-report --help explains the options", file=sys.stderr)
        return _USAGE
    except ReportError as error:
        print(f"tagc-report: {clean(str(error))}", file=sys.stderr)
        return _FAILED
    except BrokenPipeError:
        sys.stderr.close()
        return _FAILED
    except OSError as error:
        print(f"tagc-report: the summary cannot be printed: {error.strerror}", file=sys.stderr)
        return _FAILED
