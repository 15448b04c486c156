"""What compress() asks of a wrapper: fsdp2.py, ddp.py and fsdp1.py have one each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tagc.torch.exchange.interfaces import Wrapped
from tagc.torch.handle import Compressed
from tagc.torch.schedule import policy


class Wrapper(Wrapped):
    """A wrapped model, for compress()."""

    _model: Any  # a torch.nn.Module, of the wrapper's class

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [*policy.named_parameters(self._model)]

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
