"""Reads results of `tagc bench` and the lab."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any

from tagc.report import units
from tagc.report.model import LEGS, MEMORIES, ArmSet, LabCase, Report, Result, Run, Spread, divided, spread_of
from tagc.report.reading import Node, ReportError, as_number


def _legs(node: Node, name: str) -> list[float]:
    """Returns the bytes of each leg. Those that the file does not name have 0."""
    legs = node.node(name)
    return [0.0 if math.isnan(value) else value for value in map(legs.number_or_nan, LEGS)]


def _memory(node: Node) -> list[float]:
    memory = node.node_or_empty("memory_bytes")  # which the lab keeps of no plan
    return [memory.number_or_nan(name) for name in MEMORIES]


def _spread(node: Node, name: str) -> Spread:
    spread = node.node(name)
    middle, least, most, n = (spread.number(member) for member in ("median", "min", "max", "n"))
    if math.isnan(middle):
        return Spread()
    return Spread(middle, least, most, int(n) if 1 <= n < 1e9 else 1)


# ---- bench ----


def _read_arm(arm: Node, result: Result) -> None:
    result.total_s = _spread(arm, "total_s")
    result.exposed_s = _spread(arm, "exposed_s")
    result.speedup = _spread(arm, "speedup") if "speedup" in arm.value else Spread()
    iterations = arm.nodes("iterations")
    for part, name in enumerate(("compute_s", "wait_gather_s", "wait_reduce_s", "optimizer_s")):
        result.part_s[part] = spread_of([iteration.number(name) for iteration in iterations]).middle
    result.bits = _legs(arm, "bits_per_param")
    result.memory = _memory(arm)
    result.n_params = arm.number("n_params")
    result.n_compressed = arm.number_or_nan("n_compressed")
    options = arm.get("options")
    result.options = options if isinstance(options, dict) else {}


def add_bench(report: Report, bench: Node) -> ArmSet:
    # null: left out
    arms = bench.nodes("arms") if "arms" not in bench.value or bench.get("arms") is not None else []
    model = bench.node("model").text("name")
    arm_set = ArmSet(
        "bench",
        "",
        bench=bench,
        world_size=bench.number("world_size"),
        n_hosts=bench.number("n_hosts"),
        bits_per_s=8 * bench.node_or_empty("link").number_or_nan("all_to_all_bytes_per_s"),
    )
    if not arm_set.world_size >= 1:
        raise ReportError(f"{bench.place}: world_size is {arm_set.world_size:g}, must be at least 1")
    medium = "memory" if bench.get("transport") == "local" else "link"  # then nothing is sent over a network
    at = f", {medium} {units.rate(arm_set.bits_per_s)}" if math.isfinite(arm_set.bits_per_s) else ""
    ranks, hosts = units.plural(arm_set.world_size, "rank"), units.plural(arm_set.n_hosts, "host")
    arm_set.title = f"{model[:60]}, {ranks} on {hosts}{at}"
    report.sets.append(arm_set)
    for arm in arms:
        result = report.add_result(arm_set, arm.text("name"))
        _read_arm(arm, result)
        if "speedup" not in arm.value:
            result.speedup = _ratio(arms[0], arm)
    return arm_set


def _median_of_round(arm: Node, number: int) -> float:
    kept = arm.get("round_s")  # of the lab, which keeps no single iterations
    if isinstance(kept, list):
        return as_number(kept[number]) if number < len(kept) else math.nan
    steps = [step for step in arm.nodes_or_none("iterations") if step.get("round") == number]
    return spread_of([step.number_or_nan("total_s") for step in steps]).middle


def pair_ratio(bench: Node, first: str, second: str) -> Spread:
    """Returns the median time of the first arm over that of the second, one sample per round."""
    arms = {arm.text_or("name", ""): arm for arm in reversed(bench.nodes_or_none("arms"))}
    return _ratio(arms[first], arms[second]) if first in arms and second in arms else Spread()


def _ratio(slow: Node, fast: Node) -> Spread:
    ratios: list[float] = []
    while len(ratios) < 1000:
        ratio = divided(_median_of_round(slow, len(ratios)), _median_of_round(fast, len(ratios)))
        if math.isnan(ratio):
            break
        ratios.append(ratio)
    return spread_of(ratios)


# ---- the lab ----


def rate_of(text: str) -> float:
    """Returns bits per second of "2gbit", in tc's notation; NaN for other texts."""
    match = re.fullmatch(r"([0-9.]+)(k|m|g|t|)bit", text)
    try:
        return (
            float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[match[2]]
            if match
            else math.nan
        )
    except ValueError:
        return math.nan


def _numbers(value: Any) -> list[float]:
    return (
        [number for number in map(as_number, value) if not math.isnan(number)]
        if isinstance(value, list)
        else []
    )


def _range(link: Node, name: str) -> tuple[float, float]:
    numbers = _numbers(link.get(name)) or [math.nan]
    return min(numbers), max(numbers)


def _sum(value: Any) -> float:
    return sum(_numbers(value)) if _numbers(value) else math.nan


def _read_run(
    report: Report, case: Node, item: Node, suffix: str, add_trace: Callable[[str, str], None]
) -> None:
    label, world_size = item.text("label"), item.number("world_size")
    name = f"{label[:68]}{suffix[:48]}"
    trace = item.get("trace")
    if isinstance(trace, str):
        try:
            add_trace(trace, name)
        except ReportError as error:
            report.notes.append(f"the timeline of {name} is left out: {error}")
    if not isinstance(item.get("bits_per_param"), dict) and not item.get("evals"):
        return  # made for its timeline only
    run = Run(
        name,
        int(world_size) if 1 <= world_size < 1e6 else 1,
        item.number("n_params"),
        item.number_or_nan("n_compressed"),
        item.number("seed"),
        place=len(report.cases),
    )
    # of all runs, of this one
    options = {**case.node_or_empty("options").value, **item.node_or_empty("options").value}
    run.about = {"options": options} if options else {}
    if isinstance(item.get("bits_per_param"), dict):
        run.bits = _legs(item, "bits_per_param")
    if isinstance(item.get("total_s"), dict):
        run.total_s = _spread(item, "total_s")
    evals = [(entry.number("step"), entry.number("val_loss")) for entry in item.nodes("evals")]
    run.evals = [(step, loss) for step, loss in evals if math.isfinite(step)]
    report.runs.append(run)


def _read_case(
    report: Report, case: Node, lab: Node, n_cases: int, add_trace: Callable[[str, str], None]
) -> None:
    experiment = lab.text("experiment")
    n_hosts, per_host = case.number("hosts"), case.number("ranks_per_host")
    link, interface = case.node_or_empty("link"), case.node_or_empty("interface")
    rate = link.text_or("rate", "")
    asked = link.node_or_empty("latency").text_or("asked", "")
    shaping = "".join(
        f", {part}" for part in (rate[:30], asked[:12], "WireGuard" if link.get("tunnel") else "") if part
    )
    settings = lab.get("settings")
    title = f"{experiment[:60]}: {units.plural(n_hosts, 'host')} x {units.plural(per_host, 'rank')}{shaping}"
    case_read = LabCase(
        experiment,
        title,
        settings if isinstance(settings, dict) else {},
        n_hosts * per_host,
        rate,
        link.number_or_nan("mtu"),
        _range(link, "tcp_one_way_bits_per_s"),
        _range(link, "tcp_both_ways_bits_per_s"),
        _sum(interface.get("sent_bytes")),
        _sum(interface.get("received_bytes")),
        interface.number_or_nan("overhead"),
    )
    report.cases.append(case_read)
    suffix = f" ({n_hosts:.0f} x {per_host:.0f}{shaping[:36]})" if n_cases > 1 else ""
    if isinstance(case.get("bench"), dict):
        case_read.arms = add_bench(report, case.node("bench"))
        case_read.arms.title = title
        if math.isfinite(rate_of(rate)):
            case_read.arms.bits_per_s = rate_of(rate)
    for item in case.nodes_or_none("runs"):
        _read_run(report, case, item, suffix, add_trace)


def add_lab(report: Report, lab: Node, path: str, add_trace: Callable[[str, str], None]) -> None:
    """Adds a result of the lab. add_trace(path, label): reads a timeline from the result's folder."""
    cases = lab.nodes("cases")
    if lab.node_or_empty("settings").get("is_quick") is True:
        report.notes.append(
            f"{lab.text('experiment')} was a quick trial of the experiment: its times are not meaningful"
        )
    for case in cases:
        _read_case(
            report,
            case,
            lab,
            len(cases),
            lambda name, label: add_trace(os.path.join(os.path.dirname(path), name), label),
        )
