"""Figures as SVG and PNG files, without a browser."""

from __future__ import annotations

import html
import os
import re
from typing import Any
from xml.etree import ElementTree

import vl_convert

from tagc.report import style
from tagc.report.figures import Figure
from tagc.report.model import Report, Units
from tagc.report.reading import ReportError, clean
from tagc.report.style import Drawing

_FONT = re.compile(r' font-family="[^"]*"')
_SPACE = "{http://www.w3.org/2000/svg}"
_EMPTY = ("", "M0,0h0v0h0Z")  # paths of Vega that draw nothing
_LONG = re.compile(r"\d+\.\d{2,}")  # a number with more digits than a screen shows
_NEEDLESS = ("role", "aria-roledescription", "aria-hidden", "pointer-events")
_DEFAULTS = {
    "opacity": "1",
    "stroke-width": "1",
    "fill-opacity": "1",
    "stroke-opacity": "1",
    "x2": "0",
    "y2": "0",
    "transform": "translate(0,0)",
}
_INHERITED = ("fill", "font-size", "font-weight", "stroke", "stroke-dasharray", "stroke-width", "text-anchor")
_SIZE = re.compile(r'width="([0-9.]+)" height="([0-9.]+)" viewBox="[^"]*"')


def write_file(path: str, content: bytes) -> None:
    """Writes a temporary file and renames it, so that the file is complete. A pipe, a device or a link is
    written directly."""
    is_plain = not os.path.lexists(path) or (os.path.isfile(path) and not os.path.islink(path))
    target = f"{path}.partial" if is_plain else path
    try:
        if os.path.isdir(path):
            raise ReportError(f"cannot write {path}: it is a folder")
        with open(target, "wb") as file:
            file.write(content)
        if is_plain:
            os.replace(target, path)
    except OSError as error:
        if is_plain and os.path.lexists(target):
            os.unlink(target)
        raise ReportError(f"cannot write {path}: {error.strerror}") from None


def as_svg(spec: dict[str, Any]) -> str:
    """Returns the drawing without labels of marks: a picture has a title and a description."""
    return _smaller(str(vl_convert.vegalite_to_svg({**spec, "config": {**spec["config"], "aria": False}})))


def _smaller(svg: str) -> str:
    """Returns the same drawing in half the bytes: without what draws nothing, and with what most children say
    said once by their group."""
    ElementTree.register_namespace("", _SPACE[1:-1])
    root = ElementTree.fromstring(svg)
    _shrink(root)
    return ElementTree.tostring(root, encoding="unicode").replace(" />", "/>")


def _shrink(node: ElementTree.Element) -> None:
    for child in list(node):
        if child.tag == f"{_SPACE}path" and child.get("d") in _EMPTY:
            node.remove(child)
            continue
        _shrink(child)
        if child.tag == f"{_SPACE}g" and not child.attrib:
            at = list(node).index(child)
            node[at : at + 1] = list(child)
        elif (child.tag == f"{_SPACE}g" and not len(child)) or (
            child.tag == f"{_SPACE}text" and not child.text and not len(child)
        ):
            node.remove(child)
    for name, value in list(node.attrib.items()):
        if (
            name in _NEEDLESS
            or value == _DEFAULTS.get(name)
            or (name == "class" and " role-mark" not in value)
        ):
            del node.attrib[name]
        elif name not in ("class", "id"):
            node.set(
                name,
                _LONG.sub(
                    lambda number: f"{float(number[0]):.{1 if float(number[0]) >= 1 else 2}f}".removesuffix(
                        ".0"
                    ),
                    value,
                ),
            )
    for name in _INHERITED if node.tag == f"{_SPACE}g" else ():
        values = [child.get(name) for child in node]
        most = max(values, key=values.count, default=None)
        if most is not None and None not in values:
            node.set(name, most)
            for child in node:
                if child.get(name) == most:
                    del child.attrib[name]


def _stacked(drawings: list[str], title: str, caption: str) -> str:
    """Joins SVG drawings vertically, and adds a title and the rules for dark pages."""
    sizes = []
    for drawing in drawings:
        match = _SIZE.search(drawing)
        if not match:
            raise ReportError(
                "vl-convert returned an SVG of unknown size; tagc-report was made for vl-convert-python 1.9"
            )
        sizes.append((float(match[1]), float(match[2])))
    width, height = max(size[0] for size in sizes), sum(size[1] for size in sizes)
    body, y = [], 0.0
    for drawing, size in zip(drawings, sizes):
        body.append(drawing.replace("<svg ", f'<svg y="{y:g}" ', 1))
        y += size[1]
    used = [
        line
        for line in style.dark_rules("svg").split("\n")
        if line[line.index("#") : line.index("#") + 7] in "".join(body)
    ]
    rules = "\n".join(["<style>@media screen and (prefers-color-scheme: dark) {", *used, "}</style>"])
    about = f"<title>{html.escape(clean(title))}</title><desc>{html.escape(clean(caption))}</desc>"
    names: dict[str, str] = {}  # of clips: Vega continues its count in the next drawing
    inner = re.sub(
        r"\bclip[0-9]+\b", lambda clip: names.setdefault(clip[0], f"clip-{len(names)}"), "\n".join(body)
    )
    fonts = set(_FONT.findall(inner))
    font = fonts.pop() if len(fonts) == 1 else ""  # of all text: once for the whole picture
    inner = inner.replace(font, "") if font else inner
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}"{font}>'
        f"{about}\n{rules}\n{inner}\n</svg>\n"
    )


def write(report: Report, units: Units, figure: Figure, path: str, is_dark: bool = False) -> None:
    """Writes a picture. path ends in .svg (for light and dark pages) or .png (light unless is_dark)."""
    drawings = figure.draw(report, units)
    if not drawings:
        raise ReportError(f"nothing to draw as {figure.name}: it needs {figure.needs}")
    write_file(path, render(drawings, figure, path.lower().endswith(".png"), is_dark))


def render(drawings: list[Drawing], figure: Figure, is_png: bool, is_dark: bool = False) -> bytes:
    specs = [drawing.spec() for drawing in drawings]
    if is_dark:
        specs = [style.dark_spec(spec) for spec in specs]
    svg = _stacked([as_svg(spec) for spec in specs], figure.title, figure.caption)
    return bytes(vl_convert.svg_to_png(svg, scale=2.0)) if is_png else svg.encode()
