"""The kinds of wrapped models, and which of them a model is of."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tagc import _annexes
from tagc._library import Error
from tagc.torch.exchange import internals
from tagc.torch.hooks import ddp
from tagc.torch.hooks.engines import check_engine
from tagc.torch.hooks.wrapper import Wrapper
from tagc.torch.schedule import policy


def check_model(model: Any) -> None:
    """Raises an Error unless this torch is new enough and the model is a module."""
    if internals.version() < internals.OLDEST:
        raise Error(
            "unsupported",
            f"torch is {torch.__version__}, must be {'.'.join(map(str, internals.OLDEST))} or newer",
        )
    check_engine(model)
    if not isinstance(model, torch.nn.Module):
        raise Error("argument", f"model is a {type(model).__name__}, must be a torch.nn.Module")


class Looked(NamedTuple):
    """What determines the communication of a model."""

    units: Sequence[Sequence[tuple[str, Sequence[int]]]]  # of each the (name, shape) of what is trained
    gathered: Sequence[Sequence[tuple[torch.dtype, int]]]  # of each the (dtype, elements) that a gather sends
    n_gathers: list[int]  # of each in a step
    dtypes: tuple[torch.dtype | None, torch.dtype | None]  # of gradients and gathers; None: the parameters'
    group: dist.ProcessGroup  # of the gradients' exchange


class Advised(NamedTuple):
    """What advise() knows of a kind."""

    units: str = "units"  # what they are called
    units_of: Callable[[int], str] = str  # what to write for units of so many elements
    look: Callable[[Any], Looked] | None = (
        None  # None: advise() does not know such models, or knows them itself
    )
    reduces_frozen: bool = False  # whether torch reduces what is not trained, too, as zeros


class Kind(NamedTuple):
    """A kind of wrapped models, for compress(). An annex adds one by a kind.py with a KIND."""

    name: str  # of the wrapper
    how: str  # what must be done to a model, in words
    takes: Callable[[Any, Any], bool]  # whether this is such a model, with such a `between`
    wrapper: Callable[[Any, Any], Wrapper]  # of a model and `between`, or an Error
    takes_between: bool = False
    goes_first: bool = False  # where it takes a model, it does so in the place of all others
    needs_init: bool = True  # whether its ranks are those of torch.distributed
    advised: Advised | None = None


def _has_fsdp2(model: torch.nn.Module, between: Any) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _fsdp2(model: Any, between: Any) -> Wrapper:
    from tagc.torch.hooks import fsdp2

    return fsdp2.Wrapper(model, group_of(model, between))


def _is_ddp(model: torch.nn.Module, between: Any) -> bool:
    return isinstance(model, torch.nn.parallel.DistributedDataParallel)


def _ddp(model: Any, between: None) -> Wrapper:
    return ddp.Wrapper(model)


_FSDP2 = Advised(
    "units (modules with fully_shard())",
    lambda n_elems: f"for bucket in tagc.buckets(layers, {n_elems}): fully_shard(bucket)",
)
_DDP = Advised(
    "buckets", lambda n_elems: f"DistributedDataParallel(model, bucket_cap_mb={-(-4 * n_elems // 2**20)})"
)


@functools.cache
def kinds() -> list[Kind]:
    """Returns all kinds."""
    of_annexes = [importlib.import_module(f"tagc.{name}.kind").KIND for name in _annexes.with_part("kind")]
    return [
        Kind("fsdp2", "fully_shard()-ed", _has_fsdp2, _fsdp2, takes_between=True, advised=_FSDP2),
        Kind("ddp", "wrapped in DistributedDataParallel", _is_ddp, _ddp, advised=_DDP),
        *of_annexes,
    ]


def kinds_of(model: Any, between: Any = None) -> list[Kind]:
    """Returns those that this model is of."""
    if not isinstance(model, torch.nn.Module):
        return []
    fitting = [kind for kind in kinds() if kind.takes(model, between)]
    return [kind for kind in fitting if kind.goes_first] or fitting


def group_of(model: torch.nn.Module, between: Any) -> dist.ProcessGroup | None:
    """Returns the process group that `between` means: it may be the name of a dimension of the mesh that the
    model's mesh was cut from, or a mesh of one dimension. Local."""
    if isinstance(between, DeviceMesh):
        if between.ndim != 1:
            raise Error(
                "argument",
                f"between is a mesh of {between.ndim} dimensions, must have one, as mesh['site'] has",
            )
        return between.get_group()
    if not isinstance(between, str):
        if between is not None and not isinstance(between, dist.ProcessGroup):
            raise Error(
                "argument",
                f"between is {between!r}, must be a process group that this rank is in, its mesh of one "
                "dimension, or the name of that dimension",
            )
        return between
    own = next(
        (parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)), None
    )
    if own is None:
        raise Error(
            "argument",
            (
                f"between is {between!r}, and this model has no mesh, of which that could be a dimension: "
                "give "
                f"mesh[{between!r}]"
            ),
        )
    root = internals.root_mesh(own)
    others = [name for name in root.mesh_dim_names or () if name not in (own.mesh_dim_names or ())]
    if between not in others:
        names = ", ".join(map(repr, others)) or "there is none, so give a process group"
        raise Error(
            "argument",
            (
                f"between is {between!r}, must be a dimension of the mesh that this model's mesh was cut "
                "from "
                f"and does not have: {names}"
            ),
        )
    return root[between].get_group()


def kind_of(model: Any, between: Any, only: str | None = None, call: str = "compress()") -> Kind:
    """Returns the one that this model is of. call: what the user has called."""
    check_model(model)
    if internals.composable_ddp_within(model) is not None:
        raise Error(
            "unsupported",
            "this model has the replicate() of torch.distributed._composable.replicate, which hides "
            "its DDP: use DistributedDataParallel(model), or replicate() of "
            "torch.distributed._composable.replicate_with_fsdp",
        )
    fitting = kinds_of(model, between)
    if len(fitting) != 1:
        how = "not wrapped" if not fitting else "in both " + " and ".join(kind.name for kind in fitting)
        ways = ", or ".join(kind.how for kind in kinds())
        raise Error("argument", f"model is a {type(model).__name__}, {how}: it must be {ways}, before {call}")
    if (name := next((name for name, p in policy.named_parameters(model) if p.is_meta), None)) is not None:
        raise Error(
            "argument",
            f"{name} is on the meta device, where it has no values: "
            + (
                "DistributedDataParallel keeps the parameters that it was made with, so give them memory "
                "with to_empty(), and values, before wrapping"
                if fitting[0].name == "ddp"
                else f"give it memory with to_empty(), and values, before {call}"
            ),
        )
    if only is not None and fitting[0].name != only:
        raise Error(
            "argument", f"ddp_state() is for DistributedDataParallel; this model is {fitting[0].name}"
        )
    if between is not None and not fitting[0].takes_between:
        raise Error("argument", f"between is for fully_shard()-ed models; this one is {fitting[0].name}")
    return fitting[0]
