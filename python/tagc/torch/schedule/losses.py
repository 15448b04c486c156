"""Whether the loss that the user hands over has risen, over windows of as many exchanges as watch.py's. All ranks decide from sums
over ranks.

It tells a run that goes astray. It cannot tell one that learns more slowly than it would dense: docs/first-try.md says why."""

from __future__ import annotations

import math
from typing import Any

import torch

LEAST = 20  # losses in a window, of all ranks
MOST_RISE = 0.02  # of a window's mean loss above the least, in the least
MOST_ERRORS = 4.0  # and in standard errors of that difference; both, in two windows in a row


class Losses:
    def __init__(self) -> None:
        self._own: list[torch.Tensor] = []  # of this rank, since take()
        self._pooled = (0.0, 0.0, 0.0)  # of all ranks, since the last window: as take()
        self._least: tuple[float, float] | None = None  # (mean, its variance) of the window with the least mean
        self._has_risen = False  # in the last window

    def add(self, loss: float | torch.Tensor) -> None:
        self._own.append(torch.as_tensor(loss).detach().float().mean())

    def take(self) -> tuple[float, float, float]:
        """(sum, sum of squares, number) of this rank's losses that are finite. Begins anew."""
        own, self._own = self._own, []
        values = [value for value in (loss.item() for loss in own) if math.isfinite(value)]
        return math.fsum(values), math.fsum(value * value for value in values), float(len(values))

    def rise(self, total: float, squares: float, n: float) -> float | None:
        """take() of every rank, summed. By what share of the least loss it has risen, where that is too much."""
        total, squares, n = self._pooled = (self._pooled[0] + total, self._pooled[1] + squares, self._pooled[2] + n)
        if n < LEAST:
            return None
        self._pooled = (0.0, 0.0, 0.0)
        mean = total / n
        variance = max(squares / n - mean * mean, 0.0) / (n - 1)
        if self._least is None or mean <= self._least[0]:
            self._least, self._has_risen = (mean, variance), False
            return None
        least, of_least = self._least
        had_risen, rise = self._has_risen, mean - least
        self._has_risen = rise > MOST_RISE * abs(least) and rise > MOST_ERRORS * math.sqrt(variance + of_least)
        if not (had_risen and self._has_risen):
            return None
        self._least, self._has_risen = (mean, variance), False  # what comes is held against this one
        return rise / abs(least) if least else math.inf

    # ---- in checkpoints ----

    def state(self, with_window: bool) -> dict[str, Any]:
        own = [value.item() for value in self._own] if with_window else []
        return {"least": self._least, "has_risen": self._has_risen, "pooled": self._pooled,
                "own": [value for value in own if math.isfinite(value)]}

    def load(self, state: dict[str, Any], with_window: bool) -> None:
        least, pooled = state.get("least"), state.get("pooled", (0.0, 0.0, 0.0))
        self._pooled = (pooled[0], pooled[1], pooled[2])
        self._least, self._has_risen = None if least is None else (least[0], least[1]), state.get("has_risen", False)
        self._own = [torch.tensor(value) for value in state.get("own", ())] if with_window else []


def fits_losses(state: Any) -> bool:
    """Whether this is one of state()."""
    if not isinstance(state, dict) or not isinstance(state.get("has_risen", False), bool):
        return False
    least, pooled = state.get("least"), state.get("pooled", (0, 0, 0))
    return ((least is None or _are_finite(least, 2) and least[1] >= 0) and _are_finite(pooled, 3) and min(pooled[1:]) >= 0
            and _are_finite(state.get("own", [])))


def _are_finite(values: Any, n: int | None = None) -> bool:
    return isinstance(values, (list, tuple)) and n in (None, len(values)) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) for value in values)
