"""What handle.record() writes: one JSON line per step, which tagc-report draws."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from tagc._library import Error
from tagc.torch.state import State

FORMAT = 1


def _finish(path: str, waiting: list[dict[str, Any]], losses: list[torch.Tensor]) -> None:
    """Writes the line that waits, if one does, with the mean of the losses."""
    if not waiting:
        return
    line = waiting.pop()
    if losses:
        value = torch.stack([loss.cpu() for loss in losses]).mean().item()
        line["loss"] = value if math.isfinite(value) else None  # JSON has no NaN
        losses.clear()
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _cut_torn_line(path: str) -> None:
    """Cuts off what a crash or a full disk left of the last line: the next line would continue it."""
    with open(path, "rb+") as file:
        start = max(0, file.seek(0, os.SEEK_END) - (1 << 20))  # no line is longer
        file.seek(start)
        file.truncate(start + file.read().rfind(b"\n") + 1)


def _end(path: str, waiting: list[dict[str, Any]], losses: list[torch.Tensor]) -> None:
    try:
        _finish(path, waiting, losses)
    except OSError as failure:
        _warn_of_end(path, failure)


def _warn_of_end(path: str, failure: OSError) -> None:
    warnings.warn(f"tagc: {path} cannot be written, the record ends: {failure}", stacklevel=3)


class Log:
    """Of one handle. Rank 0 writes, and the others do nothing."""

    def __init__(self, path: Any, state: State, groups: Mapping[str, str]) -> None:
        """groups: name of a parameter -> the group with which its level is shown."""
        try:
            self._path = os.fspath(path)
        except TypeError:
            raise Error("argument", f"path is {path!r}, must be the name of a file") from None
        if os.path.isdir(self._path):
            raise Error("argument", f"path is {self._path!r}, which is a folder; name a file")
        if state.wrapper.speaks:
            try:
                os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
                with open(self._path, "a", encoding="utf-8"):
                    pass
            except OSError as failure:
                raise Error("io", f"path is {self._path!r}, which cannot be written: {failure}") from failure
        self._state, self._groups = state, groups
        self._losses: list[torch.Tensor] = []
        self._comes_after: bool | None = None  # whether a step's loss is seen after its backward pass
        self._waiting: list[dict[str, Any]] = []  # the last line, if it may still get a loss
        self._levels: dict[str, float] = {}
        self._epoch, self._last_s = -1, time.monotonic()
        self._is_new, self._is_lost = True, False
        self.close = weakref.finalize(self, _end, self._path, self._waiting, self._losses)  # at exit, too

    def see(self, loss: float | torch.Tensor) -> None:
        """Takes a loss for the line of its step."""
        if self._state.wrapper.speaks:
            self._losses.append(torch.as_tensor(loss).detach().float().mean())

    def step(self, stats: Mapping[str, Any]) -> None:
        """Writes the line of a step. Waits for the device that has the loss."""
        if not self._state.wrapper.speaks or self._is_lost:
            return
        try:
            self._step(stats)
        except OSError as failure:  # training goes on, as on the other ranks
            self._is_lost = True
            self._waiting.clear()
            _warn_of_end(self._path, failure)

    def _step(self, stats: Mapping[str, Any]) -> None:
        if self._is_new:
            self._begin(stats)
        if self._comes_after is None:
            self._comes_after = not self._losses
        now_s = time.monotonic()
        line = {"type": "step", **stats, "wall_s": now_s - self._last_s, "levels": self._levels_now()}
        self._last_s = now_s
        if self._comes_after:
            _finish(self._path, self._waiting, self._losses)
        self._waiting.append(line)
        if not self._comes_after:
            _finish(self._path, self._waiting, self._losses)

    def _begin(self, stats: Mapping[str, Any]) -> None:
        """Starts the file; that of a run that goes on is continued."""
        self._is_new = False
        if stats["step"] > 1 and os.path.exists(self._path) and os.path.getsize(self._path):
            _cut_torn_line(self._path)
            if os.path.getsize(self._path):
                return
        about = {"type": "torch", "format": FORMAT, "world_size": stats["world_size"],
                 "n_params": stats["n_elems"], "n_compressed": stats["n_compressed"]}  # fmt: skip
        with open(self._path, "w", encoding="utf-8") as file:
            file.write(json.dumps(about) + "\n")

    def _levels_now(self) -> dict[str, float]:
        """Returns the mean level of each group, by elements."""
        schedule = self._state.schedule
        if schedule.epoch != self._epoch:
            sizes = {p.name: p.numel for p in self._state.wrapper.parameters()}
            sums: dict[str, list[float]] = {}
            for name, level in schedule.levels().items():
                weights = sums.setdefault(self._groups.get(name, "other"), [0.0, 0.0])
                weights[0] += sizes[name] * level
                weights[1] += sizes[name]
            self._levels = {group: round(level / n, 4) for group, (level, n) in sums.items() if n}
            self._epoch = schedule.epoch
        return self._levels
