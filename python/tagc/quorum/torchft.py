"""Whether torchft is there: it wraps a model, or the user gave its Manager or one of its process groups."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tagc.torch.extension import ddp_hooks
from tagc.torch.hooks import ddp


def manager_of(model: torch.nn.Module) -> Any:
    """Returns torchft's Manager if torchft wrapped this model; else None."""
    if "torchft.ddp" not in sys.modules:
        return None
    from torchft import DistributedDataParallel, Manager

    if not isinstance(model, DistributedDataParallel):
        return None
    states = [state.partner if isinstance(state, ddp.State) else state for _, state in ddp_hooks(model)]
    return next((state for state in states if isinstance(state, Manager)), None)


def is_manager(found: Any) -> bool:
    """Returns whether this is torchft's Manager."""
    module = sys.modules.get("torchft.manager")
    return module is not None and isinstance(found, module.Manager)


def is_managed_group(group: Any) -> bool:
    """Returns whether this is one of torchft's process groups."""
    found = sys.modules.get("torchft.process_group")
    return found is not None and isinstance(group, found.ProcessGroup)
