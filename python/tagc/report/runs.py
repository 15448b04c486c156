"""Reads metrics.jsonl, which `tagc train` writes."""

from __future__ import annotations

import math
import os

from tagc.report.model import LEGS, Run, Step
from tagc.report.reading import Node, ReportError, as_number, clean, parse, read_text


def read_run(path: str) -> Run:
    """Reads a run. path: its folder, or its metrics.jsonl. An incomplete last line is ignored."""
    file = os.path.join(path, "metrics.jsonl") if os.path.isdir(path) else path
    folder = os.path.dirname(path) if os.path.basename(path) == "metrics.jsonl" else path
    run = Run(clean(os.path.basename(os.path.abspath(folder))))
    lines = read_text(file).split("\n")
    for number, line in enumerate(lines, 1):
        is_last = number == len(lines)
        if is_last and not line:
            break
        try:
            value = parse(line, f"{file} line {number}")
        except ReportError as error:
            if not is_last:
                raise ReportError(str(error).replace(f"line {number} line 1 ", f"line {number} ")) from None
            run.is_torn = True
            break
        _add_line(run, Node(value, f"{file} line {number}"))
    if not run.steps:
        raise ReportError(f"{file} holds no steps")
    run.seed = _seed(run)
    return run


def _seed(run: Run) -> float:
    try:
        seed = float(run.options.get("seed", "nan"))
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return seed if math.isfinite(seed) else math.nan


def _add_line(run: Run, line: Node) -> None:
    kind = line.get("type")
    if kind in ("step", "eval") and math.isnan(line.number_or_nan("step")):
        raise ReportError(f'{line.place}: an entry of type "{kind}" has no number as "step"')
    if kind == "run":
        world_size = line.number_or_nan("world_size")
        run.world_size = int(world_size) if 1 <= world_size < 1e6 else 1
        run.n_params = line.number_or_nan("n_params")
        run.n_compressed = line.number_or_nan("n_compressed")
        run.about = run.about or line.value
    elif kind == "step":
        run.steps.append(_step(line, run.world_size))
    elif kind == "eval":
        run.evals.append((line.number_or_nan("step"), line.number_or_nan("val_loss")))


def _step(line: Node, world_size: int) -> Step:
    bits = line.get("bits_sent_per_param")
    whole = world_size / (world_size - 1) if world_size > 1 else 0.0
    get = line.number_or_nan
    return Step(
        get("step"),
        get("loss"),
        get("wall_s"),
        get("compute_s"),
        get("wait_gather_s"),
        get("wait_reduce_s"),
        get("optimizer_s"),
        tuple(whole * as_number(bits.get(leg) if isinstance(bits, dict) else None) for leg in LEGS),
    )


def is_metrics(path: str) -> bool:
    """Returns whether this is metrics.jsonl, an object per line. The content of the first line tells it from
    a one-line result."""
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            first = parse(file.readline(1 << 20), path)
    except (OSError, ReportError):
        return False
    return isinstance(first, dict) and first.get("type") in ("run", "step", "eval")
