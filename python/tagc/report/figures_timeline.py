"""Timelines: per trace and rank a row for compute, one for the codec, and one per lane of transfers. All
traces of a figure have one scale. A trace has more spans than a page can show, so narrow neighbours are
merged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from tagc.report import style, units
from tagc.report.model import Report
from tagc.report.traces import COMM, Span, Trace, Window, backward_windows, middle, shown_units, step_window

MOST_TRACES, MOST_LANES, ROW = 8, 6, 19
_NARROW = 2000  # a span shorter than this share of the figure is merged with its neighbours
_LOOKS = (
    ("forward", style.FILLS[5]), ("backward", style.FILLS[0]), ("optimizer", style.FILLS[2]),
    ("compute waits", style.IDLE),
    ("codec: select", style.FILLS[3]), ("codec: index", style.FILLS[5]), ("codec: encode", style.FILLS[6]),
    ("codec: decode", style.FILLS[2]), ("codec waits", style.IDLE),
    ("comm: index", style.FILLS[5]), ("comm: values", style.FILLS[1]), ("comm: leftover", style.FILLS[6]),
    ("comm: result", style.FILLS[3]), ("comm: gather", style.FILLS[4]), ("comm: control", style.FILLS[7]),
    ("other", style.FILLS[7]),
)  # fmt: skip
_COLORS = dict(_LOOKS)


def _look(span: Span) -> str:
    if span.kind == "other":
        return "other"
    if span.kind == "wait":
        return "compute waits" if span.track == 0 else "codec waits"
    return span.kind if span.track == 0 else f"{'codec' if span.track == 1 else 'comm'}: {span.kind}"


def _row_spans(
    spans: list[Span], window: Window, length_s: float, row: int, scale: float
) -> list[dict[str, Any]]:
    """Returns the spans of one row: wide ones unchanged, narrow neighbours of one kind merged."""
    rows: list[dict[str, Any]] = []
    narrow: dict[str, dict[str, Any]] = {}
    least = length_s / _NARROW
    for span in spans:
        start, end = max(span.start_s, window[0]) - window[0], min(span.end_s, window[1]) - window[0]
        look = _look(span)
        if end - start >= least:
            n_bytes = f", {units.n_bytes(span.n_bytes)}" if span.n_bytes > 0 else ""
            rows.append(
                {
                    "r": row,
                    "a": start / scale,
                    "b": end / scale,
                    "k": look,
                    "u": span.unit,
                    "t": f"{units.time(span.end_s - span.start_s)}{n_bytes}",
                }
            )
            continue
        last = narrow.get(look)
        if last and start * (1 / scale) - last["b"] <= least / scale:
            last["b"], last["n"] = max(last["b"], end / scale), last["n"] + 1
            last["t"] = f"{last['n']} short ones"
        else:
            narrow[look] = {
                "r": row,
                "a": start / scale,
                "b": min(max(end, start + least / 2), window[1] - window[0]) / scale,
                "k": look,
                "u": span.unit,
                "t": units.time(span.end_s - span.start_s),
                "n": 1,
            }
            rows.append(narrow[look])
    return [
        {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in row.items()
            if name != "n"
        }
        for row in rows
    ]


class _Rows:
    """The rows of a figure, from the top."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.spans: list[dict[str, Any]] = []
        self.heads: list[dict[str, Any]] = []
        self.marks: list[dict[str, Any]] = []

    def add(self, label: str) -> int:
        self.labels.append(label)
        return len(self.labels) - 1


def _add_rank(rows: _Rows, trace: Trace, rank: int, window: Window, length_s: float, scale: float) -> None:
    by_track: dict[int, list[Span]] = {}
    for span in trace.of_rank(rank):
        if span.end_s > window[0] and span.start_s < window[1] and span.track < COMM + MOST_LANES:
            by_track.setdefault(span.track, []).append(span)
    is_several = len(trace.ranks) > 1
    for i, track in enumerate(sorted(by_track)):
        name = ("compute", "codec", "comm")[track] if track <= COMM else ""
        row = rows.add(f"rank {rank}: {name}" if is_several and i == 0 else name)
        rows.spans += _row_spans(by_track[track], window, length_s, row, scale)


def _draw(shown: list[tuple[Trace, Window, Window | None]]) -> style.Drawing | None:
    """Draws timelines. shown: traces, their windows, and the outlined part of each."""
    shown = [row for row in shown if row[1][1] > row[1][0]][:MOST_TRACES]
    length_s = max((window[1] - window[0] for _, window, _ in shown), default=0.0)
    if not length_s > 0:
        return None
    scale, unit = (1e-3, "ms") if length_s < 1 else (1.0, "s")
    rows = _Rows()
    for trace, window, mark in shown:
        rows.heads.append({"r": rows.add(""), "t": f"{trace.label}, {units.time(window[1] - window[0])}"})
        for i, rank in enumerate(trace.ranks[: 1 if len(shown) > 2 else 2]):
            top = len(rows.labels)
            _add_rank(rows, trace, rank, window, length_s, scale)
            if mark and i == 0:
                rows.marks.append(
                    {
                        "a": (mark[0] - window[0]) / scale,
                        "b": (mark[1] - window[0]) / scale,
                        "r": top - 0.55,
                        "q": len(rows.labels) - 0.45,
                    }
                )
    n = len(rows.labels)
    met = [name for name, _ in _LOOKS if any(span["k"] == name for span in rows.spans)]
    hidden = style.legend_param("shown", "k", met)
    x = alt.X(
        "a:Q",
        title=f"time ({unit})",
        scale=alt.Scale(domain=[0, length_s / scale], nice=False),
        axis=alt.Axis(grid=False),
    )
    named = [row for row, label in enumerate(rows.labels) if label]
    axis = alt.Axis(
        values=named,
        tickCount=len(named),
        labelExpr="labels[datum.value]",
        domain=False,
        ticks=False,
        grid=False,
        title=None,
        labelPadding=6,
        labelOverlap=False,
    )
    y = alt.Y("y:Q", axis=axis, scale=alt.Scale(domain=[n - 0.5, -0.5], nice=False, zero=False))
    color = alt.Color(
        "k:N",
        title=None,
        sort=None,
        legend=alt.Legend(columns=style.columns(met), symbolType="square"),
        scale=alt.Scale(domain=met, range=[_COLORS[name] for name in met]),
    )
    spans = (
        alt.Chart(style.data("spans"))
        .transform_filter(hidden)
        .transform_calculate(y="datum.r - 0.42", z="datum.r + 0.42")
    )
    boxes = spans.mark_rect(clip=True, stroke=style.PAGE, strokeWidth=0.4).encode(
        x=x,
        x2="b:Q",
        y=y,
        y2="z:Q",
        color=color,
        tooltip=[
            alt.Tooltip("k:N", title="what"),
            alt.Tooltip("u:N", title="unit"),
            alt.Tooltip("t:N", title="took"),
        ],
    )
    wide = [
        span | {"m": (span["a"] + span["b"]) / 2, "pale": _COLORS[span["k"]] in style.PALE}
        for span in rows.spans
        if span["u"]
        and "waits" not in span["k"]
        and (span["b"] - span["a"]) * scale / length_s * 690 > style.text_width(span["u"], 10.5) + 6
    ]
    labels = [
        alt.Chart(style.data("wide"))
        .transform_filter(hidden)
        .transform_filter(f"datum.pale == {value}")
        .mark_text(color=color_, fontSize=10.5, baseline="middle", clip=True)
        .encode(x=alt.X("m:Q"), y=alt.Y("r:Q"), text="u:N")
        for value, color_ in (("true", style.PALE_INK), ("false", style.PAGE))
    ]
    heads = alt.Chart(style.data("heads")).mark_text(align="left", baseline="middle", fontWeight="bold",
                                                     fontSize=12, dx=2).encode(
        x=alt.value(0), y=alt.Y("r:Q"), text="t:N")  # fmt: skip
    layers: list[Any] = [boxes, *labels, heads]
    if rows.marks:
        layers.append(alt.Chart(style.data("marks")).mark_rect(clip=True, fill=None, stroke=style.INK,
            strokeWidth=1.5, strokeDash=[5, 3])
                      .encode(x=alt.X("a:Q"), x2="b:Q", y=alt.Y("r:Q"), y2="q:Q"))  # fmt: skip
    layers[0] = layers[0].add_params(hidden, style.zoom_param(["x"])).properties(name="spans")
    chart = alt.layer(*layers).add_params(alt.param(name="labels", value=rows.labels)).properties(
        width=style.WIDTH, height=ROW * n, autosize=alt.AutoSizeParams(type="fit-x",
            contains="padding"),
        padding=style.padding(max(style.text_width(label, 12) for label in rows.labels)))  # fmt: skip
    return style.Drawing(chart, {"spans": rows.spans, "wide": wide, "heads": rows.heads, "marks": rows.marks})


def _window(trace: Trace, asked: Sequence[str] | None) -> Window | None:
    wanted = shown_units(trace, asked)
    windows = backward_windows(trace, trace.ranks[0], wanted) if wanted else []
    return middle(windows) if windows else None


def step(report: Report, asked: Sequence[str] | None) -> style.Drawing | None:
    shown: list[tuple[Trace, Window, Window | None]] = []
    for trace in report.traces:
        inside = _window(trace, asked)
        whole = step_window(trace, inside)
        is_inside = inside is not None and whole[0] <= inside[0] and inside[1] <= whole[1]
        shown.append((trace, whole, inside if is_inside else None))
    return _draw(shown)


def window(report: Report, asked: Sequence[str] | None) -> style.Drawing | None:
    windows = [(trace, _window(trace, asked)) for trace in report.traces]
    return _draw([(trace, inside, None) for trace, inside in windows if inside and math.isfinite(inside[1])])
