"""FSDP1: a communication hook instead of the reduce-scatter of each flat parameter (NO_SHARD: of the
all-reduce; hybrid sharding: of the all-reduce over replicas, too).

A flat parameter holds its module's parameters one after the other, with padding between them if
use_orig_params aligns addresses. It is cut into one row per rank, also inside a parameter. torch passes one
state to the hooks of all flat parameters and does not tell them apart, so each gets a state of its own after
registration. On hosts of several ranks a residual is of the rows, or the slice of a row, that this rank
exchanges: of the parameter's shape, and zero elsewhere."""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from tagc._library import Error
from tagc.fsdp1 import internals
from tagc.torch import Compressed
from tagc.torch.extension import (
    DTYPES,
    AnyWrapper,
    Exchanged,
    Expected,
    Gradient,
    Hosts,
    Kinds,
    Place,
    Unit,
    add_up,
    layouts,
    place_of,
    policy,
    words_of_slow_sums,
)


class _Flat:
    """One FullyShardedDataParallel instance and its flat parameter."""

    def __init__(self, module: FullyShardedDataParallel, name: str, flat: internals.FlatParameter) -> None:
        assert module.process_group is not None  # FullyShardedDataParallel has made one
        self.module, self.group = module, module.process_group
        self.name = policy.clean_name(name) if name else "the root module"
        self.is_sharded = module.sharding_strategy != ShardingStrategy.NO_SHARD
        is_hybrid = module.sharding_strategy in internals.hybrid()
        self.replicas = internals.replicas(module) if is_hybrid else None  # of shards
        if (hook := internals.hook_of(module)) is not None:
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
        self._layouts: dict[tuple[object, ...], layouts.Layout] = {}

    def set_kinds(self, kinds: Kinds) -> None:
        changed = [parameter._replace(**kinds[parameter.name]) for parameter in self.parameters]
        if changed != self.parameters:  # else its reducers stay
            self.parameters = changed
            self._layouts.clear()

    def dtype(self) -> torch.dtype:
        """Returns that of its gradient when it is exchanged."""
        mixed = self.module.mixed_precision
        return mixed.reduce_dtype or mixed.param_dtype or self._flat.dtype

    def n_padded(self) -> int:
        """Returns elements of the whole gradient: as many for each rank."""
        world_size = self.group.size() if self.is_sharded else 1
        return -(-self._n_elems // world_size) * world_size

    def about(self) -> tuple[object, ...]:
        """Returns what its layouts come from."""
        names = [parameter.name for parameter in self.parameters]
        return self.module.sharding_strategy.name, names, self._starts, self._n_elems

    @property
    def n_replicas(self) -> int:
        return 1 if self.replicas is None else self.replicas.size()

    def layout(self, n_elems: int, hosts: Hosts, with_frozen: bool = False) -> layouts.Layout:
        """Returns the layout of a whole gradient of n_elems."""
        world_size = self.group.size()
        if n_elems - self._n_elems not in range(world_size if self.is_sharded else 1):  # padded to whole rows
            raise Error(
                "mismatch",
                f"the gradient has {n_elems} elements, the flat parameter {self._n_elems}, over {world_size} "
                "ranks",
            )

        def make(parameters: list[layouts.Parameter], starts: list[int]) -> layouts.Layout:
            if self.is_sharded:
                return layouts.cut(parameters, starts, n_elems, world_size)
            if hosts.is_two_level:
                parameters = [_flattened(parameter) for parameter in parameters]
            return layouts.bucket(parameters, world_size, starts, n_elems)

        return self._layout(("whole", n_elems, hosts.n_hosts), make, with_frozen)

    def row_layout(self, row: int, hosts: Hosts, with_frozen: bool = False) -> layouts.Layout:
        """Returns the layout of this rank's row, which has that many elements."""
        first = self.group.rank() * row

        def make(parameters: list[layouts.Parameter], starts: list[int]) -> layouts.Layout:
            pieces = []
            for i, (parameter, start) in enumerate(zip(parameters, starts)):
                begin, end = max(start, first), min(start + parameter.numel, first + row)
                if begin < end:
                    pieces.append(layouts.Piece(i, begin - first, begin - start, end - begin))
            if hosts.is_two_level:
                parameters = [_flattened(parameter) for parameter in parameters]
            return layouts.Layout(parameters, pieces, row, 1, hosts.n_hosts * hosts.per_host)

        return self._layout(("row", row, hosts.n_hosts), make, with_frozen)

    def own(self, hosts: Hosts, is_row: bool) -> layouts.Layout:
        """Returns the layout of what this rank exchanges of all parameters, frozen ones, too."""
        world_size = self.group.size()
        row = -(-self._n_elems // world_size)
        if self.is_sharded and not is_row:
            rows = hosts.rows if hosts.is_two_level else None
            return layouts.cut(self.parameters, self._starts, row * world_size, world_size, rows)
        if is_row:
            whole = self.row_layout(row, hosts, with_frozen=True)
        else:
            whole = self.layout(self._n_elems, hosts, with_frozen=True)
        return layouts.part(whole, hosts.per_host, hosts.place)

    def _layout(
        self,
        key: tuple[object, ...],
        make: Callable[[list[layouts.Parameter], list[int]], layouts.Layout],
        with_frozen: bool,
    ) -> layouts.Layout:
        """Returns make() of the parameters that are trained, or all, and where they begin."""
        taken = [with_frozen or is_trained for is_trained in self._flat.trained()]
        key = *key, tuple(taken)
        if key not in self._layouts:
            parameters = [parameter for parameter, is_there in zip(self.parameters, taken) if is_there]
            starts = [start for start, is_there in zip(self._starts, taken) if is_there]
            self._layouts[key] = make(parameters, starts)
        return self._layouts[key]


def _flattened(parameter: layouts.Parameter) -> layouts.Parameter:
    """Ranks of a host then share it as layouts.part() says, element by element."""
    return parameter._replace(shape=(parameter.numel,), dim=0)


class _State:
    """The state of the hook of one flat parameter."""

    def __init__(self, handle: Compressed, unit: Exchanged, flat: _Flat, sums_replicas: bool) -> None:
        """sums_replicas: whether tagc sums over replicas, and torch over shards, or the other way round."""
        self.handle, self.unit, self.flat, self._sums_replicas = handle, unit, flat, sums_replicas

    def exchange(self, gradient: torch.Tensor, output: torch.Tensor) -> None:
        flat, replicas = self.flat, self.flat.replicas
        if self._sums_replicas and replicas is not None:
            self._add_up(flat.group, gradient, output)
            self._exchange(replicas, output, output, flat.row_layout)
            return
        self._exchange(flat.group, gradient, output, flat.layout)
        if replicas is not None:
            self._add_up(replicas, output, output)

    def expected(self) -> Expected:
        """Returns its next exchange."""
        flat, replicas = self.flat, self.flat.replicas
        group = flat.group if not self._sums_replicas or replicas is None else replicas
        n_elems, hosts = flat.n_padded(), self.handle.wrapper.hosts(group)
        if group is flat.group:
            return Expected(self.unit, group, n_elems, flat.dtype(), lambda: flat.layout(n_elems, hosts))
        row = n_elems // flat.group.size()
        return Expected(self.unit, group, row, flat.dtype(), lambda: flat.row_layout(row, hosts))

    def _exchange(
        self,
        group: dist.ProcessGroup,
        gradient: torch.Tensor,
        output: torch.Tensor,
        layout: Callable[..., layouts.Layout],
    ) -> None:
        passes, hosts, n = self.handle.passes, self.handle.wrapper.hosts(group), gradient.numel()
        find_layout = functools.partial(layout, n, hosts)
        passes.exchange(Gradient(self.unit, group, gradient, output, ReduceOp.AVG, find_layout))

    def _add_up(self, group: dist.ProcessGroup, gradient: torch.Tensor, output: torch.Tensor) -> None:
        """Lets torch average."""
        op: Any = ReduceOp.AVG
        if gradient.dtype == torch.float16:  # whose sum may be too large
            gradient, op = gradient.div_(group.size()), ReduceOp.SUM
        torchs = self.handle.passes.torchs(group, gradient.device, f"gradients of {self.unit.name}")
        add_up(gradient, output, op, torchs, group.size())


def _hook(state: _State, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Exchanges a gradient. gradient: of the whole flat parameter, on this rank. output: for this rank's row;
    None if it is not sharded."""
    state.exchange(gradient, gradient if output is None else output)


class Wrapper(AnyWrapper):
    """A FullyShardedDataParallel model, for compress()."""

    name = "fsdp1"
    sums_within_hosts = True
    has_flat_parameters = True

    def __init__(self, model: FullyShardedDataParallel) -> None:
        self._model = model
        self._states: list[_State] = []
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
        found = [self._group_of(flat) for flat in self._flats]
        if self.cluster is None:  # compress() has yet to look for the hosts of both
            found += [flat.replicas for flat in self._flats if flat.replicas is not None]
        return found

    def _group_of(self, flat: _Flat) -> dist.ProcessGroup:
        """Returns the group over which tagc sums."""
        return flat.replicas if self._sums_replicas(flat) and flat.replicas is not None else flat.group

    def _sums_replicas(self, flat: _Flat) -> bool:
        """Returns whether tagc sums over the replicas of shards, which are inside a host. If all ranks are on
        one host, those of a shard group count as one."""
        if flat.replicas is None or flat.n_replicas == 1 or self.cluster is None:
            return False
        return self.hosts(flat.group).is_on_one_host

    def n_ranks(self) -> int:
        return self._flats[0].group.size() * self._flats[0].n_replicas

    def ranks(self) -> list[int]:
        flat = self._flats[0]
        if flat.replicas is None:
            return super().ranks()
        if self.n_ranks() == dist.get_world_size():
            return list(range(self.n_ranks()))
        if (mesh := internals.mesh(flat.module)) is None:
            raise Error(
                "unsupported",
                f"{flat.name} has {flat.module.sharding_strategy} over {self.n_ranks()} of "
                f"{dist.get_world_size()} ranks, and process groups do not say which: give "
                "FullyShardedDataParallel a device_mesh",
            )
        ranks: list[int] = mesh.mesh.flatten().tolist()
        return sorted(ranks)

    def deciders(self) -> list[dist.ProcessGroup] | None:
        replicas = self._flats[0].replicas
        if replicas is None:
            return super().deciders()
        return self.in_levels(group for group in (self._flats[0].group, replicas) if group.size() > 1)

    def place(self) -> Place:
        flat = self._flats[0]
        hosts, n_shards = self.hosts(self._group_of(flat)), flat.group.size()
        place, cut = place_of(self.ranks(), internals.mesh(flat.module)), self._cut()
        if self._sums_replicas(flat):
            part, parts = flat.group.rank() * hosts.per_host + hosts.place, n_shards * hosts.per_host
            return Place(hosts.host, hosts.n_hosts, place.where, part, parts, cut)
        first = 0 if flat.replicas is None else flat.replicas.rank() * hosts.n_hosts
        n_replicas = flat.n_replicas * hosts.n_hosts
        if not hosts.is_two_level:
            return Place(first + flat.group.rank(), n_replicas, place.where)
        return Place(first + hosts.host, n_replicas, place.where, hosts.place, hosts.per_host, cut)

    def _cut(self) -> str:
        """Returns what tells rows and slices from those of flat parameters that are made in another way."""
        return f"{zlib.crc32(repr([flat.about() for flat in self._flats]).encode()):08x}"

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

    def expected(self) -> list[Expected]:
        return [state.expected() for state in self._states]

    def is_in_backward(self) -> bool:
        return internals.is_in_backward(self._model)

    def install(self, handle: Compressed) -> None:
        if not self._model.check_is_root():
            raise Error(
                "state",
                "this model is a part of a FullyShardedDataParallel model: compress() takes the whole",
            )
        if any(flat.replicas is not None for flat in self._flats):
            taken = "".join("rs"[not self._sums_replicas(flat)] for flat in self._flats)
            for group in self.deciders() or ():
                handle.passes.comm(group).agree(
                    "the hosts of shards and of replicas", {"sums taken over": taken}
                )
        handle.passes.undo.append(self._remove)
        # all units may come in passes within the pass, as of reentrant checkpointing
        handle.passes.undo.append(internals.in_each_backward(self._model, handle.passes.await_end))
        for flat in self._flats:
            sums_replicas = self._sums_replicas(flat)
            own = flat.own(self.hosts(self._group_of(flat)), sums_replicas)
            make = functools.partial(Unit, own=own)
            unit = handle.state.add_unit(flat.name, make, parameters=flat.parameters)
            state = _State(handle, unit, flat, sums_replicas)
            internals.set_hook(flat.module, _hook, state)
            self._states.append(state)
        self._warn_of_slow_sums()

    def _warn_of_slow_sums(self) -> None:
        """Warns of what torch sums between hosts."""
        slow = [
            flat
            for flat in self._flats
            if flat.replicas is not None and flat.n_replicas > 1 and not self._sums_replicas(flat)
            if not self.hosts(flat.replicas).is_on_one_host
        ]
        if slow and dist.get_rank() == 0:
            text = words_of_slow_sums(
                len(slow), len(self._flats), slow[0].name, slow[0].group, slow[0].n_replicas
            )
            warnings.warn(f"tagc: {text}", stacklevel=4)

    def _remove(self) -> None:
        for module in FullyShardedDataParallel.fsdp_modules(self._model):
            internals.remove_hook(module)
