"""FSDP2 under torchft: a model that is sharded inside each replica, over a process group of its own.

torch reduce-scatters inside the replica. Then each rank exchanges its shards with the ranks of the same place
in the other replicas. Each rank has a Manager, so these are its quorum, and torchft's should_commit() is the
same on all ranks of a replica. Residuals are of shards."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.quorum import internals
from tagc.quorum.managed import Managed
from tagc.torch import Compressed
from tagc.torch.extension import Exchanged, Gradient, Wrapped
from tagc.torch.hooks import fsdp2


class _AllReduce:
    """In the place of set_all_reduce_hook(). After a failure of the transport it leaves the gradients of this
    step as they are, and torchft does not commit them."""

    def __init__(self, handle: Compressed, unit: Exchanged, module: fsdp2.Module, wrapper: Wrapper) -> None:
        self._handle, self._unit, self._module, self._wrapper = handle, unit, module, wrapper

    def __call__(self, reduce_output: torch.Tensor) -> None:
        wrapper, handle, module = self._wrapper, self._handle, self._module
        try:
            wrapper.begin(handle)
            wrapper.prepare(reduce_output)
            hosts = wrapper.hosts(wrapper.quorum)
            find_layout = functools.partial(module.shard_layout, reduce_output.numel(), hosts)
            what = wrapper.quorum, reduce_output, reduce_output, dist.ReduceOp.SUM, find_layout
            handle.passes.exchange(Gradient(self._unit, *what, agrees=True))
            wrapper.goes_on([parameter.name for parameter in module.parameters])
        except BaseException as failure:
            handle.passes.give_up()
            if not wrapper.gives_up(handle, failure):
                raise


class Wrapper(Managed, fsdp2.Wrapper):
    """All fully_shard()-ed modules of a model of a replica, for compress()."""

    sums_shards = True

    def __init__(self, model: torch.nn.Module, manager: Any) -> None:
        if internals.has_async_quorum(manager):
            raise Error(
                "unsupported",
                "this Manager has use_async_quorum=True: FSDP2 needs False, because torchft would send the "
                "state to a replica "
                "that joins in the middle of a pass, when parameters are whole",
            )
        self._manager = manager
        super().__init__(model)

    def connect(
        self, handle: Compressed, timeout_s: float | None, fingerprint: Mapping[str, Any], is_on_host: bool
    ) -> None:
        shards = self.modules[0].group.shard_group
        assert shards is not None  # __init__() has looked
        fingerprint = {**fingerprint, "place in the shard group": shards.rank()}
        super().connect(handle, timeout_s, fingerprint, is_on_host)

    def groups(self) -> list[Any]:
        return super().groups() + ([] if self._quorum is None else [self._quorum])

    def n_ranks(self) -> int:
        return super().n_ranks() * (1 if self._quorum is None else self._quorum.size())

    def deciders(self) -> list[Any] | None:
        return Wrapped.deciders(self)  # replicas change, and no connection is over all ranks of all of them

    def install(self, handle: Compressed) -> None:
        super().install(handle)
        self.follow_commits(handle)

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "ranks of a replica": super().n_ranks()}

    def all_reduce(self, handle: Compressed, unit: Exchanged, module: fsdp2.Module) -> object:
        return _AllReduce(handle, unit, module, self)
