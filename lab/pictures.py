"""Pictures of results, drawn by `tagc report`."""
import pathlib
import subprocess

import results
from common import LabError

FIGURES = {"times": "time", "bits": "bits", "losses": "loss", "timeline": "window"}


def draw(path, tagc):
    """NAME.svg beside the result NAME.json; its path."""
    path = pathlib.Path(path)
    result = results.read(path)
    figure = FIGURES.get(result["settings"].get("table"))
    if not figure:
        raise LabError(f'{path}: "table" is {result["settings"].get("table")!r}, allowed: {", ".join(FIGURES)}')
    picture = path.with_suffix(".svg")
    words = [str(tagc), "report", "--quiet", f"--svg={figure}={picture}", str(path)]
    shown = [run["timeline"]["shown"] for case in result["cases"] for run in case.get("runs", []) if "timeline" in run]
    if shown:
        words.append(f"--units={','.join(shown[0])}")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise LabError(f"no picture of {path}: {' '.join(words)}: {done.stderr.strip()}")
    return picture
