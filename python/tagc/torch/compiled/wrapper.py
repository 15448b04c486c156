"""compress() of a model with SimpleFSDP's parametrizations: their properties call tagc's operators then, each
for one parameter.

Ranks must exchange in one order, and each has a compiler that may order operators otherwise. Reduce-scatters
cannot pass each other: in a graph each hands the next a value. Gathers may: a rank has what another one wants
to gather, joins it, and keeps what comes until its own graph asks for that."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.torch.compiled import ops
from tagc.torch.compiled.parametrize import Found, again, class_of, find
from tagc.torch.exchange import internals, waits
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.comm import Disagreement
from tagc.torch.exchange.hosts import Hosts
from tagc.torch.exchange.interfaces import ALONE, Kinds, Place, place_of
from tagc.torch.exchange.unit import DTYPES, Unit, scale_of
from tagc.torch.handle import Compressed
from tagc.torch.hooks.gathers import AllGather, GatheringWrapper
from tagc.torch.hooks.kinds import parametrized
from tagc.torch.schedule import policy


class Sharded:
    """One parameter, sharded over the ranks of a group: rank r has the r-th chunk along a dimension. Padded
    to the size of the first one, that is row r of what is exchanged."""

    def __init__(self, name: str, found: Found) -> None:
        self.sharded, self.op = found.parameter, found.op
        self.precision, self.reshards = found.how.precision, found.how.reshards
        self.group: dist.ProcessGroup = self.sharded.device_mesh.get_group()
        self.n_ranks, dim = self.group.size(), self.sharded.placements[0].dim
        shape = tuple(self.sharded.shape)
        self.parameter = layouts.Parameter(name, shape, "dense", dim, n_whole=self.sharded.numel())
        self.n_shard = layouts.chunked_elems(self.parameter, self.n_ranks) // self.n_ranks
        self.key = ops.key_of(self)
        self._layout: layouts.Layout | None = None
        self._handle: Compressed | None = None
        self._ahead: tuple[torch.Tensor, int] | None = None  # what others have gathered; of which version

    @property
    def what(self) -> str:
        """What ranks call a gather of it."""
        return f"parameters of {self.parameter.name}"

    @property
    def dtype(self) -> torch.dtype:
        """Of the whole parameter, where the model reads it."""
        dtype: torch.dtype = self.precision.param_dtype or self.sharded.dtype
        return dtype

    def reduced_dtype(self) -> torch.dtype:
        return self.precision.reduce_dtype or self.dtype

    def own(self) -> torch.Tensor:
        """Returns this rank's shard, as the optimizer has it."""
        shard: torch.Tensor = self.sharded.detach().to_local()
        return shard

    def set_kind(self, kinds: Kinds) -> None:
        changed = self.parameter._replace(**kinds[self.parameter.name])
        if changed != self.parameter:
            self.parameter, self._layout = changed, None

    def connect(self, handle: Compressed, tag: int) -> AllGather | None:
        """Makes what exchanges it. Returns what gathers it, unless torch does."""
        self._handle, name, hosts = handle, self.parameter.name, handle.wrapper.hosts(self.group)
        held = None if hosts.is_flat else hosts.rows
        self._unit = handle.state.add_unit(name, Unit, [self.parameter], self.n_ranks, held)
        if self.dtype not in DTYPES:
            self._gather: Any = waits.AllGather(name, handle.state.options.timeout_s)
            return None
        wire = handle.state.options.parameters or ("bf16" if self.dtype == torch.bfloat16 else "fp32")
        owned = self.group, self.n_shard, lambda: [self.own()]
        self._gather = AllGather(handle.passes, name, owned, wire, tag, may_run_beside=False)
        handle.passes.frees.append(self._gather.close)
        return self._gather

    # ---- what the operators call ----

    def all_gather(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the whole parameter. Collective."""
        while True:
            ahead, self._ahead = self._ahead, None
            if ahead is not None and ahead[1] == internals.n_changes(self.own()):
                return ahead[0]
            try:
                return self._whole(shard.detach().to(dtype))
            except Disagreement as problem:
                if self._handle is None or not self._handle.wrapper.joins(problem.whats):
                    raise

    def gather_ahead(self) -> None:
        """Gathers it because some rank wants it, and keeps it until this one does. Collective."""
        version = internals.n_changes(self.own())
        self._ahead = self._whole(self.own().to(self.dtype)), version

    def forget(self) -> None:
        """Drops what this rank has not asked for."""
        self._ahead = None

    def _whole(self, shard: torch.Tensor) -> torch.Tensor:
        shape, dim = self.parameter.shape, self.parameter.dim
        if self.n_ranks == 1:
            return shard.clone()
        row = _padded(shard.reshape(-1), self.n_shard)
        whole = row.new_empty(self.n_ranks * self.n_shard)
        self._gather(whole, row, self.group)
        if dim:
            return layouts.from_wire(whole, self.parameter, self.n_ranks)
        return whole[: self.parameter.numel].view(shape)

    def reduce_scatter(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns this rank's shard of the reduced gradients. Collective."""
        handle, own = self._handle, self.own()
        assert handle is not None  # the key is given by install()
        values = layouts.to_wire(gradient.detach(), self.parameter, self.n_ranks)
        if self.n_ranks == 1:
            return values.to(dtype, copy=True).mul_(scale_of(self.op, 1)).view(own.shape)
        # an exchange takes the memory of its source, and this one is the graph's
        source = torch.empty(self.n_ranks * self.n_shard, dtype=self.reduced_dtype(), device=values.device)
        source[: values.numel()].copy_(values)
        source[values.numel() :].zero_()
        target = source.new_empty(self.n_shard)
        handle.passes.exchange(
            self._unit, self.group, source, target, self.op, self._find_layout, recurs=False
        )
        return target[: own.numel()].view(own.shape).to(dtype)

    def _find_layout(self) -> layouts.Layout:
        if self._layout is None:
            assert self._handle is not None
            hosts: Hosts = self._handle.wrapper.hosts(self.group)
            n_rows = 0 if hosts.is_flat else len(hosts.rows)
            self._layout = layouts.chunked([self.parameter], self.n_ranks, n_rows)
        return self._layout


def _padded(flat: torch.Tensor, n_elems: int) -> torch.Tensor:
    if flat.numel() == n_elems:
        return flat
    padded = flat.new_zeros(n_elems)
    padded[: flat.numel()].copy_(flat)
    return padded


class Compressible(property):
    """A parameter whose module is compressed: reading it calls tagc's operator."""

    def __init__(self, name: str) -> None:
        super().__init__(functools.partial(_read, name))


def _read(name: str, module: Any) -> torch.Tensor:
    parameter = internals.own_parameter(module, name)
    key, dtype, reshards = module.tagc_keys[name]
    return again(ops.all_gather, reshards, parameter.to_local(), key, parameter.shape, dtype)


def _copied(module: Any, memo: dict[int, Any]) -> Any:
    """Returns a copy for which torch exchanges, as before compress()."""
    own = type(module), module.tagc_keys, module.tagc_handle
    _restore(module)
    try:
        return copy.deepcopy(module, memo)
    finally:
        module.__class__, module.tagc_keys, module.tagc_handle = own


def _restore(module: Any) -> None:
    module.__class__ = type(module).__bases__[0]
    del module.tagc_keys, module.tagc_handle


class Wrapper(GatheringWrapper):
    """All such parameters of a model, for compress()."""

    name = "simple_fsdp"
    sums_within_hosts = True

    def __init__(self, model: torch.nn.Module) -> None:
        for name, module, _ in parametrized(model):
            if hasattr(module, "tagc_handle"):
                raise Error("state", f"{name or 'the model'} has a tagc handle: close() it first")
        self._model, self._found = model, list(find(model))
        names = {id(parameter): name for name, parameter in policy.named_parameters(model)}
        self._sharded: dict[int, Sharded] = {}  # by id of the parameter, which several modules may have
        for found in self._found:
            name = names[id(found.parameter)]
            self._sharded.setdefault(id(found.parameter), Sharded(name, found))
        self._of_what = {one.what: one for one in self._sharded.values()}
        self._gathers = []

    # ---- what it is ----

    def groups(self) -> list[dist.ProcessGroup]:
        return list(dict.fromkeys(one.group for one in self._sharded.values()))

    def place(self) -> Place:
        one = next(iter(self._sharded.values()))
        hosts, place = (
            self.hosts(one.group),
            place_of(dist.get_process_group_ranks(one.group), one.sharded.device_mesh),
        )
        if not hosts.is_two_level:
            return place
        return place._replace(
            replica=place.replica // hosts.per_host, replicas=place.replicas // hosts.per_host
        )

    @property
    def gathers(self) -> bool:
        return True

    def parameters(self) -> list[layouts.Parameter]:
        return [one.parameter for one in self._sharded.values()]

    def left_to_torch(self) -> dict[str, str]:
        found = {}
        for one in self._sharded.values():
            if one.reduced_dtype() not in DTYPES:
                found[one.parameter.name] = str(one.reduced_dtype()).removeprefix("torch.")
            elif one.n_ranks == 1:
                found[one.parameter.name] = ALONE
        return found

    def exchanged(self) -> set[int]:
        return set(self._sharded)

    def set_kinds(self, kinds: Kinds) -> None:
        for one in self._sharded.values():
            one.set_kind(kinds)

    # ---- what it does ----

    def install(self, handle: Compressed) -> None:
        for tag, one in enumerate(self._sharded.values()):
            if (gather := one.connect(handle, tag)) is not None:
                self._gathers.append(gather)
        names: dict[torch.nn.Module, list[str]] = {}
        for found in self._found:
            names.setdefault(found.module, []).append(found.name)
        for module, own in names.items():
            self._replace(module, tuple(own), handle)
            handle.passes.undo.append(functools.partial(_restore, module))
        self.follow_loads(handle)

    def _replace(self, module: Any, names: tuple[str, ...], handle: Compressed) -> None:
        """Replaces the properties of a module, which keeps the handle, as hooks would."""
        kind: Any = type(module)
        module.__class__ = class_of(kind, names, Compressible, "Compressed", _copied)
        module.tagc_keys, module.tagc_handle = {}, handle
        for name in names:
            one = self._sharded[id(internals.own_parameter(module, name))]
            module.tagc_keys[name] = one.key, one.dtype, one.reshards

    def joins(self, whats: Sequence[str]) -> bool:
        wanted = [self._of_what[what] for what in dict.fromkeys(whats) if what in self._of_what]
        for one in wanted:
            one.gather_ahead()
            try:
                internals.at_end_of_backward(one.forget)
            except RuntimeError:  # in a forward pass
                pass
        return bool(wanted)
