"""Pictures of results, drawn by tagc-report."""

import json
import pathlib
import subprocess
import tempfile

from common import ROOT, LabError
from experiment import OF_TORCH

import results

FIGURES = {
    "times": "time",
    "exchanges": "link",
    "bits": "bits",
    "losses": "pareto",
    "quality": "pareto-all",
    "timeline": "window",
}
NO_LIBRARY = 77  # exit code of scripts/report.sh


class NoLibrary(LabError):
    """No Python on this machine can draw."""


def draw(path):
    """Draws NAME.svg in the folder of the result NAME.json; returns its path, or None if the result has no
    picture."""
    path = pathlib.Path(path)
    if results.read(path)["settings"].get("table") in OF_TORCH:
        return None
    figure, units = figure_of(path)
    if figure == "window" and not all(file.exists() for file in traces_of(path)):
        raise LabError(
            f"no picture of {path}: its traces are not beside it; "
            f"experiments/lab/lab run {path.stem} makes them anew"
        )
    picture = path.with_suffix(".svg")
    with tempfile.TemporaryDirectory() as folder:
        shown = _ordered(path, folder)
        words = [
            str(ROOT / "scripts" / "report.sh"),
            "--quiet",
            f"--svg={figure}={picture}",
            *units,
            str(shown),
        ]
        done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode == NO_LIBRARY:
        raise NoLibrary(f"no picture of {path}: {done.stderr.strip()}")
    if done.returncode != 0:
        raise LabError(f"no picture of {path}: {' '.join(words)}: {done.stderr.strip()}")
    return picture


def _ordered(path, folder):
    """Returns the path of the result with the arm `against` first. A picture compares the others with it."""
    result = results.read(path)
    against = result["settings"].get("against")
    benches = [case["bench"] for case in result["cases"] if "bench" in case]
    if not against or not benches:
        return path
    for bench in benches:
        bench["arms"].sort(key=lambda arm: arm["name"] != against)
    shown = pathlib.Path(folder) / path.name
    shown.write_text(json.dumps(result))
    return shown


def traces_of(path):
    """Returns the paths of the traces that a result names."""
    runs = [run for case in results.read(path)["cases"] for run in case["runs"]]
    return [path.parent / run["trace"] for run in runs if "trace" in run]


def figure_of(path):
    """The name of a result's figure, and the arguments that choose the units of a timeline."""
    result = results.read(path)
    figure = FIGURES.get(result["settings"].get("table"))
    if not figure:
        raise LabError(
            f'{path}: "table" is {result["settings"].get("table")!r}, allowed: {", ".join(FIGURES)}'
        )
    shown = [
        run["timeline"]["shown"]
        for case in result["cases"]
        for run in case.get("runs", [])
        if "timeline" in run
    ]
    return figure, [f"--units={','.join(shown[0])}"] if shown else []
