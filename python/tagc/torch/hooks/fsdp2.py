"""FSDP2: a reduce-scatter and an all-gather of our own for each fully_shard()-ed module, or an all-reduce
after it.

The reduce-scatter's input is (W, row): row r is the r-th chunk of each parameter that got a gradient, one
after the other, padded. Which parameters those are it does not say; Module finds out. On H hosts of L ranks
each, what is exchanged between hosts is (H, row): the rows of the ranks at this rank's place in them."""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from tagc._library import Error
from tagc.torch.exchange import internals, staging, waits
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.hosts import Hosts
from tagc.torch.exchange.interfaces import ALONE, Exchanged, Expected, Kinds, Place, place_of
from tagc.torch.exchange.model import DTYPES, Unit
from tagc.torch.exchange.model_exchanges import Gradient
from tagc.torch.handle import Compressed
from tagc.torch.hooks.gathers import AllGather, GatheringWrapper
from tagc.torch.hooks.wrapper import words_of_slow_sums
from tagc.torch.schedule import policy

__all__ = ["Module", "Wrapper"]  # for annexes that extend it


class Module:
    """What one fully_shard()-ed module exchanges together, in FSDP2's order: its parameters, or those on one
    mesh. group: its internals.FsdpGroup."""

    def __init__(self, module: FSDPModule, name: str, group: internals.FsdpGroup) -> None:
        self.module, self.name, self.group = module, name, group
        is_cut = group.shard_group is not None and group.shard_group.size() > 1
        self.parameters = [
            layouts.Parameter("", shape, "dense", dim * is_cut, split=split, n_whole=sharded.numel())
            for (shape, dim), split, sharded in zip(group.shapes(), group.splits(), group.sharded_parameters)
        ]
        self._layouts: dict[Any, layouts.Layout] = {}  # by key
        self._reduces_unused = False

    def name_parameters(self, names: Mapping[int, str]) -> None:
        """Names the parameters. names: id of a parameter of the model -> its name."""
        self.parameters = [
            parameter._replace(name=names[id(sharded)])
            for parameter, sharded in zip(self.parameters, self.group.sharded_parameters)
        ]

    def meshes(self) -> list[DeviceMesh]:
        """Returns those of its parameters: that of fully_shard(), and where tensors are parallel, larger
        ones."""
        return [parameter.device_mesh for parameter in self.group.sharded_parameters]

    def only_group(self) -> dist.ProcessGroup:
        """Returns the larger of torch's groups of shards and of replicas."""
        groups = [g for g in (self.group.shard_group, self.group.replica_group) if g is not None]
        return max(groups, key=lambda group: group.size())

    @property
    def has_two_sums(self) -> bool:
        """Whether torch sums twice: over shards, and over replicas of them."""
        groups = self.group.shard_group, self.group.replica_group
        return all(group is not None and group.size() > 1 for group in groups)

    @property
    def _n_shards(self) -> int:
        return 1 if self.group.shard_group is None else self.group.shard_group.size()

    def n_shard(self) -> int:
        """Returns elements that this rank owns, with padding: what it gives to a gather."""
        n_shards = self._n_shards
        return sum(layouts.chunked_elems(parameter, n_shards) for parameter in self.parameters) // n_shards

    def n_reduced(self) -> int:
        """Returns elements of the gradient of all trained parameters, with padding."""
        world_size = 1 if self.group.shard_group is None else self.group.shard_group.size()
        return sum(layouts.chunked_elems(self.parameters[i], world_size) for i in self.group.reduced())

    def dtype(self) -> torch.dtype:
        """Returns that of its gradient when it is exchanged, if all parameters have one."""
        reduced, computed = self.group.dtypes()
        return reduced or computed or self.group.sharded_parameters[0].dtype

    def own(self) -> list[torch.Tensor]:
        """Returns what this rank owns of the parameters, as the optimizer has it."""
        return [parameter.detach().to_local() for parameter in self.group.sharded_parameters]

    def gathers_one_dtype(self) -> bool:
        """Returns whether tagc can gather the parameters: those of several dtypes are bytes to torch."""
        found = set(self.group.gather_dtypes())
        return len(found) == 1 and found <= set(DTYPES)

    def gather_itemsize(self) -> int:
        """Returns the bytes of an element in a gather of one dtype."""
        found = next(iter(self.group.gather_dtypes()))
        assert found is not None  # gathers_one_dtype()
        return found.itemsize

    def set_kinds(self, kinds: Kinds) -> None:
        changed = [parameter._replace(**kinds[parameter.name]) for parameter in self.parameters]
        if changed != self.parameters:  # else its reducers stay
            self.parameters = changed
            self._layouts.clear()

    def trainable(self) -> list[layouts.Parameter]:
        return [
            p for p, sharded in zip(self.parameters, self.group.sharded_parameters) if sharded.requires_grad
        ]

    def _reduce_unused(self) -> None:
        """Makes torch give zeros for parameters without a gradient, which it has left out, from the next pass
        on. Before torch 2.13 it cannot."""
        if internals.can_reduce_unused():
            self.module.set_reduce_scatter_unused_params(True, recurse=False)
            self._reduces_unused = True

    def leave_unused(self) -> None:
        """Undoes what _reduce_unused() has done."""
        if self._reduces_unused:
            self.module.set_reduce_scatter_unused_params(False, recurse=False)
            self._reduces_unused = False

    def layout(self, n_elems: int, hosts: Hosts) -> layouts.Layout | None:
        """Returns the layout of an input of n_elems; None where some parameters got no gradient."""
        world_size = len(hosts.rows) * hosts.per_host
        return self._layout(
            n_elems, world_size, ("rows", world_size), lambda present: layouts.chunked(present, world_size)
        )

    def shard_layout(self, n_elems: int, hosts: Hosts) -> layouts.Layout | None:
        """Returns the layout of what this rank owns of the parameters, n_elems with padding, to be summed
        over a group with these hosts; as layout(). Under replicate() it owns them whole."""
        world_size, key = self._n_shards, ("shard", hosts.n_hosts, hosts.per_host)
        return self._layout(
            n_elems * world_size, world_size, key, lambda present: self._shard(present, hosts)
        )

    def _shard(self, present: Sequence[layouts.Parameter], hosts: Hosts) -> layouts.Layout:
        if (world_size := self._n_shards) > 1:
            sizes = [layouts.chunked_elems(p, world_size) // world_size for p in present]
            present = [p._replace(shape=(size,), dim=0) for p, size in zip(present, sizes)]
        return layouts.bucket(present, hosts.n_hosts * hosts.per_host)

    def own_part(self, hosts: Hosts) -> layouts.Layout | None:
        """Returns the layout of what this rank exchanges of its shard where other ranks of the host have the
        same one and exchange the rest; None: no other rank does. hosts: as of shard_layout()."""
        if hosts.is_flat or self._n_shards == 1:
            return None
        return layouts.part(self._shard(self.parameters, hosts), hosts.per_host, hosts.place)

    def _layout(
        self,
        n_elems: int,
        world_size: int,
        kind: tuple[object, ...],
        make: Callable[[Sequence[layouts.Parameter]], layouts.Layout],
    ) -> layouts.Layout | None:
        present = [self.parameters[i] for i in self.group.reduced()]
        n_all = sum(layouts.chunked_elems(parameter, world_size) for parameter in present)
        if n_elems > n_all:
            raise Error(
                "mismatch",
                f"the gradient has {n_elems} elements, and all of this module's parameters have {n_all} over "
                f"{world_size} ranks",
            )
        if n_elems < n_all:
            self._reduce_unused()
            return None
        key = kind, tuple(parameter.name for parameter in present)
        if key not in self._layouts:
            self._layouts[key] = make(present)
        return self._layouts[key]


class ReduceScatter(waits.FsdpComm):
    """For set_custom_reduce_scatter(): one per module. In CPU memory, where it can, it goes on while other
    modules compute."""

    def __init__(
        self, handle: Compressed, unit: Exchanged, module: Module, arrival: Arrival | None = None
    ) -> None:
        """arrival: of its results, as long as it is the module's all-reduce hook."""
        self._handle, self._unit, self._module, self._arrival = handle, unit, module, arrival

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Makes room for the input of an exchange, before torch copies gradients to it."""
        group = self._module.group.shard_group
        if group is not None and device.type == "cpu":
            self._handle.passes.make_room(math.prod(map(int, size)) * dtype.itemsize, group)
        return super().allocate(size, dtype=dtype, device=device)

    def expected(self, group: dist.ProcessGroup) -> Expected:
        """Returns its next exchange."""
        module, hosts = self._module, self._handle.wrapper.hosts(group)
        n_elems = module.n_reduced()
        return Expected(self._unit, group, n_elems, module.dtype(), lambda: module.layout(n_elems, hosts))

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        passes, hosts = self._handle.passes, self._handle.wrapper.hosts(group)
        find_layout = functools.partial(self._module.layout, input_tensor.numel(), hosts)
        # torch divides what comes with another op
        may_last = op == dist.ReduceOp.AVG and input_tensor.device.type == "cpu"
        may_last = may_last and not self._module.group.reads_sums_at_once(output_tensor.dtype)
        may_last = may_last and not self._is_watched()
        gradient = Gradient(self._unit, group, input_tensor, output_tensor, op, find_layout)
        passes.exchange(gradient._replace(waits=self._waits(), may_last=may_last))

    def _is_watched(self) -> bool:
        """Returns whether a hook of the user's may read gradients while the backward pass goes on."""
        wrapper = self._handle.wrapper
        assert isinstance(wrapper, Wrapper)
        parameters = (one for module in wrapper.modules for one in module.group.sharded_parameters)
        return internals.has_backward_hooks(self._handle.model.modules(), parameters)

    def _waits(self) -> int:
        has_hook = self._arrival is not None and self._module.group.comms[2] is self._arrival
        return staging.FOR_INPUT if has_hook else staging.FOR_RESULT


class Arrival:
    """In the place of set_all_reduce_hook(), after a ReduceScatter on a device: torch's stream of all-reduces
    waits for the result. In its stream of reduce-scatters the encoding of the next unit would wait for this
    one's network, and so would compute, which waits there until the input may be used again."""

    def __init__(self, handle: Compressed) -> None:
        self._handle = handle

    def __call__(self, reduce_output: torch.Tensor) -> None:
        self._handle.passes.runners.follow(reduce_output)


class AllReduce:
    """In the place of set_all_reduce_hook(): after torch's own reduce-scatter within a host, the owner's
    shard is averaged with those of the same place in the other hosts, over `between` or over the replicas of
    a mesh. Residuals are of shards then, not of whole gradients. Under replicate() there are no shards: whole
    gradients are averaged over all ranks."""

    def __init__(
        self,
        handle: Compressed,
        unit: Exchanged,
        module: Module,
        group: dist.ProcessGroup,
        is_torchs: bool = False,
    ) -> None:
        """is_torchs: whether torch would sum over that group itself."""
        self._handle, self._unit, self._module, self._group = handle, unit, module, group
        self._hosts, self._is_torchs = handle.wrapper.hosts(group), is_torchs
        # whether slices come together within hosts, in the stream that waits for the exchange
        self._has_work_after = self._hosts.is_two_level
        # by set_requires_all_reduce(False), until the last micro-step; where there are shards, torch has it
        self._held: torch.Tensor | None = None
        if module.group.shard_group is None:
            self._held = module.group.swap_held(None)
            handle.passes.undo.append(self._hand_back)

    def _hand_back(self) -> None:
        """Leaves what is held to torch, which goes on with it when the handle is closed."""
        if self._held is not None:
            self._module.group.swap_held(self._held)
            self._held = None

    def expected(self) -> Expected:
        """Returns its next exchange."""
        module, shards = self._module, self._module.group.shard_group
        n_elems = module.n_reduced() // (1 if shards is None else shards.size())
        return Expected(
            self._unit,
            self._group,
            n_elems,
            module.dtype(),
            lambda: module.shard_layout(n_elems, self._hosts),
        )

    def __call__(self, reduce_output: torch.Tensor) -> None:
        if self._module.group.holds_back():
            if self._held is None:
                self._held = reduce_output.clone()
            else:
                self._held += reduce_output
            reduce_output.zero_()  # which torch adds to the gradient
            return
        runners = self._handle.passes.runners
        device, _ = runners.find(reduce_output)
        is_behind = self._held is None and device is not None and not self._has_work_after
        if self._held is not None:
            reduce_output += self._held
            self._held = None
        op = self._module.group.sum_op if self._is_torchs else dist.ReduceOp.AVG
        # In the current stream it would wait for the exchanges before it. torch made the tensor in its stream
        # of reduce-scatters. Where it casts the sums, it frees this one in that stream's order, while the
        # current stream still has work on it: follow() keeps it.
        find_layout = functools.partial(self._module.shard_layout, reduce_output.numel(), self._hosts)
        gradient = Gradient(self._unit, self._group, reduce_output, reduce_output, op, find_layout)
        if device is not None and is_behind:
            with device.streams.behind(self._module.group.reduce_scatter_stream):
                self._handle.passes.exchange(gradient._replace(waits=staging.FOR_INPUT))
        else:
            self._handle.passes.exchange(gradient)
        runners.follow(reduce_output)


def modules_of(model: torch.nn.Module) -> list[Module]:
    """Returns a Module for each fully_shard() that has parameters, and for each mesh where these are on
    several; modules that were given to it in one list have one state."""
    lists: dict[int, list[tuple[str, FSDPModule]]] = {}
    found, registered = [], {id(parameter) for parameter in model.parameters()}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            lists.setdefault(id(internals.fsdp_state(module)), []).append((name or "the root module", module))
    for modules in lists.values():
        for group in internals.fsdp_groups(modules[0][1]):
            group.keep_requires_grad(registered)
        for _, module in modules:
            # after a forward pass alone the root's parameters are still whole, and not the optimizer's
            module.reshard()
    names = {id(parameter): name for name, parameter in policy.named_parameters(model)}
    for modules in lists.values():
        name, groups = (
            "-".join(dict.fromkeys((modules[0][0], modules[-1][0]))),
            internals.fsdp_groups(modules[0][1]),
        )
        for i, group in enumerate(groups):
            module = Module(
                modules[0][1], f"{name}, mesh {i + 1} of {len(groups)}" if len(groups) > 1 else name, group
            )
            if module.parameters:
                module.name_parameters(names)
                found.append(module)
    return found


# module -> weak reference to the handle that has put hooks in
_compressed: weakref.WeakKeyDictionary[FSDPModule, weakref.ref[Compressed]] = weakref.WeakKeyDictionary()


class Wrapper(GatheringWrapper):
    """All fully_shard()-ed modules of a model, for compress()."""

    name = "fsdp2"
    sums_shards = False  # over another group, after torch's reduce-scatter

    def __init__(self, model: torch.nn.Module, between: dist.ProcessGroup | None = None) -> None:
        self._model, self.between = model, between
        self.sums_shards = self.sums_shards or between is not None
        self.modules = modules_of(model)
        self._gathers = []
        self._expected: list[Callable[[], Expected]] = []
        self._gathers_ahead: list[Callable[[Any], object]] = []
        for module in self.modules:
            earlier = _compressed.get(module.module)
            handle = None if earlier is None else earlier()
            if handle is not None and not handle.is_closed:
                raise Error("state", f"{module.name} is compressed already: close() its tagc handle first")
        # parallel tensors inside a host do no harm; but replicas that join and leave could not decide on them
        meshes = self._meshes() if between is None else [module.group.data_mesh for module in self.modules]
        if self.sums_shards and any(mesh.ndim > 1 for mesh in meshes):
            raise Error(
                "unsupported",
                "between wants fully_shard() over a mesh of one dimension, inside each host; this model's "
                "has more. Leave between out: tagc then sums over the dimension that is between hosts",
            )
        if self.sums_shards and any(module.group.shard_group is None for module in self.modules):
            raise Error(
                "unsupported",
                "between is for fully_shard()-ed models; this one has replicate(), whose gradients tagc sums "
                "over all replicas: leave between out",
            )

    def groups(self) -> list[dist.ProcessGroup]:
        found = [self.group_of(module) for module in self.modules]
        if self.cluster is None:  # compress() has yet to look for the hosts of both
            replicas = [module.group.replica_group for module in self.modules if module.has_two_sums]
            found += [group for group in replicas if group is not None]
        return found + ([self.between] if self.between is not None else [])

    def group_of(self, module: Module) -> dist.ProcessGroup:
        """Returns the group over which tagc sums gradients. A mesh may have a dimension of shards, one of
        replicas, and one within tensors."""
        shards, replicas = module.group.shard_group, module.group.replica_group
        group = replicas if self._sums_replicas(module) else shards
        assert group is not None  # there is one or the other
        return group

    def _sums_replicas(self, module: Module) -> bool:
        """Returns whether tagc sums over replicas in torch's place: of whole gradients; or of shards, where
        shards are inside a host. If all ranks are on one host, those of a shard group count as one."""
        shards, replicas = module.group.shard_group, module.group.replica_group
        if shards is None or replicas is None or replicas.size() == 1:
            return shards is None
        if shards.size() == 1:
            return True
        return self._are_on_one_host(module.group.all_groups()[0])

    def _are_on_one_host(self, groups: list[list[int]]) -> bool:
        """Returns whether each of these groups of ranks is, as far as this rank knows."""
        cluster = self.cluster
        return cluster is not None and all(cluster.n_hosts(ranks) == 1 for ranks in groups)

    def _meshes(self) -> list[DeviceMesh]:
        """Returns the meshes of all parameters, each once."""
        return list(dict.fromkeys(mesh for module in self.modules for mesh in module.meshes()))

    def _hosts(self, module: Module) -> Hosts:
        return self.hosts(self.group_of(module))

    def _ranks(self) -> set[int]:
        """Returns all ranks of the meshes: those of this host with `between`."""
        return {rank for mesh in self._meshes() for rank in mesh.mesh.flatten().tolist()}

    def ranks(self) -> list[int]:
        return sorted(self._ranks())

    def _n_hosts(self) -> int:
        return 1 if self.between is None else self.between.size()

    def n_ranks(self) -> int:
        return len(self._ranks()) * self._n_hosts()

    def n_batches(self) -> int:
        return max(len(module.group.data_ranks) for module in self.modules) * self._n_hosts()

    def deciders(self) -> list[dist.ProcessGroup] | None:
        if (alike := super().deciders()) is not None:
            return alike
        ranks = self._ranks()
        whole = next((mesh for mesh in self._meshes() if mesh.size() == len(ranks)), None)
        if whole is None:
            return None
        groups = self.in_levels(group for group in whole.get_all_groups() if group.size() > 1)
        return groups + ([] if self.between is None else [self.between])

    def place(self) -> Place:
        module = self.modules[0]
        group = module.group
        if self.between is None:
            place, hosts = place_of(group.data_ranks, group.data_mesh), self._hosts(module)
            if self._sums_replicas(module):
                parts = hosts.per_host if module.has_two_sums else 1
                return Place(hosts.host, hosts.n_hosts, place.where, hosts.place % parts, parts)
            return place.among(hosts)
        if self.n_ranks() == dist.get_world_size():
            return Place(self.between.rank(), self.between.size(), {})
        others = dist.get_process_group_ranks(self.between)
        where = place_of(group.data_ranks, group.data_mesh, others).where
        return Place(self.between.rank(), self.between.size(), where)

    def inner(self) -> list[dist.ProcessGroup]:
        found = [module.group.shard_group for module in self.modules] if self.sums_shards else []
        return [group for group in found if group is not None]

    @property
    def sums_within_hosts(self) -> bool:  # type: ignore[override]
        return not self.sums_shards

    @property
    def has_several_meshes(self) -> bool:
        """Whether gradients of some parameters are averaged over other ranks than those of others."""
        return len({module.group.data_ranks for module in self.modules}) > 1

    @property
    def gathers(self) -> bool:
        return all(module.group.shard_group is not None for module in self.modules)

    def fingerprint(self) -> dict[str, Any]:
        return {
            **super().fingerprint(),
            "ranks of between": None if self.between is None else self.between.size(),
        }

    def parameters(self) -> list[layouts.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters]

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (parameter.name, sharded)
            for module in self.modules
            for parameter, sharded in zip(module.parameters, module.group.sharded_parameters)
        ]

    def left_to_torch(self) -> dict[str, str]:
        found = {}
        for module in self.modules:
            given = module.group.dtypes()[0]
            for name, sharded in zip(
                (parameter.name for parameter in module.parameters), module.group.sharded_parameters
            ):
                dtype = given or sharded.dtype
                if dtype not in DTYPES:
                    found[name] = str(dtype).removeprefix("torch.")
                elif self.group_of(module).size() == 1 and not self.sums_shards:
                    found[name] = ALONE
        return found

    def exchanged(self) -> set[int]:
        return set().union(*(module.group.ids() for module in self.modules))

    def set_kinds(self, kinds: Kinds) -> None:
        for module in self.modules:
            module.set_kinds(kinds)

    def is_in_backward(self) -> bool:
        return internals.is_in_fsdp_backward(self.modules[0].module)

    def is_ended_by_hand(self) -> bool:
        return internals.is_ended_by_hand(self.modules[0].module)

    def install(self, handle: Compressed) -> None:
        if any(module.has_two_sums for module in self.modules):
            taken = "".join("rs"[not self._sums_replicas(module)] for module in self.modules)
            for group in self.deciders() or ():
                handle.passes.comm(group).agree(
                    "the hosts of shards and of replicas", {"sums taken over": taken}
                )
        for tag, module in enumerate(self.modules):
            _compressed[module.module] = weakref.ref(handle)
            before, comms = module.group.comms, self._comms(handle, tag, module)
            handle.passes.undo.append(functools.partial(module.group.restore_comms, before, comms))
            handle.passes.undo.append(module.leave_unused)
            for what, own in module.group.replaced(*comms):
                _warn(
                    f"{module.name} has a custom {what} ({type(own).__name__}), which is not called while "
                    "tagc exchanges in its place: handle.close() puts it back"
                )
            module.group.set_comms(*comms)
        # of those without parameters, too: torch calls that of the root, or of the module that came first
        modules = [module for module in self._model.modules() if isinstance(module, FSDPModule)]
        for state in dict.fromkeys(map(internals.fsdp_state, modules)):
            handle.passes.undo.append(internals.call_after_reductions(state, handle.passes.end_backward))
        self._warn_of_outsiders()
        self._warn_of_slow_sums()
        if handle.state.options.parameters is not None:
            self._say_how_gathers_differ(handle)
        self.follow_parameters(handle)
        if self.between is not None:
            places = {str(mesh.get_coordinate()) for mesh in self._meshes()}
            handle.passes.comm(self.between).agree("between", {"place in the model's mesh": sorted(places)})

    def _comms(self, handle: Compressed, tag: int, module: Module) -> tuple[object, object, object]:
        """Returns (reduce-scatter, all-gather, all-reduce hook) of one module; None: as it is."""
        shards, name, timeout_s = module.group.shard_group, module.name, handle.state.options.timeout_s
        n_chunks, held = self._chunks(module)
        own = module.own_part(self._hosts(module)) if self._sums_replicas(module) else None
        make = functools.partial(Unit, own=own)
        unit = handle.state.add_unit(name, make, module.parameters, n_chunks, held)
        all_reduce: object = None
        if self._sums_replicas(module):
            handle.passes.undo.append(module.group.leave_replicas_to_the_hook())
            all_reduce = AllReduce(handle, unit, module, self.group_of(module), is_torchs=True)
            self._expected.append(all_reduce.expected)
        if shards is None:
            return None, None, all_reduce
        gather: AllGather | None = None
        if (wire := self._gather_format(handle, module)) is not None:
            gather = AllGather(handle.passes, name, (shards, module.n_shard(), module.own), wire, tag)
            self._gathers.append(gather)
            itemsize = module.gather_itemsize()
            self._gathers_ahead.append(functools.partial(gather.prepare, itemsize=itemsize))
            handle.passes.frees.append(gather.close)
        if self.sums_shards:
            all_reduce = self.all_reduce(handle, unit, module)
            if isinstance(all_reduce, AllReduce):
                self._expected.append(all_reduce.expected)
        if all_reduce is not None:
            return waits.ReduceScatter(name, timeout_s), gather, all_reduce
        is_alone = handle.passes.runners.staging is not None and module.group.comms[2] is None
        arrival = Arrival(handle) if is_alone else None
        reduce_scatter = ReduceScatter(handle, unit, module, arrival)
        self._expected.append(functools.partial(reduce_scatter.expected, shards))
        return reduce_scatter, gather, arrival

    def expected(self) -> list[Expected]:
        return [expected() for expected in self._expected]

    def gathers_ahead(self) -> list[Callable[[Any], object]]:
        return self._gathers_ahead

    def _chunks(self, module: Module) -> tuple[int, range | None]:
        """Returns (number of chunks of a parameter in wire order, those of which tagc has the residual; None:
        all)."""
        shards, hosts = module.group.shard_group, self._hosts(module)
        n_chunks = 1 if shards is None else shards.size()
        if shards is not None and (self.sums_shards or module.has_two_sums and self._sums_replicas(module)):
            return n_chunks, range(shards.rank(), n_chunks, n_chunks)
        if not hosts.is_two_level:
            return n_chunks, None
        if self._sums_replicas(module):  # of whole gradients
            n_chunks = hosts.per_host
            return n_chunks, range(hosts.place, n_chunks, n_chunks)
        return n_chunks, hosts.rows

    def _gather_format(self, handle: Compressed, module: Module) -> str | None:
        """Returns the format in which tagc gathers the parameters; None: torch gathers them, as it does where
        they are of several dtypes, inside a host, and on one rank of several."""
        shards, replicas = module.group.shard_group, module.group.replica_group
        is_inside = module.has_two_sums and self._sums_replicas(module) or self._hosts(module).is_one
        is_inside |= shards is not None and shards.size() == 1 and replicas is not None
        return None if is_inside or not module.gathers_one_dtype() else handle.state.options.parameters

    def _warn_of_slow_sums(self) -> None:
        """Warns of what torch sums between hosts."""
        slow = [
            module
            for module in self.modules
            if module.has_two_sums
            and not self._sums_replicas(module)
            and not self._are_on_one_host(module.group.all_groups()[1])
        ]
        if slow:
            shards, replicas = slow[0].group.shard_group, slow[0].group.replica_group
            assert shards is not None and replicas is not None  # has_two_sums
            _warn(words_of_slow_sums(len(slow), len(self.modules), slow[0].name, shards, replicas.size()))

    def all_reduce(self, handle: Compressed, unit: Exchanged, module: Module) -> object:
        """Returns the hook that sums shards."""
        assert self.between is not None
        return AllReduce(handle, unit, module, self.between)

    def _say_how_gathers_differ(self, handle: Compressed) -> None:
        """Says which units torch gathers whatever the format is, and what "lossless" rounds."""
        wire = handle.state.options.parameters
        torchs = [module for module in self.modules if not module.gathers_one_dtype()]
        if torchs:
            dtypes = sorted({str(dtype or "its own format") for dtype in torchs[0].group.gather_dtypes()})
            handle.state.say(
                f"tagc: torch gathers {len(torchs)} of {len(self.modules)} units as it does without tagc, "
                f"such as {torchs[0].name}, which has {' and '.join(dtypes)}: with parameters={wire!r} tagc "
                "gathers units of one dtype, fp32, bf16 or fp16"
            )
        gathered = {module.group.gather_dtypes()[0] for module in self.modules if module not in torchs}
        if wire == "lossless" and gathered - {torch.bfloat16}:
            handle.state.say(
                "tagc: parameters='lossless' rounds fp32 and fp16 to bf16, as 'bf16' does; nothing is lost "
                "where MixedPrecisionPolicy(param_dtype=torch.bfloat16) computes in bf16"
            )

    def _warn_of_outsiders(self) -> None:
        inside = {id(sharded) for module in self.modules for sharded in module.group.sharded_parameters}
        named = self._model.named_parameters()
        outside = [name for name, p in named if p.requires_grad and id(p) not in inside]
        if outside:
            _warn(
                f"{len(outside)} trained parameters are in no fully_shard(), such as {outside[0]}: neither "
                "torch nor tagc sums their gradients over ranks"
            )


def _warn(text: str) -> None:
    """Warns by rank 0, once for each text."""
    if dist.get_rank() == 0:
        warnings.warn(f"tagc: {text}", stacklevel=4)
