"""libtagc's messages by gloo, for where the native transport cannot be had (native.py).

Each comm has a gloo group of its own over the ranks of the user's group, so that its messages, which
libtagc's comm thread sends, never mix with the user's collectives. A round of short messages is one
collective call. Longer messages are sent point to point between libtagc's own buffers, without a copy; all
messages of a transfer start before the first wait."""

from __future__ import annotations

import ctypes
import datetime
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from tagc import _library as lib
from tagc.torch.exchange.waits import SOON, disconnect, soon, unheard

_MEMORY = ctypes.c_char * (1 << 47)  # any address; the views below have the lengths
COLLECTIVE_BYTES = 1 << 16  # per message: above it, copying takes longer than separate calls


def bytes_at(address: int, n_bytes: int) -> torch.Tensor:
    """Returns a tensor over memory that it does not own."""
    return torch.frombuffer(_MEMORY.from_address(address), dtype=torch.uint8, count=n_bytes)


class Lost(Exception):
    """The connection is of no use any more. peer: the place among the ranks where that began, or -1 if
    unknown."""

    status = "transport"

    def __init__(self, peer: int, text: str, status: str | None = None) -> None:
        super().__init__(text)
        self.peer, self.status = peer, status or self.status


class Silence(Lost):
    """No answer in time."""

    status = "timeout"


class Gone(Lost):
    """A connection ended: the rank at its other end did, or the network."""


class Gloo:
    """ranks: the numbers of the ranks in torch.distributed, or what messages to users call them. rank: this
    one's place among them. store: of this connection alone."""

    name = "gloo"

    def __init__(self, store: dist.Store, rank: int, ranks: tuple[int, ...], timeout_s: float) -> None:
        self.rank, self.ranks, self.world_size = rank, ranks, len(ranks)
        self._timeout_s, self._timeout = timeout_s, datetime.timedelta(seconds=timeout_s)
        self._store = store
        self._group = self._connected(store)
        self._is_idle = threading.Event()  # whether libtagc's comm thread is in no call of torch
        self._is_idle.set()
        # They must live as long as the comm.
        self._ops = lib.CallbackOps(
            lib.TRANSPORT_ABI, lib.EXCHANGE_FN(self._on_exchange), lib.ABORT_FN(self._on_abort)
        )

    def _connected(self, store: dist.Store) -> Any:
        """Returns gloo's group. If a peer falls silent while it connects, gloo waits five times its
        time-out. So ranks meet in the store first, up to the time-out, and for the rest gloo gets a fifth
        of it."""
        if not hasattr(dist.ProcessGroupGloo, "set_timeout"):  # an older torch
            return dist.ProcessGroupGloo(store, self.rank, self.world_size, self._timeout)
        store.set(f"came {self.rank}", "")
        store.wait([f"came {rank}" for rank in range(self.world_size)], self._timeout)
        fifth = max(self._timeout / 5, min(self._timeout, SOON))
        group: Any = dist.ProcessGroupGloo(store, self.rank, self.world_size, fifth)
        group.set_timeout(self._timeout)
        return group

    def comm(self, options: lib.CommOptions) -> ctypes.c_void_p:
        """Returns a tagc_comm."""
        # gloo times out first, because its error names the reason
        options.timeout_s = min(1e6, 2 * self._timeout_s)
        names = (ctypes.c_int32 * self.world_size)(*self.ranks)
        options.names = ctypes.cast(names, ctypes.POINTER(ctypes.c_int32))
        comm = ctypes.c_void_p()
        lib.call(
            "tagc_comm_create_callback",
            ctypes.byref(self._ops),
            None,
            self.rank,
            self.world_size,
            ctypes.byref(options),
            ctypes.byref(comm),
        )
        return comm

    def wait(self, timeout_s: float) -> bool:
        """Waits until libtagc is in no call of torch. Returns whether that is so."""
        return self._is_idle.wait(timeout_s)

    def close(self) -> None:
        """After the comm was destroyed."""
        self._group = None

    # ---- what libtagc's comm thread calls ----

    def _on_exchange(self, _context: int | None, transfer: Any) -> int:
        self._is_idle.clear()
        try:
            self._move(transfer.contents)
            return 0
        except BaseException as failure:  # nothing may pass through C
            mine = failure if isinstance(failure, Lost) else Lost(-1, str(failure))
            # before this rank closes, so that peers do not report it as the first to fail
            if isinstance(failure, Lost):
                self._tell(mine)
            told = self._hear()
            if told is None or told == self._told(mine):
                status, peer, text = mine.status, mine.peer, str(mine)
            else:
                status, number, text = told.split(" ", 2)
                peer = int(number)
            return lib.load().tagc_report_rank(
                lib.STATUSES.index(status), peer, text.encode(errors="replace")
            )
        finally:
            self._is_idle.set()

    def _move(self, transfer: lib.Transfer) -> None:
        """Moves the messages of a transfer. All ranks choose the same way, because round_bytes is the same on
        all."""
        if 0 < transfer.round_bytes <= COLLECTIVE_BYTES and self.world_size > 2:
            self._move_together(transfer)
        else:
            self._move_each(transfer)

    def _move_together(self, transfer: lib.Transfer) -> None:
        lengths, sent = [0] * self.world_size, []
        for part in transfer.sends[: transfer.n_sends]:
            lengths[part.peer] = part.n_bytes
            sent.append(ctypes.string_at(transfer.send + part.offset, part.n_bytes) if part.n_bytes else b"")
        expected = [0] * self.world_size
        for part in transfer.receives[: transfer.n_receives]:
            expected[part.peer] = part.n_bytes
        source = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
        ctypes.memmove(source.data_ptr(), b"".join(sent), source.numel())
        target = torch.empty(sum(expected), dtype=torch.uint8, device="cpu")
        begin = time.monotonic()
        try:
            self._group.alltoall_base(target, source, expected, lengths).wait(self._timeout)
        except RuntimeError as failure:
            is_late, ranks = self._is_late(begin), unheard(self._store, self.ranks[self.rank], self.ranks)
            if not is_late:
                raise Gone(
                    -1, f"{ranks or 'a rank'} ended or cannot be reached any more: {failure}"
                ) from failure
            peers = f" from {ranks}" if ranks else ""
            raise Silence(-1, f"no answer{peers} within {self._timeout.total_seconds():g} s") from failure
        at = target.data_ptr()
        for part in transfer.receives[: transfer.n_receives]:
            if part.n_bytes:
                ctypes.memmove(transfer.recv + part.offset, at, part.n_bytes)
                at += part.n_bytes

    def _move_each(self, transfer: lib.Transfer) -> None:
        work, peer, begin = [], self.rank, time.monotonic()
        try:
            for part in transfer.receives[: transfer.n_receives]:
                if part.n_bytes:
                    peer, memory = part.peer, bytes_at(transfer.recv + part.offset, part.n_bytes)
                    work.append((peer, self._group.recv([memory], peer, 0)))
            sends = [part for part in transfer.sends[: transfer.n_sends] if part.n_bytes]
            # staggered, so that ranks do not all send to one
            sends.sort(key=lambda part: (part.peer - self.rank) % self.world_size)
            for part in sends:
                peer, memory = part.peer, bytes_at(transfer.send + part.offset, part.n_bytes)
                work.append((peer, self._group.send([memory], peer, 0)))
            for rank, message in work:
                peer, begin = rank, time.monotonic()
                message.wait(self._timeout)
        except RuntimeError as failure:
            if self._is_late(begin):
                raise Silence(
                    peer, f"no answer from rank {self.ranks[peer]} within {self._timeout.total_seconds():g} s"
                ) from failure
            raise Gone(
                peer, f"rank {self.ranks[peer]} ended or cannot be reached any more: {failure}"
            ) from failure

    def _is_late(self, begin: float) -> bool:
        return time.monotonic() - begin >= 0.99 * self._timeout.total_seconds()

    # ---- giving up ----

    def _on_abort(self, _context: int | None, failure: Any) -> None:
        try:
            status, peer = lib.STATUSES[failure.contents.status], failure.contents.rank
            self._tell(Lost(peer, failure.contents.reason.decode(errors="replace"), status))
            disconnect(self._group)
        except BaseException:  # no exception may pass through C, and no peer can be reached
            pass

    def _tell(self, failure: Lost) -> None:
        """Keeps the first failure of all ranks."""
        text = self._told(failure)
        soon(lambda: self._store.compare_set("gave up", "", text))

    def _told(self, failure: Lost) -> str:
        return f"{failure.status} {failure.peer} rank {self.ranks[self.rank]} gave up: {failure}"

    def _hear(self) -> str | None:
        """Returns what _told() made where a rank gave up first, if it arrives soon; else None."""

        def ask() -> str:
            self._store.wait(["gave up"], SOON)
            return self._store.get("gave up").decode(errors="replace")

        return soon(ask)
