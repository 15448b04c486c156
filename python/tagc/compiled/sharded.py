"""One parameter of a model whose parameters are properties: what tagc's operators of it ask of its module."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from tagc.compiled import ops
from tagc.compiled.parametrize import Found
from tagc.compiled.starts import Started
from tagc.torch.extension import fingerprint, layouts, n_changes


class Module(Protocol):
    """That of a parameter (modules.py)."""

    @property
    def scale(self) -> float:
        """By which a sum over ranks is multiplied."""
        ...

    def read(self, one: Sharded) -> torch.Tensor:
        """Returns one of its parameters, whole, in new memory. Collective."""
        ...

    def take(self, one: Sharded, values: torch.Tensor) -> None:
        """Takes a gradient in wire order, and begins the exchange if it is the last one. Collective."""
        ...

    def begin_all(self) -> None:
        """Begins the exchanges of all modules' gradients that have come, since somebody waits for sums."""
        ...

    def sums(self, started: Started) -> torch.Tensor:
        """Returns what an exchange gives."""
        ...


class Sharded:
    """A parameter, sharded over the ranks of a group: rank r has the r-th chunk along a dimension, padded to
    the size of the first one."""

    def __init__(self, name: str, found: Found) -> None:
        self.sharded, self.op = found.parameter, found.op
        self.precision, self.reshards = found.how.precision, found.how.reshards
        self.group: dist.ProcessGroup = self.sharded.device_mesh.get_group()
        self.n_ranks, dim = self.group.size(), self.sharded.placements[0].dim
        shape = tuple(self.sharded.shape)
        self.parameter = layouts.Parameter(name, shape, "dense", dim, n_whole=self.sharded.numel())
        self.n_shard = layouts.chunked_elems(self.parameter, self.n_ranks) // self.n_ranks
        self.key = ops.key_of(self)
        self._module: Module | None = None
        self._sums: list[tuple[Started, slice]] = []  # where its sums come that wait() has not given yet

    @property
    def dtype(self) -> torch.dtype:
        """Of the whole parameter, where the model reads it."""
        dtype: torch.dtype = self.precision.param_dtype or self.sharded.dtype
        return dtype

    @property
    def reduced_dtype(self) -> torch.dtype:
        return self.precision.reduce_dtype or self.dtype

    def kind(self) -> tuple[object, ...]:
        """Returns what parameters must have in common to be exchanged together."""
        dtypes = self.sharded.dtype, self.dtype, self.reduced_dtype
        return self.group, self.sharded.device, *dtypes, str(self.op)

    def own(self) -> torch.Tensor:
        """Returns this rank's shard, as the optimizer has it."""
        with torch.inference_mode(False):  # which detaches nothing of a DTensor
            shard: torch.Tensor = self.sharded.detach().to_local()
        return shard

    def version(self) -> tuple[object, ...]:
        """Returns what changes when this rank's shard does: torch counts the changes of a parameter, but not
        those by what state_dict() gives, into which a checkpoint may be loaded. Reading a device's memory for
        that would wait for the device."""
        with torch.inference_mode(False), torch.no_grad():  # the first has no such numbers
            counts = n_changes(self.sharded), n_changes(self.sharded.to_local())
        is_near = self.sharded.device.type == "cpu"
        return *counts, fingerprint(self.own().contiguous()) if is_near else ""

    def connect(self, module: Module) -> None:
        """Makes what the model reads. Its gradient comes to the parameter by ops.Late, also where that is to
        be trained only later."""
        self._module = module
        if not self.sharded.is_floating_point():
            self.read = self.own()
            return
        is_trained = self.sharded.requires_grad
        with torch.enable_grad():
            self.read = ops.late(self.sharded.requires_grad_(True).to_local(), self.key)
        self.sharded.requires_grad_(is_trained)

    def release(self) -> None:
        """Gives up the parameter's node of autograd, without which torch can give it other values."""
        self.read = self.read.detach()

    def renew(self) -> None:
        """Makes what the model reads again. With another dtype or device, reading it is an Error."""
        if (self.read.dtype, self.read.device) == (self.sharded.dtype, self.sharded.device):
            self.connect(self._connected())

    # ---- what the operators call ----

    def all_gather(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the whole parameter. Collective."""
        return self._connected().read(self)

    def reduce_scatter(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Lets the module reduce a gradient, and returns zeros in the shape of this rank's shard of it.
        wait() gives that itself. Collective."""
        module, shard = self._connected(), self.own()
        placeholder = gradient.new_zeros(shard.shape, dtype=dtype)
        values = layouts.to_wire(gradient.detach(), self.parameter, self.n_ranks)
        if self.n_ranks == 1:
            alone = values.to(dtype, copy=True).mul_(module.scale)
            self.comes(Started(0, alone), slice(0, alone.numel()))
        else:
            module.take(self, values)
        return placeholder

    def comes(self, started: Started, at: slice) -> None:
        """Notes that its sums are there in what an exchange gives."""
        self._sums.append((started, at))

    def wait(self) -> torch.Tensor:
        """Returns the sum of all that reduce_scatter() has got since the last wait(): a model that reads a
        parameter in several places has several gradients of it."""
        module, shard = self._connected(), self.own()
        module.begin_all()
        begun, self._sums = self._sums, []
        sums = [module.sums(started)[at][: shard.numel()].view(shard.shape) for started, at in begun]
        if not sums:  # reentrant checkpointing: a pass within the pass has taken them all
            return torch.zeros_like(shard)
        own = sums[0].clone()  # torch cannot copy models whose gradients share memory
        for more in sums[1:]:
            own += more
        return own

    def forget(self) -> None:
        self._sums = []

    def _connected(self) -> Module:
        assert self._module is not None  # the key is given by install()
        return self._module
