"""The parameters that a hook exchanges together: what exchanges them, and their residuals by name. When its
layout becomes another one (a parameter without a gradient, rebuilt buckets), the unit keeps what was not
sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.model import Follower, Sum, UnitModel, stowable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ReduceOp = dist.ReduceOp


class LocalFailure(Error):
    """A failure of this rank's device, while other ranks wait for its messages."""


def scale_of(op: Any, world_size: int) -> float:
    """Returns the factor of the sum over ranks: for AVG, SUM or PREMUL_SUM."""
    if op == ReduceOp.AVG:
        return 1.0 / world_size
    if op == ReduceOp.SUM:
        return 1.0
    if op == ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        return float(factor)
    raise Error("unsupported", f"reduce op {op}: tagc has AVG, SUM and PREMUL_SUM")


def kind_of(op: Any, world_size: int) -> tuple[str, float]:
    """Returns the op of reducers, and the factor that their sums get."""
    factor = scale_of(op, world_size)
    return ("avg", 1.0) if factor == 1.0 / world_size else ("sum", factor)


def check_tensors(source: torch.Tensor, target: torch.Tensor, what: str) -> None:
    for tensor in (source, target):
        if tensor.dtype not in DTYPES:
            raise Error("unsupported", f"{what} of {tensor.dtype}: must be fp32, bf16 or fp16")
    if source.dtype != target.dtype:
        raise Error("unsupported", f"{what} of {source.dtype} into {target.dtype}: must be the same")
    if source.device != target.device:
        raise Error("unsupported", f"{what} on {source.device} into {target.device}: must be the same")


class Unit:
    """name: of the module. follower: says how its parameters are sent. own: has the pieces of every parameter
    that this rank exchanges, where the ranks of a replica have parts of a residual (Place.part); None: all of
    them."""

    rests = False

    def __init__(self, name: str, follower: Follower, own: layouts.Layout | None = None) -> None:
        self.name, self.follower, self._own = name, follower, own
        self.model: UnitModel | None = None
        # residuals of parameters that keep none now, in wire order; the model's, too
        self._stowed: dict[str, torch.Tensor] = {}

    # ---- as of interfaces.Exchanged ----

    def find_unit(self) -> Unit | None:
        return self

    def make_unit(self) -> Unit:
        return self

    def model_of(self, wanted: Sum, rests: bool = False) -> UnitModel:
        """Returns what exchanges that, with the residuals that there are, made or changed if need be. rests:
        as of a UnitModel. Collective."""
        model = self.model
        if model is None or not model.is_alike(wanted):
            return self._open_model(wanted, rests)
        if model.layout is not wanted.layout:
            model.follow(wanted.layout)
        return model

    def _open_model(self, wanted: Sum, rests: bool) -> UnitModel:
        try:
            self.close()
        except Error as problem:
            raise LocalFailure(problem.status, str(problem)) from problem
        held, layout, levels = None, wanted.layout, wanted.levels
        are_chunks = not layout.is_cut and not (layout.all_reduce and self._own is not None)
        if levels.within is not None and are_chunks:
            n_owners = levels.per_host if layout.all_reduce else levels.world_size
            held = range(levels.place, n_owners, levels.per_host)
        self.model = UnitModel(self.name, wanted, self.follower, rests, held, self._stowed)
        return self.model

    # ---- residuals by parameter ----

    def residuals_on_the_wire(self) -> dict[str, torch.Tensor]:
        """Returns copies as a UnitModel does. Local."""
        if self.model is not None:
            return self.model.residuals_on_the_wire()
        return {name: values.clone() for name, values in self._stowed.items()}

    def names_of_residuals(self) -> set[str]:
        """Returns the names in residuals_on_the_wire()."""
        return set(self._stowed) if self.model is None else self.model.names_of_residuals()

    def set_residuals_on_the_wire(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replaces all residuals by name -> (numel,) in wire order, of which it takes this rank's part; those
        not named become zero."""
        stowed = {name: stowable(tensor) for name, tensor in values.items()}
        if self._own is not None:
            # a checkpoint of another number of ranks has whole ones, which all ranks of a replica get
            for name, gaps in self._own.gaps_by_name().items():
                for gap in gaps if name in stowed else ():
                    stowed[name][gap].fill_(-0.0)
        if self.model is not None:
            self.model.set_residuals_on_the_wire(stowed)
        else:
            self._stowed.clear()
            self._stowed.update(stowed)

    def scale_residuals(self, factor: float) -> None:
        if self.model is not None:
            self.model.scale_residuals(factor)
            return
        for values in self._stowed.values():
            values.mul_(factor)

    def free(self) -> None:
        """Frees the model and residuals. It makes no tensor, because the garbage collector may call it while
        torch traces."""
        if self.model is not None:
            self.model.free()
        self.model = None
        self._stowed.clear()

    def close(self) -> None:
        """Ends the model, and keeps the residuals for the next one."""
        model, self.model = self.model, None
        if model is not None:
            model.close()
