"""Predicted iteration times as lines over link rate or number of ranks; as bars if plans vary in neither."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from tagc.report import figures_bars, style, units
from tagc.report.model import PlanPoint, Report

MOST_ARMS, MOST_POINTS = 64, 2000


def _rate(point: PlanPoint) -> float:
    return point.bits_per_s


def _world(point: PlanPoint) -> float:
    return point.world_size


def _key(value: float) -> float:
    return float(f"{value:.6g}") if math.isfinite(value) else -1.0


def _chart(report: Report, is_over_rate: bool) -> list[PlanPoint]:
    """Returns the largest group of points of one model that differ only in x: the data of the chart. Empty if
    no group has two values of x."""
    at, fixed = (_rate, _world) if is_over_rate else (_world, _rate)
    charts: dict[tuple[str, float, float], list[PlanPoint]] = {}
    for point in report.plan[:MOST_POINTS]:
        if math.isfinite(point.iteration_s) and at(point) >= 1:
            charts.setdefault((point.model, _key(fixed(point)), _key(point.latency_s)), []).append(point)
    best = max(charts.values(), key=lambda points: len({at(point) for point in points}), default=[])
    return best if len({at(point) for point in best}) > 1 else []


def _measured(report: Report, chart: list[PlanPoint], is_over_rate: bool) -> list[tuple[str, float, float]]:
    """Returns (arm, x, seconds) of benches of the same arm, with the chart's number of ranks if it is fixed.
    The rate of a lab's case is only known as measured, so a chart over ranks takes benches within a tenth of
    its rate."""
    arms = {point.name for point in chart}
    found = []
    for bench in report.sets:
        if bench.kind != "bench":
            continue
        first = chart[0]
        fits = (
            bench.world_size == first.world_size
            if is_over_rate
            else abs(bench.bits_per_s / first.bits_per_s - 1) < 0.1
            if first.bits_per_s
            else False
        )
        at = bench.bits_per_s if is_over_rate else bench.world_size
        if fits and at >= 1:
            found += [
                (result.name, at, result.total_s.middle)
                for result in bench.results
                if result.name in arms and result.total_s.n
            ]
    return found


def _lines(report: Report, is_over_rate: bool) -> style.Drawing | None:
    chart = _chart(report, is_over_rate)
    if not chart:
        return None
    arms = list(dict.fromkeys(point.name for point in chart))[:MOST_ARMS]
    scale = 1e9 if is_over_rate else 1.0
    rows: list[dict[str, Any]] = [
        {
            "arm": point.name,
            "x": (_rate(point) if is_over_rate else _world(point)) / scale,
            "y": point.iteration_s,
        }
        for point in chart
        if point.name in arms
    ]
    rows.sort(key=lambda row: row["x"])
    dots: list[dict[str, Any]] = [
        {"arm": arm, "x": at / scale, "y": seconds}
        for arm, at, seconds in _measured(report, chart, is_over_rate)
        if arm in arms
    ]
    for row in rows + dots:
        row["t"] = units.time(row["y"])
        row["at"] = units.rate(row["x"] * 1e9) if is_over_rate else units.plural(row["x"], "rank")
    first = chart[0]
    delay = f", {units.time(first.latency_s)}" if first.latency_s > 0 else ""
    title = (
        f"link (Gbit/s); {first.model[:40]}, {units.plural(first.world_size, 'rank')}{delay}"
        if is_over_rate
        else f"ranks; {first.model[:40]}, link {units.rate(first.bits_per_s)}{delay}"
    )
    shown = style.legend_param("shown", "arm", arms)
    color = style.arm_color(arms, [style.line_color(report.color(arm)) for arm in arms])
    dashes = alt.StrokeDash(
        "arm:N",
        sort=None,
        title=None,
        scale=alt.Scale(domain=arms, range=[style.dash(report.color(arm)) for arm in arms]),
    )
    values = sorted({row["x"] for row in rows})
    x = alt.X(
        "x:Q",
        title=title,
        scale=alt.Scale(type="log", nice=False, domain=[values[0] / 1.15, values[-1] * 1.15]),
        axis=alt.Axis(values=values, tickCount=len(values), format="~g", labelOverlap="greedy"),
    )
    most = max(row["y"] for row in rows + dots)
    y = alt.Y(
        "y:Q",
        title="simulated time of an optimizer step (s)",
        scale=alt.Scale(domain=[0, 1.05 * most], nice=False),
    )

    def tip(kind: str) -> list[alt.Tooltip]:
        return [
            alt.Tooltip("arm:N", title="arm"),
            alt.Tooltip("at:N", title="at"),
            alt.Tooltip("t:N", title=kind),
        ]

    layers: list[Any] = [
        alt.Chart(style.data("lines")).transform_filter(shown).mark_line(clip=True).encode(x=x, y=y,
            color=color, strokeDash=dashes),
        alt.Chart(style.data("lines")).transform_filter(shown).mark_point(filled=True, size=25, opacity=1,
            clip=True).encode(x=x, y=y, color=color, tooltip=tip("simulated")),
        alt.Chart(style.data("measured")).transform_filter(shown).mark_point(filled=False, shape="diamond",
            size=110, strokeWidth=2, clip=True)
        .encode(x=x, y=y, color=color, tooltip=tip("measured")),
    ]  # fmt: skip
    layers = layers if dots else layers[:2]
    layers[0] = layers[0].add_params(shown, style.zoom_param(["x", "y"])).properties(name="lines")
    drawn = alt.layer(*layers).properties(
        width=style.WIDTH, height=440, autosize=alt.AutoSizeParams(type="fit", contains="padding")
    )
    return style.Drawing(drawn, {"lines": rows, "measured": dots})


def over_rate(report: Report) -> list[style.Drawing]:
    drawing = _lines(report, True)
    if drawing:
        return [drawing]
    return [] if _chart(report, False) else figures_bars.plan(report)


def over_world(report: Report) -> list[style.Drawing]:
    drawing = _lines(report, False)
    return [drawing] if drawing else []
