"""One rank's connection to the others of a process group, for libtagc: by the native transport, or where
a rank cannot use that, by gloo."""

from __future__ import annotations

import ctypes
import datetime
import os
import secrets
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.exchange import endings, internals, native
from tagc.torch.exchange.gloo import Gloo
from tagc.torch.exchange.identity import identity
from tagc.torch.exchange.said import say
from tagc.torch.exchange.waits import OwnCollectives, timeout_of, within

_TEXT_BYTES = 1024
_GLOOS_FILES = 8  # file descriptors of a group, besides two for each rank

Way = Gloo | native.Native  # by which libtagc's messages go


class _Offer(NamedTuple):
    """What a rank tells the others before there is a connection."""

    n_made: int  # connections of this process so far
    host: str
    address: bytes | None  # None: it cannot use the native transport, because
    why_not: str
    why_fewer: str  # than it should have: connections with each peer
    has_tls: bool  # whether its environment wants TLS
    is_loopback: bool
    secret: bytes  # rank 0's counts


_n_made = 0
_said: set[str] = set()  # reasons for gloo


class Disagreement(Error):
    """Ranks come with different calls. whats: that of each, in rank order."""

    def __init__(self, text: str, whats: Sequence[str]) -> None:
        super().__init__("mismatch", text)
        self.whats = whats


class Comm:
    """One rank's connection to the others of `group`. Collective to make. transport: as in compress()."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_s: float,
        transport: str = "host",
        more_work_bytes: int | None = None,
    ) -> None:
        """more_work_bytes: as of tagc_comm_options; None: its default."""
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._handle = ctypes.c_void_p()
        self._name = ""  # of this connection, the same on all ranks
        self._gloo: Any = None  # for collectives()
        self._way = self._connect(group, transport)
        options = lib.initialised(lib.CommOptions, "tagc_comm_options_init")
        if more_work_bytes is not None:
            options.more_work_bytes = more_work_bytes
        self._handle = self._way.comm(options)
        endings.add(self)
        try:
            self.all_gather(b"\0")  # closing before a peer has connected to all ranks would fail there
        except BaseException:
            self.close()
            raise

    def _connect(self, group: dist.ProcessGroup, transport: str) -> Way:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        # messages to users have the ranks of torch.distributed
        self.rank, self.world_size = dist.get_rank(group), len(self.ranks)
        way, self._name = _connect(group, self.rank, self.ranks, self._timeout_s, transport)
        return way

    @property
    def handle(self) -> ctypes.c_void_p:
        if not self._handle:
            raise Error("state", "this tagc connection is closed")
        return self._handle

    @property
    def transport(self) -> str:
        """The name of the one in use, "native" or "gloo"."""
        return self._way.name

    @property
    def needs_python(self) -> bool:
        """Whether each of its messages takes Python's lock."""
        return isinstance(self._way, Gloo)

    # ---- what the layer calls ----

    def all_gather(self, data: bytes) -> list[bytes]:
        """Returns the bytes of every rank, all of one length, in rank order. Collective."""
        received = ctypes.create_string_buffer(len(data) * self.world_size)
        lib.call("tagc_comm_all_gather", self.handle, data, len(data), received, len(received))
        everyone = received.raw
        return [everyone[i * len(data) : (i + 1) * len(data)] for i in range(self.world_size)]

    def agree(
        self, what: str, numbers: Mapping[str, Any], failure: BaseException | None = None, vote: int = 0
    ) -> list[int]:
        """Compares. Collective: if all ranks agree on the same `what`, have equal `numbers` (up to six; name:
        integer, or anything with a unique repr()) and none has a `failure` (an exception), returns the `vote`
        (an integer) of every rank. Otherwise all raise the same Error, which names a rank that differs."""
        status = failure.status if isinstance(failure, Error) else "argument"
        words, text = compared(what, numbers)
        if failure:
            words[0] |= lib.STATUSES.index(status)
            text = str(failure)
        mine = struct.pack("<8q", *words, vote)
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
            raise Disagreement(
                f"ranks do not agree: rank {first} comes with {whats[0]}, and rank {self.ranks[odd]} with "
                f"{whats[odd]}: every rank must use the same modules or keys, in the same order",
                whats,
            )
        has, has_other = _differing(texts[0], texts[odd])
        raise Error(
            "mismatch",
            f"{what}: ranks do not agree: rank {first} has {has}; rank {self.ranks[odd]} has {has_other}",
        )

    def collectives(self, what: str) -> OwnCollectives:
        """Returns collectives of tensors in CPU memory, by a gloo group of this connection's own. The first
        call is collective. what: for messages."""
        with self._lock:
            if self._gloo is None:
                lacks = _lack_of_files(self.world_size)
                self.agree(what, {}, Error("transport", lacks) if lacks else None)
                store = dist.PrefixStore(f"{self._name}/tensors", internals.default_store())
                timeout = datetime.timedelta(seconds=self._timeout_s)
                try:
                    self._gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)
                except RuntimeError as failure:
                    raise Error(
                        "transport", f"{what}: no gloo group of ranks {_listed(self.ranks)}: {failure}"
                    ) from failure
            return OwnCollectives(self._gloo, self.ranks, what, self._timeout_s)

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
        if self._handle and not self._way.wait(0):
            self.abort("its process ends")

    def wait(self, timeout_s: float) -> bool:
        return not self._handle or self._way.wait(timeout_s)

    def close(self) -> None:
        """Closes the connection. Call it after all its reducers and gatherers are closed."""
        if self._handle:
            lib.load().tagc_comm_destroy(self._handle)
            self._handle = ctypes.c_void_p()
            self._way.close()
            self._gloo = None


def agree_in_turn(
    comms: Sequence[Comm | None],
    what: str,
    numbers: Mapping[str, Any],
    failure: BaseException | None = None,
    vote: int = 0,
    one_of: Callable[[Sequence[int]], int] = max,
) -> int:
    """Compares as Comm.agree() does, over one connection after the other, such as those of a host and of a
    place: all their ranks raise the same Error. one_of: makes one vote of many. Returns that of all ranks.
    Collective."""
    for comm in comms:
        try:
            if comm is not None:
                vote = one_of(comm.agree(what, numbers, failure, vote))
        except Exception as problem:  # those of the next one learn of it there
            failure = problem
    if failure is not None:
        raise failure
    return vote


def compared(what: str, numbers: Mapping[str, Any]) -> tuple[list[int], str]:
    """Returns the numbers by which ranks compare what they come with, and that in words."""
    values = [
        value if isinstance(value, int) else zlib.crc32(repr(value).encode()) for value in numbers.values()
    ]
    words = [zlib.crc32(what.encode()) << 8, *values, *[0] * (6 - len(values))]
    return words, "; ".join(f"{name} {value}" for name, value in numbers.items())


def _differing(one: str, other: str) -> tuple[str, str]:
    """Returns the first number that differs in two texts of compared(), with its name, as each has it."""
    pairs = zip(one.split("; "), other.split("; "))
    return next((pair for pair in pairs if pair[0] != pair[1]), (one, other))


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _padded(text: str, n_bytes: int) -> bytes:
    return text.encode(errors="replace")[:n_bytes].ljust(n_bytes, b"\0")


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def share(group: dist.ProcessGroup, mine: Any, timeout: datetime.timedelta | None = None) -> list[Any]:
    """Returns one object of every rank, in rank order. timeout: the group's by default. Collective over
    `group`, before there is a comm."""
    if timeout is None:
        timeout = datetime.timedelta(seconds=timeout_of(group))
    everyone = [None] * dist.get_world_size(group)
    within(
        timeout, group, "the ranks of a group", lambda: dist.all_gather_object(everyone, mine, group=group)
    )
    return everyone


# ---- how ranks connect ----


def _connect(
    group: dist.ProcessGroup, rank: int, ranks: tuple[int, ...], timeout_s: float, transport: str
) -> tuple[Way, str]:
    """Returns (the native transport for all but "gloo" if all ranks can use it, else gloo; the name of the
    connection). For "host", rank 0 then prints why; for "native" that is an Error. Collective;
    all ranks return the same or raise the same Error."""
    global _n_made
    timeout = datetime.timedelta(seconds=timeout_s)
    port, offers = _offer(group, rank, ranks, timeout, transport)
    _n_made = 1 + max(offer.n_made for offer in offers)
    name = f"tagc/{_n_made}/{','.join(map(str, ranks))}"

    def first(texts: Iterable[str]) -> str:
        return next((f"rank {ranks[r]}: {text}" for r, text in enumerate(texts) if text), "")

    _check_tls(offers, ranks)
    has_tls = offers[0].has_tls
    why_not = first(offer.why_not for offer in offers)
    if port is not None and not why_not:
        _say(
            rank,
            "one connection with each peer, instead of several",
            first(offer.why_fewer for offer in offers),
        )
        mine = ""
        try:
            addresses = [offer.address for offer in offers if offer.address is not None]
            port.connect(addresses, offers[0].secret, name, min(timeout_s, native.PATIENCE_S))
        except Error as failure:
            mine = str(failure)
        why_not = first(share(group, mine, timeout))
        if not why_not:
            return native.Native(port, timeout_s), name
    if port is not None:
        port.close()
    if transport == "native":
        raise Error("unsupported", f"transport is 'native': {why_not}")
    if has_tls:
        raise Error("unsupported", f"{native.TLS_VARIABLE} is set, and gloo would not encrypt: {why_not}")
    lacks = share(group, _lack_of_files(len(ranks)), timeout)
    if lack := first(lacks):
        raise Error("transport", f"no connection can be made: {lack}")
    if transport == "host":
        _say(rank, "messages go by gloo, which takes longer than libtagc's own connections", why_not)
    # new_group() would not do: it reuses the name of a destroyed group, and then finds that group's
    # addresses in the store
    store = dist.distributed_c10d.PrefixStore(name, internals.default_store())
    return Gloo(store, rank, ranks, timeout_s), name


def _check_tls(offers: Sequence[_Offer], ranks: Sequence[int]) -> None:
    """Raises Error, on all ranks, unless all or none want TLS."""
    wants = [ranks[r] for r, offer in enumerate(offers) if offer.has_tls]
    if wants and len(wants) < len(ranks):
        lacks = [rank for rank in ranks if rank not in wants]
        raise Error(
            "mismatch",
            f"{native.TLS_VARIABLE} is set on rank {wants[0]} and not on rank {lacks[0]}: set it on all "
            "ranks, or on none",
        )


def _say(rank: int, what: str, why: str) -> None:
    """Says it on rank 0, once for each reason; "": there is none."""
    if rank == 0 and why and why not in _said:
        _said.add(why)
        say(f"tagc: {what}: {why}")


def _lack_of_files(world_size: int) -> str:
    """Returns why this rank cannot make a gloo group, or "". Where one cannot, the others would wait for it
    until their time is over."""
    opened: list[int] = []
    n = _GLOOS_FILES + 2 * world_size
    try:
        while len(opened) < n:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        return ""
    except OSError as failure:
        return f"{failure.strerror}: gloo needs {n} file descriptors, and {len(opened)} are free (ulimit -n)"
    finally:
        for file in opened:
            os.close(file)


def _offer(
    group: dist.ProcessGroup, rank: int, ranks: tuple[int, ...], timeout: datetime.timedelta, transport: str
) -> tuple[native.Port | None, list[_Offer]]:
    """Returns this rank's port, and what every rank offers. A name that means the host itself on the host
    that has it (127.0.1.1 in Debian's /etc/hosts) is of no use to other hosts: such ranks look again."""
    port: native.Port | None = None
    offers: list[_Offer] = []
    why_not, why_fewer = f"its transport is {transport!r}", ""
    may_be_loopback, n_sockets = True, None
    while True:
        if transport != "gloo" and (
            port is None or port.is_loopback > may_be_loopback or n_sockets not in (None, port.n_sockets)
        ):
            if port is not None:
                port.close()
            port, why = native.open_port(rank, ranks, may_be_loopback, n_sockets)
            why_not, why_fewer = (why, "") if port is None else ("", why or why_fewer)
        mine = _Offer(
            _n_made,
            identity(),
            port.address if port is not None else None,
            why_not if port is None else "",
            why_fewer,
            _wants_tls(),
            port is not None and port.is_loopback,
            secrets.token_bytes(native.SECRET_BYTES) if rank == 0 else b"",
        )
        offers = share(group, mine, timeout)
        has_others = len({offer.host for offer in offers}) > 1
        if may_be_loopback and has_others and any(offer.is_loopback for offer in offers):
            may_be_loopback = False
        elif n_sockets is None and any(offer.why_fewer for offer in offers):
            n_sockets = 1
        else:
            return port, offers


def _wants_tls() -> bool:
    try:
        return native.tls_secret() is not None
    except Error:  # it has no port either, and says why
        return True
