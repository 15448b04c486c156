"""Calls without a key. No residual takes what a format rounds off, so values are rounded at random before: to
the next lower or higher one that the format has, with such odds that the mean is right."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from tagc.torch.exchange.exchanged_part import Arrays, ExchangedPart
from tagc.torch.exchange.layout import Layout
from tagc.torch.exchange.unit import Unit
from tagc.torch.exchange.work import Work
from tagc.torch.schedule import policy
from tagc.torch.schedule.options import EVERY_VALUE_BLOCK, Options

# format -> (its largest integer, values that share a scale), as libtagc's reducers and gatherers have them
OF_REDUCERS = {"int8": (127, 128), "int4": (7, EVERY_VALUE_BLOCK)}
_OF_GATHERERS = 128, 256  # of int8
_PIECE = 1 << 20  # elements that are rounded at once, for which it takes memory


def values_of(options: Options, n_elems: int) -> str | None:
    """Returns the format of what tensors of so many elements are sent in; None: as they are. Without a
    residual there is no selection, and fewer than 4 bits are too coarse."""
    is_coded = options.exchange == "direct" and options.values not in ("fp32", "bf16")
    if not is_coded or n_elems < policy.MIN_ELEMS:
        return None
    return options.values if options.values in OF_REDUCERS else "int4"


def seed_of(*numbers: int) -> int:
    return zlib.crc32(repr(numbers).encode())


def round_at_random(values: torch.Tensor, most: int, block: int, seed: int) -> None:
    """Rounds rows (n_rows, n) in place, so that a format whose scale is a block's largest value over `most`
    has all of them. The largest stays as it is."""
    generator = torch.Generator(values.device).manual_seed(seed)
    for row in values:
        for piece in row.split(_PIECE):
            own = torch.nn.functional.pad(piece.float(), (0, -len(piece) % block)).view(-1, block)
            largest = own.abs().amax(1, keepdim=True)
            scale = (largest / most).bfloat16().float()
            odds = torch.rand(own.shape, generator=generator, device=own.device)
            rounded = (own / scale + odds).floor_().clamp_(-most, most).mul_(scale)
            is_kept = (own.abs() == largest) | (scale < torch.finfo(torch.float32).tiny)
            piece.copy_(torch.where(is_kept, own, rounded).view(-1)[: len(piece)])


def rounded_for_gather(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns them as a gather in int8 has them."""
    values = values.clone()
    round_at_random(values.view(1, -1), *_OF_GATHERERS, seed)
    return values


class OnceUnit(Unit):
    """Of tensors of one size."""

    seed = 0  # of the next exchange, another one on each rank

    def __init__(self, name: str, values: str, options: Options) -> None:
        super().__init__(name, lambda *_: options.direct(values, 0.0))
        self._format = OF_REDUCERS[values]

    can_be_alone = False

    def alone(self, layout: Layout, makes: bool = False) -> Unit | None:
        return None

    def reduce(self, *arguments: Any, **options: Any) -> Any:
        self.scale_residuals(0.0)  # what the last tensor has left is none of this one's
        return super().reduce(*arguments, **options)

    def _pack(self, work: Work, source: torch.Tensor, target: torch.Tensor) -> dict[ExchangedPart, Arrays]:
        arrays = super()._pack(work, source, target)
        for each, (gradient, _) in arrays.items():
            round_at_random(gradient.view(-1, each.part.shard), *self._format, self.seed)
        return arrays
