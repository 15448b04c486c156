"""Which of torch's wrappers a model has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.torch.exchange import internals
from tagc.torch.hooks.engines import check_engine
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


def parametrized(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, list[str]]]:
    """Yields (name, module, names of parameters) where parameters are properties of their module's class, as
    in SimpleFSDP."""
    for prefix, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
        names = [name for name in own if isinstance(getattr(type(module), name, None), property)]
        if names:
            yield prefix, module, names


def kind_of(
    model: Any, between: dist.ProcessGroup | None, only: str | None = None, call: str = "compress()"
) -> str:
    """Returns the model's wrapper: "fsdp2", "ddp", "fsdp1" or "simple_fsdp". call: what the user
    has called."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    check_model(model)
    if internals.composable_ddp_within(model) is not None:
        raise Error(
            "unsupported",
            "this model has the replicate() of torch.distributed._composable.replicate, which hides "
            "its DDP: use DistributedDataParallel(model), or replicate() of "
            "torch.distributed._composable.replicate_with_fsdp",
        )
    kinds = {
        "fsdp2": any(isinstance(module, FSDPModule) for module in model.modules()),
        "ddp": isinstance(model, DistributedDataParallel),
        "fsdp1": isinstance(model, FullyShardedDataParallel),
        "simple_fsdp": next(parametrized(model), None) is not None,
    }
    found = [kind for kind, is_it in kinds.items() if is_it]
    if len(found) != 1:
        how = "not wrapped" if not found else "in both " + " and ".join(found)
        raise Error(
            "argument",
            f"model is a {type(model).__name__}, {how}: it must be fully_shard()-ed, or wrapped in "
            "DistributedDataParallel or FullyShardedDataParallel, or sharded by tagc.data_parallel(), before "
            f"{call}",
        )
    if (name := next((name for name, p in policy.named_parameters(model) if p.is_meta), None)) is not None:
        raise Error(
            "argument",
            f"{name} is on the meta device, where it has no values: "
            + (
                "DistributedDataParallel keeps the parameters that it was made with, so give them memory "
                "with to_empty(), and values, before wrapping"
                if found == ["ddp"]
                else f"give it memory with to_empty(), and values, before {call}"
            ),
        )
    if only is not None and found != [only]:
        raise Error("argument", f"ddp_state() is for DistributedDataParallel; this model is {found[0]}")
    if between is not None and found != ["fsdp2"]:
        raise Error("argument", f"between is for fully_shard()-ed models; this one is {found[0]}")
    return found[0]
