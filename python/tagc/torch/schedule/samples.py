"""Samples of gradients, from which the schedule tells noise from a direction."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch

from tagc import _library as lib
from tagc.torch.exchange.layout import Layout


class Sample(NamedTuple):
    """Where a layout's input has the sampled elements of its parameters."""

    numbers: tuple[int, ...]  # of parameters, as the schedule numbers them
    counts: tuple[int, ...]  # elements of each
    places: torch.Tensor


def positions(n_elems: int) -> torch.Tensor:
    """Returns which of a parameter's elements are looked at: the same everywhere, in ascending order."""
    numbers, n = (ctypes.c_uint64 * lib.SCHEDULE_SAMPLE)(), ctypes.c_size_t()
    lib.load().tagc_schedule_positions(n_elems, numbers, ctypes.byref(n))
    return torch.tensor(numbers[: n.value], dtype=torch.long, device="cpu")


class Samples:
    """Of one model. numbers: name of a parameter -> its number."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self._numbers = numbers
        self._of_layouts: weakref.WeakKeyDictionary[Layout, Sample] = weakref.WeakKeyDictionary()

    def of(self, layout: Layout, device: torch.device) -> Sample:
        """Returns the sample of a layout, with places on that device."""
        sample = self._of_layouts.get(layout)
        if sample is None or sample.places.device != device:
            sample = self._of_layouts[layout] = self._made(layout, device)
        return sample

    def _made(self, layout: Layout, device: torch.device) -> Sample:
        places, counts, numbers = [], [], []
        for i, parameter in enumerate(layout.parameters):
            if parameter.name not in self._numbers or not parameter.numel:
                continue
            wanted = positions(parameter.numel)
            sampled = torch.cat(
                [
                    wanted[(wanted >= piece.offset) & (wanted < piece.offset + piece.length)]
                    - piece.offset
                    + piece.start
                    for piece in layout.pieces_of(i)
                ]
            )
            places.append(sampled)
            counts.append(len(sampled))
            numbers.append(self._numbers[parameter.name])
        joined = torch.cat(places) if places else torch.empty(0, dtype=torch.long, device="cpu")
        return Sample(tuple(numbers), tuple(counts), joined.to(device))
