"""Exchanges of gradients of which a part is missing. FSDP2 leaves out parameters without a gradient, and does
not say which. Such an exchange is dense, and the unit's residuals are kept for the next one that is whole."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from tagc.torch.exchange import internals
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.interfaces import Exchanged
from tagc.torch.exchange.model import Levels, Unit


class UnknownLayouts:
    """Of one handle."""

    def __init__(self) -> None:
        self._dense: dict[tuple[Any, ...], tuple[Unit, layouts.Layout]] = {}  # by unit, size and ranks
        self._warned: set[str] = set()  # names of units

    def dense(
        self, unit: Exchanged, n_elems: int, levels: Levels, all_reduce: bool
    ) -> tuple[Unit, layouts.Layout]:
        """Returns a unit that takes all n_elems values as one dense parameter."""
        world_size = levels.world_size
        key = (unit.name, n_elems, levels.between.ranks, world_size)
        if key not in self._dense:
            parameters = [layouts.Parameter(unit.name, (n_elems,), "dense")]
            if all_reduce:
                layout = layouts.bucket(parameters, world_size)
            else:
                layout = layouts.cut(parameters, [0], n_elems, world_size)
            self._dense[key] = Unit(unit.name, unit.follower), layout
        return self._dense[key]

    def units(self) -> Iterable[Unit]:
        return [unit for unit, _ in self._dense.values()]

    def clear(self) -> None:
        self._dense.clear()

    def warn(self, unit: Exchanged) -> None:
        """Warns once per unit."""
        if unit.name in self._warned:
            return
        self._warned.add(unit.name)
        held = ", ".join(sorted(unit.names_of_residuals()))
        if internals.can_reduce_unused():
            until = "in this backward pass"
            how = (
                "From the next one on torch gives zeros for them, as after "
                "model.set_reduce_scatter_unused_params(True). Call that before the first pass if ranks "
                "leave out different parameters"
            )
        else:
            until = "until they all have one again"
            how = (
                "model.set_reduce_scatter_unused_params(True) of torch 2.13 gives zeros for them. If all "
                "ranks leave out the same module, its own fully_shard() or requires_grad = False will do, "
                "too. If they leave out different parameters"
            )
        warnings.warn(
            f"tagc: some parameters of {unit.name} got no gradient; its gradients are sent uncompressed "
            f"{until}{f', with the residuals of {held} kept' if held else ''}. {how}, as experts that only "
            "some ranks use: without it torch adds up gradients of different parameters",
            stacklevel=2,
        )
