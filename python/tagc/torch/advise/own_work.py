"""What FSDP2 itself takes of a step, besides computing and communication: it copies shards into gathers and
parameters out of them, and joins gradients for reductions.

Modules of a unit's size show it, whose collectives send nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tagc.torch.exchange import internals
from tagc.torch.exchange.waits import FsdpComm

N_UNITS = 3  # one after the other, as in a model: memory of one is not at once the next one's
N_PARAMETERS = 4
_COLUMNS = 256


class _Unit(torch.nn.Module):
    def __init__(self, n_elems: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        rows = max(1, n_elems // (N_PARAMETERS * _COLUMNS))
        self.parts = torch.nn.ParameterList(
            [torch.zeros(rows, _COLUMNS, dtype=dtype, device=device) for _ in range(N_PARAMETERS)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part.sum()
        return x


class _SendsNothing(FsdpComm):
    """A collective of FSDP2: its memory, and no exchange."""

    def __call__(self, *_: Any, **__: Any) -> None:
        pass


def passes(
    n_elems: int,
    n_gathers: int,
    group: dist.ProcessGroup,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns two functions, each a forward and backward pass of N_UNITS units of n_elems elements: without
    FSDP2, and with it. n_gathers: 1 or 2 of each unit. dtypes: of gathers and of reductions. Collective over
    the group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = DeviceMesh.from_group(group, device.type)
    policy = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    plain, wrapped = (
        torch.nn.Sequential(*(_Unit(n_elems, dtype, device) for _ in range(N_UNITS)))
        for dtype in (dtypes[0], torch.float32)
    )
    for unit in wrapped:
        sharded = fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=n_gathers > 1)
        for one in internals.fsdp_groups(sharded):
            one.set_comms(_SendsNothing(), _SendsNothing())

    def run(model: torch.nn.Module) -> None:
        model(torch.zeros(1, dtype=dtypes[0], device=device, requires_grad=True)).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return lambda: run(plain), lambda: run(wrapped)
