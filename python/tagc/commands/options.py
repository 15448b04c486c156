"""Values of options within a range."""

from __future__ import annotations

import argparse
import re


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
