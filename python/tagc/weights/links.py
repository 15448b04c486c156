"""Connections of a WeightSync: a gloo group from each sender to all receivers, one of all senders, and one of
all ranks, for bytes in CPU memory, whatever the user's group is for. A time-out of gloo ends all connections
of its group."""

from __future__ import annotations

import datetime
import functools
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.torch.extension import bytes_at, default_store, disconnect, unheard
from tagc.weights.frame import memory_of

CHUNK_BYTES = 1 << 28  # of one call of gloo
PATIENCE = datetime.timedelta(days=1)  # of a rank that has called, until the others call
_LONGEST_PAUSE_S = 0.05  # between two looks
_T = TypeVar("_T")


class Links:
    """senders, receivers: ranks of the user's group. name: of these connections alone, the same on all
    ranks."""

    def __init__(
        self, name: str, rank: int, senders: Sequence[int], receivers: Sequence[int], timeout_s: float
    ) -> None:
        self._name, self._rank, self._receivers = name, rank, list(receivers)
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._groups: dict[int, Any] = {}  # of gloo; its calls are missing in the stubs of torch
        for sender in senders if receivers else ():
            if rank == sender or rank in receivers:
                self._groups[sender] = self._connect(str(sender), [sender, *receivers])
        self._among = self._connect("senders", senders) if len(senders) > 1 and rank in senders else None
        self._senders, self._everyone = senders, sorted([*senders, *receivers])
        self._all = self._connect("all", self._everyone)

    def _connect(self, what: str, members: Sequence[int]) -> Any:
        place, store = members.index(self._rank), self._store(what)
        return _try(functools.partial(dist.ProcessGroupGloo, store, place, len(members), self._timeout))

    def _store(self, what: str) -> dist.Store:
        return dist.PrefixStore(f"tagc/weights/{self._name}/{what}", default_store())

    def tell(self, said: Any) -> list[Any]:
        """Returns the objects of all senders, in their order. Collective over them; local if there is one."""
        return [said] if self._among is None else self._share(self._among, said)

    def share(self, said: Any) -> list[Any]:
        """Returns the object of each rank. Collective."""
        return self._share(self._all, said)

    def await_calls(self) -> None:
        """Waits until all ranks call this, for up to PATIENCE. Error as soon as one has ended. Collective."""
        options = dist.BarrierOptions()
        options.timeout = PATIENCE
        begin = time.monotonic()
        try:
            work = self._all.barrier(options)
            while not work.is_completed():  # a wait() of torch's would take no Ctrl-C
                time.sleep(min(_LONGEST_PAUSE_S, 0.001 + 0.1 * (time.monotonic() - begin)))
            work.wait()
        except RuntimeError as failure:
            raise self._lost(self._all, failure) from failure
        except BaseException:
            disconnect(self._all)  # else the process would end only with the wait
            raise

    def _share(self, group: Any, said: Any) -> list[Any]:
        data = pickle.dumps(said)
        try:
            sizes, work = self._gather(group, torch.tensor([len(data)], device="cpu"))
            work.wait(self._timeout)
            padded = data.ljust(int(max(sizes)), b"\0")
            everyone, work = self._gather(group, torch.frombuffer(bytearray(padded), dtype=torch.uint8))
            work.wait(self._timeout)
        except RuntimeError as failure:
            raise self._lost(group, failure) from failure
        return [pickle.loads(theirs.numpy().tobytes()) for theirs in everyone]

    @staticmethod
    def _gather(group: Any, data: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        everyone = [torch.empty_like(data) for _ in range(group.size())]
        return everyone, group.allgather([everyone], [data])

    def _lost(self, group: Any, failure: RuntimeError) -> Error:
        """Returns the Error for a failed collective of a group, which ends for all then."""
        disconnect(group)
        ranks = self._everyone if group is self._all else self._senders
        silent = unheard(self._store("lost"), self._rank, ranks)
        return Error("transport", f"{silent or 'a rank'} ended or does not answer: {failure}")

    def move(self, sender: int, to: Sequence[int], frame: bytes | None, n_bytes: int) -> torch.Tensor | None:
        """Sends the frame of a sender, of n_bytes, to those receivers. frame: on the sender alone. Returns
        it on the ranks that get it."""
        if not to or (self._rank != sender and self._rank not in to):
            return None
        if frame is None:
            buffer = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
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


def rank_and_size(group: Any) -> tuple[int, int]:
    """Returns the rank here and how many there are."""
    if group is None:
        return 0, 1
    is_group = isinstance(group, dist.ProcessGroup)
    if not is_group and group != dist.GroupMember.NON_GROUP_MEMBER:
        raise Error("argument", f"group is {group!r}, must be a ProcessGroup of torch.distributed or None")
    if not is_group or dist.get_rank(group) < 0:
        raise Error("argument", "this rank is not in the group: only ranks of a group make its WeightSync")
    return dist.get_rank(group), dist.get_world_size(group)


def senders_of(source: int | Sequence[int], size: int) -> list[int]:
    """Returns the ranks that send, in order."""
    ranks = list(source) if isinstance(source, Iterable) else [source]
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
            raise Error("argument", f"source is {source!r}, must be ranks from 0 to {size - 1}")
    if not ranks or len(set(ranks)) != len(ranks):
        raise Error("argument", f"source is {source!r}, must be one rank or several different ones")
    return sorted(ranks)
