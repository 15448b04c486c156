"""Values of options: sizes, rates, times and ranges."""

from __future__ import annotations

import argparse
import re

_SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
PAYLOAD = 1448 / 1538  # a frame of 1538 bytes on the line has 1448 bytes of TCP's data


def _scaled(text: str, units: dict[str, float], what: str) -> float:
    found = re.fullmatch(_NUMBER + r"\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in units or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f'"{text[:40]}", allowed: {what}')
    return float(found[1]) * units[found[2]]


def size(text: str) -> float:
    return _scaled(text, _SIZES, "a number above 0, as in 350m, 1b or 7e9")


def seconds(text: str) -> float:
    return _scaled(text, _TIMES, "a number above 0 with us, ms or s, as in 50us")


def rate(text: str) -> float:
    """Returns bits per second."""
    return _scaled(text, _RATES, "a rate above 0 in kbit, mbit, gbit or tbit, as in 10gbit")


def rates(text: str) -> list[float]:
    return [rate(one) for one in text.split(",")]


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
