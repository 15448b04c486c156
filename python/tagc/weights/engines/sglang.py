"""A weight loader of SGLang (0.5.23), which names it at its start, and calls it in every rank:

    sglang.Engine(model_path=..., custom_weight_loader=["tagc.weights.engines.sglang.load"])
    update(engine, store, version)          from the process that has the Engine

What travels by SGLang's own ways is the store's address and the version. Each rank reads from the store."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tagc._library import Error
from tagc.weights.follow import Follower
from tagc.weights.layout import Rank, engine_layout
from tagc.weights.lora import Merged

LOADER = "tagc.weights.engines.sglang.load"
_NAME = "tagc"
_Receiver = Follower | Merged
_followers: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, _Receiver]] = weakref.WeakKeyDictionary()


def update(
    engine: Any, store: str, version: int, wait_s: float = 60.0, lora_scale: float | None = None
) -> None:
    """Turns the weights of an Engine of SGLang into that version of a store. lora_scale: where the store has
    an adapter alone, of its product (lora_alpha / r): it is added to the engine's weights."""
    asked = {"store": store, "version": version, "wait_s": wait_s, "lora_scale": lora_scale}
    text = json.dumps(asked).encode()
    engine.begin_weight_update()
    try:
        message = [(_NAME, torch.frombuffer(bytearray(text), dtype=torch.uint8))]
        engine.update_weights_from_tensor(message, load_format=LOADER)
    finally:
        engine.end_weight_update()


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Is what SGLang calls in a rank, with the message of update(). An Error ends the rank, as that of any
    custom loader does. Weights are written in place; the first time the model's load_weights() loads the same
    version, and must come to the same bits."""
    from sglang.srt.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    if len(named_tensors) != 1 or named_tensors[0][0] != _NAME:
        raise Error("argument", f"{LOADER} is called by {__name__}.update() alone")
    asked = json.loads(named_tensors[0][1].cpu().numpy().tobytes())
    address, follower = _followers.get(model, ("", None))
    if follower is None or address != asked["store"]:
        rank = Rank(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
        device = next(model.parameters()).device
        loads: Any = model.load_weights
        layout, scale = engine_layout(model, rank), asked["lora_scale"]
        follower = (
            Merged(layout, asked["store"], scale)
            if scale is not None
            else Follower(
                layout,
                asked["store"],
                loader=lambda tensors: loads((name, tensor.to(device)) for name, tensor in tensors),
            )
        )
        _followers[model] = (asked["store"], follower)
    with torch.no_grad():
        follower.update(asked["version"], asked["wait_s"])
