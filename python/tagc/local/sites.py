"""What one site of local steps is: a plain model in one process, a DDP model, or a model that FSDP2 shards
inside the site. Under torchft a site is a replica, and torchft knows the others.

A rank exchanges with the ranks that have the same place in the other sites. Under FSDP2 it has its shards for
that. Under DDP all ranks of a site have the same parameters, so that each takes a slice of them, and gathers
the others' slices within the site afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tagc._library import Error
from tagc.torch.extension import DTYPES, Comm, check_model, kinds_of, policy


class Exchanges(Protocol):
    """The exchanges of sites that join and leave."""

    def run(self, fragment: Any) -> bool: ...

    def run_all(self) -> None: ...

    def connection(self) -> Comm: ...

    def residuals_before(self, fragment: Any) -> Mapping[str, torch.Tensor] | None:
        """Returns residuals from before an exchange that did not count here; None if there is no such
        exchange."""
        ...

    def forget(self) -> None:
        """Forgets that exchange: residuals are new, and none of them is undone."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Others(Protocol):
    """Who knows sites that join and leave."""

    def check(self, optimizer: Any, between: Any, delay: Any) -> None:
        """Raises Error if LocalSteps cannot work with these. Local."""
        ...

    def join(self, handle: Any, fingerprint: Mapping[str, Any]) -> Exchanges:
        """Returns the exchanges of these LocalSteps. fingerprint: what all sites must have alike, by name."""
        ...


class Trained(NamedTuple):
    """A parameter that an optimizer steps."""

    name: str
    parameter: torch.nn.Parameter

    def local(self) -> torch.Tensor:
        """Returns what this rank has of it, sharing its memory."""
        values = self.parameter.detach()
        return values.to_local() if isinstance(values, DTensor) else values


class Site:
    """This rank's place among all. between: the ranks with the same place in their sites, None: all ranks.
    is_managed: they join and leave. Local; Error where the model is none of the three."""

    n_sites, site = 1, 0
    n_slices, slice = 1, 0
    is_managed = False
    between: dist.ProcessGroup

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        between: dist.ProcessGroup | None,
        is_managed: bool = False,
    ) -> None:
        self.model, self.optimizers, self.is_managed = model, list(optimizers), is_managed
        self.kind = _kind(model, between)
        # over each of which the ranks of this site agree, one after the other
        self.inner = self._inner_groups()
        if not is_managed:
            self._join(between)
        elif self.kind == "ddp":
            raise Error(
                "unsupported",
                "model is DistributedDataParallel: where sites join and leave, LocalSteps takes a plain "
                "model or a fully_shard()-ed one",
            )
        self.trained = self._find_trained()

    def _join(self, between: dist.ProcessGroup | None) -> None:
        if between is None and self.n_inner > 1:
            raise Error(
                "argument",
                f"this model is {self.kind} over {self.n_inner} ranks, and between is None: it must be the "
                "group of the ranks that have the same place in their sites, as mesh['site'].get_group() is",
            )
        world = dist.group.WORLD
        assert world is not None
        self.between = world if between is None else between
        self.n_sites, self.site = self.between.size(), dist.get_rank(self.between)
        others = set(dist.get_process_group_ranks(self.between)) - {dist.get_rank()}
        for group in self.inner:
            if both := others & set(dist.get_process_group_ranks(group)):
                raise Error(
                    "argument",
                    f"ranks {dist.get_rank()} and {min(both)} are of two sites by `between`, and this "
                    f"model, {self.kind}, is sharded or averaged over both: give it a mesh or a process "
                    "group inside its site",
                )
        if self.kind == "ddp":
            self.n_slices, self.slice = self.inner[0].size(), dist.get_rank(self.inner[0])

    @property
    def rank(self) -> int:
        """Of torch.distributed: under torchft, within this site; 0 where there is none."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def n_inner(self) -> int:
        """Ranks of a site."""
        return math.prod(group.size() for group in self.inner)

    def _inner_groups(self) -> list[dist.ProcessGroup]:
        if isinstance(self.model, torch.nn.parallel.DistributedDataParallel):
            return [self.model.process_group]
        by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for parameter in self.model.parameters():
            if isinstance(parameter, DTensor):
                for group in parameter.device_mesh.get_all_groups():
                    by_ranks[tuple(dist.get_process_group_ranks(group))] = group
        return list(by_ranks.values())

    def _find_trained(self) -> list[Trained]:
        names = {id(parameter): name for name, parameter in policy.named_parameters(self.model)}
        stepped = self._stepped()
        if strange := len(stepped - names.keys()):
            raise Error(
                "argument",
                f"the optimizer has {strange} parameters that are not the model's: it must be made of the "
                "wrapped model's",
            )
        trained = [Trained(names[id(p)], p) for p in self.model.parameters() if id(p) in stepped]
        if not trained:
            raise Error("argument", "the optimizer has no parameter that requires a gradient")
        for one in trained:
            if one.parameter.dtype not in DTYPES:
                raise Error("unsupported", f"{one.name} is {one.parameter.dtype}: must be fp32, bf16 or fp16")
            if one.parameter.is_meta:
                raise Error("argument", f"{one.name} is on the meta device: give it memory and values first")
        return trained

    def _stepped(self) -> set[int]:
        return {
            id(parameter)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }

    def check_trained(self) -> None:
        """Raises Error where another parameter is trained by now."""
        if new := self._stepped() - {id(one.parameter) for one in self.trained}:
            names = sorted(name for name, p in policy.named_parameters(self.model) if id(p) in new)
            raise Error(
                "state",
                f"{', '.join(names[:3]) or 'a parameter'} was not trained when LocalSteps was made, and is "
                "now: close it, and make it anew",
            )


def _kind(model: torch.nn.Module, between: Any) -> str:
    check_model(model)
    for kind in kinds_of(model, between):
        if kind.name not in ("ddp", "fsdp2"):
            raise Error(
                "unsupported",
                f"model or between is of {kind.name}, which exchanges in every backward pass: LocalSteps "
                "takes a plain model, DDP, or fully_shard(); where sites join and leave, give it the model "
                "itself and manager=",
            )
    is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if is_ddp and is_sharded:
        raise Error(
            "unsupported",
            "model is DistributedDataParallel with parameters that are sharded, too: LocalSteps takes one of "
            "both",
        )
    return "ddp" if is_ddp else "fsdp2" if is_sharded else "plain"
