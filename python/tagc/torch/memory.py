"""What tagc holds in memory on this rank, counted from what is allocated."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import NamedTuple

import torch

from tagc import _library as lib
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.runner import Runners


class Held(NamedTuple):
    """Bytes in one kind of memory."""

    residual: int = 0  # what is not sent yet
    replicas: int = 0  # of parameters, with deltas; of LocalSteps, the anchor and outer momentum
    buffers: int = 0  # of reducers and gatherers, whatever is under way
    pinned: int = 0  # for copies to and from a device
    transient: int = 0  # of the exchange under way; stays allocated for the next one

    @property
    def persistent(self) -> int:
        return self.residual + self.replicas + self.buffers

    @property
    def total(self) -> int:
        return self.persistent + self.pinned + self.transient


class Memory(NamedTuple):
    """Of one rank."""

    host: Held
    device: Held

    @property
    def total(self) -> int:
        return self.host.total + self.device.total

    def __str__(self) -> str:
        """Returns a table, a line for each kind of memory that is in use."""
        fields = [*Held._fields, "total"]
        rows = [["", *fields]]
        for name, held in zip(self._fields, (self.host, self.device)):
            if held.total or name == "host":
                rows.append([name, *(text_of(getattr(held, field)) for field in fields)])
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)

    def __repr__(self) -> str:
        return (
            f"<tagc holds {text_of(self.host.total)} of host memory, {text_of(self.device.total)} on devices>"
        )


def text_of(n_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.3g} {unit}"
    return f"{n_bytes} B"


def count(
    comms: Iterable[Comm],
    replicas: Iterable[torch.Tensor],
    runners: Runners | None = None,
    transient: Iterable[torch.Tensor] = (),
) -> Memory:
    """Returns what connections with their reducers and gatherers, replicas, runners and tensors of exchanges
    under way hold. Local."""
    host, device, spares_there = [0] * len(Held._fields), [0] * len(Held._fields), 0
    residual, copies, buffers, pinned, under_way = range(len(Held._fields))
    for comm in comms:
        held = lib.initialised(lib.Memory, "tagc_memory_init")
        lib.call("tagc_comm_memory", comm.handle, ctypes.byref(held))
        host[residual] += held.residual_bytes
        host[buffers] += held.buffer_bytes
        host[under_way] += held.work_bytes + held.spare_bytes
        device[residual] += held.device_residual_bytes
        spares_there += held.device_spare_bytes
    for field, tensors in (copies, replicas), (under_way, transient):
        for tensor in tensors:
            (host if tensor.device.type == "cpu" else device)[field] += tensor.nbytes
    if runners is not None:
        host[pinned] += runners.pinned_bytes()
        if runners.kernels is not None:  # work memory, and bodies of all reducers
            device[under_way] += spares_there
            device[buffers] += runners.kernels.n_bytes - device[residual] - spares_there
    return Memory(Held(*host), Held(*device))
