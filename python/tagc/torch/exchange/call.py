"""What a hook asks for: the exchange of a gradient, and the agreement of all ranks on it."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.exchange.comm import Comm, agree_in_turn, compared
from tagc.torch.exchange.interfaces import Exchanged
from tagc.torch.exchange.layout import Layout
from tagc.torch.exchange.model import Levels, PartStats
from tagc.torch.exchange.unit import check_tensors, scale_of

FindLayout = Callable[[], "Layout | None"]  # of the gradient; None: its parameters are unknown
Record = Callable[["Reduction", PartStats, float], object]  # of its outcome, and how long it took


class Gradient(NamedTuple):
    """What a hook hands over, and how it is to be exchanged.

    group: over whose ranks it is summed.
    find_layout() -> the layout of `source`; None if some parameters are missing: then this exchange is dense
        and residuals do not change.
    waits: whether later work of the current stream waits for the result; or staging.FOR_INPUT.
    recurs: whether this unit comes once in a step.
    number: from which rounding derives, of a call that belongs to no step; None: the step's.
    agrees: whether, in CPU memory, ranks agree before it by messages of its own, because they may come with
        other calls.
    may_last: whether, in CPU memory, the sums need be there at the end of the pass alone."""

    unit: Exchanged
    group: Any
    source: torch.Tensor
    target: torch.Tensor
    op: Any
    find_layout: FindLayout
    waits: int = True
    recurs: bool = True
    number: int | None = None
    agrees: bool = False
    may_last: bool = False


class Reduction:
    """The exchange of a gradient, which it does not keep. It checks everything that must be checked in the
    hook itself.

    failure: of this rank, which tells the others.
    loaded: of which exchange the state is that this rank has loaded.
    opens_step: whether it is the first of an exchange of the whole model.
    agrees_first: whether ranks agree by messages of their own, before the exchange."""

    is_agreed = False  # whether all ranks have
    agree_s = 0.0  # how long that took
    n_within = 0  # bytes to ranks of the host
    step = 0  # the number of that exchange of the model, which whoever begins it sets

    def __init__(
        self,
        gradient: Gradient,
        levels: Levels,
        loss_scale: Callable[[], float],
        failure: BaseException | None,
        loaded: int | None,
        opens_step: bool,
        agrees_first: bool,
    ) -> None:
        source, target = gradient.source, gradient.target
        self.unit, self.op, self.number, self.waits = (
            gradient.unit, gradient.op, gradient.number, gradient.waits
        )  # fmt: skip
        self.levels, self.failure = levels, failure
        self.opens_step, self.agrees_first = opens_step, agrees_first
        self.n_elems, self.dtype = source.numel(), source.dtype
        self.n_bytes = self.n_elems * source.element_size()
        self.is_all_reduce = source.numel() == target.numel()
        self.layout: Layout | None = None
        self.loss_scale, self._numbers = 1.0, dict[str, Any]()
        try:
            if failure is not None:
                return
            check_tensors(source, target, "gradient")
            for tensor in (source, target):
                if tensor.layout != torch.strided or not tensor.is_contiguous():
                    raise Error("unsupported", f"a gradient of {tensor.layout}: must be dense and contiguous")
            layout = self.layout = gradient.find_layout()
            n_output = source.numel() if layout is None or layout.all_reduce else layout.row
            world_size = levels.world_size
            if target.numel() != n_output and (layout or target.numel() * world_size != n_output):
                raise Error("mismatch", f"the output has {target.numel()} elements, must have {n_output}")
            self.loss_scale = loss_scale()
            self._numbers = {
                "elements": source.numel(),
                "dtype": source.dtype,
                "parameters": _fingerprint(layout),
                "factor of op": scale_of(self.op, world_size),
                "loss scale": self.loss_scale,
                "loaded at exchange": loaded,
            }
        except Exception as problem:
            self.failure = problem

    @property
    def comm(self) -> Comm:
        """The connection between hosts."""
        return self.levels.between

    @property
    def what(self) -> str:
        return f"gradients of {self.unit.name}"

    def word(self) -> int:
        """Returns a checksum of what all ranks must have alike, for libtagc to compare."""
        data = struct.pack("=7q", *compared(self.what, self._numbers)[0])
        return int(lib.load().tagc_checksum(data, len(data)))

    def agree(self) -> None:
        """Makes all ranks agree on it, or raise the same Error, also of one that has failed. Collective: over
        the ranks of the host, of which one may have failed, and then over those of this place in all
        hosts."""
        begin = time.perf_counter()
        agree_in_turn(self.levels, self.what, self._numbers, self.failure)
        self.is_agreed, self.agree_s = True, time.perf_counter() - begin


def _fingerprint(layout: Layout | None) -> str:
    if layout is None:
        return (
            "unknown, because some got no gradient (model.set_reduce_scatter_unused_params(True), of torch "
            "2.13 or newer, gives them zeros)"
        )
    names = zlib.crc32(
        "\n".join(
            f"{parameter.name} {parameter.level} {parameter.sparsity}" for parameter in layout.parameters
        ).encode()
    )
    return f"{len(layout.parameters)} ({names:08x})"
