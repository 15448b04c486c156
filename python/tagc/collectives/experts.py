"""Expert parallelism whose tokens travel in few bits: a style for parallelize_module() around another one,
such as torchtitan's ExpertParallel."""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode

from tagc._library import Error
from tagc.collectives import internals
from tagc.collectives.collectives import Collectives
from tagc.collectives.operators import Exchange

# so that a style without a name gets the same one on every rank: by the Collectives
_numbers: weakref.WeakKeyDictionary[Collectives, Any] = weakref.WeakKeyDictionary()


class CompressedExperts(ParallelStyle):
    """A style of experts, whose dispatch and combine go by Collectives.all_to_all():

        comm = Collectives(ep_mesh)
        parallelize_module(block.moe.experts, ep_mesh, CompressedExperts(ExpertParallel(), comm))

    style: torchtitan's ExpertParallel, or another whose hooks before and behind the module's forward move
        tokens over the mesh by all_to_all_single_autograd(), a function of torch, or by all_to_all_single().
        All else in it stays: placements, permutations, padding, counts of tokens, which travel whole. If
        those before or those behind move none so, the module's first forward ends with an Error.
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
        group = device_mesh.get_group()
        ranks = dist.get_process_group_ranks(group)
        if ranks != self.comm.ranks:
            raise Error(
                "argument", f"comm is of the ranks {self.comm.ranks}, must be of those of the mesh, {ranks}"
            )
        key = self.key
        if key is None:
            key = f"experts {next(_numbers.setdefault(self.comm, itertools.count()))}"
        known = {number for _, hooks in internals.hooks_of(module) for number in hooks}
        # a copy is of this layer alone: it keeps the splits between dispatch and combine
        made: nn.Module = copy.copy(self.style)._apply(module, device_mesh)
        found = [
            (what, hooks, number)
            for what, hooks in internals.hooks_of(made)
            for number in hooks.keys() - known
        ]
        if not found:
            raise Error(
                "unsupported", f"{type(self.style).__name__} adds no hooks, by which tokens could travel"
            )
        moves: dict[str, list[_Move]] = {}
        for what, hooks, number in found:
            move = _Move(self.comm.tokens(f"{key} {what}"), group.group_name)
            moves.setdefault(what, []).append(move)
            hooks[number] = functools.partial(_inside, move, hooks[number])
        made.register_forward_hook(functools.partial(_check_moved, type(self.style).__name__, moves))
        return made


def _check_moved(style: str, moves: dict[str, list[_Move]], *_: Any) -> None:
    """Raises Error if what would be sent by tagc was sent in another way, or not at all. Local: a style calls
    the same on all ranks, also for no tokens."""
    for what, of_hooks in moves.items():
        if not any(move.has_moved for move in of_hooks):
            raise Error(
                "unsupported",
                f"CompressedExperts({style}): the {what} of {style} moves no tokens that can be compressed: "
                "its hooks must call all_to_all_single_autograd() or all_to_all_single() of "
                "torch.distributed._functional_collectives with floats and the group of the mesh, as "
                f"torchtitan's ExpertParallel does: take such a style, or {style} without CompressedExperts",
            )


class _Move(TorchFunctionMode):
    """Inside of it, torch's all-to-all of floats over a group is this exchange. What else is called there
    stays torch's."""

    def __init__(self, exchange: Exchange, group_name: str) -> None:
        super().__init__()
        self.exchange, self.group_name, self.has_moved = exchange, group_name, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # with autograd or without, by the release of torch; that which writes its output has no fourth one
        moves = "all_to_all_single" in str(function) and args[3:4] == (self.group_name,)
        if moves and args[0].is_floating_point():
            self.has_moved = True
            return self.exchange(*args[:3])
        return function(*args, **(kwargs or {}))


def _inside(move: _Move, hook: Callable[..., Any], *arguments: Any) -> Any:
    with move:
        return hook(*arguments)
