"""The private attributes of torch that FSDP1 needs beside those of tagc.torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tagc.torch.extension import TESTED, reader

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SEEN = {
    "FullyShardedDataParallel._handle": TESTED,
    "ShardingStrategy._HYBRID_SHARD_ZERO2": "2.9 to 2.14",
    "FullyShardedDataParallel._comm_hook": TESTED,
    "FullyShardedDataParallel._comm_hook_state": TESTED,
    "FullyShardedDataParallel._inter_node_pg": "2.9 to 2.14",
    "FullyShardedDataParallel._device_mesh": "2.9 to 2.14",
    "FullyShardedDataParallel._post_backward_callback_queued": TESTED,
    "FlatParamHandle.flat_param": TESTED,
    "FlatParameter._fqns": TESTED,
    "FlatParameter._shapes": TESTED,
    "FlatParameter._params": TESTED,
    "FlatParameter._numels_with_padding": TESTED,
    "FlatParameter._is_padding_mask": TESTED,
}
_get, _find = reader(SEEN)


def flat_of(module: torch.nn.Module) -> FlatParameter | None:
    """Returns the flat parameter of a FullyShardedDataParallel module; None if it has none of its own."""
    handle = _get(module, "FullyShardedDataParallel._handle")
    return None if handle is None else FlatParameter(_get(handle, "FlatParamHandle.flat_param"))


class FlatParameter:
    def __init__(self, flat: Any) -> None:
        self._flat = flat

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Returns (name within the module, shape) of each parameter in it."""
        return list(
            zip(
                _get(self._flat, "FlatParameter._fqns"), map(tuple, _get(self._flat, "FlatParameter._shapes"))
            )
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is sharded."""
        dtype: torch.dtype = self._flat.dtype
        return dtype

    def starts(self) -> tuple[list[int], int]:
        """Returns the start of each parameter, and the number of all elements with padding between them."""
        starts, at = [], 0
        for numel, is_padding in zip(
            _get(self._flat, "FlatParameter._numels_with_padding"),
            _get(self._flat, "FlatParameter._is_padding_mask"),
        ):
            if not is_padding:
                starts.append(at)
            at += numel
        return starts, at

    def trained(self) -> list[bool]:
        """Returns whether each parameter is trained."""
        own = _get(self._flat, "FlatParameter._params")
        if own is None:
            return [bool(self._flat.requires_grad)] * len(self.shapes())
        return [parameter.requires_grad for parameter in own]


def hook_of(module: torch.nn.Module) -> Any:
    return _get(module, "FullyShardedDataParallel._comm_hook")


def set_hook(module: Any, hook: object, state: object) -> None:
    """Sets the hook of one module. torch's own method refuses hybrid sharding, whose hook then has to sum
    over replicas, too."""
    hook_of(module), _get(module, "FullyShardedDataParallel._comm_hook_state")
    module._comm_hook, module._comm_hook_state = hook, state


def hybrid() -> tuple[Any, Any]:
    """Returns FSDP1's strategies with replicas of shards: that which gathers twice, and once per step."""
    from torch.distributed.fsdp import ShardingStrategy

    return ShardingStrategy.HYBRID_SHARD, _get(ShardingStrategy, "ShardingStrategy._HYBRID_SHARD_ZERO2")


def replicas(module: torch.nn.Module) -> dist.ProcessGroup:
    """Returns the group over which hybrid sharding sums shards."""
    group: dist.ProcessGroup = _get(module, "FullyShardedDataParallel._inter_node_pg")
    return group


def mesh(module: torch.nn.Module) -> DeviceMesh | None:
    """Returns the mesh that it was made with; None if it was made with process groups."""
    mesh: DeviceMesh | None = _find(module, "FullyShardedDataParallel._device_mesh")
    return mesh


def remove_hook(module: Any) -> None:
    module._comm_hook = module._comm_hook_state = None


def is_in_backward(model: torch.nn.Module) -> bool:
    return bool(_find(model, "FullyShardedDataParallel._post_backward_callback_queued", False))


def in_each_backward(module: torch.nn.Module, call: Callable[[], object]) -> Callable[[], None]:
    """Calls call() in each backward pass that begins with what module() returns: not in passes within it.
    Returns a function that undoes it."""

    def in_backward(_: torch.Tensor) -> None:
        call()

    def look(_: torch.nn.Module, __: Any, output: Any) -> None:
        for tensor in torch.utils._pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(in_backward)

    return module.register_forward_hook(look).remove
