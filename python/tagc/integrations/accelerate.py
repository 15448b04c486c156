"""accelerate: one line after prepare(). save_state() and load_state() then include residuals and schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import tagc.torch as tagc
from tagc.integrations import _common

if TYPE_CHECKING:
    from accelerate import Accelerator


def compress(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: Any = None, **options: Any
) -> tagc.Compressed:
    """Returns tagc.compress() of the model that accelerator.prepare() returned, DDP or FSDP2. save_state()
    then writes a folder `tagc` in its own folder, with a file of each rank; load_state() reads it, also with
    another number of processes. Collective."""
    _common.check_started("start this script with torchrun or accelerate launch")
    handle = tagc.compress(model, optimizer, **options)
    if getattr(accelerator, "scaler", None) is not None:
        handle.follow(accelerator.scaler)
    for hook in (
        accelerator.register_save_state_pre_hook(
            lambda models, weights, folder: _common.save(handle, folder)
        ),
        accelerator.register_load_state_pre_hook(lambda models, folder: _common.load(handle, folder)),
    ):
        handle.on_close(hook.remove)
    return handle
