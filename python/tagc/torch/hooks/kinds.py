"""The kinds of wrapped models, and which of them a model is of."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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


class Kind(NamedTuple):
    """A kind of wrapped models, for compress(). An annex adds one by a kind.py with a KIND."""

    name: str  # of the wrapper
    how: str  # what must be done to a model, in words
    takes: Callable[[Any], bool]  # whether this is such a model
    wrapper: Callable[[Any, Any], Wrapper]  # of a model and `between`, which is None but for FSDP2


def _has_fsdp2(model: torch.nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _fsdp2(model: Any, between: dist.ProcessGroup | None) -> Wrapper:
    from tagc.torch.hooks import fsdp2

    return fsdp2.Wrapper(model, between)


def _has_fsdp1(model: torch.nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(model, FullyShardedDataParallel)


def _fsdp1(model: Any, between: None) -> Wrapper:
    from tagc.torch.hooks import fsdp1

    return fsdp1.Wrapper(model)


@functools.cache
def kinds() -> list[Kind]:
    """Returns all kinds."""
    of_annexes = [importlib.import_module(f"tagc.{name}.kind").KIND for name in _annexes.with_part("kind")]
    return [
        Kind("fsdp2", "fully_shard()-ed", _has_fsdp2, _fsdp2),
        Kind("ddp", "wrapped in DistributedDataParallel", _is_ddp, _ddp),
        Kind("fsdp1", "wrapped in FullyShardedDataParallel", _has_fsdp1, _fsdp1),
        *of_annexes,
    ]


def _ddp(model: Any, between: None) -> Wrapper:
    return ddp.Wrapper(model)


def _is_ddp(model: torch.nn.Module) -> bool:
    return isinstance(model, torch.nn.parallel.DistributedDataParallel)


def kinds_of(model: torch.nn.Module) -> list[Kind]:
    """Returns those that this model is of."""
    return [kind for kind in kinds() if kind.takes(model)]


def kind_of(
    model: Any, between: dist.ProcessGroup | None, only: str | None = None, call: str = "compress()"
) -> Kind:
    """Returns the one that this model is of. call: what the user has called."""
    check_model(model)
    if internals.composable_ddp_within(model) is not None:
        raise Error(
            "unsupported",
            "this model has the replicate() of torch.distributed._composable.replicate, which hides "
            "its DDP: use DistributedDataParallel(model), or replicate() of "
            "torch.distributed._composable.replicate_with_fsdp",
        )
    found = kinds_of(model)
    if len(found) != 1:
        how = "not wrapped" if not found else "in both " + " and ".join(kind.name for kind in found)
        ways = ", or ".join(kind.how for kind in kinds())
        raise Error("argument", f"model is a {type(model).__name__}, {how}: it must be {ways}, before {call}")
    if (name := next((name for name, p in policy.named_parameters(model) if p.is_meta), None)) is not None:
        raise Error(
            "argument",
            f"{name} is on the meta device, where it has no values: "
            + (
                "DistributedDataParallel keeps the parameters that it was made with, so give them memory "
                "with to_empty(), and values, before wrapping"
                if found[0].name == "ddp"
                else f"give it memory with to_empty(), and values, before {call}"
            ),
        )
    if only is not None and found[0].name != only:
        raise Error("argument", f"ddp_state() is for DistributedDataParallel; this model is {found[0].name}")
    if between is not None and found[0].name != "fsdp2":
        raise Error("argument", f"between is for fully_shard()-ed models; this one is {found[0].name}")
    return found[0]
