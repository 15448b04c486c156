"""Reads metrics.jsonl, which `tagc train` writes, and what PyTorch's handle.record() or an on_step function
wrote: statistics, one object per line."""

from __future__ import annotations

import math
import os

from tagc.report.model import LEGS, Run, Step, divided
from tagc.report.reading import Node, ReportError, as_number, clean, parse, read_text


def read_run(path: str) -> Run:
    """Reads a run, which may have no steps yet. path: its folder, or its file. An incomplete last line is
    ignored."""
    file = os.path.join(path, "metrics.jsonl") if os.path.isdir(path) else path
    folder = os.path.dirname(path) if os.path.basename(path) == "metrics.jsonl" else path
    run = Run(clean(os.path.basename(os.path.abspath(folder)).removesuffix(".jsonl")))
    lines = read_text(file).split("\n")
    for number, line in enumerate(lines, 1):
        is_last = number == len(lines)
        if not line.strip():
            continue
        try:
            value = parse(line, f"{file} line {number}", is_log=True)
        except ReportError as error:
            if not is_last:
                raise ReportError(str(error).replace(f"line {number} line 1 ", f"line {number} ")) from None
            run.is_torn = True
            break
        _add_line(run, Node(value, f"{file} line {number}"))
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
    if kind == "torch" or _is_statistics(line.value):
        _add_torch(run, line)
        return
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


def _is_statistics(value: object) -> bool:
    """Returns whether it is what Compressed.stats() returns."""
    return isinstance(value, dict) and isinstance(value.get("bytes_by_leg"), dict) and "n_elems" in value


def _add_torch(run: Run, line: Node) -> None:
    """Adds a line of PyTorch's. A run that went on from a checkpoint writes steps again, which replace those
    that it wrote before."""
    get = line.number_or_nan
    world_size = get("world_size")
    run.is_torch = True
    run.world_size = int(world_size) if 1 <= world_size < 1e6 else 1
    if line.get("type") == "torch":
        if line.get("format") != 1:
            raise ReportError(f'{line.place}: "format" is {line.get("format")!r}, allowed: 1')
        run.n_params, run.n_compressed = get("n_params"), get("n_compressed")
        return
    step, n = get("step"), get("n_elems")
    if math.isnan(step):
        raise ReportError(f'{line.place}: statistics have no number as "step"')
    if math.isnan(run.n_params):
        run.n_params, run.n_compressed = n, get("n_compressed")
    whole = run.world_size / (run.world_size - 1) if run.world_size > 1 else 0.0
    sent = line.node("bytes_by_leg")
    bits = tuple(divided(8 * whole * sent.number_or_nan(leg), n) for leg in LEGS)
    while run.steps and run.steps[-1].step >= step:
        run.steps.pop()
    nan = math.nan
    run.steps.append(
        Step(step, get("loss"), get("wall_s"), nan, get("gather_s"), get("exchange_s"), nan, bits)
    )
    for group in line.node_or_empty("levels").value:
        level = line.node("levels").number_or_nan(group)
        points = run.levels.setdefault(group, [])
        while points and points[-1][0] >= step:
            points.pop()
        points.append((step, level))


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
    a one-line result; where it has none yet, the file's name does."""
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            first = parse(file.readline(1 << 20), path, is_log=True)
    except OSError:
        return False
    except ReportError:
        return path.endswith(".jsonl")
    return isinstance(first, dict) and (
        first.get("type") in ("run", "step", "eval", "torch") or _is_statistics(first)
    )
