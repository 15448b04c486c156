"""Private attributes of torch that this annex needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

_Hooks = MutableMapping[int, Callable[..., Any]]


def hooks_of(module: nn.Module) -> Iterator[tuple[str, _Hooks]]:
    """Yields, for each module in it, "dispatch" with its hooks before forward, and "combine" with those
    behind."""
    for inner in module.modules():
        yield "dispatch", inner._forward_pre_hooks
        yield "combine", inner._forward_hooks


def moves_rows(function: Any) -> bool:
    """Returns whether this is the operator of torch's functional all_to_all_single(), with autograd or
    without."""
    names = ("_c10d_functional", "_c10d_functional_autograd")
    found = (getattr(getattr(torch.ops, name), "all_to_all_single", None) for name in names)
    return function in [one for packet in found if packet is not None for one in (packet, packet.default)]
