"""Gathers that are started before the model asks for them. A rank has its shard at any time, so it needs to
know only which parameter comes next: that of the last passes, if they went on alike. So compiled code, which
has each gather where the whole parameter is read first, computes while the next one is gathered."""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from tagc.compiled.starts import Started, Starts

MOST_PASSES = 4  # training and evaluation, with and without recomputing


class Gathered(Protocol):
    """Parameters that are gathered together."""

    @property
    def n_elems(self) -> int: ...

    def version(self) -> object:
        """Returns what changes when this rank's shards do."""
        ...

    def gathered(self, have_changed: bool) -> torch.Tensor:
        """Returns the whole of them, in the runner's thread. Collective. have_changed: since an earlier
        gather."""
        ...


class Ahead:
    """Of one handle. most: how many elements are gathered ahead together, beside those of any
    size."""

    def __init__(self, starts: Starts, most: int) -> None:
        self._starts, self._most = starts, most
        self._passes: list[list[Gathered]] = []  # what came in the last different ones, the newest last
        self._now: list[Gathered] = []  # what has come in this one
        self._alike: list[list[Gathered]] = []  # of the last ones: those that began as this one
        self._started: dict[Gathered, tuple[Started, object]] = {}  # with the version

    def take(self, one: Gathered, is_forward: bool, have_changed: bool = False) -> torch.Tensor:
        """Returns the whole of them, and starts what comes next. Collective. is_forward: in no
        backward pass. have_changed: since an earlier gather."""
        self._note(one, is_forward)
        # What was started and does not come next stays: others have it, too, and may not ask for it again.
        started = self._started.pop(one, None)
        have_changed = have_changed or (started is not None and started[1] != one.version())
        if started is None or have_changed:
            started = self._start(one, have_changed)
        self._look_ahead()
        try:
            return self._starts.wait(started[0])
        except BaseException:
            # what is behind it has failed, too, and ranks have come to different places of this pass
            self._started.clear()
            self._begin()
            raise

    def _note(self, one: Gathered, is_forward: bool) -> None:
        at = len(self._now)
        alike = [each for each in self._alike if each[at : at + 1] == [one]]
        if is_forward and not alike and one in self._now[:1]:
            self._end()  # a forward pass without a backward pass is over
            alike = [each for each in self._passes if each[0] is one]
        self._now.append(one)
        self._alike = alike

    def _start(self, one: Gathered, have_changed: bool = False) -> tuple[Started, object]:
        version = one.version()
        return self._starts.start(functools.partial(one.gathered, have_changed)), version

    def _look_ahead(self) -> None:
        """Starts what comes next in this pass."""
        at, seen, held = len(self._now), set[Gathered](), sum(each.n_elems for each in self._started)
        while True:
            next_ones = {each[at] if at < len(each) else None for each in self._alike}
            one = next_ones.pop() if len(next_ones) == 1 else None
            if one is None or one in seen:
                return
            if one not in self._started:
                if held and held + one.n_elems > self._most:
                    return
                self._started[one] = self._start(one)
                held += one.n_elems
            seen.add(one)
            at += 1

    def end(self) -> None:
        """Notes the end of a pass, and drops what it did not ask for."""
        self._started.clear()
        self._end()

    def _end(self) -> None:
        if self._now:
            others = [each for each in self._passes if each != self._now]
            self._passes = [*others[1 - MOST_PASSES :], self._now]
        self._begin()

    def _begin(self) -> None:
        self._now, self._alike = [], list(self._passes)
