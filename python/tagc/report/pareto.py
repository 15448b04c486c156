"""Loss against bits: finds the arms that no other beats in both."""

from __future__ import annotations

from dataclasses import dataclass

from tagc.report.model import CONTROL, GATHER, ArmSet, Report, Result, Spread, finite_sum

FLOOR = 0.01  # percent: on a logarithmic axis, gaps below are drawn here
MOST_POINTS = 128


@dataclass
class Point:
    arms: ArmSet
    result: Result
    bits: float  # per parameter, rank and step
    gap: Spread  # in percent, against the first arm of its set
    is_first: bool
    is_paper: bool
    is_front: bool = False


def _beats(a: Point, b: Point) -> bool:
    x, y = a.gap.middle, b.gap.middle
    return a.bits <= b.bits and x <= y and (a.bits < b.bits or x < y)


def find(report: Report, is_all: bool) -> list[Point]:
    """Returns arms of all sets of runs that have a gap and bits, and the first of each set. is_all: bits of
    all legs, else only of gradients. Empty if there are only first arms."""
    points: list[Point] = []
    for arms in report.sets:
        for i, result in enumerate(arms.results if arms.kind == "runs" else ()):
            bits = finite_sum(
                bits for leg, bits in enumerate(result.bits) if is_all or leg not in (GATHER, CONTROL)
            )
            if bits > 1e-9 and (i == 0 or result.gap.n):
                gap = result.gap.times(100) if i else Spread(0.0, 0.0, 0.0, 0)
                points.append(
                    Point(arms, result, bits, gap, i == 0, result.options.get("exchange") == "sketch")
                )
    points = points[:MOST_POINTS]
    for point in points:
        point.is_front = not point.is_first and not any(
            _beats(other, point) for other in points if not other.is_first
        )
    return points if any(not point.is_first for point in points) else []
