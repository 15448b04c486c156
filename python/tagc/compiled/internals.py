"""The private attributes of torch that compiled models need beside those of tagc.torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tagc.torch.extension import TESTED, reader

SEEN = {
    "Module._parameters": TESTED,
    "Module._apply": TESTED,
    "torch._library.effects.EffectType": "2.10 to 2.15",
    "CustomOpDef.register_effect": "2.10 to 2.15",
}
_get, _find = reader(SEEN)


def own_parameter(module: Any, name: str) -> Any:
    """Returns a parameter that a property of the module's class hides."""
    return _get(module, "Module._parameters")[name]


def apply_within(around: Callable[[Any], AbstractContextManager[None]]) -> tuple[str, Callable[..., Any]]:
    """Returns (name, method) of a class of modules whose tensors .to() and such change within
    around(module)."""

    def apply(module: Any, *arguments: Any, **options: Any) -> Any:
        with around(module):
            return _get(super(type(module), module), "Module._apply")(*arguments, **options)

    return "_apply", apply


def keep_order_of(operator: Any) -> None:
    """Makes compilers keep the order of calls of a custom operator, by a value that goes from each to the
    next."""
    register = _find(operator, "CustomOpDef.register_effect")
    effects = sys.modules.get("torch._library.effects")
    if register is not None and effects is not None:
        register(_get(effects, "torch._library.effects.EffectType").ORDERED)
