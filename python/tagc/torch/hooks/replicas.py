"""What a module keeps from gather to gather: with deltas, a replica of all rows in bf16 and a checksum of
what this rank gave last. Without deltas nothing."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable

import torch

from tagc import _library as lib
from tagc.torch.exchange.gatherer import Gatherer
from tagc.torch.exchange.interfaces import Replica
from tagc.torch.exchange.staging import Kernels

CHANGED, RESET = 1, 2  # bits of a vote

_ROW = 1 << 16  # elements of a device that are hashed side by side
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd factor, as an int64


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """Returns a checksum of the values of tensors, one after the other."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous()
        if values.numel():
            found.update((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))
    return found.hexdigest()


def fingerprint(values: torch.Tensor, like: str = "") -> str:
    """Returns a checksum of a contiguous tensor, fast where it is: in CPU memory that of libtagc, on a device
    one of its own, which begins with "device". like: of the same kind as that one."""
    if like.startswith("device") or (values.device.type != "cpu" and not like):
        return f"device{_device_sum(values) & (1 << 64) - 1:016x}"
    values = values.cpu()
    return f"{lib.load().tagc_checksum(values.data_ptr(), values.nbytes):016x}"


def _device_sum(values: torch.Tensor) -> int:
    """Returns a hash modulo 2^64 in which the sum of each column is a polynomial of its values, and that of
    all columns has odd random weights: a single changed value always changes it."""
    words = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
    sums = torch.zeros(_ROW, dtype=torch.int64, device=values.device)
    for row in words.split(_ROW):
        sums.mul_(_ODD)
        sums[: row.numel()] += row
    weights = torch.arange(1, _ROW + 1, dtype=torch.int64, device=values.device)
    for factor in (_ODD, -0x40A7B892E31B1A47):  # as splitmix64 does
        weights ^= weights >> 30
        weights *= factor
    return int((sums * (weights | 1)).sum().item()) * 31 + values.numel()


class Gathers:
    """Of one module over one group."""

    def __init__(self, is_delta: bool) -> None:
        self._is_delta = is_delta
        self.gatherer: Gatherer | None = None  # made at the first run
        self.wants_reset = False
        self.was_loaded = False  # whether parameters were loaded since the last gather, perhaps the same
        self.sent = ""  # fingerprint of what this rank gave last
        self._replica: torch.Tensor | None = None  # (W * shard,) bf16, with deltas
        self._room: torch.Tensor | None = None  # where the first one will be

    def vote(self, shard: torch.Tensor) -> tuple[int, str]:
        """Returns (whether this rank's shard is another than at the last gather, and whether all of it must
        travel; its fingerprint)."""
        found = fingerprint(shard) if self._is_delta else ""
        changed = self._replica is None or found != self.sent
        self.wants_reset |= changed and self.was_loaded
        self.was_loaded = False
        return (CHANGED if changed else 0) | (RESET if self.wants_reset else 0), found

    def run(
        self, shard: torch.Tensor, output: torch.Tensor, kernels: Kernels | None, vote: int, found: str
    ) -> None:
        """Gathers shard into output, of which it may be part. kernels: where both are on their device. vote:
        of all ranks. found: what vote() returned beside it. The gatherer is there."""
        gatherer = self.gatherer
        assert gatherer is not None
        if not self._is_delta:
            self._run_whole(gatherer, shard, output)
            return
        if self._replica is None or vote:
            replica = self._memory(gatherer, shard.device)
            if vote & RESET:
                gatherer.reset()
            self.wants_reset = True  # unless this goes well
            self._run(gatherer, shard, replica, kernels)
            self._replica, self.sent, self.wants_reset = replica, found, False
        output.copy_(self._replica)

    def _run_whole(self, gatherer: Gatherer, shard: torch.Tensor, output: torch.Tensor) -> None:
        full, own = output, shard.float()
        if output.dtype != gatherer.dtype:
            full = torch.empty(output.numel(), dtype=gatherer.dtype, device=output.device)
        elif own is shard and _overlap(shard, output):
            own = shard.clone()
        self.wants_reset = False
        gatherer.run(own, full)
        if full is not output:
            output.copy_(full)

    @staticmethod
    def _run(gatherer: Gatherer, shard: torch.Tensor, replica: torch.Tensor, kernels: Kernels | None) -> None:
        own = shard.float()  # the tensor itself where it is fp32
        if kernels is not None:
            kernels.streams.settle()
        gatherer.run(own, replica)

    def _memory(self, gatherer: Gatherer, device: torch.device) -> torch.Tensor:
        if self._replica is not None:
            return self._replica
        if (room := self._room) is not None:
            self._room = None
            return room
        with torch.inference_mode(False):  # it outlives an evaluation
            return torch.empty(gatherer.n_elems, dtype=torch.bfloat16, device=device)

    def reserve(self, device: torch.device) -> None:
        """Takes the memory of the replica. gatherer is there."""
        assert self.gatherer is not None
        self._room = self._memory(self.gatherer, device)

    def restore(self, replica: Replica, shard: torch.Tensor, kernels: Kernels | None) -> None:
        """Makes the rows of all ranks the replica, and `shard` what was given last. Collective."""
        assert self.gatherer is not None
        full = self._memory(self.gatherer, shard.device)
        self.gatherer.reset()
        self.wants_reset = True
        self._run(self.gatherer, replica.row.to(shard.device), full, kernels)
        self.gatherer.set_replica(full, replica.n_gathers)
        self._replica, self.wants_reset = full, False

    @property
    def memory(self) -> torch.Tensor | None:
        """The replica, or what will be one."""
        return self._room if self._replica is None else self._replica

    def row(self, place: int) -> tuple[torch.Tensor | None, int]:
        """Returns (row `place` of the replica, number of gathers); None where the next gather does without a
        replica."""
        n_gathers = 0 if self.gatherer is None or self.wants_reset else self.gatherer.n_gathers()
        if self.gatherer is None or n_gathers == 0 or self._replica is None:
            return None, 0
        n_shard = self.gatherer.n_shard
        return self._replica[place * n_shard : (place + 1) * n_shard].cpu().clone(), n_gathers

    def close(self) -> None:
        if self.gatherer is not None:
            self.gatherer.close()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
