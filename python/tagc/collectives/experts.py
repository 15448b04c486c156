"""Expert parallelism whose tokens travel in few bits: a style for parallelize_module() around another one,
such as torchtitan's ExpertParallel."""

from __future__ import annotations

import copy
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tagc._library import Error
from tagc.collectives.collectives import Collectives

CALLED = "all_to_all_single_autograd"  # what dispatch and combine move tokens by
# so that a style without a name gets the same one on every rank: by the Collectives
_numbers: weakref.WeakKeyDictionary[Collectives, Any] = weakref.WeakKeyDictionary()


class CompressedExperts(ParallelStyle):
    """A style of experts, whose dispatch and combine go by Collectives.all_to_all():

        comm = Collectives(ep_mesh)
        parallelize_module(block.moe.experts, ep_mesh, CompressedExperts(ExpertParallel(), comm))

    style: torchtitan's ExpertParallel, or another whose methods call all_to_all_single_autograd(), a function
        of torch. All else in it stays: placements, permutations, padding, counts of tokens, which travel
        whole.
    comm: over the ranks of the mesh; one for all layers, and closed by you after training.
    key: the name of the layer, the same on all ranks. Not given: layers are numbered in the order in which
        the style is applied."""

    def __init__(self, style: ParallelStyle, comm: Collectives, *, key: str | None = None) -> None:
        super().__init__()
        if not isinstance(style, ParallelStyle):
            raise Error("argument", f"style is a {type(style).__name__}, must be a ParallelStyle")
        if not isinstance(comm, Collectives):
            raise Error("argument", f"comm is a {type(comm).__name__}, must be Collectives of the mesh")
        self.style, self.comm, self.key = style, comm, key

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = dist.get_process_group_ranks(device_mesh.get_group())
        if ranks != self.comm.ranks:
            raise Error(
                "argument", f"comm is of the ranks {self.comm.ranks}, must be of those of the mesh, {ranks}"
            )
        key = self.key
        if key is None:
            key = f"experts {next(_numbers.setdefault(self.comm, itertools.count()))}"
        # of this layer alone, since it keeps the splits between dispatch and combine
        apply: Callable[[nn.Module, DeviceMesh], nn.Module] = _rebound(self.style, self.comm, key)._apply
        return apply(module, device_mesh)


def _rebound(style: ParallelStyle, comm: Collectives, key: str) -> Any:
    """Returns a copy of the style whose methods find ours where they look for torch's function. Nobody else's
    do: not the module's globals change, but those of copies of its functions."""
    copied: Any = copy.copy(style)
    n_found = 0
    for kind in reversed(type(style).__mro__):
        for name, method in vars(kind).items():
            if not isinstance(method, types.FunctionType) or CALLED not in method.__code__.co_names:
                continue
            if CALLED not in method.__globals__:
                continue
            exchange = comm.tokens(f"{key} {name}")

            def move(
                tokens: torch.Tensor,
                output_split_sizes: Any,
                input_split_sizes: Any,
                group: Any = None,
                tag: str = "",
                exchange: Any = exchange,
            ) -> Any:
                return exchange(tokens, output_split_sizes, input_split_sizes)

            ours = types.FunctionType(
                method.__code__,
                {**method.__globals__, CALLED: move},
                method.__name__,
                method.__defaults__,
                method.__closure__,
            )
            ours.__kwdefaults__ = method.__kwdefaults__
            setattr(copied, name, types.MethodType(ours, copied))
            n_found += 1
    if not n_found:
        raise Error(
            "unsupported",
            f"{type(style).__name__} has no method that calls {CALLED}(), by which tokens would travel",
        )
    return copied
