"""A part of a unit and its reducer: where its gradient is packed, and where its sums come. Parts are packed
in memory that units share (work.py), but for one that stays in the source: nobody reads that any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tagc import _library as lib
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.reducer import Reducer
from tagc.torch.exchange.work import Want

_LARGEST = 65504.0  # of fp16
Arrays = tuple[torch.Tensor, torch.Tensor]  # a reducer's gradient and its output
CHANGEABLE = {"format", "sparsity", "block", "result_format", "result_sparsity"}  # of a reducer


class ExchangedPart:
    """A part and its reducer."""

    def __init__(
        self,
        layout: layouts.Layout,
        part: layouts.Part,
        rank: int,
        reducer: Reducer,
        options: Mapping[str, Any],
    ) -> None:
        self._rank, self.reducer = rank, reducer
        self._place(layout, part)
        self.options = dict(options)
        self.n_saturated = 0  # in the last exchange

    def _place(self, layout: layouts.Layout, part: layouts.Part) -> None:
        self.layout, self.part, self.outputs = layout, part, layout.output_runs(part, self._rank)
        self._is_whole = part.is_whole(layout.n_elems)

    def has_values_of(self, layout: layouts.Layout, part: layouts.Part) -> bool:
        """Returns whether that part has the same values in the same order."""
        return _order(layout, part) == _order(self.layout, self.part)

    def can_become(self, layout: layouts.Layout, part: layouts.Part, options: Mapping[str, Any]) -> bool:
        """Returns whether the part has the same values in the same order, and differs in nothing but what a
        reducer can change."""
        if not self.has_values_of(layout, part):
            return False
        changed = {name for name in {*options, *self.options} if options.get(name) != self.options.get(name)}
        return not changed or (changed <= CHANGEABLE and options["exchange"] == lib.EXCHANGES["direct"])

    def change(self, layout: layouts.Layout, part: layouts.Part, options: Mapping[str, Any]) -> None:
        """Becomes that of another part that can_become() allows. The residual stays in place."""
        if options != self.options:
            self.reducer.change(options)
        self.options = dict(options)
        self._place(layout, part)

    def packs(self, source: torch.Tensor) -> bool:
        """Returns whether the reducer cannot read the source itself."""
        return not (self._is_whole and _is_usable(source, self.reducer.device, self.reducer.dtype))

    def can_stay(self, source: torch.Tensor) -> bool:
        """Returns whether the part, which is packed, can be moved together in the source."""
        is_usable = _is_usable(source, self.reducer.device, self.reducer.dtype)
        return is_usable and source.device.type == "cpu" and self.part.n_elems <= source.numel()

    def wants(self, source: torch.Tensor, target: torch.Tensor, stays: bool) -> list[Want]:
        """Returns what it needs for its gradient and for its sums."""
        reducer = self.reducer
        n_bytes = 0 if stays or not self.packs(source) else reducer.n_elems * reducer.dtype.itemsize
        has_place = self._writes(source, target) or self._sums_replace(source, stays)
        return [(reducer.device, -(-n_bytes // 4)), (reducer.device, 0 if has_place else reducer.n_output)]

    def _writes(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Returns whether the reducer can write the target itself."""
        is_apart = target.data_ptr() != source.data_ptr()
        return self._is_whole and is_apart and _is_usable(target, self.reducer.device)

    def _sums_replace(self, source: torch.Tensor, stays: bool) -> bool:
        """Returns whether the sums take the place of the gradient, once that is read."""
        is_source = stays or not self.packs(source)
        return self.reducer.is_in_place and not (is_source and source.data_ptr() % 4)

    def pack(self, source: torch.Tensor, target: torch.Tensor, lent: Arrays, stays: bool) -> Arrays:
        """Returns the packed gradient, and where its sums come. lent: what wants() asked for. Of all parts,
        the one that stays is packed last."""
        gradient, (packed, output), reducer = source, lent, self.reducer
        if self.packs(source):
            gradient = (source if stays else packed.view(reducer.dtype))[: reducer.n_elems]
            if stays:
                layouts.move_runs(source, self.part.runs)  # none goes to where a later one is
            else:
                layouts.copy_runs(source, gradient, self.part.runs)
            for run in self.part.gaps:
                gradient[run.target : run.target + run.length].zero_()
        if self._writes(source, target):
            output = target
        elif self._sums_replace(source, stays):
            n_elems = 4 * reducer.n_output // reducer.dtype.itemsize
            output = gradient.view(-1)[:n_elems].view(torch.float32)
        return gradient, output

    def wait(self) -> None:
        """Waits until the sums are there, or the work for them is enqueued."""
        self.reducer.wait()

    def put(self, output: torch.Tensor, target: torch.Tensor, scale: float) -> None:
        """Gives target the sums, which are there, times `scale`."""
        self.n_saturated = 0
        if scale != 1.0:
            output.mul_(scale)
        elif target.dtype == torch.float16 and output.device.type == "cpu":
            if self.options["op"] == lib.OPS["avg"]:
                self._saturate(output)
        if output.data_ptr() != target.data_ptr():
            layouts.copy_runs(output, target, self.outputs)
        else:  # they are in it, and have to be moved apart
            layouts.move_runs(target, reversed(self.outputs))

    def _saturate(self, output: torch.Tensor) -> None:
        """Keeps a mean within fp16: that of finite gradients fits, and what rounding and residuals put
        beyond waits in the residual."""
        least, most = torch.aminmax(output)
        if not max(-least.item(), most.item()) > _LARGEST or not (least.isfinite() and most.isfinite()):
            return
        rest = output - output.clamp(-_LARGEST, _LARGEST)
        output -= rest
        self.n_saturated = int(rest.count_nonzero())
        if (residual := self.reducer.residual()) is not None:
            n, is_all = rest.numel(), rest.numel() == residual.numel()
            # all ranks have the same rest of an all-reduce, the owner alone that of its row
            own = residual if is_all else residual[self._rank * n : (self._rank + 1) * n]
            own.add_(rest, alpha=1 if is_all else residual.numel() // n)
            self.reducer.set_residual(residual)

    def close(self) -> None:
        self.reducer.close()


def _order(layout: layouts.Layout, part: layouts.Part) -> list[tuple[str, int, int, int]]:
    """Returns which elements of which parameters are where in a part."""
    return [
        (layout.parameters[piece.parameter].name, piece.offset, piece.length, at) for piece, at in part.pieces
    ] + [("", 0, part.n_elems, part.shard)]


def _is_usable(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    return tensor.dtype == dtype and tensor.is_contiguous() and tensor.device == device
