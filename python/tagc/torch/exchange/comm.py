"""A process group as the network of libtagc, by gloo.

Each comm has a gloo group of its own over the ranks of the user's group, so that its messages, which
libtagc's comm thread sends, never mix with the user's collectives. A round of short messages is one
collective call. Longer messages are sent point to point between libtagc's own buffers, without a copy; all
messages of a transfer start before the first wait."""

from __future__ import annotations

import ctypes
import datetime
import struct
import threading
import time
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.exchange import endings, internals
from tagc.torch.exchange.waits import SOON, disconnect, soon, unheard, within

_TRANSPORT = lib.STATUSES.index("transport")
_MEMORY = ctypes.c_char * (1 << 47)  # any address; the views below have the lengths
_TEXT_BYTES = 1024
_COLLECTIVE_BYTES = 1 << 16  # per message: above it, copying takes longer than separate calls


def bytes_at(address: int, n_bytes: int) -> torch.Tensor:
    """Returns a tensor over memory that it does not own."""
    return torch.frombuffer(_MEMORY.from_address(address), dtype=torch.uint8, count=n_bytes)


def tensor_at(address: int, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of that dtype and shape over memory that it does not own."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(_MEMORY.from_address(address), dtype=like.dtype, count=like.numel()).view(
        like.shape
    )


_n_made = 0


def _gloo(group: dist.ProcessGroup, ranks: tuple[int, ...], timeout: datetime.timedelta) -> tuple[Any, Any]:
    """Returns a gloo group over the ranks of `group`, in their order, and its part of the store.
    new_group() would not do: it reuses the name of a destroyed group, and then finds that group's
    addresses in the store."""
    global _n_made
    _n_made = 1 + max(share(group, _n_made, timeout))
    name = f"tagc/{_n_made}/{','.join(map(str, ranks))}"
    store = dist.distributed_c10d.PrefixStore(name, internals.default_store())
    return dist.ProcessGroupGloo(store, dist.get_rank(group), len(ranks), timeout), store


class Comm:
    """One rank's connection to the others of `group`. Collective to make."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._connect(group)
        self._lock = threading.RLock()
        self._is_idle = threading.Event()  # whether libtagc's comm thread is in no call of torch
        self._is_idle.set()
        self._handle = ctypes.c_void_p()
        # They must live as long as the comm.
        self._ops = lib.CallbackOps(
            lib.TRANSPORT_ABI, lib.EXCHANGE_FN(self._on_exchange), lib.ABORT_FN(self._on_abort)
        )
        options = lib.initialised(lib.CommOptions, "tagc_comm_options_init")
        # gloo times out first, because its error names the reason
        options.timeout_s = min(1e6, 2 * timeout_s)
        lib.call(
            "tagc_comm_create_callback",
            ctypes.byref(self._ops),
            None,
            self.rank,
            self.world_size,
            ctypes.byref(options),
            ctypes.byref(self._handle),
        )
        endings.add(self)
        try:
            self.all_gather(b"\0")  # closing before a peer has connected to all ranks would fail there
        except BaseException:
            self.close()
            raise

    def _connect(self, group: dist.ProcessGroup) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        # messages to users have the ranks of torch.distributed
        self.rank, self.world_size = dist.get_rank(group), len(self.ranks)
        self._group, self._store = _gloo(group, self.ranks, self._timeout)

    @property
    def handle(self) -> ctypes.c_void_p:
        if not self._handle:
            raise Error("state", "this tagc connection is closed")
        return self._handle

    # ---- what libtagc's comm thread calls ----

    def _on_exchange(self, _context: int | None, transfer: Any) -> int:
        self._is_idle.clear()
        try:
            self._move(transfer.contents)
            return 0
        except BaseException as failure:  # nothing may pass through C
            text = f"rank {self.ranks[self.rank]} could not exchange with its peers: {failure}"
            mine = str(failure) if isinstance(failure, Silence) else text
            # before this rank closes, so that peers do not report it as the first to fail
            if isinstance(failure, (Silence, Gone)):
                self._tell(mine)
            reason = self._hear()
            text = text if reason is None or reason == self._told(mine) else reason
            return lib.load().tagc_report(_TRANSPORT, text.encode(errors="replace"))
        finally:
            self._is_idle.set()

    def _move(self, transfer: lib.Transfer) -> None:
        """Moves the messages of a transfer. All ranks choose the same way, because round_bytes is the same on
        all."""
        if 0 < transfer.round_bytes <= _COLLECTIVE_BYTES and self.world_size > 2:
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
        source = torch.empty(sum(lengths), dtype=torch.uint8)
        ctypes.memmove(source.data_ptr(), b"".join(sent), source.numel())
        target = torch.empty(sum(expected), dtype=torch.uint8)
        begin = time.monotonic()
        try:
            self._group.alltoall_base(target, source, expected, lengths).wait(self._timeout)
        except RuntimeError as failure:
            is_late, ranks = self._is_late(begin), unheard(self._store, self.ranks[self.rank], self.ranks)
            if not is_late:
                raise Gone(
                    f"{ranks or 'a rank'} ended or cannot be reached any more ({failure})"
                ) from failure
            words = f", and no word from {ranks}" if ranks else ""
            raise Silence(f"no answer within {self._timeout.total_seconds():g} s{words}") from failure
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
                    f"no answer from rank {self.ranks[peer]} within {self._timeout.total_seconds():g} s"
                ) from failure
            raise Gone(
                f"rank {self.ranks[peer]} ended or cannot be reached any more ({failure})"
            ) from failure

    def _is_late(self, begin: float) -> bool:
        return time.monotonic() - begin >= 0.99 * self._timeout.total_seconds()

    # ---- giving up ----

    def _on_abort(self, _context: int | None, reason: bytes) -> None:
        try:
            self._tell(reason.decode(errors="replace"))
            disconnect(self._group)
        except BaseException:  # no exception may pass through C, and no peer can be reached
            pass

    def _tell(self, reason: str) -> None:
        """Keeps the first reason of all ranks."""
        text = self._told(reason)
        soon(lambda: self._store.compare_set("gave up", "", text))

    def _told(self, reason: str) -> str:
        return f"rank {self.ranks[self.rank]} gave up: {reason}"

    def _hear(self) -> str | None:
        """Returns the reason for which another rank gave up, if it arrives soon; else None."""

        def ask() -> str:
            self._store.wait(["gave up"], SOON)
            return self._store.get("gave up").decode(errors="replace")

        return soon(ask)

    # ---- what the layer calls ----

    def all_gather(self, data: bytes) -> list[bytes]:
        """Returns the bytes of every rank, all of one length, in rank order. Collective."""
        received = ctypes.create_string_buffer(len(data) * self.world_size)
        lib.call("tagc_comm_all_gather", self.handle, data, len(data), received)
        everyone = received.raw
        return [everyone[i * len(data) : (i + 1) * len(data)] for i in range(self.world_size)]

    def agree(
        self, what: str, numbers: Mapping[str, Any], failure: BaseException | None = None, vote: int = 0
    ) -> list[int]:
        """Compares. Collective: if all ranks agree on the same `what`, have equal `numbers` (up to six; name:
        integer, or anything with a unique repr()) and none has a `failure` (an exception), returns the `vote`
        (an integer) of every rank. Otherwise all raise the same Error, which names a rank that differs."""
        status = failure.status if isinstance(failure, Error) else "argument"
        values = [
            value if isinstance(value, int) else zlib.crc32(repr(value).encode())
            for value in numbers.values()
        ]
        begin = (lib.STATUSES.index(status) if failure else 0) | zlib.crc32(what.encode()) << 8
        mine = struct.pack("<8q", begin, *values, *[0] * (6 - len(values)), vote)
        text = str(failure) if failure else ", ".join(f"{name} {value}" for name, value in numbers.items())
        with self._lock:
            everyone = self.all_gather(mine)
            if not failure and all(other[:-8] == mine[:-8] for other in everyone):
                return [struct.unpack_from("<q", other, 56)[0] for other in everyone]
            said = self.all_gather(_padded(what, _TEXT_BYTES // 4) + _padded(text, _TEXT_BYTES))
        whats, texts = zip(
            *((_text(one[: _TEXT_BYTES // 4]), _text(one[_TEXT_BYTES // 4 :])) for one in said)
        )
        for rank, other in enumerate(everyone):
            if status := struct.unpack_from("<q", other)[0] & 0xFF:
                # another agreement may have said already which rank it is
                is_said = texts[rank].startswith(f"{whats[rank]}: rank")
                text = texts[rank] if is_said else f"{whats[rank]}: rank {self.ranks[rank]}: {texts[rank]}"
                raise Error(status, text) from failure
        first = self.ranks[0]
        odd = next(rank for rank, other in enumerate(everyone) if other[:-8] != everyone[0][:-8])
        if whats[odd] != whats[0]:
            raise Error(
                "mismatch",
                f"ranks do not agree: rank {first} comes with {whats[0]}, and rank {self.ranks[odd]} with "
                f"{whats[odd]}: every rank must use the same modules, in the same order",
            )
        raise Error(
            "mismatch",
            f"{what}: ranks do not agree: rank {first} has {texts[0]}; rank {self.ranks[odd]} has "
            f"{texts[odd]}",
        )

    @property
    def agreement_bytes(self) -> int:
        """The message of one rank if all agree, and of each other."""
        return 64 * (self.world_size - 1)

    def bytes_sent(self) -> dict[str, int]:
        """Returns bytes sent since the comm was made, by leg."""
        return self._bytes()[0]

    def bytes_received(self) -> dict[str, int]:
        return self._bytes()[1]

    def _bytes(self) -> tuple[dict[str, int], dict[str, int]]:
        sent, received = (ctypes.c_uint64 * lib.N_LEGS)(), (ctypes.c_uint64 * lib.N_LEGS)()
        lib.load().tagc_comm_bytes(self.handle, sent, received, lib.N_LEGS)
        return dict(zip(lib.LEGS, sent)), dict(zip(lib.LEGS, received))

    def abort(self, reason: str) -> None:
        """Makes all of its exchanges fail on all ranks, so that none waits."""
        lib.load().tagc_comm_abort(self.handle, reason.encode(errors="replace"))

    def give_up(self) -> None:
        """Ends what is under way, if anything is, before the process ends."""
        if self._handle and not self._is_idle.is_set():
            self.abort("its process ends")

    def wait(self, timeout_s: float) -> bool:
        return self._is_idle.wait(timeout_s)

    def close(self) -> None:
        """Closes the connection. Call it after all its reducers and gatherers are closed."""
        if self._handle:
            lib.load().tagc_comm_destroy(self._handle)
            self._handle = ctypes.c_void_p()
            self._group = None


def _padded(text: str, n_bytes: int) -> bytes:
    return text.encode(errors="replace")[:n_bytes].ljust(n_bytes, b"\0")


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


class Silence(Exception):
    """No answer in time."""


class Gone(Exception):
    """A connection ended: the rank at its other end did, or the network."""


def share(
    group: dist.ProcessGroup, mine: Any, timeout: datetime.timedelta = datetime.timedelta(seconds=300)
) -> list[Any]:
    """Returns one object of every rank, in rank order. Collective over `group`, before there is a comm."""
    everyone = [None] * dist.get_world_size(group)
    within(
        timeout, group, "the ranks of a group", lambda: dist.all_gather_object(everyone, mine, group=group)
    )
    return everyone
