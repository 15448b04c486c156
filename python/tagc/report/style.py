"""Light and dark colours, and everything that all figures share.

A figure's specification holds the light colours. Style sheets replace them by the dark ones: Vega writes a
colour as an attribute of an SVG element, and a rule of a style sheet overrides an attribute. So one drawing
serves both, prints in light colours, and also works in programs without style sheets. Two light colours with
different dark ones must differ. Fills and strokes follow Okabe and Ito, for colour-blind readers; strokes are
darker on light pages, because a thin line needs more contrast than a box."""

from __future__ import annotations

from typing import Any

import altair as alt

PAGE, PANEL, INK, SOFT, GRID, FRAME = "#ffffff", "#f6f8fa", "#1f2328", "#59636e", "#dfe4e9", "#6e7782"
IDLE, PALE_INK = "#dde2e8", "#12202c"
FILLS = ("#0072b2", "#d55e00", "#009e73", "#b3568f", "#e69f00", "#56b4e9", "#6f58b8", "#6e7781")
LINES = ("#0072b2", "#d55e00", "#008c66", "#b3568f", "#a87800", "#3187bd", "#6f58b8", "#6e7781")
DASHES = ([1, 0], [8, 3], [2, 3], [10, 3, 2, 3], [14, 4])
PALE = (FILLS[4], FILLS[5], IDLE)  # text on these is dark
DARK = {
    PAGE: "#0d1117", PANEL: "#161b22", INK: "#e6edf3", SOFT: "#9aa4ae", GRID: "#2b3138", FRAME: "#8b949e",
    IDLE: "#363d45",
    PALE_INK: "#0d1117", "#0072b2": "#58b4f0", "#d55e00": "#ff8c42", "#009e73": "#3fd0a4",
    "#008c66": "#3fd0a4",
    "#b3568f": "#e79bc8", "#e69f00": "#f0c24a", "#a87800": "#f0c24a", "#56b4e9": "#a5dcfa",
    "#3187bd": "#a5dcfa",
    "#6f58b8": "#b7a0f0", "#6e7781": "#98a2ac",
}  # fmt: skip
FONT = "Liberation Sans, Arial, Helvetica, DejaVu Sans, sans-serif"
WIDTH = 800
LABEL_WIDTH = 330  # of the longest name of an arm that is shown whole
WIDER = 0.18  # by how much text may be wider where it is looked at: DejaVu Sans beside Liberation Sans


def line_color(i: int) -> str:
    return LINES[i % len(LINES)]


def dash(i: int) -> list[int]:
    """Returns the colour of an arm. Colours repeat after eight arms; dashes then distinguish them."""
    return list(DASHES[i // len(LINES) % len(DASHES)])


def text_width(text: str, size: float = 11) -> float:
    """Returns the approximate width in pixels."""
    return 0.56 * size * len(text)


def padding(longest: float) -> dict[str, float]:
    """Returns the room around a chart whose labels at the left are so wide in our font: Vega leaves what that
    needs, and a reader's may be wider."""
    return {"left": 5 + int(WIDER * longest), "right": 5, "top": 5, "bottom": 5}


def dark_rules(scope: str) -> str:
    """Returns CSS that turns the light colours of drawings under `scope` into the dark ones."""
    return "\n".join(
        f'{scope} [fill="{light}"] {{ fill: {dark} }} {scope} [stroke="{light}"] {{ stroke: {dark} }}'
        for light, dark in DARK.items()
    )


def dark_spec(spec: Any) -> Any:
    """Returns the specification in dark colours, for pictures without style sheets."""
    if isinstance(spec, str):
        return DARK.get(spec, spec)
    if isinstance(spec, list):
        return [dark_spec(item) for item in spec]
    if isinstance(spec, dict):
        return {name: item if name == "datasets" else dark_spec(item) for name, item in spec.items()}
    return spec


def config() -> dict[str, Any]:
    axis = {
        "labelColor": INK,
        "titleColor": SOFT,
        "titleFontWeight": "normal",
        "titleFontSize": 12,
        "labelFontSize": 12,
        "gridColor": GRID,
        "domainColor": FRAME,
        "tickColor": FRAME,
        "titlePadding": 8,
        "labelLimit": LABEL_WIDTH,
        "titleLimit": 700,
        "labelSeparation": 6,
    }
    return {"background": PAGE, "font": FONT, "axis": axis, "view": {"stroke": None}, "text": {"color": INK,
        "fontSize": 11, "font": FONT},
            "legend": {"labelColor": INK, "labelFontSize": 12, "labelLimit": 320, "titleColor": SOFT,
                       "titleFontWeight": "normal",
                       "orient": "bottom", "symbolStrokeWidth": 2.5, "columnPadding": 40},
            "rule": {"color": INK}, "line": {"strokeWidth": 2, "strokeJoin": "round"}}  # fmt: skip


# ---- parts of figures ----


def data(name: str) -> alt.NamedData:
    return alt.NamedData(name=name)


def columns(names: list[str]) -> int:
    """Returns options of a legend under a figure."""
    longest = max((min(text_width(name, 12), 320) for name in names), default=0)
    return max(1, min(len(names), int((WIDTH - 40) / (longest + 68))))


def legend_param(name: str, field: str, names: list[str]) -> alt.Parameter:
    """Returns a selection: a click in the legend hides an entry, and another click shows it again. It must be
    in the first layer that has the legend's channel, because the legend takes it from there."""
    return alt.selection_point(name=name, fields=[field], bind="legend", toggle="true", empty=False,
                               clear=False,
                               value=[{field: each} for each in names])  # fmt: skip


def zoom_param(encodings: list[Any]) -> alt.Parameter:
    """Returns a parameter: dragging moves the axes. The wheel zooms only with Ctrl, so that it still scrolls
    the page. A double click resets."""
    return alt.selection_interval(
        name="zoom", bind="scales", encodings=encodings, zoom="wheel![event.ctrlKey]"
    )


def arm_color(names: list[str], colors: list[str]) -> alt.Color:
    """Returns the colour of lines: the legend shows their dashes, without a layer's opacity."""
    legend = alt.Legend(columns=columns(names), symbolType="stroke", symbolOpacity=1, symbolSize=400)
    return alt.Color(
        "arm:N", title=None, sort=None, scale=alt.Scale(domain=names, range=colors), legend=legend
    )


class Drawing:
    """A chart and its data, joined only at the end: Altair checks the chart, which would be slow with many
    rows."""

    def __init__(self, chart: Any, datasets: dict[str, list[dict[str, Any]]]) -> None:
        self.chart = chart
        self.datasets = datasets

    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.chart.to_dict()
        del spec["$schema"]  # an address; the library needs none
        spec["config"] = config()
        spec["datasets"] = self.datasets
        return spec
