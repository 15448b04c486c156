"""When a parameter's gradient has become what selection is made for.

Selection sends a value once in many exchanges, and until then it waits in the residual. Where gradients are mostly noise
that costs nothing: what has gathered meanwhile is as large as the steps that a dense exchange would have made. Where they
point the same way exchange after exchange, as they do in a model that has just begun to learn, Adam makes one step of what
would have been many, and training falls behind.

So each parameter begins with every value in few bits, and a sample of its gradient is looked at over windows of WINDOW
exchanges: with s the sum of an element's gradients in a window and q that of their squares, s^2 / q is 1 for noise and
WINDOW for a gradient that does not change. The mean over elements is the parameter's coherence; it leaves out those whose
gradients are next to nothing, such as rows of an embedding that the text never uses, once the model has learnt so. Each
element counts alike, as in Adam's steps, and not by its size: in an embedding the few rows of frequent tokens have nearly
all of the gradient's norm. All ranks decide from the sums over ranks, and so alike."""

from __future__ import annotations

import base64
import math
import struct
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.layout import Layout

WINDOW = 20
SAMPLE = 512  # elements of a parameter that are looked at
FAINT = 0.03  # elements below this times the parameter's root mean square are not


class _Sample(NamedTuple):
    names: tuple[str, ...]
    places: torch.Tensor  # in the layout's input
    counts: tuple[int, ...]  # elements of each name


class _Window:
    """Of one parameter: n exchanges, and the sums and squares of its sampled elements, which may be views."""

    def __init__(self, n: int, sums: torch.Tensor, squares: torch.Tensor) -> None:
        self.n, self.sums, self.squares = n, sums, squares

    def take(self) -> tuple[float, float]:
        """(sum of s^2 / q, elements that it is over), NaN where one was not finite. Begins anew."""
        sums, squares = self.sums.double(), self.squares.clone()
        self.n = 0
        self.sums.zero_()
        self.squares.zero_()
        if not math.isfinite(squares.sum()):
            return math.nan, 1.0
        counts = squares > FAINT**2 * squares.mean()
        return (sums[counts].square() / squares[counts]).sum().item(), float(counts.sum())


class _Open(NamedTuple):
    """What add() needs for a layout: the windows of its parameters side by side."""

    sample: _Sample
    sums: torch.Tensor
    squares: torch.Tensor
    windows: tuple[_Window, ...]  # of each name, views of these


def positions(n_elems: int, n_sample: int = SAMPLE) -> torch.Tensor:
    """Which of a parameter's elements are looked at: spread out, the same everywhere, in order."""
    if n_elems <= n_sample:
        return torch.arange(n_elems)
    return (torch.arange(n_sample) * 2654435761 % n_elems).unique()


def _sample(layout: Layout, names: Collection[str]) -> _Sample:
    index, counts, chosen = [], [], []
    for i, parameter in enumerate(layout.parameters):
        if parameter.name not in names or not parameter.numel:
            continue
        wanted = positions(parameter.numel)
        own = torch.cat([wanted[(wanted >= piece.offset) & (wanted < piece.offset + piece.length)] - piece.offset + piece.start
                         for piece in layout.pieces_of(i)])
        index.append(own)
        counts.append(len(own))
        chosen.append(parameter.name)
    return _Sample(tuple(chosen), torch.cat(index) if index else torch.empty(0, dtype=torch.long), tuple(counts))


class Watch:
    """names: of the parameters that are looked at."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)
        self._windows: dict[str, _Window] = {}  # name -> _Window
        self._open: dict[Layout, _Open] = {}  # layout -> _Open; no two have a name in common
        self._samples: weakref.WeakKeyDictionary[Layout, _Sample] = weakref.WeakKeyDictionary()  # layout -> _Sample

    def add(self, layout: Layout, gradient: torch.Tensor) -> tuple[str, ...]:
        """A gradient of that layout, on this rank. Returns the names of those whose window is full."""
        if not self._names:
            return ()
        found = self._open.get(layout) or self._turn(layout)
        if not found.windows:
            return ()
        if found.sample.places.device != gradient.device:
            found = self._open[layout] = found._replace(sample=found.sample._replace(places=found.sample.places.to(gradient.device)))
        values = gradient.index_select(0, found.sample.places).float().cpu()
        found.sums.add_(values)
        found.squares.addcmul_(values, values)
        for window in found.windows:
            window.n += 1
        return tuple(name for name, window in zip(found.sample.names, found.windows) if window.n >= WINDOW)

    def take(self, names: Iterable[str]) -> list[tuple[float, float]]:
        """[(sum of s^2 / q, elements that it is over)] of each, on this rank, NaN where one was not finite; their windows begin anew."""
        return [self._windows[name].take() for name in names]

    def squares(self, names: Iterable[str]) -> list[tuple[float, float]]:
        """[(sum of squares of the sampled elements, how many they are)] of each window so far, on this rank. Before take()."""
        windows = [self._windows[name] for name in names]
        return [(window.squares.sum(dtype=torch.float64).item(), float(window.n * len(window.squares))) for window in windows]

    def scale(self, factor: float) -> None:
        for window in self._windows.values():
            window.sums.mul_(factor)
            window.squares.mul_(factor**2)

    def _turn(self, layout: Layout) -> _Open:
        """Windows of that layout's parameters go on, side by side now."""
        sample = self._samples.get(layout)
        if sample is None:
            sample = self._samples[layout] = _sample(layout, self._names)
        for other in [other for other, found in self._open.items() if not set(found.sample.names).isdisjoint(sample.names)]:
            for name in self._open.pop(other).sample.names:
                window = self._windows[name]
                window.sums, window.squares = window.sums.clone(), window.squares.clone()
        sums, squares, windows = torch.zeros(len(sample.places)), torch.zeros(len(sample.places)), []
        for name, n, own_sums, own_squares in zip(sample.names, sample.counts, sums.split(sample.counts), squares.split(sample.counts)):
            before, window = self._windows.get(name), _Window(0, own_sums, own_squares)
            if before is not None and len(before.sums) == n:
                window.n = before.n
                own_sums.copy_(before.sums)
                own_squares.copy_(before.squares)
            self._windows[name] = window
            windows.append(window)
        found = self._open[layout] = _Open(sample, sums, squares, tuple(windows))
        return found

    # ---- in checkpoints ----

    def state(self) -> dict[str, Any]:
        """Windows under way, as text by name."""
        return {name: [window.n, base64.b64encode(torch.cat([window.sums, window.squares]).numpy().tobytes()).decode()]
                for name, window in self._windows.items() if window.n}

    def load(self, state: Mapping[str, Any]) -> None:
        """Replaces the open windows."""
        self._open, self._windows = {}, {}
        for name, (n, text) in state.items():
            if name in self._names:
                values = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)
                self._windows[name] = _Window(n, *(half.clone() for half in values.chunk(2)))


def fits_window(window: Any) -> bool:
    """Whether this is one of state()."""
    try:
        n, text = window
        n_bytes = len(base64.b64decode(text, validate=True))
    except (ValueError, TypeError):
        return False
    return isinstance(n, int) and 0 <= n < WINDOW and 0 < n_bytes <= 8 * SAMPLE and n_bytes % 8 == 0


def pooled(comm: Comm, mine: list[float]) -> list[float]:
    """Collective: the sum over ranks of each of a list of numbers, which is as long everywhere."""
    packed = [struct.unpack(f"<{len(mine)}d", data) for data in comm.all_gather(struct.pack(f"<{len(mine)}d", *mine))]
    return [sum(values) for values in zip(*packed)]


def coherence_of(signal: float, weight: float) -> float | None:
    """From take() of every rank, summed: None where there was no gradient, NaN where it was not finite."""
    if weight == 0 and signal == 0:
        return None
    return signal / weight if weight > 0 and math.isfinite(signal) else math.nan
