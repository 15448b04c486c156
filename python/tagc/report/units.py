"""Numbers as text: three digits and a fitting unit, "-" for unknown ones."""

from __future__ import annotations

import math

_TIMES = ((1e-9, " ns"), (1e-6, " µs"), (1e-3, " ms"), (1.0, " s"))
_BYTES = ((1.0, " B"), (1e3, " kB"), (1e6, " MB"), (1e9, " GB"), (1e12, " TB"))
_RATES = ((1.0, " bit/s"), (1e3, " kbit/s"), (1e6, " Mbit/s"), (1e9, " Gbit/s"), (1e12, " Tbit/s"))
_COUNTS = ((1.0, ""), (1e3, " k"), (1e6, " M"), (1e9, " G"), (1e12, " T"))


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return f"0{units[-1][1] if units is _TIMES else units[0][1]}"
    scale, unit = [row for row in units if row is units[0] or abs(value) >= 0.9995 * row[0]][-1]
    shown = value / scale
    size = abs(shown)
    if size >= 1e5:
        return f"{shown:.3g}{unit}"
    return f"{shown:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}{unit}"


def time(seconds: float) -> str:
    return _scaled(seconds, _TIMES)


def n_bytes(count: float) -> str:
    return _scaled(count, _BYTES)


def rate(bits_per_s: float) -> str:
    return _scaled(bits_per_s, _RATES)


def count(n: float) -> str:
    if math.isfinite(n) and abs(n) < 1e4 and n == math.floor(n):
        return f"{n:.0f}"
    return _scaled(n, _COUNTS)


def fixed(value: float, digits: int) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.{digits}f}" if abs(value) < 1e7 else f"{value:.{digits}g}"


def percent(share: float) -> str:
    value = 100 * share
    if not math.isfinite(value):
        return "-"
    return f"{value:.1f} %" if abs(value) < 1e6 else f"{value:.3g} %"


def change(share: float) -> str:
    """Formats 0.123 as "+12.3 %"."""
    value = 100 * share
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    return f"{value:+.3g} %" if size >= 1e6 else f"{value:+.1f} %" if size >= 9.995 else f"{value:+.2f} %"


def ratio(value: float) -> str:
    return f"{min(value, 9999):.2f}"


def plural(n: float, word: str) -> str:
    return f"{n:.0f} {word}{'' if n == 1 else 's'}"
