"""One exchange that a hook asks for, and the agreement of all ranks before it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any

import torch

from tagc._library import Error
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.interfaces import Exchanged
from tagc.torch.exchange.layout import Layout
from tagc.torch.exchange.unit import check_tensors, scale_of

FindLayout = Callable[[], "Layout | None"]  # of the gradient; None: its parameters are unknown


class Call:
    """Checks everything that must be checked in the hook itself."""

    def __init__(self, unit: Exchanged, comm: Comm, source: torch.Tensor, target: torch.Tensor, op: Any, find_layout: FindLayout,
                 failure: BaseException | None, loss_scale: Callable[[], float], known_scale: float | None) -> None:
        self.unit, self.comm, self.op = unit, comm, op
        self.layout: Layout | None = None
        self.scale, self.failure = 1.0, failure
        self._numbers: dict[str, Any] = {}
        try:
            if failure is not None:
                return
            check_tensors(source, target, "gradient")
            layout = self.layout = find_layout()
            n_output = source.numel() if layout is None or layout.all_reduce else layout.row
            if target.numel() != n_output and (layout or target.numel() * comm.world_size != n_output):
                raise Error("mismatch", f"the output has {target.numel()} elements, must have {n_output}")
            self.scale = loss_scale() if known_scale is None else known_scale
            self._numbers = {"elements": source.numel(), "dtype": source.dtype, "parameters": _fingerprint(layout),
                             "factor": scale_of(op, comm.world_size), "loss scale": self.scale}
        except Exception as problem:
            self.failure = problem

    def agree(self) -> float:
        """Collective. Returns the seconds that it took."""
        begin = time.perf_counter()
        self.comm.agree(f"gradients of {self.unit.name}", self._numbers, self.failure)
        return time.perf_counter() - begin


def _fingerprint(layout: Layout | None) -> str:
    if layout is None:
        return "unknown"
    names = zlib.crc32("\n".join(f"{parameter.name} {parameter.stage} {parameter.kept}" for parameter in layout.parameters).encode())
    return f"{len(layout.parameters)} ({names:08x})"
