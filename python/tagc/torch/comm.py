"""A process group as tagc's network: whatever libtagc sends goes through gloo's point-to-point messages.

Each comm has a gloo group of its own over the ranks of the user's group, so that its messages, sent from libtagc's
comm thread, never meet the user's collectives. Bytes go from and to libtagc's own buffers, without a copy."""

import ctypes
import datetime
import struct
import threading
import zlib

import torch
import torch.distributed as dist

from tagc import _library as lib
from tagc._library import Error

_TRANSPORT = lib.STATUSES.index("transport")
_MEMORY = ctypes.c_char * (1 << 47)  # any address, any length: views below say how much of it
_TEXT_BYTES = 1024


def bytes_at(address, n_bytes):
    """A tensor over memory that somebody else owns."""
    return torch.frombuffer(_MEMORY.from_address(address), dtype=torch.uint8, count=n_bytes)


def floats_at(address, n_elems):
    return torch.frombuffer(_MEMORY.from_address(address), dtype=torch.float32, count=n_elems)


_n_made = 0


def _gloo(group, ranks, timeout):
    """A gloo group over the ranks of `group`, in their order. Not new_group(), which takes a name again when the group that
    had it is destroyed, and then finds the old one's addresses in the store."""
    global _n_made
    _n_made = 1 + max(share(group, _n_made))
    name = f"tagc/{_n_made}/{','.join(map(str, ranks))}"
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, dist.get_rank(group), len(ranks), timeout)


class Comm:
    """One rank's connection to the others of `group`. Collective to make."""

    def __init__(self, group, timeout_s):
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank, self.world_size = dist.get_rank(group), len(self.ranks)
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._group = _gloo(group, self.ranks, self._timeout)
        self._lock = threading.RLock()
        self._handle = ctypes.c_void_p()
        self._ops = lib.CallbackOps(lib.TRANSPORT_ABI, lib.EXCHANGE_FN(self._on_exchange))  # lives as long as the comm
        options = lib.initialised(lib.CommOptions, "tagc_comm_options_init")
        options.timeout_s = min(1e6, 2 * timeout_s)  # gloo gives up first, and knows why
        lib.call("tagc_comm_create_callback", ctypes.byref(self._ops), None, self.rank, self.world_size, ctypes.byref(options),
                 ctypes.byref(self._handle))
        try:
            self.all_gather(b"\0")  # who closes before a peer has connected to all would be a failure there
        except BaseException:
            self.close()
            raise

    @property
    def handle(self):
        if not self._handle:
            raise Error("state", "this tagc connection is closed")
        return self._handle

    def _on_exchange(self, _context, transfer):
        try:
            self._move(transfer.contents)
            return 0
        except BaseException as failure:  # nothing may pass through C
            text = f"rank {self.rank} could not exchange with its peers: {failure}"
            return lib.load().tagc_report(_TRANSPORT, text.encode(errors="replace"))

    def _move(self, transfer):
        work = []
        for part in transfer.receives[:transfer.n_receives]:
            if part.n_bytes:
                memory = bytes_at(transfer.recv + part.offset, part.n_bytes)
                work.append(self._group.recv([memory], part.peer, 0))
        sends = [part for part in transfer.sends[:transfer.n_sends] if part.n_bytes]
        sends.sort(key=lambda part: (part.peer - self.rank) % self.world_size)  # not all to the same rank at once
        for part in sends:
            memory = bytes_at(transfer.send + part.offset, part.n_bytes)
            work.append(self._group.send([memory], part.peer, 0))
        for message in work:
            message.wait(self._timeout)

    def all_gather(self, data):
        """Collective: the bytes of every rank, all of one length, in rank order."""
        received = ctypes.create_string_buffer(len(data) * self.world_size)
        lib.call("tagc_comm_all_gather", self.handle, data, len(data), received)
        everyone = received.raw
        return [everyone[i * len(data):(i + 1) * len(data)] for i in range(self.world_size)]

    def agree(self, what, numbers, failure=None, vote=0):
        """Collective: where every rank has the same `numbers` (up to six, name: integer, or anything whose repr() tells it
        apart) and none has a `failure` (an exception), returns the `vote` (an integer) of every rank. Otherwise all raise the
        same Error, which names a rank that differs."""
        status = failure.status if isinstance(failure, Error) else "argument"
        values = [value if isinstance(value, int) else zlib.crc32(repr(value).encode()) for value in numbers.values()]
        mine = struct.pack("<8q", lib.STATUSES.index(status) if failure else 0, *values, *[0] * (6 - len(values)), vote)
        text = str(failure) if failure else ", ".join(f"{name} {value}" for name, value in numbers.items())
        with self._lock:
            everyone = self.all_gather(mine)
            if not failure and all(other[:-8] == mine[:-8] for other in everyone):
                return [struct.unpack_from("<q", other, 56)[0] for other in everyone]
            texts = self.all_gather(text.encode(errors="replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"))
        texts = [text.rstrip(b"\0").decode(errors="replace") for text in texts]
        for rank, other in enumerate(everyone):
            if status := struct.unpack_from("<q", other)[0]:
                raise Error(status, f"{what}: rank {rank}: {texts[rank]}") from failure
        odd = next(rank for rank, other in enumerate(everyone) if other[:-8] != everyone[0][:-8])
        raise Error("mismatch", f"{what}: ranks do not agree: rank 0 has {texts[0]}; rank {odd} has {texts[odd]}")

    @property
    def agreement_bytes(self):
        """What one rank sends, and gets, when all agree."""
        return 64 * (self.world_size - 1)

    def bytes_sent(self):
        """Since the comm was made, by leg."""
        return self._bytes()[0]

    def bytes_received(self):
        return self._bytes()[1]

    def _bytes(self):
        sent, received = (ctypes.c_uint64 * lib.N_LEGS)(), (ctypes.c_uint64 * lib.N_LEGS)()
        lib.load().tagc_comm_bytes(self.handle, sent, received, lib.N_LEGS)
        return dict(zip(lib.LEGS, sent)), dict(zip(lib.LEGS, received))

    def close(self):
        """After all reducers and gatherers made on it."""
        if self._handle:
            lib.load().tagc_comm_destroy(self._handle)
            self._handle = ctypes.c_void_p()
            self._group = None


def share(group, mine):
    """Collective over `group`, before there is a comm: one object of every rank, in rank order."""
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone
