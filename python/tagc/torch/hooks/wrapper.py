"""What compress() asks of a wrapper: fsdp2.py and ddp.py have one each, and annexes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.torch.exchange.interfaces import Wrapped
from tagc.torch.handle import Compressed
from tagc.torch.schedule import policy
from tagc.torch.schedule.options import Settings


class Wrapper(Wrapped):
    """A wrapped model, for compress()."""

    _model: Any  # a torch.nn.Module, of the wrapper's class

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [*policy.named_parameters(self._model)]

    def agreeing(self) -> list[dist.ProcessGroup | None]:
        """Returns groups over which, one after the other, all ranks of the model agree. If these are all
        ranks, the world, because a rank with a wrong model does not know another group. [None]: this rank
        alone."""
        groups = self.groups()
        if not groups:
            raise Error("argument", "this model has no parameters")
        world = dist.group.WORLD
        if world is not None and self.n_ranks() == dist.get_world_size():
            return [world]
        return [*(self.deciders() or groups[:1])]

    def check(self, options: Settings, is_on_device: bool) -> None:
        """Raises an Error on options that mean nothing here. Local."""

    def connect(
        self, handle: Compressed, timeout_s: float | None, fingerprint: Mapping[str, Any], is_on_host: bool
    ) -> None:
        """Makes the connections of the exchanges that are known. timeout_s: as the user gave it. fingerprint:
        what must be equal on all ranks, by name. is_on_host: parameters are in CPU memory. Collective."""
        handle.passes.connect(is_on_host)

    def install(self, handle: Compressed) -> None:
        """Installs tagc's hooks. Collective."""
        raise NotImplementedError


def words_of_slow_sums(n: int, of: int, name: str, shards: dist.ProcessGroup, n_replicas: int) -> str:
    """Returns a warning: n of so many units, such as this one, are both sharded and replicated over ranks on
    several hosts."""
    return (
        f"{n} of {of} units, such as {name}, are sharded over {shards.size()} ranks on several hosts, where "
        f"tagc compresses, and replicated over {n_replicas} on several hosts, too, where torch sums, "
        "uncompressed. If each host has all shards of a replica, only sums over replicas are between hosts, "
        "and tagc compresses them"
    )
