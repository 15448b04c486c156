"""Exchanges that operators start, and that go on in the runner's thread while the model computes: one after
the other, in the order in which they were started."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable

import torch

from tagc.torch.extension import Future, Host

Exchange = Callable[[], torch.Tensor]

_NOTHING = torch.empty(0)


class Started:
    """An exchange, which may have ended. n_elems: of the gradient that it keeps until then."""

    future: Future

    def __init__(self, n_elems: int, result: torch.Tensor | None = None) -> None:
        self.n_elems, self.result = n_elems, result
        self.failure: BaseException | None = None


class Starts:
    """Those of one handle. most: how many elements the gradients of those under way have together, beside one
    of any size: a rank that computes faster than it sends would keep its whole gradient otherwise."""

    def __init__(self, host: Host, most: int) -> None:
        self._host, self._most = host, most
        self._under_way: collections.deque[Started] = collections.deque()
        # Once one has failed, which it does on all ranks, none of them runs those behind it until drain().
        self._failure: BaseException | None = None

    def start(self, exchange: Exchange, n_elems: int = 0) -> Started:
        """Hands an exchange to the thread. It raises nothing: wait() does."""
        self._make_room(n_elems)
        started = Started(n_elems)

        def run() -> torch.Tensor:
            with torch.no_grad():
                try:
                    if self._failure is None:
                        started.result = exchange()
                except BaseException as failure:
                    self._failure = failure
            started.failure = self._failure
            return _NOTHING

        started.future = self._host.future(run)
        self._under_way.append(started)
        return started

    def _make_room(self, n_elems: int) -> None:
        while self._under_way and self._under_way[0].future.done():
            self._under_way.popleft()
        while n_elems and (held := sum(each.n_elems for each in self._under_way)):
            if held + n_elems <= self._most:
                return
            self._under_way.popleft().future.wait()

    def wait(self, started: Started) -> torch.Tensor:
        """Returns what it gives. If it has failed, it raises the Error that all ranks raise."""
        if started.result is None:
            started.future.wait()
        if started.failure is not None:
            self.drain()
            raise started.failure  # of a pass that was given up
        assert started.result is not None
        return started.result

    def drain(self) -> None:
        """Waits for all of them, and raises the first failure."""
        while self._under_way:
            self._under_way.popleft().future.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def drop(self) -> None:
        """Waits for those of a pass that was given up."""
        with contextlib.suppress(BaseException):
            self.drain()
