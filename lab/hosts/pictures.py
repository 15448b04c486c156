"""Pictures of results, drawn by tagc-report. Arms have the names there that a reader knows who never saw the
lab (NAMES); tables have those by which an arm is asked for."""

import json
import pathlib
import re
import subprocess
import tempfile

import results
from common import ROOT, LabError
from experiment import OF_TORCH

FIGURES = {
    "times": "time",
    "exchanges": "link",
    "bits": "bits",
    "losses": "pareto",
    "quality": "pareto-all",
    "timeline": "window",
}
NO_LIBRARY = 77  # exit code of scripts/report.sh
# Result -> the arms of its picture, where all of them would be more than one message. The table has all.
SHOWN = {
    "speed": ("fsdp", "fsdp-bf16", "zero2-bf16", "all-legs"),
    "links": ("fsdp", "zero2-bf16", "tagc-10x", "zero2-packed"),
}
# An arm's name -> in words. OPTIONS: what stands behind a plus.
NAMES = {
    "fsdp": "FSDP in fp32",
    "fsdp-bf16": "FSDP in bf16",
    "zero2-bf16": "ZeRO-2 in bf16",
    "tagc-10x-all": "TAGC as published, all layers",
    "tagc-2x-sum4": "sketch 2x, positions summed",
    "tagc-4x-sum4": "sketch 4x, positions summed",
    "tagc-10x-sum4": "sketch 10x, positions summed",
    "tagc-2x-or": "sketch 2x",
    "tagc-4x-or": "sketch 4x",
    "tagc-10x-or": "sketch 10x",
    "tagc-10x": "TAGC as published",
    "packed": "tagc packed, FSDP",
    "zero2-packed": "tagc packed, ZeRO-2",
    "direct": "tagc: gradients, FSDP",
    "zero2-direct": "tagc: gradients, ZeRO-2",
    "all-legs": "tagc: gradients and parameters",
    "all-legs-2bit": "tagc: the same, parameters in 2 bits",
    "direct, delta2": "tagc: gradients; parameters in 2 bits",
    "direct, beta2 as dense": "tagc: gradients, beta2 as without",
    "dense": "not compressed",
    "dense b0": "not compressed, beta1 0.5",
    "paper": "TAGC as published",
}
OPTIONS = {
    "exchange-each-micro-step=yes": "exchanged each micro-step",
    "wrap=matrix": "per matrix",
    "compress=paper": "no attention",
    "compress=all": "all layers",
    "index=sum1": "1-bit index",
    "unpeeled=estimate": "estimates",
    "two-level=yes": "two levels",
    "sharding=hybrid": "sharded inside hosts",
}


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
            f"no picture of {path}: its traces are not beside it; lab/lab run {path.stem} makes them anew"
        )
    picture = path.with_suffix(".svg")
    with tempfile.TemporaryDirectory() as folder:
        shown = _shown(path, folder)
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


def in_words(name):
    """Returns an arm's name as a reader knows it; what NAMES lacks as it is."""
    if found := re.fullmatch(r"(\d+) int(\d), mild (\d+) int\d(?:, delta(\d))?", name):
        zero, bits, zero_of_attention, of_parameters = found.groups()
        text = f"{100 - int(zero)} % in {bits} bits, attention {100 - int(zero_of_attention)} %"
        return f"{text}; parameters in {of_parameters} bits" if of_parameters else text
    base, *options = name.split("+")
    numbers = {"sparsity": "{} zero", "prefetch": "{} ahead", "grads-in-flight": "{} at once"}
    words = [NAMES.get(base, base)]
    for option in options:
        key, _, value = option.partition("=")
        count = f"{100 * float(value):g} %" if key == "sparsity" else value
        in_bucket = f"buckets of {int(value) / 2**20:.2g} Mi" if key == "bucket-elems" else None
        words.append(OPTIONS.get(option) or in_bucket or numbers.get(key, option).format(count))
    return ", ".join(words)


def _shown(path, folder):
    """Returns the path of the result as a picture shows it: names in words, and the arm `against` first, with
    which the picture compares the others."""
    result = results.read(path)
    against = result["settings"].get("against")
    for case in result["cases"]:
        arms = case.get("bench", {}).get("arms", [])
        arms[:] = [arm for arm in arms if arm["name"] in SHOWN.get(path.stem, (arm["name"],))]
        arms.sort(key=lambda arm: arm["name"] != against)
        for arm in arms:
            arm["name"] = in_words(arm["name"])
        for run in case.get("runs", []):
            run["label"] = in_words(run["label"])
    shown = pathlib.Path(folder) / path.name
    shown.write_text(json.dumps(result))
    for trace in traces_of(path):
        link = pathlib.Path(folder) / trace.relative_to(path.parent)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(trace.resolve())
    return shown


def traces_of(path):
    """Returns the paths of the traces that a result names."""
    runs = [run for case in results.read(path)["cases"] for run in case.get("runs", [])]
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
