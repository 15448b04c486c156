"""Reads JSON files that are not trusted: errors name the file and the place, and every text is safe to
print."""

from __future__ import annotations

import json
import math
import os
import re
from typing import Any

MOST_BYTES = 1 << 30
MOST_NUMBER = 1e290  # sums and ratios of larger numbers overflow
# Control characters, those that change the direction of text, surrogates, and two that XML forbids.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


class ReportError(Exception):
    """A mistake in an input. The text is for the user."""


def clean(text: str) -> str:
    """Returns `text` with U+FFFD instead of characters that would break a page or a terminal."""
    return _UNSAFE.sub("\ufffd", text)


def _clean_all(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_clean_all(item) for item in value]
    if isinstance(value, dict):
        return {clean(name): _clean_all(item) for name, item in value.items()}
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _unknown(_: str) -> None:
    return None


def parse(text: str, place: str, is_log: bool = False) -> Any:
    """Returns the value of a JSON text. ReportError names `place` and the line. is_log: NaN and Infinity are
    None, because users write logs by json.dumps(); elsewhere they are errors."""
    try:
        value = json.loads(text, parse_constant=_unknown if is_log else _no_constant)
        return _clean_all(value) if "\\" in text or _UNSAFE.search(text.replace("\n", "")) else value
    except json.JSONDecodeError as error:
        raise ReportError(f"{place} line {error.lineno} is no JSON: {error.msg}") from None
    except RecursionError:
        raise ReportError(f"{place} is no JSON of tagc: it is nested too deeply") from None
    except ValueError as error:
        raise ReportError(f"{place} is no JSON: {error}") from None


def read_text(path: str) -> str:
    try:
        if os.path.getsize(path) > MOST_BYTES:
            raise ReportError(
                f"{path} is larger than 1 GiB: write a trace of fewer steps (--trace-steps); of a run's log, "
                "every tenth line is enough"
            )
        with open(path, encoding="utf-8", newline="\n") as file:
            return file.read()
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ReportError(f"{path} is no UTF-8 at byte {error.start}") from None


def as_number(value: object) -> float:
    """Returns a finite number; NaN for anything else, or a number that is too large."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if abs(number) <= MOST_NUMBER else math.nan


class Node:
    """A JSON object, and its place for error texts. Members are read by name and kind."""

    def __init__(self, value: object, place: str) -> None:
        if not isinstance(value, dict):
            raise ReportError(f"{place} is no object")
        self.value: dict[str, Any] = value
        self.place = place

    def _refuse(self, name: str, kind: str) -> ReportError:
        if name in self.value:
            return ReportError(f'{self.place}: "{name}" is no {kind}')
        return ReportError(f'{self.place} lacks "{name}", a{"n" if kind == "object" else ""} {kind}')

    def get(self, name: str) -> Any:
        return self.value.get(name)

    def node(self, name: str) -> Node:
        if not isinstance(self.get(name), dict):
            raise self._refuse(name, "object")
        return Node(self.get(name), f"{self.place} {name}")

    def node_or_empty(self, name: str) -> Node:
        value = self.get(name)
        return Node(value if isinstance(value, dict) else {}, f"{self.place} {name}")

    def items(self, name: str) -> list[Any]:
        if not isinstance(self.get(name), list):
            raise self._refuse(name, "list")
        return list(self.get(name))

    def nodes(self, name: str) -> list[Node]:
        return [Node(item, f"{self.place} {name}[{i}]") for i, item in enumerate(self.items(name))]

    def nodes_or_none(self, name: str) -> list[Node]:
        return self.nodes(name) if isinstance(self.get(name), list) else []

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self._refuse(name, "text")
        return value

    def text_or(self, name: str, default: str) -> str:
        value = self.get(name)
        return value if isinstance(value, str) else default

    def number(self, name: str) -> float:
        """Returns a number, NaN for null."""
        value = self.get(name)
        if name not in self.value or (
            value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)))
        ):
            raise self._refuse(name, "number")
        return as_number(value)

    def number_or_nan(self, name: str) -> float:
        return as_number(self.get(name))
