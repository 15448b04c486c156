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

import base64
import math
import struct
from typing import NamedTuple

import torch

WINDOW = 20
SAMPLE = 512  # elements of a parameter that are looked at
FAINT = 0.03  # elements below this times the parameter's root mean square are not


class _Sample(NamedTuple):
    names: tuple
    index: torch.Tensor  # of the layout's input
    counts: tuple  # elements of each name


def positions(n_elems, n_sample=SAMPLE):
    """Which of a parameter's elements are looked at: spread out, the same everywhere, in order."""
    if n_elems <= n_sample:
        return torch.arange(n_elems)
    return (torch.arange(n_sample) * 2654435761 % n_elems).unique()


def _sample(layout, names):
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

    def __init__(self, names):
        self._names = set(names)
        self._window = {}  # name -> (exchanges, sums (n,), squares (n,))
        self._layout = self._open = None  # of the last call, and its sums side by side

    def add(self, layout, gradient):
        """A gradient of that layout, on this rank. Returns the names of those whose window is full."""
        if not self._names:
            return ()
        if self._layout is not layout:
            self._turn(layout)
        sample, counts, sums, squares = self._open
        if not sample.names:
            return ()
        values = gradient.index_select(0, sample.index).float()
        sums.add_(values)
        squares.addcmul_(values, values)
        for i in range(len(counts)):
            counts[i] += 1
        return tuple(name for name, n in zip(sample.names, counts) if n >= WINDOW)

    def take(self, names):
        """[(sum of s^2 / q, elements that it is over)] of each, on this rank, NaN where one was not finite; their windows begin anew."""
        self._close()
        found = []
        for name in names:
            _, sums, squares = self._window.pop(name)
            if not math.isfinite(squares.sum()):
                found.append((math.nan, 1.0))
                continue
            counts = squares > FAINT**2 * squares.mean()
            found.append(((sums[counts].double().square() / squares[counts]).sum().item(), float(counts.sum())))
        return found

    def scale(self, factor):
        self._close()
        self._window = {name: (n, sums * factor, squares * factor**2) for name, (n, sums, squares) in self._window.items()}

    def _turn(self, layout):
        self._close()
        sample = _sample(layout, self._names)
        had = [self._window.get(name) for name in sample.names]
        had = [w if w is not None and len(w[1]) == n else (0, torch.zeros(n), torch.zeros(n)) for w, n in zip(had, sample.counts)]
        counts = [n for n, _, _ in had]
        empty = torch.empty(0)
        self._layout = layout
        self._open = sample, counts, torch.cat([s for _, s, _ in had] or [empty]), torch.cat([q for _, _, q in had] or [empty])

    def _close(self):
        """Sums side by side -> sums by name."""
        if self._open is None:
            return
        sample, counts, sums, squares = self._open
        for name, n, own_sums, own_squares in zip(sample.names, counts, sums.split(sample.counts), squares.split(sample.counts)):
            self._window[name] = n, own_sums.clone(), own_squares.clone()
        self._layout = self._open = None

    # ---- in checkpoints ----

    def state(self):
        """Windows under way, as text by name."""
        self._close()
        return {name: [n, base64.b64encode(torch.cat([sums, squares]).numpy().tobytes()).decode()]
                for name, (n, sums, squares) in self._window.items()}

    def load(self, state):
        """In place of the windows under way."""
        self._layout = self._open = None
        self._window = {}
        for name, (n, text) in state.items():
            if name in self._names:
                values = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)
                self._window[name] = (n, *(half.clone() for half in values.chunk(2)))


def fits_window(window):
    """Whether this is one of state()."""
    try:
        n, text = window
        n_bytes = len(base64.b64decode(text, validate=True))
    except (ValueError, TypeError):
        return False
    return isinstance(n, int) and 0 <= n < WINDOW and 0 < n_bytes <= 8 * SAMPLE and n_bytes % 8 == 0


def pooled(comm, mine):
    """Collective: the coherence of each, from take() of every rank; None where there was no gradient, NaN where it was not
    finite."""
    packed = [struct.unpack(f"<{2 * len(mine)}d", data) for data in
              comm.all_gather(struct.pack(f"<{2 * len(mine)}d", *(value for pair in mine for value in pair)))]
    total = [sum(values) for values in zip(*packed)]
    return [None if weight == 0 and signal == 0 else signal / weight if weight > 0 and math.isfinite(signal) else math.nan
            for signal, weight in zip(total[0::2], total[1::2])]
