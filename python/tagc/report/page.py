"""The page: one self-contained HTML file, from the summary to the origin of all inputs. Sections without data
are left out."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import vl_convert

from tagc.report import figures, style, summary, tables
from tagc.report.model import Report, Units
from tagc.report.tables import escaped

_SECTIONS = (
    ("loss", "Loss", ("loss", "loss-time", "loss-bits", "gap")),
    ("levels", "Levels", ("levels",)),
    ("quality", "Loss against bits", ("pareto", "pareto-all")),
    ("time", "Time of a step", ("time",)),
    ("bits", "Bytes on the wire", ("bits",)),
    ("timeline", "Timeline", ("timeline", "window")),
    ("memory", "Memory", ("memory",)),
    ("codec", "Codec and link", ("codec", "link")),
)

# The page fetches nothing, and its policy makes the browser enforce that. Vega's interpreter (ast) evaluates
# expressions, so no text of the page becomes code.
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<meta name="generator" content="tagc-report">
<link rel="icon" href="data:,">
"""
_SCRIPT = """
const specs = JSON.parse(document.getElementById('specs').textContent);
const draw = async () => {
  for (const place of document.querySelectorAll('.drawing')) {
    const spec = specs[place.dataset.spec];
    spec.width = Math.max(Math.min(spec.width, place.clientWidth || spec.width), 480);
    await vegaEmbed(place, spec, {ast: true, renderer: 'svg', actions: false, tooltip: {theme: 'none'}});
  }
  document.body.dataset.drawn = specs.length;
};
draw().catch(error => {
  const words = document.createElement('p');
  words.className = 'notes';
  words.textContent = 'The figures could not be drawn: ' + error;
  document.querySelector('main').prepend(words);
});
"""
_HINT = (
    "step: time of an optimizer step, median. speed-up: the first arm's time over this arm's. exposed: share of the step in which compute "
    "waits for the network. bits: per parameter, rank and step, before the factor (W-1)/W, over the whole model. gap: validation loss "
    "against the first arm. Shaded: the shortest step."
)
_HOW = (
    "Point at a mark to see its values. Click an entry of a legend to hide it or to show it again. Drag to move the axes, turn the wheel with "
    "Ctrl to zoom, and double-click to go back."
)


def _css() -> str:
    light = {
        "page": style.PAGE,
        "panel": style.PANEL,
        "ink": style.INK,
        "soft": style.SOFT,
        "grid": style.GRID,
        "link": "#0a58a8",
    }
    light |= {f"b{i}": color for i, color in enumerate(style.LINES)}
    dark = {name: style.DARK.get(color, "#79b8ff") for name, color in light.items()}

    def variables(colors: dict[str, str]) -> str:
        return "; ".join(f"--{name}: {color}" for name, color in colors.items())

    swatches = "\n".join(f".b{i} {{ background: var(--b{i}) }}" for i in range(len(style.LINES)))
    # Print in light colours, because paper is white.
    return (
        f":root {{ color-scheme: light dark; {variables(light)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {variables(dark)} }}\n{style.dark_rules('.drawing')} }}\n"
        f"@media print {{ :root {{ color-scheme: light }} }}\n{swatches}\n"
        f"{pathlib.Path(__file__).with_name('page.css').read_text(encoding='utf-8')}"
    )


class _Page:
    def __init__(self, report: Report, units: Units) -> None:
        self.report = report
        self.units = units
        self.specs: list[dict[str, Any]] = []
        self.nav: list[str] = []
        self.body: list[str] = []

    def section(self, name: str, title: str, inner: str) -> None:
        self.nav.append(f'<a href="#{name}">{title}</a>')
        self.body.append(f'<section id="{name}">\n<h2>{title}</h2>\n{inner}</section>\n')

    def figure(self, name: str, has_heading: bool) -> str:
        figure = figures.find(name)
        drawings = figure.draw(self.report, self.units)
        if not drawings:
            return ""
        parts = [
            f"<h3>{escaped(figure.title)}</h3>\n" if has_heading else "",
            f'<figure id="figure-{name}">\n',
        ]
        for drawing in drawings:
            parts.append(
                f'<div class="drawing" data-spec="{len(self.specs)}" role="img" aria-label="{escaped(figure.title)}"></div>\n'
            )
            self.specs.append(drawing.spec())
        return "".join(parts) + f"<figcaption>{escaped(figure.caption)}</figcaption>\n</figure>\n"

    def summary(self) -> str:
        report = self.report
        words = "".join(f"<p>{escaped(line)}</p>\n" for line in summary.words(report, self.units))
        parts = [f'<div class="verdict">\n{words}</div>\n' if words else ""]
        shown = [arms for arms in report.sets if arms.results]
        parts += [tables.summary_of(report, arms) for arms in shown]
        parts.append(f'<p class="hint">{escaped(_HINT)}</p>\n' if shown else "")
        notes = "".join(f"<li>{escaped(note)}</li>\n" for note in report.notes)
        parts.append(f'<div class="notes"><ul>\n{notes}</ul></div>\n' if notes else "")
        return "".join(parts) + f'<p class="hint screen">{escaped(_HOW)}</p>\n'

    def add_all(self) -> None:
        report = self.report
        self.section("summary", "Summary", self.summary())
        for name, title, names in _SECTIONS:
            inner = "".join(self.figure(figure, len(names) > 1) for figure in names)
            if not inner:
                continue
            if name == "timeline":
                inner += tables.shares(report, self.units)
            elif name == "codec":
                inner += tables.link(report)
            self.section(name, title, inner)
        if report.cases:
            self.section("lab", "Lab", tables.lab(report))
        self.section("origin", "What the runs were", tables.options(report) + tables.sources(report))


@functools.lru_cache(maxsize=1)
def _library() -> str:
    """Returns Vega and this page's script as one module; bundling takes seconds."""
    return str(vl_convert.javascript_bundle(_SCRIPT))


def _json_for_html(value: object) -> str:
    """Returns JSON for a script element, in which nothing may look like markup."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def render(report: Report, units: Units, title: str | None) -> str:
    page = _Page(report, units)
    page.add_all()
    title = escaped(title or "tagc: measurements")
    library = _library() if page.specs else ""
    script = f'<script type="application/json" id="specs">{_json_for_html(page.specs)}</script>\n<script type="module">{library}</script>\n'
    nav, body = "\n".join(page.nav), "".join(page.body)
    return (
        f"{_HEAD}<title>{title}</title>\n<style>\n{_css()}</style>\n</head>\n<body>\n<header>\n<h1>{title}</h1>\n"
        f'<nav aria-label="Sections">\n{nav}\n</nav>\n</header>\n<main>\n{body}</main>\n{script if page.specs else ""}</body>\n</html>\n'
    )
