"""Engines of other libraries, which sum gradients by themselves, where tagc has no hook. They are found
without importing them: by where classes, hooks and attributes of parameters come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from tagc._library import Error
from tagc.torch.exchange import internals

_INSTEAD = "use fully_shard() or DistributedDataParallel, and an optimizer of torch's kind"
# {module: (engine, what to do instead)}. Layers and optimizers of such libraries also work without an engine,
# and are in other modules.
_ENGINES = {
    "deepspeed.runtime": (
        "DeepSpeed",
        f"{_INSTEAD}, in the place of initialize(); under Accelerate or the Trainer, FSDP version 2 in the "
        "place of DeepSpeed's plugin",
    ),
    "colossalai.booster": ("Colossal-AI", ""),
    "colossalai.interface": ("Colossal-AI", ""),
    "colossalai.zero": ("Colossal-AI", ""),
}
_OF_COLOSSAL = f"{_INSTEAD}, in the place of boost(); or pass model.module after boost() by TorchDDPPlugin"


def check_engine(model: Any) -> None:
    """Raises an Error if the model is an engine of another library, or inside one."""
    for origin, what in _origins(model):
        for package, (engine, instead) in _ENGINES.items():
            if f"{origin}.".startswith(f"{package}."):
                inner = getattr(model, "module", None)
                if isinstance(inner, (DistributedDataParallel, FullyShardedDataParallel)):
                    instead = f"pass its .module, which is a {type(inner).__name__}"
                raise Error(
                    "unsupported",
                    f"the model is in an engine of {engine} ({what} of {origin}), which sums gradients by "
                    f"itself, uncompressed: {instead or _OF_COLOSSAL}",
                )


def _origins(model: Any) -> Iterator[tuple[str, str]]:
    """Yields (module of Python, what of the model comes from there)."""
    for cls in type(model).__mro__:
        yield cls.__module__, cls.__name__
    if not isinstance(model, torch.nn.Module):
        return
    for module in model.modules():
        for cls in type(module).__mro__:
            yield cls.__module__, cls.__name__
        for hook in internals.hooks_of(module):
            yield _module_of(hook), "a hook"
    for name, parameter in model.named_parameters():
        yield type(parameter).__module__, name
        for value in (*vars(parameter).values(), *internals.gradient_hooks_of(parameter)):
            yield type(value).__module__, name
            yield _module_of(value), name


def _module_of(function: Any) -> str:
    """Returns the module in which a function was written, also one within a method or a partial()."""
    function = getattr(function, "func", function)
    return str(getattr(function, "__module__", None))
