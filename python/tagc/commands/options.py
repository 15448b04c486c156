"""Values of options: sizes and ranges."""

from __future__ import annotations

import argparse
import re

_SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"


def size(text: str) -> float:
    found = re.fullmatch(_NUMBER + r"\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in _SIZES or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f'"{text[:40]}", allowed: a number above 0, as in 350m, 1b or 7e9')
    return float(found[1]) * _SIZES[found[2]]


def whole(least: int, most: int) -> type[int]:
    """Returns what reads an integer of that range; argparse calls it."""

    def read(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f'"{text[:40]}", allowed: {least} to {most}')
        return int(text)

    return read  # type: ignore[return-value]


def real(least: float, most: float) -> type[float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f'"{text[:40]}", allowed: {least:g} to {most:g}')
        return value

    return read  # type: ignore[return-value]
