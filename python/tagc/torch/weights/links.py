"""Connections of a WeightSync: a gloo group from each sender to all receivers, for bytes in CPU memory,
whatever the user's group is for."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.torch.exchange import internals
from tagc.torch.exchange.gloo import bytes_at
from tagc.torch.weights.frame import memory_of

CHUNK_BYTES = 1 << 28  # of one call of gloo
_T = TypeVar("_T")


class Links:
    """senders, receivers: ranks of the user's group. name: of these connections alone, the same on all
    ranks."""

    def __init__(
        self, name: str, rank: int, senders: Sequence[int], receivers: Sequence[int], timeout_s: float
    ) -> None:
        self._rank, self._receivers = rank, list(receivers)
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._groups: dict[int, Any] = {}  # of gloo; its calls are missing in the stubs of torch
        for sender in senders if receivers else ():
            members = [sender, *receivers]
            if rank in members:
                store = dist.PrefixStore(f"tagc/weights/{name}/{sender}", internals.default_store())
                place = members.index(rank)
                make = functools.partial(dist.ProcessGroupGloo, store, place, len(members), self._timeout)
                self._groups[sender] = _try(make)

    def move(self, sender: int, to: Sequence[int], frame: bytes | None, n_bytes: int) -> torch.Tensor | None:
        """Sends the frame of a sender, of n_bytes, to those receivers. frame: on the sender alone. Returns
        it on the ranks that get it."""
        if not to or (self._rank != sender and self._rank not in to):
            return None
        if frame is None:
            buffer = torch.empty(n_bytes, dtype=torch.uint8)
        else:
            buffer = bytes_at(memory_of(frame).ctypes.data, n_bytes)
        _try(lambda: self._move(sender, to, buffer))
        return None if self._rank == sender else buffer

    def _move(self, sender: int, to: Sequence[int], buffer: torch.Tensor) -> None:
        group = self._groups[sender]
        for at in range(0, buffer.numel(), CHUNK_BYTES):
            chunk = buffer[at : at + CHUNK_BYTES]
            if len(to) == len(self._receivers) > 1:
                options = dist.BroadcastOptions()
                options.rootRank = 0
                group.broadcast([chunk], options).wait(self._timeout)
            elif self._rank == sender:
                for work in [group.send([chunk], 1 + self._receivers.index(rank), 0) for rank in to]:
                    work.wait(self._timeout)
            else:
                group.recv([chunk], 0, 0).wait(self._timeout)


def _try(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except RuntimeError as failure:
        raise Error("transport", f"weights did not arrive: {failure}") from failure
