"""Loss curves: several seeds of an arm are one line, their mean, in a band from least to most."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from tagc.report import style, units
from tagc.report.groups import group_gap
from tagc.report.model import Group, Report, Run, Spread, spread_of

MOST_RUNS_OF_LEVELS = 4
MOST_GROUPS, MOST_POINTS = 64, 400  # points of a line of training losses; a page cannot show more
X = Callable[[Run], Callable[[float], float]]  # of a run: a step's position on the axis


@dataclass
class Curve:
    arm: str
    color: int
    kind: str  # "training", "validation"
    points: list[tuple[float, Spread]]


def _at_step(run: Run) -> Callable[[float], float]:
    return lambda step: step


def _sum_until(run: Run, value: Callable[[Any], float]) -> Callable[[float], float]:
    steps = [step.step for step in run.steps]
    sums = list(itertools.accumulate(max(x, 0.0) if math.isfinite(x) else 0.0 for x in map(value, run.steps)))

    def until(step: float) -> float:
        n = bisect.bisect_right(steps, step)
        return sums[n - 1] if n else 0.0 if step <= 0 else math.nan

    return until


def _at_time(run: Run) -> Callable[[float], float]:
    """Returns seconds of training before the end of a step."""
    return _sum_until(run, lambda step: step.wall_s)


def _at_bits(run: Run) -> Callable[[float], float]:
    """Returns bits per parameter that a rank has sent by the end of a step."""
    return _sum_until(run, lambda step: sum(bits for bits in step.bits if math.isfinite(bits)))


def _mean_of(runs: Sequence[Run], at: X) -> Callable[[float], float]:
    each = [at(run) for run in runs]
    return lambda step: spread_of([where(step) for where in each], is_mean=True).middle


def _smooth(run: Run) -> list[float]:
    """Returns the mean over a fortieth of the run around each step, because losses of single batches are too
    noisy to read."""
    half, n = len(run.steps) // 80, len(run.steps)
    sums = [0.0, *itertools.accumulate(step.loss if math.isfinite(step.loss) else 0.0 for step in run.steps)]
    counts = [0, *itertools.accumulate(int(math.isfinite(step.loss)) for step in run.steps)]
    smooth = []
    for i in range(n):
        low, high = max(i - half, 0), min(i + half + 1, n)
        n_in = counts[high] - counts[low]
        smooth.append((sums[high] - sums[low]) / n_in if n_in else math.nan)
    return smooth


def _training(group: Group, at: X) -> list[tuple[float, Spread]]:
    n = min(len(run.steps) for run in group.runs)
    smooth = [_smooth(run) for run in group.runs]
    where = _mean_of(group.runs, at)
    every = max(1, math.ceil(n / MOST_POINTS))
    chosen = sorted({*range(0, n, every), n - 1}) if n else []
    return [
        (where(group.runs[0].steps[i].step), spread_of([losses[i] for losses in smooth], is_mean=True))
        for i in chosen
    ]


def _validation(group: Group, at: X, is_gap: bool) -> list[tuple[float, Spread]]:
    where = _mean_of(group.runs, at)
    points = []
    for step, _ in group.runs[0].evals:
        spread = spread_of([run.loss_at(step) for run in group.runs], is_mean=True)
        if is_gap:
            spread = group_gap(group, group.first, step).times(100)
        points.append((where(step), spread))
    return points


def _interesting_most(curves: Sequence[Curve]) -> float:
    """Returns the upper end of the loss axis: the highest loss after the first tenth of the run."""
    most = -math.inf
    for curve in curves:
        end = max((x for x, _ in curve.points if math.isfinite(x)), default=0.0)
        most = max(
            [
                most,
                *(
                    spread.middle
                    for x, spread in curve.points
                    if x >= end / 10 and math.isfinite(spread.middle)
                ),
            ]
        )
    return most


def _rows(curves: Sequence[Curve], x_scale: float, x_name: str) -> list[dict[str, Any]]:
    rows = []
    for curve in curves:
        for x, spread in curve.points:
            if not math.isfinite(x) or not spread.n:
                continue
            row: dict[str, Any] = {
                "arm": curve.arm,
                "x": float(f"{x / x_scale:.6g}"),
                "y": float(f"{spread.middle:.6g}"),
                "kind": curve.kind,
            }
            row["tip"] = f"{curve.kind}, {units.fixed(spread.middle, 4)}"
            if spread.n > 1:
                row |= {"low": spread.least, "high": spread.most}
                row["tip"] += (
                    f" ({units.fixed(spread.least, 4)} to {units.fixed(spread.most, 4)}, {spread.n} seeds)"
                )
            row["at"] = f"{x_name} {x / x_scale:.6g}"
            rows.append(row)
    return rows


def lines(curves: Sequence[Curve], x_title: str, y_title: str, *, x_scale: float = 1.0,
          y_most: float | None = None,
          is_gap: bool = False, x_name: str = "step") -> style.Drawing | None:  # fmt: skip
    """Draws one line per arm; training losses are thin if there are validation losses, too."""
    rows = _rows(curves, x_scale, x_name)
    if not rows:
        return None
    arms = list(dict.fromkeys(curve.arm for curve in curves))
    colors = {curve.arm: curve.color for curve in curves}
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ("training", "validation")}
    lows = [row.get("low", row["y"]) for row in rows] + ([0.0] if is_gap else [])
    highs = [row.get("high", row["y"]) for row in rows] + ([0.0] if is_gap else [])
    bottom, top = min(lows), max(highs)
    if y_most is not None and math.isfinite(y_most):
        top = min(max(y_most, bottom), top)
    margin = 0.05 * (top - bottom) or 0.05 * abs(top) or 1.0
    shown = style.legend_param("shown", "arm", arms)
    color = style.arm_color(arms, [style.line_color(colors[arm]) for arm in arms])
    dashes = alt.StrokeDash(
        "arm:N",
        sort=None,
        title=None,
        scale=alt.Scale(domain=arms, range=[style.dash(colors[arm]) for arm in arms]),
    )
    x = alt.X("x:Q", title=x_title, scale=alt.Scale(nice=False, zero=False))
    y = alt.Y(
        "y:Q", title=y_title, scale=alt.Scale(zero=False, nice=False, domain=[bottom - margin, top + margin])
    )
    tip = [
        alt.Tooltip("arm:N", title="arm"),
        alt.Tooltip("at:N", title="at"),
        alt.Tooltip("tip:N", title="loss"),
    ]

    def base(name: str) -> alt.Chart:
        return alt.Chart(style.data(name)).transform_filter(shown).encode(x=x, y=y, color=color)

    layers: list[Any] = []
    if is_gap:
        layers.append(
            alt.Chart(style.data("zero")).mark_rule(strokeDash=[4, 3], color=style.INK).encode(y=alt.Y("y:Q"))
        )
    has_both = bool(by_kind["training"]) and bool(by_kind["validation"])
    if by_kind["training"]:
        layers.append(
            base("training")
            .mark_line(clip=True, opacity=0.55 if has_both else 1, strokeWidth=1.2 if has_both else 2)
            .encode(strokeDash=dashes, tooltip=tip)
        )
    if by_kind["validation"]:
        band = base("validation").transform_filter("isValid(datum.low)").mark_area(clip=True, opacity=0.18)
        layers.append(band.encode(y=alt.Y("low:Q", title=y_title), y2="high:Q"))
        layers.append(base("validation").mark_line(clip=True).encode(strokeDash=dashes))
        layers.append(
            base("validation").mark_point(clip=True, filled=True, size=42, opacity=1).encode(tooltip=tip)
        )
    first = 1 if is_gap else 0  # the layer whose legend it is
    layers[first] = layers[first].add_params(shown, style.zoom_param(["x", "y"])).properties(name="lines")
    chart = alt.layer(*layers).properties(
        width=style.WIDTH, height=420, autosize=alt.AutoSizeParams(type="fit", contains="padding")
    )
    return style.Drawing(chart, by_kind | ({"zero": [{"y": 0}]} if is_gap else {}))


def _curves(report: Report, at: X, is_gap: bool, needs_steps: bool) -> list[Curve]:
    has_evals = any(len(run.evals) > 1 for run in report.runs)
    curves = []
    for group in report.groups[:MOST_GROUPS]:
        color = report.color(group.name)
        if needs_steps and not group.runs[0].steps:
            continue
        if not is_gap and group.runs[0].steps:
            curves.append(Curve(group.name, color, "training", _training(group, at)))
        if has_evals and group.runs[0].evals:
            curves.append(Curve(group.name, color, "validation", _validation(group, at, is_gap)))
    return curves


def loss(report: Report) -> style.Drawing | None:
    curves = _curves(report, _at_step, False, False)
    return lines(curves, "optimizer step", "loss (nats per token)", y_most=_interesting_most(curves))


def _end(curves: Sequence[Curve]) -> float:
    return max((x for curve in curves for x, _ in curve.points if math.isfinite(x)), default=0.0)


def _time_unit(end: float, most_s: float, most_min: float) -> tuple[float, str]:
    return (1.0, "s") if end <= most_s else (60.0, "min") if end <= most_min else (3600.0, "h")


def loss_time(report: Report) -> style.Drawing | None:
    curves = _curves(report, _at_time, False, True)
    if not _end(curves) > 0:
        return None
    scale, unit = _time_unit(_end(curves), 300, 18000)
    return lines(
        curves,
        f"time of training ({unit})",
        "loss (nats per token)",
        x_scale=scale,
        y_most=_interesting_most(curves),
        x_name=unit,
    )


def loss_bits(report: Report) -> style.Drawing | None:
    curves = _curves(report, _at_bits, False, True)
    if not _end(curves) > 0:
        return None
    return lines(curves, "bits sent so far, per parameter and rank, gradients and parameters, before (W-1)/W",
                 "loss (nats per token)",
                 y_most=_interesting_most(curves), x_name="bits")  # fmt: skip


def gap(report: Report) -> style.Drawing | None:
    if sum(len(group.runs[0].evals) > 1 for group in report.groups) < 2:
        return None
    return lines(
        _curves(report, _at_step, True, False),
        "optimizer step",
        "validation loss against the first arm (%)",
        is_gap=True,
    )


# ---- levels ----

LEVELS = ("8 bits (FRESH)", "4 bits (EVERY)", "the largest (LARGEST)", "fewer (LAST)")


def levels(report: Report) -> list[style.Drawing]:
    """Draws the level of each group of parameters, a drawing per run."""
    drawings = []
    for run in [run for run in report.runs if run.levels][:MOST_RUNS_OF_LEVELS]:
        names = sorted(run.levels)
        every = max(1, math.ceil(max(map(len, run.levels.values())) / MOST_POINTS))
        rows = [
            # groups at one level are drawn beside each other
            {"arm": name, "x": step, "level": level, "y": round(level + 0.06 * (k - (len(names) - 1) / 2), 4)}
            for k, name in enumerate(names)
            for i, (step, level) in enumerate(run.levels[name])
            if math.isfinite(level) and (i % every == 0 or i == len(run.levels[name]) - 1)
        ]
        color = style.arm_color(names, [style.line_color(i) for i in range(len(names))])
        axis = alt.Axis(values=[0, 1, 2, 3], labelExpr=f"{list(LEVELS)}[datum.value]", title=None)
        chart = (
            alt.Chart(style.data("levels"))
            .mark_line(interpolate="step-after", strokeWidth=2.5)
            .encode(
                x=alt.X("x:Q", title=f"step of {run.label}", scale=alt.Scale(nice=False, zero=False)),
                y=alt.Y("y:Q", axis=axis, scale=alt.Scale(domain=[-0.3, 3.3], nice=False)),
                color=color,
                tooltip=[
                    alt.Tooltip("arm:N", title="group"),
                    alt.Tooltip("x:Q", title="step"),
                    alt.Tooltip("level:Q", title="level"),
                ],
            )
            .properties(
                width=style.WIDTH,
                height=220,
                autosize=alt.AutoSizeParams(type="fit", contains="padding"),
                padding=style.padding(max(style.text_width(level, 12) for level in LEVELS)),
            )
        )
        drawings.append(style.Drawing(chart, {"levels": rows}))
    return drawings
