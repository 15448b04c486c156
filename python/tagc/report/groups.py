"""Groups runs that differ only in their seeds into arms, and compares arms."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
from collections.abc import Callable, Sequence

from tagc.report.model import (
    LEGS,
    PARTS,
    ArmSet,
    Group,
    Report,
    Result,
    Run,
    Spread,
    Step,
    divided,
    only,
    spread_of,
)

# Options that do not change what a run computes or sends.
NO_MATTER = (
    "seed",
    "out",
    "trace",
    "trace-steps",
    "quiet",
    "resume",
    "keep",
    "save-every",
    "config",
    "timeout",
    "eval-batches",
)


def _key(run: Run) -> str:
    """Runs with one key are of one group."""
    if run.place > 0:
        return json.dumps([run.label, run.place])
    if not run.about:  # of PyTorch: nothing tells seeds of one arm from different arms
        return f"run {id(run)}"
    about = copy.deepcopy(run.about)
    about.pop("from_step", None)
    about.pop("origin", None)
    if isinstance(about.get("options"), dict):
        for name in NO_MATTER:
            about["options"].pop(name, None)
    return json.dumps(about, sort_keys=True)


def _name(runs: Sequence[Run]) -> str:
    """Returns the common start of the runs' names, without a trailing "-seed" and such: packed-s1, packed-s2
    give packed."""
    labels = [run.label for run in runs]
    base = os.path.commonprefix(labels)
    if len(labels) > 1:
        was_cut = base != labels[0]
        for ending in ("seed", "s"):
            rest = base[: -len(ending)]
            if base.endswith(ending) and len(rest) > 1 and not rest[-1].isalnum():
                base = rest
                break
        if was_cut:
            base = base.rstrip("-_. ")
    return base or labels[0]


def group_gap(group: Group, base: Group, step: float) -> Spread:
    """Returns the validation loss of `group` / that of `base` - 1, at `step`: between runs with the same seed
    if there are such, else against the mean of `base`. Of a group to itself: the distance of its runs from
    their mean."""
    mean = losses_at(base, step).middle
    gaps = []
    for run in group.runs:
        paired = [other.loss_at(step) for other in base.runs if other.seed == run.seed and group is not base]
        against = next((loss for loss in reversed(paired) if math.isfinite(loss)), mean)
        gaps.append(divided(run.loss_at(step), against) - 1)
    return spread_of(gaps, is_mean=True)


def losses_at(group: Group, step: float) -> Spread:
    return spread_of([run.loss_at(step) for run in group.runs], is_mean=True)


def _last_common_step(*groups: Group) -> float:
    """Returns the last step at which every run of the groups was evaluated; NaN if there is none."""
    for step, _ in reversed(groups[0].runs[0].evals):
        if all(math.isfinite(run.loss_at(step)) for group in groups for run in group.runs):
            return step
    return math.nan


def _over_steps(group: Group, share: float, value: Callable[[Step], float]) -> Spread:
    """Returns the spread over the steps of all runs; least and most leave out `share` of them on each
    side."""
    values = sorted(x for run in group.runs for x in map(value, run.warm_steps) if math.isfinite(x))
    spread = spread_of(values)
    if spread.n == 0:
        return spread
    cut = int(share * (spread.n - 1))
    return Spread(spread.middle, values[cut], values[-1 - cut], spread.n)


def _bits_of(group: Group, leg: int) -> float:
    per_run = [
        spread_of([step.bits[leg] for step in run.warm_steps], is_mean=True).middle
        if run.steps
        else run.bits[leg]
        for run in group.runs
    ]
    return spread_of(per_run, is_mean=True).middle


def _fill(result: Result, group: Group) -> None:
    run = group.runs[0]
    result.n_runs = len(group.runs)
    result.n_params, result.n_compressed, result.options = run.n_params, run.n_compressed, run.options
    result.total_s = run.total_s if run.total_s.n else _over_steps(group, 0.1, lambda step: step.wall_s)
    result.exposed_s = _over_steps(group, 0.1, lambda step: step.exposed_s)
    names = ("compute_s", "wait_gather_s", "wait_reduce_s", "optimizer_s")
    for part, name in enumerate(names):
        result.part_s[part] = _over_steps(group, 0, lambda step, name=name: getattr(step, name)).middle  # type: ignore[misc]
    result.bits = [_bits_of(group, leg) if run.world_size > 1 else 0.0 for leg in range(len(LEGS))]
    result.loss = losses_at(group, _last_common_step(group))


def _make_groups(report: Report) -> None:
    groups: dict[str, Group] = {}
    firsts: dict[int, Group] = {}
    for run in report.runs:
        groups.setdefault(_key(run), Group("", [])).runs.append(run)
    report.groups = list(groups.values())
    for i, group in enumerate(report.groups):
        place = group.runs[0].place
        name = _name(group.runs)
        others = [other.name for other in report.groups[:i] if other.runs[0].place == place]
        n_before = sum(other == name or other.startswith(f"{name} ") for other in others)
        group.name = f"{name} ({n_before + 1})" if n_before else name
        group.base = firsts.setdefault(place, group)
        if group.base is group:
            group.base = None


def _make_sets(report: Report) -> None:
    sets: dict[int, ArmSet] = {}
    for group in report.groups:
        place = group.runs[0].place
        if place not in sets:
            title = f"{report.cases[place - 1].title}, training runs" if place > 0 else "Training runs"
            sets[place] = ArmSet("runs", title, world_size=group.runs[0].world_size, place=place)
            report.sets.append(sets[place])
        arms = sets[place]
        result = report.add_result(arms, group.name)
        _fill(result, group)
        if group.base:
            result.gap = group_gap(group, group.base, _last_common_step(group.base, group))
        result.speedup = only(divided(arms.results[0].total_s.middle, result.total_s.middle))


# Arms that many pictures show have the same colour in all of them.
KNOWN = {"fsdp": 0, "dense": 0, "tagc-10x": 1, "paper": 1, "all-legs": 2, "packed": 3, "zero2-bf16": 4,
         "fsdp-bf16": 5, "zero2-direct": 6, "all-legs-2bit": 7}  # fmt: skip


def colors_of(names: Sequence[str]) -> dict[str, int]:
    """Returns name -> colour. What is not known gets those that are left, and then further ones."""
    colors: dict[str, int] = {}
    for name in names:
        if name in KNOWN and KNOWN[name] not in colors.values():
            colors[name] = KNOWN[name]
    left = (color for color in itertools.count() if color not in colors.values())
    for name in names:
        if name not in colors:
            colors[name] = next(left)
    return {name: colors[name] for name in names}


def finish(report: Report) -> None:
    """Groups runs and compares arms. Call it after the last input."""
    _make_groups(report)
    _make_sets(report)
    other = PARTS.index("other")
    for arms in report.sets:
        for result in arms.results:
            # Medians of parts do not add up to the median of the sum, so the last part is the difference.
            result.part_s[:other] = [
                max(part, 0.0) if math.isfinite(part) else part for part in result.part_s[:other]
            ]
            if result.total_s.n:
                result.part_s[other] = max(
                    result.total_s.middle
                    - sum(part for part in result.part_s[:other] if math.isfinite(part)),
                    0.0,
                )
    # Runs get the first colours: only eight differ, and lines of runs need them most.
    names = dict.fromkeys([*(group.name for group in report.groups), *report.names])
    report.names = colors_of(list(names))
