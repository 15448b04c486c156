"""Stacked bars, one row per arm: time, bits, memory, codec and link."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from tagc.report import style, units
from tagc.report.model import LEGS, MEMORIES, PARTS, ArmSet, Report, Result, finite_sum
from tagc.report.reading import Node

_TIME_COLORS = tuple(style.FILLS[i] for i in (0, 4, 1, 2, 7))
_LEG_COLORS = tuple(style.FILLS[i] for i in (5, 1, 6, 3, 4, 7))
_MEMORY_COLORS = tuple(style.FILLS[i] for i in (0, 1, 2, 6, 7))
_PHASES = ("select", "index", "encode", "decode")
_PHASE_COLORS = tuple(style.FILLS[i] for i in (3, 5, 6, 2))
MOST_ROWS = 4096


@dataclass
class Bar:
    """A row; without parts, the heading of the rows below."""

    label: str
    parts: Sequence[float] = ()
    end: str = ""  # beside the bar
    low: float = math.nan  # spread of the sum
    high: float = math.nan


def _lines_of(label: str) -> list[str]:
    """Returns a name in one line or, if it is too long for one, in two, cut behind a plus or comma."""
    cuts = [i + 1 for i, letter in enumerate(label) if letter in "+,"]
    if style.text_width(label, 12) <= style.LABEL_WIDTH or not cuts:
        return [label]
    cut = min(cuts, key=lambda at: abs(at - len(label) / 2))
    return [label[:cut], label[cut:].lstrip()]


def _bars(rows: list[Bar], names: Sequence[str], colors: Sequence[str], x_title: str, scale: float,
          words: Callable[[float], str],
          mark: float | None = None) -> style.Drawing:  # fmt: skip
    rows = rows[:MOST_ROWS]
    parts, ends, heads, whiskers = [], [], [], []
    most = 0.0
    for r, row in enumerate(rows):
        if not row.parts:
            heads.append({"r": r, "t": row.label})
            continue
        total = finite_sum(row.parts)
        most = max(most, total, row.high if math.isfinite(row.high) else 0.0)
        for i, part in enumerate(row.parts):
            if math.isfinite(part) and part > 0:
                parts.append(
                    {
                        "r": r,
                        "p": names[i],
                        "o": i,
                        "v": part / scale,
                        "e": row.end,
                        "w": row.high / scale if math.isfinite(row.high) else 0,
                        "arm": row.label,
                        "tip": words(part),
                    }
                )
        if total == 0:
            ends.append({"r": r, "e": row.end})
        if math.isfinite(row.low) and math.isfinite(row.high):
            whiskers.append({"r": r, "a": row.low / scale, "b": row.high / scale})
    met = [name for name in names if any(part["p"] == name for part in parts)]
    labels = [_lines_of(row.label) if row.parts else [""] for row in rows]
    longest = max((style.text_width(line, 12) for lines in labels for line in lines), default=0.0)
    longest = min(style.LABEL_WIDTH, longest)
    ends_width = (1 + style.WIDER) * max(style.text_width(row.end) for row in rows) + 14
    share = min(0.6, ends_width / (style.WIDTH - longest - 20))
    shown = style.legend_param("shown", "p", met)
    x = alt.X(
        "a:Q",
        title=x_title,
        scale=alt.Scale(domain=[0, (most / scale or 1) / (1 - share)], nice=False),
        axis=alt.Axis(tickCount=8),
    )
    axis = alt.Axis(labelExpr="labels[datum.value]", domain=False, ticks=False, title=None, labelPadding=6)
    y = alt.Y("r:O", axis=axis, scale=alt.Scale(domain=list(range(len(rows))), paddingInner=0.25))
    color = alt.Color("p:N", title=None, sort=None, scale=alt.Scale(domain=met,
        range=[colors[names.index(name)] for name in met]),
                      legend=alt.Legend(columns=style.columns(met)) if len(met) > 1 else None)  # fmt: skip
    tip = [
        alt.Tooltip("arm:N", title="arm"),
        alt.Tooltip("p:N", title="part"),
        alt.Tooltip("tip:N", title="value"),
    ]
    stacked = alt.Chart(style.data("parts")).transform_filter(shown).transform_stack(
        stack="v", as_=["a", "b"], groupby=["r"], sort=[alt.SortField("o")])  # fmt: skip
    bars = stacked.mark_bar(clip=True).encode(x=x, x2="b:Q", y=y, color=color, tooltip=tip)
    text: dict[str, Any] = {"align": "left", "baseline": "middle"}
    total_text = (alt.Chart(style.data("parts")).transform_filter(shown).transform_aggregate(sum="sum(v)",
        groupby=["r", "e", "w"])
                  .transform_calculate(at="max(datum.sum, datum.w)").mark_text(dx=6, clip=True,
                      **text).encode(x="at:Q", y=y, text="e:N"))  # fmt: skip
    layers: list[Any] = [bars.properties(name="bars")]
    if mark is not None:
        layers.append(alt.Chart(style.data("mark")).mark_rule(strokeDash=[4, 3], clip=True).encode(x="x:Q"))
    layers.append(total_text)
    if whiskers:
        layers.append(
            alt.Chart(style.data("whiskers"))
            .mark_rule(clip=True, strokeWidth=1.2)
            .encode(x="a:Q", x2="b:Q", y=y)
        )
        for end in ("a", "b"):
            layers.append(
                alt.Chart(style.data("whiskers"))
                .mark_tick(clip=True, size=7, thickness=1.2, color=style.INK)
                .encode(x=f"{end}:Q", y=y)
            )
    if ends:
        layers.append(
            alt.Chart(style.data("ends")).mark_text(dx=6, **text).encode(x=alt.value(0), y=y, text="e:N")
        )
    if heads:
        layers.append(
            alt.Chart(style.data("heads"))
            .mark_text(fontWeight="bold", fontSize=12, dx=2, **text)
            .encode(x=alt.value(0), y=y, text="t:N")
        )
    layers[0] = layers[0].add_params(shown, style.zoom_param(["x"]))
    chart = alt.layer(*layers).add_params(alt.param(name="labels", value=labels)).properties(
        width=style.WIDTH, height=24 * len(rows), autosize=alt.AutoSizeParams(type="fit-x",
            contains="padding"), padding=style.padding(longest))  # fmt: skip
    return style.Drawing(
        chart, {"parts": parts, "ends": ends, "heads": heads, "whiskers": whiskers, "mark": [{"x": mark}]}
    )


# ---- sets of arms ----


@dataclass
class View:
    """The parts of an arm that a figure shows, and their labels."""

    parts: Callable[[Result], Sequence[float]]
    names: Sequence[str]
    colors: Sequence[str]
    unit: Callable[[float], tuple[str, float]]  # from the longest bar: title and scale of the axis
    words: Callable[[float], str]
    end: Callable[[Result], str]
    heading: Callable[[ArmSet], str] = lambda arms: ""  # added to the heading of a set
    leaves_out_repeats: bool = False
    spread: Callable[[Result], tuple[float, float]] = lambda result: (math.nan, math.nan)


def _is_same(a: ArmSet, b: ArmSet, view: View) -> bool:
    """Returns rows without repetitions: a sweep of the link has the same bytes and memory for each rate."""
    if len(a.results) != len(b.results):
        return False
    for x, y in zip(a.results, b.results):
        if x.name != y.name:
            return False
        for p, q in zip(view.parts(x), view.parts(y)):
            if math.isfinite(p) != math.isfinite(q) or (
                math.isfinite(p) and abs(p - q) > 1e-3 * max(abs(p), abs(q)) + 1e-3
            ):
                return False
    return True


def _most(arms: ArmSet, view: View) -> float:
    return max((finite_sum(view.parts(result)) for result in arms.results), default=0.0)


def _draw_sets(report: Report, view: View) -> list[style.Drawing]:
    """Groups sets of similar size, which share an axis: a model of megabytes would be invisible beside one of
    gigabytes."""
    drawn: list[ArmSet] = []
    for arms in report.sets:
        if _most(arms, view) > 0:
            if not view.leaves_out_repeats or not any(_is_same(arms, other, view) for other in drawn):
                drawn.append(arms)
    if not drawn:
        return []
    sizes = [_most(arms, view) for arms in drawn]
    charts = [drawn] if max(sizes) <= 6 * min(sizes) else [[arms] for arms in drawn]
    drawings = []
    for chart in charts:
        rows: list[Bar] = []
        for arms in chart:
            if len(drawn) > 1 or view.heading(arms):
                rows.append(Bar(arms.title + view.heading(arms)))
            rows += [
                Bar(result.name, view.parts(result), view.end(result), *view.spread(result))
                for result in arms.results
            ]
        title, scale = view.unit(max(_most(arms, view) for arms in chart))
        drawings.append(_bars(rows, view.names, view.colors, title, scale, view.words))
    return drawings


def time(report: Report) -> list[style.Drawing]:
    def end(result: Result) -> str:
        total = units.time(result.total_s.middle)
        return f"{total}, {units.ratio(result.speedup.middle)}x" if result.speedup.n else total

    def unit(most: float) -> tuple[str, float]:
        name, scale = ("ms", 1e-3) if most < 1 else ("s", 1.0)
        return f"time of an optimizer step: median, and in whiskers least to most ({name})", scale

    def heading(arms: ArmSet) -> str:
        first = arms.results[0].name
        is_short = len(first) <= 20  # else it ends outside the picture; the row itself says 1.00x
        return f"; 1.00x: {first}" if len(arms.results) > 1 and arms.results[0].total_s.n and is_short else ""

    def spread(result: Result) -> tuple[float, float]:
        return (result.total_s.least, result.total_s.most) if result.total_s.n > 1 else (math.nan, math.nan)

    return _draw_sets(
        report,
        View(
            lambda result: result.part_s, PARTS, _TIME_COLORS, unit, units.time, end, heading, spread=spread
        ),
    )


def _bits_words(bits: float) -> str:
    return f"{units.fixed(bits, 2 if bits < 10 else 1)} bits per parameter"


def bits(report: Report) -> list[style.Drawing]:
    title = "bits per parameter, rank and step, before (W-1)/W"
    return _draw_sets(report, View(lambda result: result.bits, LEGS, _LEG_COLORS, lambda most: (title, 1.0),
                                   _bits_words,
                                   lambda result: units.fixed(finite_sum(result.bits), 2),
                                   leaves_out_repeats=True))  # fmt: skip


def memory(report: Report) -> list[style.Drawing]:
    def unit(most: float) -> tuple[str, float]:
        return ("memory of a rank (MB)", 1e6) if most < 1e9 else ("memory of a rank (GB)", 1e9)

    return _draw_sets(report, View(lambda result: result.memory, MEMORIES, _MEMORY_COLORS, unit,
                                   units.n_bytes,
                                   lambda result: units.n_bytes(finite_sum(result.memory)),
                                   leaves_out_repeats=True))  # fmt: skip


# ---- codec and link of a bench ----


def _entries(report: Report, name: str, row: Callable[[Node], Bar]) -> list[Bar]:
    benches = [
        (arms.title, arms.bench.nodes(name))
        for arms in report.sets
        if arms.bench and isinstance(arms.bench.get(name), list)
    ]
    benches = [(title, entries) for title, entries in benches if entries]
    rows: list[Bar] = []
    for title, entries in benches:
        rows += [Bar(title)] if len(benches) > 1 else []
        rows += [row(entry) for entry in entries]
    return rows


def _codec_row(entry: Node) -> Bar:
    to_floor = entry.node_or_empty("to_floor")
    parts = [to_floor.number_or_nan(name) for name in _PHASES]
    ratio, sparsity = entry.number_or_nan("ratio"), entry.number_or_nan("sparsity")
    words = [entry.text_or("exchange", "?")[:20]]
    words += [f"{ratio:.3g}x"] if ratio > 0 else []
    words += [index for index in [entry.text_or("index", "or")[:8]] if index not in ("or", "none")]
    words += [wire for wire in [entry.text_or("wire", "fp32")[:8]] if wire != "fp32"]
    label = " ".join(words)
    label += f", {100 * sparsity:.4g} %" if sparsity > 0 else ""
    label += f", {units.count(entry.number_or_nan('n_elems'))}"
    label += ", all-reduce" if entry.get("all_reduce") is True else ""
    total = entry.number_or_nan("total_to_floor")
    return Bar(label, parts, f"{total if math.isfinite(total) else finite_sum(parts):.3g}")


def codec(report: Report) -> list[style.Drawing]:
    rows = _entries(report, "codec", _codec_row)
    title = "time as a multiple of the memory floor (dashed: 1)"
    return (
        [
            _bars(
                rows, _PHASES, _PHASE_COLORS, title, 1.0, lambda value: f"{units.fixed(value, 2)} floors", 1.0
            )
        ]
        if rows
        else []
    )


def _link_row(entry: Node) -> Bar:
    share = entry.number_or_nan("share")
    return Bar(
        entry.text_or("name", "?"),
        [share],
        f"{units.percent(share)}, {units.rate(8 * entry.number_or_nan('bytes_per_s'))}",
    )


def link(report: Report) -> list[style.Drawing]:
    rows = _entries(report, "exchanges", _link_row)
    title = "share of what all ranks exchanging with all reach (%)"
    return (
        [_bars(rows, ("share of the link",), (style.FILLS[0],), title, 0.01, units.percent, 100.0)]
        if rows
        else []
    )
