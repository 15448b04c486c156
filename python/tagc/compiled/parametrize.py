"""SimpleFSDP: parameters are shards, and whoever reads one gets the whole of it, by a property of its
module's class. So what gathers and reduces is part of the model's own code, which a compiler sees.

data_parallel() makes such a model; torchtitan's data_parallel() makes another. Found is what compress() has
to know of either of them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from tagc._library import Error
from tagc.compiled import internals
from tagc.compiled.units import mark
from tagc.torch.extension import all_ranks, check_known, check_model


@dataclasses.dataclass(frozen=True)
class Precision:
    """dtypes in which parameters are gathered, and gradients reduced; None: those that they have."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @staticmethod
    def of(policy: Any) -> Precision:
        found, fields = [], ("param_dtype", "reduce_dtype")
        if policy is not None and not any(hasattr(policy, name) for name in fields):
            raise Error("argument", f"mp_policy is {policy!r}, must have param_dtype, reduce_dtype, or both")
        for name in fields:
            dtype = getattr(policy, name, None)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise Error(
                    "argument", f"{name} of mp_policy is {dtype!r}, must be a dtype of floats or None"
                )
            found.append(dtype)
        return Precision(*found)


class How(NamedTuple):
    """How data_parallel() was to gather and reduce. reshards: after the forward pass."""

    precision: Precision
    reshards: bool


class Whole(property):
    """A parameter in a class of data_parallel(): reading it gathers it, and its gradient is averaged, as
    torch does that."""

    def __init__(self, name: str, how: How) -> None:
        super().__init__(lambda module: _whole(name, how, module))  # as in wrapper.py
        self.how = how


def _whole(name: str, how: How, module: torch.nn.Module) -> torch.Tensor:
    from torch.distributed.tensor import Partial, Replicate

    parameter, precision = internals.own_parameter(module, name), how.precision
    whole = parameter.redistribute(
        placements=[Replicate()], forward_dtype=precision.param_dtype, backward_dtype=precision.reduce_dtype
    )
    averaged: torch.Tensor = whole.to_local(grad_placements=[Partial("avg")])
    return averaged


def again(gather: Callable[..., torch.Tensor], reshards: bool, *arguments: Any) -> torch.Tensor:
    """Returns gather(*arguments). reshards: whether a compiler has to call it again in the backward pass, so
    that the whole parameter is not kept for that. (Without a compiler, autograd keeps what it gets.)"""
    if not reshards or not torch.compiler.is_compiling():
        return gather(*arguments)
    whole: torch.Tensor = checkpoint(lambda *given: gather(*given), *arguments, use_reentrant=False)
    return whole


@functools.cache
def class_of(
    kind: type,
    names: tuple[str, ...],
    make: Callable[[str], property],
    prefix: str,
    methods: tuple[tuple[str, Callable[..., object]], ...] = (),
) -> type:
    """Returns the class of modules of that kind whose parameters with these names are properties. It is one
    for all of them, so that compiled code fits them all. methods: (name, what is in its place)."""
    own: dict[str, Any] = {name: make(name) for name in names}
    return type(f"{prefix}{kind.__name__}", (kind,), own | dict(methods))


def data_parallel(
    model: torch.nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    mp_policy: Any = None,
    reshard_after_forward: bool = True,
    shard_dim: int = 0,
    modules: Iterable[Any] | None = None,
    **unknown: NoReturn,
) -> torch.nn.Module:
    """Shards the parameters of a model that is to be compiled whole, as SimpleFSDP does. Collective.

        model = data_parallel(model, mesh)
        handle = tagc.compress(model, optimizer)
        compiled = torch.compile(model, fullgraph=True)

    Each parameter becomes a DTensor, sharded over `mesh`, with the values that rank 0 has. Where the model
    reads it, it is gathered, and its gradient is averaged over the ranks: without tagc.compress() by torch.

    mesh: of one dimension; default: all ranks. mp_policy: FSDP2's MixedPrecisionPolicy, or another object
        with param_dtype, in which parameters are gathered, and reduce_dtype, in which gradients are averaged.
    reshard_after_forward: whether, with tagc.compress(), compiled code gathers parameters again in the
        backward pass, and does not keep them until then.
    shard_dim: the dimension that is divided; others than 0 must be divisible by the number of ranks.
    modules: those on which you would call fully_shard(). With tagc.compress(), the parameters of each are
        gathered and reduced together, as those of a list of modules within this one, and all others as the
        root's. Default: the items of each ModuleList, and of each ModuleDict that has one class of them.

    Returns the model. Make the optimizer afterwards."""
    check_known(data_parallel, unknown)
    check_model(model)
    mesh = _checked(model, mesh, reshard_after_forward, shard_dim)
    mark(model, modules)
    make, shards = _maker(How(Precision.of(mp_policy), reshard_after_forward)), _Shards(mesh, shard_dim)
    for module in model.modules():
        own = {n: p for n, p in module.named_parameters(recurse=False, remove_duplicate=False) if p.numel()}
        for parameter_name, parameter in own.items():
            module.register_parameter(parameter_name, shards.of(parameter))
        if own:
            kind: Any = type(module)
            module.__class__ = class_of(kind, tuple(own), make, "Sharded")
    return model


@functools.cache
def _maker(how: How) -> Callable[[str], property]:
    return functools.partial(Whole, how=how)


def _checked(
    model: torch.nn.Module, mesh: DeviceMesh | None, reshard_after_forward: bool, shard_dim: int
) -> DeviceMesh:
    """Returns the mesh. Error if that or the model will not do. Local."""
    from torch.distributed.tensor import DTensor

    all_ranks()  # or that raises
    if mesh is not None and not (isinstance(mesh, DeviceMesh) and mesh.ndim == 1):
        raise Error("argument", f"mesh is {mesh!r}, must be a DeviceMesh of one dimension, or None")
    if not isinstance(reshard_after_forward, bool):
        raise Error("argument", f"reshard_after_forward is {reshard_after_forward!r}, must be True or False")
    if isinstance(shard_dim, bool) or not isinstance(shard_dim, int) or shard_dim < 0:
        raise Error("argument", f"shard_dim is {shard_dim!r}, must be an integer from 0 on")
    if next(parametrized(model), None) is not None:
        raise Error(
            "state", "this model has the parameters of SimpleFSDP already: data_parallel() was called"
        )
    found = next(model.parameters(), None)
    if found is None:
        raise Error("argument", "this model has no parameters")
    if mesh is None:
        mesh = init_device_mesh(found.device.type, (dist.get_world_size(),))
    if mesh.get_coordinate() is None:
        raise Error("argument", f"this rank is not in the mesh {mesh!r}: only its ranks call data_parallel()")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise Error(
                "unsupported", f"{name} is a DTensor: data_parallel() takes parameters that are whole"
            )
        if parameter.ndim <= shard_dim and parameter.numel():
            raise Error(
                "unsupported", f"{name} has {parameter.ndim} dimensions, and shard_dim is {shard_dim}"
            )
        if shard_dim and parameter.shape[shard_dim] % mesh.size():
            raise Error(
                "unsupported",
                f"{name} has {parameter.shape[shard_dim]} elements along dimension {shard_dim}, which "
                f"{mesh.size()} ranks do not divide: shard along dimension 0",
            )
    return mesh


class _Shards:
    """Those of parameters; one that two modules share stays one."""

    def __init__(self, mesh: DeviceMesh, dim: int) -> None:
        self._mesh, self._dim = mesh, dim
        self._of: dict[int, tuple[torch.Tensor, torch.nn.Parameter]] = {}  # by id of the whole one

    def of(self, whole: torch.nn.Parameter) -> torch.nn.Parameter:
        from torch.distributed.tensor import Shard, distribute_tensor

        if id(whole) not in self._of:
            sharded = distribute_tensor(whole.detach(), self._mesh, [Shard(self._dim)])
            self._of[id(whole)] = whole, torch.nn.Parameter(sharded, whole.requires_grad)
        return self._of[id(whole)][1]


# ---- what compress() looks for ----


def parametrized(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, list[str]]]:
    """Yields (name, module, names of parameters) where parameters are properties of their module's class, as
    in SimpleFSDP."""
    for prefix, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
        names = [name for name in own if isinstance(getattr(type(module), name, None), property)]
        if names:
            yield prefix, module, names


class Found(NamedTuple):
    """A parameter that is a property."""

    module: torch.nn.Module
    name: str  # within the module
    parameter: Any  # a DTensor
    how: How
    op: Any  # by which ranks' gradients are reduced


def find(model: torch.nn.Module) -> Iterator[Found]:
    """Yields all of a model. Error for what tagc does not know."""
    for prefix, module, names in parametrized(model):
        for name in names:
            parameter = internals.own_parameter(module, name)
            full_name = f"{prefix}.{name}".lstrip(".")
            if parameter is None or not parameter.numel():
                continue
            _check_parameter(full_name, parameter)
            yield Found(module, name, parameter, *_of_property(full_name, getattr(type(module), name)))


def _check_parameter(name: str, parameter: Any) -> None:
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        raise Error(
            "argument",
            f"{name} is a property of its module, and no DTensor: use tagc.compiled.data_parallel(model)",
        )
    placements: Any = parameter.placements
    if len(placements) != 1 or not placements[0].is_shard():
        raise Error(
            "unsupported",
            f"{name} is placed as {placements} on a mesh of {parameter.device_mesh.ndim} dimensions: tagc "
            "takes parameters that data_parallel() has sharded over one dimension. For replicas use "
            "DistributedDataParallel, for several dimensions fully_shard()",
        )
    dim, n_ranks = placements[0].dim, parameter.device_mesh.size()
    if dim and parameter.shape[dim] % n_ranks:
        raise Error(
            "unsupported",
            f"{name} has {parameter.shape[dim]} elements along dimension {dim}, which {n_ranks} ranks do not "
            "divide: shard along dimension 0",
        )


def _of_property(name: str, own: property) -> tuple[How, Any]:
    """Returns how a property gathers, and by which op it reduces. torchtitan's has a module in its closure
    that says so."""
    if isinstance(own, Whole):
        return own.how, dist.ReduceOp.AVG
    held = inspect.getclosurevars(own.fget).nonlocals.values() if inspect.isfunction(own.fget) else ()
    found: Any = next((value for value in held if hasattr(value, "grad_placements")), None)
    ops = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}
    how = getattr(found, "grad_placements", [None])[0]
    op = ops.get(getattr(how, "reduce_op", ""))
    if found is None or op is None or getattr(found, "full_dtensor", False):
        what = "which tagc does not know" if found is None else f"with gradients of {how!r}"
        if op is not None:
            what = "with full_dtensor=True"
        raise Error(
            "unsupported",
            f"{name} is a property of its module, {what}: use tagc.compiled.data_parallel(model), or "
            "data_parallel() of torchtitan 0.3 with mode='fully_shard'",
        )
    return How(Precision.of(found), True), op
