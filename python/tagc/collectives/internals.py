"""The private attributes of torch that this annex needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import nn

from tagc.torch.extension import reader

SEEN = {"Module._forward_pre_hooks": "2.9 to 2.14", "Module._forward_hooks": "2.9 to 2.14"}
_get, _ = reader(SEEN)


def hooks_of(module: nn.Module) -> Iterator[tuple[str, MutableMapping[int, Callable[..., Any]]]]:
    """Yields what each module in it has: "dispatch", hooks before forward; "combine", hooks behind."""
    for inner in module.modules():
        yield "dispatch", _get(inner, "Module._forward_pre_hooks")
        yield "combine", _get(inner, "Module._forward_hooks")
