"""accelerate: after prepare(), one line, and save_state() and load_state() carry residuals and stages with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import tagc.torch as tagc
from tagc.integrations import _common

if TYPE_CHECKING:
    from accelerate import Accelerator


def compress(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any = None, **options: Any) -> tagc.Compressed:
    """tagc.compress() of what accelerator.prepare() returned, DDP or FSDP2. save_state() then writes a folder tagc into its own,
    with a file from each rank, and load_state() reads it, with another number of processes, too. Collective."""
    handle = tagc.compress(model, optimizer, **options)
    if getattr(accelerator, "scaler", None) is not None:
        handle.follow(accelerator.scaler)
    hooks = [accelerator.register_save_state_pre_hook(lambda models, weights, folder: _common.save(handle, folder)),
             accelerator.register_load_state_pre_hook(lambda models, folder: _common.load(handle, folder))]
    handle.undo += [hook.remove for hook in hooks]
    return handle
