"""FSDP1: a communication hook instead of the reduce-scatter of each flat parameter (NO_SHARD: of the
all-reduce).

A flat parameter holds its module's parameters one after the other, with padding between them if
use_orig_params aligns addresses. It is cut into one row per rank, also inside a parameter. torch passes one
state to the hooks of all flat parameters and does not tell them apart, so each gets a state of its own after
registration."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from tagc._library import Error
from tagc.torch.exchange import internals
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.interfaces import Exchanged, Kinds
from tagc.torch.exchange.unit import DTYPES, Unit
from tagc.torch.handle import Compressed
from tagc.torch.hooks.wrapper import Wrapper as AnyWrapper
from tagc.torch.schedule import policy

_SHARDED = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


class _Flat:
    """One FullyShardedDataParallel instance and its flat parameter."""

    def __init__(self, module: FullyShardedDataParallel, name: str, flat: internals.FlatParameter) -> None:
        assert module.process_group is not None  # FullyShardedDataParallel has made one
        self.module, self.group = module, module.process_group
        self.name = policy.clean_name(name) if name else "the root module"
        self.is_sharded = module.sharding_strategy in _SHARDED
        if not self.is_sharded and module.sharding_strategy != ShardingStrategy.NO_SHARD:
            raise Error(
                "unsupported",
                f"{self.name} has {module.sharding_strategy}, for which FSDP1 takes no communication hook: "
                "must be FULL_SHARD, SHARD_GRAD_OP or NO_SHARD. fully_shard() (FSDP2) over a mesh of two "
                "dimensions does",
            )
        if (hook := internals.fsdp1_hook(module)) is not None:
            raise Error(
                "state",
                "this model is compressed already: close() its tagc handle first"
                if hook is _hook
                else f"{self.name} has a communication hook already, and FSDP1 takes only one",
            )
        self._flat = flat
        prefix = f"{name}." if name else ""
        self.parameters = [
            layouts.Parameter(policy.clean_name(prefix + fqn), shape, "dense") for fqn, shape in flat.shapes()
        ]
        self._starts, self._n_elems = flat.starts()
        self._layouts: dict[tuple[tuple[bool, ...], int, int], layouts.Layout] = {}

    def set_kinds(self, kinds: Kinds) -> None:
        changed = [parameter._replace(**kinds[parameter.name]) for parameter in self.parameters]
        if changed != self.parameters:  # else its reducers stay
            self.parameters = changed
            self._layouts.clear()

    def dtype(self) -> torch.dtype:
        """Returns that of its gradient when it is exchanged."""
        mixed = self.module.mixed_precision
        return mixed.reduce_dtype or mixed.param_dtype or self._flat.dtype

    def layout(self, n_elems: int, world_size: int) -> layouts.Layout:
        trainable = self._flat.trained()
        if n_elems - self._n_elems not in range(world_size if self.is_sharded else 1):  # padded to whole rows
            raise Error(
                "mismatch",
                f"the gradient has {n_elems} elements, the flat parameter {self._n_elems}, over {world_size} "
                "ranks",
            )
        key = tuple(trainable), n_elems, world_size
        if key not in self._layouts:
            parameters = [parameter for parameter, is_there in zip(self.parameters, trainable) if is_there]
            starts = [start for start, is_there in zip(self._starts, trainable) if is_there]
            if self.is_sharded:
                self._layouts[key] = layouts.cut(parameters, starts, n_elems, world_size)
            else:
                self._layouts[key] = layouts.bucket(parameters, world_size, starts, n_elems)
        return self._layouts[key]


class _State:
    """The state of the hook of one flat parameter."""

    def __init__(self, handle: Compressed, unit: Exchanged, flat: _Flat) -> None:
        self.handle, self.unit, self.flat = handle, unit, flat

    def exchange(self, gradient: torch.Tensor, output: torch.Tensor) -> None:
        group = self.flat.group
        self.handle.passes.exchange(
            self.unit,
            group,
            gradient,
            output,
            ReduceOp.AVG,
            lambda: self.flat.layout(gradient.numel(), group.size()),
        )


def _hook(state: _State, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Exchanges a gradient. gradient: of the whole flat parameter, on this rank. output: for this rank's row;
    None if it is not sharded."""
    state.exchange(gradient, gradient if output is None else output)


class Wrapper(AnyWrapper):
    """A FullyShardedDataParallel model, for compress()."""

    name = "fsdp1"

    def __init__(self, model: FullyShardedDataParallel) -> None:
        self._model = model
        self._flats = [
            _Flat(module, name, flat)
            for name, module in model.named_modules()
            if isinstance(module, FullyShardedDataParallel)
            and (flat := internals.flat_of(module)) is not None
        ]
        if not self._flats:
            raise Error("argument", "this FullyShardedDataParallel model has no parameters")
        self._warn_of_one_rank()

    def _warn_of_one_rank(self) -> None:
        """Warns of what FSDP1 makes of hybrid sharding where the shard group has one rank."""
        alone = [flat.name for flat in self._flats if flat.group.size() == 1]
        if alone and dist.get_rank() == 0 and dist.get_world_size() > 1:
            warnings.warn(
                f"tagc: {alone[0]} is FullyShardedDataParallel over 1 rank of {dist.get_world_size()}, so "
                "its gradients are not averaged with those of other ranks, with tagc or without, and the "
                "ranks train models of their own. FSDP1 does that with HYBRID_SHARD if a shard group has one "
                "rank: take DistributedDataParallel, or fully_shard() over all ranks",
                stacklevel=5,
            )

    def groups(self) -> list[dist.ProcessGroup]:
        return [flat.group for flat in self._flats]

    def parameters(self) -> list[layouts.Parameter]:
        return [parameter for flat in self._flats for parameter in flat.parameters]

    def set_kinds(self, kinds: Kinds) -> None:
        for flat in self._flats:
            flat.set_kinds(kinds)

    def left_to_torch(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for flat in self._flats:
            if (dtype := flat.dtype()) not in DTYPES:
                found |= {p.name: str(dtype).removeprefix("torch.") for p in flat.parameters}
        return found

    def is_in_backward(self) -> bool:
        return internals.is_in_fsdp1_backward(self._model)

    def install(self, handle: Compressed) -> None:
        try:
            self._model.register_comm_hook(None, _hook)
        except AssertionError as failure:
            raise Error("state", f"FSDP1 does not take a communication hook: {failure}") from failure
        handle.passes.undo.append(self._remove)
        for flat in self._flats:
            if internals.fsdp1_hook(flat.module) is not _hook:
                raise Error(
                    "unsupported",
                    f"torch {torch.__version__} did not take the communication hook of {flat.name}",
                )
            unit = handle.state.add_unit(flat.name, Unit, parameters=flat.parameters)
            internals.set_fsdp1_hook_state(flat.module, _State(handle, unit, flat))

    def _remove(self) -> None:
        for module in FullyShardedDataParallel.fsdp_modules(self._model):
            internals.remove_fsdp1_hook(module)
