"""compress() of a model with SimpleFSDP's parametrizations: their properties call tagc's operators then.

Ranks must exchange in one order, and each has a compiler that may order operators otherwise. Reduce-scatters
cannot pass each other: in a graph each hands the next a value. Gathers may: a rank has what another one wants
or expects to gather, joins it, and keeps what comes until its own graph asks for that or the pass ends."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.compiled import internals, ops
from tagc.compiled.modules import Module
from tagc.compiled.parametrize import Found, again, class_of, find, parametrized
from tagc.compiled.passes import Pass
from tagc.compiled.sharded import Sharded
from tagc.compiled.units import units_of
from tagc.torch import Compressed
from tagc.torch.extension import ALONE, DTYPES, GatheringWrapper, Kinds, Place, layouts, place_of, policy


class Compressible(property):
    """A parameter whose module is compressed: reading it calls tagc's operator."""

    def __init__(self, name: str) -> None:
        super().__init__(lambda module: _read(name, module))  # torch 2.9 does not look into a partial


def _read(name: str, module: Any) -> torch.Tensor:
    parameter = internals.own_parameter(module, name)
    known, shard, key, dtype, reshards = module.tagc_reads[name]
    if parameter is not known:
        raise Error(
            "state",
            f"{name} is not the parameter that compress() saw: load values into that, as load_state_dict() "
            "does without assign=True, or close() the handle first",
        )
    if (parameter.dtype, parameter.device) != (shard.dtype, shard.device):
        raise Error(
            "state",
            f"{name} is {parameter.dtype} on {parameter.device}, and compress() saw {shard.dtype} on "
            f"{shard.device}: cast or move the model before compress(), or close() the handle and call "
            "compress() again",
        )
    if not parameter.requires_grad:
        shard = shard.detach()
    return again(ops.all_gather, reshards, shard, key, parameter.shape, dtype)


def _copied(module: Any, memo: dict[int, Any]) -> Any:
    """Returns a copy for which torch exchanges, as before compress()."""
    swapped = type(module), module.tagc_reads, module.tagc_handle
    _restore(module)
    try:
        return copy.deepcopy(module, memo)
    finally:
        module.__class__, module.tagc_reads, module.tagc_handle = swapped


def _moving(module: Any) -> AbstractContextManager[None]:
    context: AbstractContextManager[None] = module.tagc_handle.wrapper.moving(module)
    return context


_METHODS = (("__deepcopy__", _copied), internals.apply_within(_moving))


def _restore(module: Any) -> None:
    module.__class__ = type(module).__bases__[0]
    del module.tagc_reads, module.tagc_handle


def _modules(model: torch.nn.Module, found: list[Found], sharded: dict[int, Sharded]) -> list[Module]:
    """Returns what exchanges each unit of a model, or those of its parameters that are of one kind()."""
    left, modules, parameters_of = dict(sharded), [], dict[torch.nn.Module, list[int]]()
    for reading in found:
        parameters_of.setdefault(reading.module, []).append(id(reading.parameter))
    for name, owners in units_of(model):
        kinds: dict[tuple[object, ...], list[Sharded]] = {}
        for key in (key for owner in owners for key in parameters_of.get(owner, [])):
            if (one := left.pop(key, None)) is not None:  # else another unit has it, too
                kinds.setdefault(one.kind(), []).append(one)
        for i, parameters in enumerate(kinds.values()):
            full_name = f"{name}, kind {i + 1} of {len(kinds)}" if len(kinds) > 1 else name
            modules.append(Module(full_name, parameters))
    return modules


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
        for reading in self._found:
            name = names[id(reading.parameter)]
            self._sharded.setdefault(id(reading.parameter), Sharded(name, reading))
        self._modules = _modules(model, self._found, self._sharded)
        self._of_what = {module.what: module for module in self._modules}
        self._of_changed = {module.what_changed: module for module in self._modules}
        self._gathers = []
        # exchanges of tensors in CPU memory go on in a thread, while another handle uses its own groups
        self.shares_groups = any(one.sharded.device.type != "cpu" for one in self._sharded.values())

    # ---- what it is ----

    def groups(self) -> list[dist.ProcessGroup]:
        return list(dict.fromkeys(one.group for one in self._sharded.values()))

    def place(self) -> Place:
        one = next(iter(self._sharded.values()))
        ranks = dist.get_process_group_ranks(one.group)
        return place_of(ranks, one.sharded.device_mesh).among(self.hosts(one.group))

    @property
    def gathers(self) -> bool:
        return True

    def parameters(self) -> list[layouts.Parameter]:
        return [one.parameter for one in self._sharded.values()]

    def left_to_torch(self) -> dict[str, str]:
        reasons = {}
        for one in self._sharded.values():
            if one.reduced_dtype not in DTYPES:
                reasons[one.parameter.name] = str(one.reduced_dtype).removeprefix("torch.")
            elif one.n_ranks == 1:
                reasons[one.parameter.name] = ALONE
        return reasons

    def exchanged(self) -> set[int]:
        return set(self._sharded)

    def set_kinds(self, kinds: Kinds) -> None:
        for module in self._modules:
            module.set_kinds(kinds)

    # ---- what it does ----

    def install(self, handle: Compressed) -> None:
        shared = self._pass = Pass(handle, max(module.n_elems for module in self._modules))
        handle.passes.settles.append(shared.starts.drop)
        for tag, module in enumerate(self._modules):
            if (gather := module.connect(shared, tag)) is not None:
                self._gathers.append(gather)
        names: dict[torch.nn.Module, list[str]] = {}
        for reading in self._found:
            names.setdefault(reading.module, []).append(reading.name)
        for owner, read_names in names.items():
            self._replace(owner, tuple(read_names), handle)
            handle.passes.undo.append(functools.partial(_restore, owner))
        handle.passes.undo += [one.release for one in self._sharded.values()]
        self.follow_parameters(handle)

    def _replace(self, module: Any, names: tuple[str, ...], handle: Compressed) -> None:
        """Replaces the properties of a module, which keeps the handle, as hooks would."""
        kind: Any = type(module)
        module.__class__ = class_of(kind, names, Compressible, "Compressed", _METHODS)
        module.tagc_reads, module.tagc_handle = {}, handle
        for name in names:
            self._note(module, name, self._sharded[id(internals.own_parameter(module, name))])

    @staticmethod
    def _note(module: Any, name: str, one: Sharded) -> None:
        module.tagc_reads[name] = one.sharded, one.read, one.key, one.dtype, one.reshards

    def finish_pass(self) -> None:
        self._pass.end()

    @contextlib.contextmanager
    def moving(self, module: torch.nn.Module) -> Iterator[None]:
        """Contains .to() and such, which swap parameters also where they change nothing. Local."""
        parameters = {id(reading.parameter) for reading in self._found if reading.module is module}
        users = [
            (reading, self._sharded[id(reading.parameter)])
            for reading in self._found
            if id(reading.parameter) in parameters
        ]
        try:
            for reading, one in users:
                one.release()
                self._note(reading.module, reading.name, one)
            yield
        finally:
            for one in {one for _, one in users}:
                one.renew()
            for reading, one in users:
                self._note(reading.module, reading.name, one)

    def joins(self, whats: Sequence[str]) -> bool:
        for rank, module in enumerate(map(self._of_changed.get, whats)):
            if module is not None:
                return self._come_together(module, rank, whats)
        wanted = [self._of_what[what] for what in dict.fromkeys(whats) if what in self._of_what]
        for one in wanted:
            one.join()
        return bool(wanted)

    @staticmethod
    def _come_together(module: Module, rank: int, whats: Sequence[str]) -> bool:
        """Returns True if all ranks have come to gather that module, whose parameters have changed on one of
        them. Otherwise some have used its old values already, and all raise the same Error."""
        other = next(
            (i for i, what in enumerate(whats) if what not in (module.what, module.what_changed)), None
        )
        if other is None:
            return True
        ranks = dist.get_process_group_ranks(module.group)
        raise Error(
            "mismatch",
            f"{module.what} have changed on rank {ranks[rank]} since they were gathered, and rank "
            f"{ranks[other]}, which comes with {whats[other]}, uses the old ones: change a parameter on all "
            "ranks, by an operation on the DTensor, which each of them sees",
        )
