"""Loss gap against bits: named points, the Pareto front as a line, and the spread of the first arm's seeds as
a band, in which differences are not significant. Bits are logarithmic; so are gaps, unless some are well
below zero."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from tagc.report import pareto, style
from tagc.report.groups import group_gap
from tagc.report.model import Report
from tagc.report.pareto import FLOOR, Point

_INNER_WIDTH, _HEIGHT, _FONT = 720, 440, 11
_KINDS = (
    ("the baseline", style.LINES[0]),
    ("the paper's sketch", style.LINES[1]),
    ("nothing beats it", style.LINES[2]),
    ("others", style.LINES[7]),
)
# Positions of a name beside its mark: right, left, above and below.
_PLACES = ((8, 0, "left"), (-8, 0, "right"), (6, -11, "left"), (6, 11, "left"), (-6, -11, "right"), (-6, 11,
    "right"),
           (0, -13, "center"), (0, 14, "center"), (10, -23, "left"), (10, 23, "left"), (-10, -23, "right"),
           (-10, 23, "right"))  # fmt: skip
Box = tuple[float, float, float, float]


def _kind(point: Point) -> int:
    return 0 if point.is_first else 1 if point.is_paper else 2 if point.is_front else 3


def _seed_spread(report: Report) -> float:
    """Returns the distance of the first arm's seeds from their mean, in percent; 0: unknown."""
    for group in report.groups:
        if group.first is group and len(group.runs) > 1 and group.runs[0].evals:
            gap = group_gap(group, group, group.runs[0].evals[-1][0])
            if gap.n > 1:
                return 100 * max(abs(gap.least), abs(gap.most))
    return 0.0


def _name_places(
    points: list[Point], place_x: Any, place_y: Any
) -> list[tuple[Point, tuple[float, float, str]]]:
    """Puts names beside their marks. A name without room is left out: pointing at the mark shows it."""
    taken: list[Box] = []
    for point in points:
        x, y = place_x(point.bits), place_y(point.gap.middle)
        taken.append((x - 5, y - 5, x + 5, y + 5))
    named: list[tuple[Point, tuple[float, float, str]]] = []
    for point in sorted(points, key=lambda point: _kind(point) == 3):  # the important ones choose first
        x, y, width = (
            place_x(point.bits),
            place_y(point.gap.middle),
            style.text_width(point.result.name, _FONT),
        )
        first = 2 if point.is_front else 0  # the line of the front would cross names beside its marks
        for dx, dy, align in _PLACES[first:] + _PLACES[:first]:
            left = x + dx - (width if align == "right" else width / 2 if align == "center" else 0)
            box = (left, y + dy - 7, left + width, y + dy + 7)
            is_inside = box[0] >= 0 and box[1] >= 0 and box[2] <= _INNER_WIDTH and box[3] <= _HEIGHT
            if is_inside and not any(
                box[0] < o[2] and o[0] < box[2] and box[1] < o[3] and o[1] < box[3] for o in taken
            ):
                taken.append(box)
                named.append((point, (dx, dy, align)))
                break
    return named


def _edge(points: list[Point], right: float) -> list[dict[str, float]]:
    """Returns the Pareto front: the least loss for at most so many bits. If the first arm is better still,
    the front ends at it."""
    edge: list[Point] = []
    for point in sorted(points, key=lambda point: point.bits):
        if point.is_front or (point.is_first and edge and point.gap.middle < edge[-1].gap.middle):
            edge.append(point)
    return (
        [{"x": point.bits, "y": point.gap.middle} for point in edge]
        + [{"x": right, "y": edge[-1].gap.middle}]
        if edge
        else []
    )


def _draw(report: Report, is_all: bool) -> style.Drawing | None:
    points = pareto.find(report, is_all)
    if not points:
        return None
    gaps = [
        gap
        for point in points
        for gap in (point.gap.middle, point.gap.least, point.gap.most)
        if math.isfinite(gap)
    ]
    highest, lowest, spread = max([0.1, *gaps]), min([0.0, *gaps]), _seed_spread(report)
    is_log = not lowest < -highest / 10
    left, right = min(point.bits for point in points) / 1.3, max(point.bits for point in points) * 1.3
    margin = 0.06 * (highest - lowest)
    bottom, top = (
        (FLOOR * 0.8, highest * 1.3) if is_log else (min(lowest, -spread) - margin, highest + margin)
    )

    def shown(gap: float) -> float:
        return max(gap, FLOOR) if is_log else gap

    def place(value: float, low: float, high: float, is_log: bool) -> float:
        return math.log(value / low) / math.log(high / low) if is_log else (value - low) / (high - low)

    x = alt.X(
        "x:Q",
        title=f"bits per parameter and step, {'gradients and parameters' if is_all else 'gradients'}",
        scale=alt.Scale(type="log", domain=[left, right], nice=False),
        axis=alt.Axis(format="~g", labelOverlap="greedy"),
    )
    kind: Any = "log" if is_log else "linear"
    y_axis = alt.Axis(
        format="~g",
        labelOverlap="greedy",
        labelExpr=f"datum.value == {FLOOR} ? '≤ {FLOOR}' : datum.label" if is_log else alt.Undefined,
    )
    y = alt.Y(
        "y:Q",
        title="loss above the baseline's (%)",
        scale=alt.Scale(type=kind, domain=[bottom, top], nice=False),
        axis=y_axis,
    )
    rows, names, whiskers = [], [], []
    for point in points:
        gap = point.gap
        row = {
            "x": point.bits,
            "y": shown(gap.middle),
            "k": _KINDS[_kind(point)][0],
            "n": point.result.name,
            "g": f"{gap.middle:+.3f} % ({gap.least:+.3f} to {gap.most:+.3f})",
            "b": f"{point.bits:.3g}",
        }
        rows.append(row)
        if gap.n > 1:
            whiskers.append({"x": point.bits, "a": shown(gap.least), "b": shown(gap.most), "k": row["k"]})
    for point, (dx, dy, align) in _name_places(points, lambda bits: _INNER_WIDTH * place(bits, left, right,
        True),
                                               lambda gap: _HEIGHT * (1 - place(shown(gap), bottom, top,
                                                   is_log))):  # fmt: skip
        names.append(
            {
                "x": point.bits,
                "y": shown(point.gap.middle),
                "n": point.result.name,
                "k": _KINDS[_kind(point)][0],
                "dx": dx,
                "dy": dy,
                "align": align,
                "w": "bold" if point.is_paper else "normal",
            }
        )
    met = [name for name, _ in _KINDS if any(row["k"] == name for row in rows)]
    hidden = style.legend_param("shown", "k", met)
    color = alt.Color(
        "k:N",
        title=None,
        sort=None,
        legend=alt.Legend(columns=style.columns(met)),
        scale=alt.Scale(domain=met, range=[color for name, color in _KINDS if name in met]),
    )
    edge = [row | {"y": shown(row["y"])} for row in _edge(points, right)]
    layers: list[Any] = []
    if spread > FLOOR:
        band = {
            "a": shown(-spread) if not is_log else bottom,
            "b": min(spread, top),
            "t": "spread of the baseline's seeds",
        }
        layers.append(
            alt.Chart(style.data("band"))
            .mark_rect(color=style.LINES[0], opacity=0.18, clip=True)
            .encode(y=alt.Y("a:Q"), y2="b:Q")
        )
        layers.append(alt.Chart(style.data("band")).mark_text(align="right", baseline="top", color=style.SOFT,
            dy=3, dx=-4)
                      .encode(x=alt.value("width"), y="b:Q", text="t:N"))  # fmt: skip
    else:
        band = {}
    layers.append(alt.Chart(style.data("edge")).mark_line(interpolate="step-after", color=style.LINES[2],
                                                          strokeWidth=1.2, opacity=0.6, clip=True)
                  .encode(x=x, y=y))  # fmt: skip
    if whiskers:
        layers.append(
            alt.Chart(style.data("whiskers"))
            .transform_filter(hidden)
            .mark_rule(clip=True, strokeWidth=1.2)
            .encode(x=x, y=alt.Y("a:Q"), y2="b:Q")
        )
    layers.append(
        alt.Chart(style.data("points"))
        .transform_filter(hidden)
        .mark_point(filled=True, size=70, opacity=1, clip=True)
        .encode(
            x=x,
            y=y,
            color=color,
            tooltip=[
                alt.Tooltip("n:N", title="arm"),
                alt.Tooltip("g:N", title="loss"),
                alt.Tooltip("b:N", title="bits"),
            ],
        )
    )
    layers.append(alt.Chart(style.data("names")).transform_filter(hidden).mark_text(
        fontSize=_FONT, clip=True, dx=alt.expr("datum.dx"), dy=alt.expr("datum.dy"),
        align=alt.expr("datum.align"), baseline="middle",
        fontWeight=alt.expr("datum.w")).encode(x=x, y=y, text="n:N"))  # fmt: skip
    # the layer whose legend it is
    layers[-2] = layers[-2].add_params(hidden, style.zoom_param(["x", "y"])).properties(name="points")
    chart = alt.layer(*layers).properties(
        width=style.WIDTH, height=_HEIGHT + 80, autosize=alt.AutoSizeParams(type="fit", contains="padding")
    )
    return style.Drawing(
        chart,
        {"points": rows, "names": names, "whiskers": whiskers, "edge": edge, "band": [band] if band else []},
    )


def gradients(report: Report) -> style.Drawing | None:
    return _draw(report, False)


def all_legs(report: Report) -> style.Drawing | None:
    return _draw(report, True)
