"""Private attributes of torch that this annex needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import nn


def hooks_of(module: nn.Module) -> Iterator[tuple[str, MutableMapping[int, Callable[..., Any]]]]:
    """Yields what each module in it has: "dispatch", hooks before forward; "combine", hooks behind."""
    for inner in module.modules():
        yield "dispatch", inner._forward_pre_hooks
        yield "combine", inner._forward_hooks
