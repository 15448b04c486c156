"""A part of the model that the sites of LocalSteps synchronise together: the exchange of its pseudo-gradient,
and the outer step.

    anchor  (n,) fp32   the last synchronised values, the same bits on all sites
    base                the anchor in the parameter's dtype, as the parameter got it
    delta   (n,) fp32   the pseudo-gradient: base - parameter
    mean    (n,) fp32   of the received deltas and residuals of all sites, the same bits on all of them

    velocity <- momentum * velocity + mean        the outer step: SGD with Nesterov's momentum
    anchor   <- anchor - lr * (mean + momentum * velocity)

A fragment is exchanged as compress() exchanges a bucket. Values are selected within each compressed
parameter. n is the number of elements that a rank exchanges of the fragment's parameters. Sums and products
are separate calls of torch: a fused call rounds once on some processors and twice on others, and sites may
differ in their processors.

Where values are selected, a site keeps in its parameters what it has not sent: they become base - residual,
the next delta contains that, and the residual is zero. The mean of all sites' parameters is what it would be
had everything been sent, and no site takes back steps that it has made. Random shares of parameters that are
averaged, the others kept, are known as SPARTA."""

from __future__ import annotations

import contextlib
import ctypes
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.local.options import Settings
from tagc.local.sites import Site, Trained
from tagc.torch.extension import Comm, Gatherer, Levels, Sum, Unit, layouts

Stats = Sequence[tuple[Any, lib.ReducerStats]]  # of each part that was exchanged: its kind and n_real


def zeros(n_elems: int) -> torch.Tensor:
    return torch.zeros(n_elems, dtype=torch.float32, device="cpu")


class Place(NamedTuple):
    """The place of a parameter in a fragment's arrays: `length` elements from `start`. They are the rank's
    elements of the parameter from `first` on. All ranks of a DDP site reserve `room` elements for their
    slice."""

    trained: Trained
    start: int
    first: int
    length: int
    room: int

    @property
    def at(self) -> slice:
        return slice(self.start, self.start + self.length)

    def read(self) -> torch.Tensor:
        """Returns (length,) in the parameter's dtype, on its device."""
        return self.trained.local().reshape(-1)[self.first : self.first + self.length]

    def rounded(self, anchor: torch.Tensor) -> torch.Tensor:
        """Returns (length,) fp32: the value of the parameter after it got the anchor (n,)."""
        values, dtype = anchor[self.at], self.trained.parameter.dtype
        return values if dtype == torch.float32 else values.to(dtype).float()


class Fragment:
    """kinds: name of a parameter -> "compressed" or "dense". Local; connect() makes what exchanges it."""

    def __init__(
        self, index: int, trained: Sequence[Trained], kinds: Mapping[str, str], site: Site, settings: Settings
    ) -> None:
        self.index, self._settings, self._n_slices = index, settings, site.n_slices
        self.places: list[Place] = []
        self.n_elems = 0
        for one in trained:
            if n := one.local().numel():
                room = -(-n // site.n_slices)
                first = min(n, site.slice * room)
                self.places.append(Place(one, self.n_elems, first, min(room, n - first), room))
                self.n_elems += room
        self.n_real = sum(place.length for place in self.places)
        self._parameters = [  # split: exchanged apart from the others
            layouts.Parameter(place.trained.name, (place.length,), kinds[place.trained.name], split=(str(i),))
            for i, place in enumerate(self.places)
        ]
        self.is_gated = settings.gate is not None
        is_selected = settings.sparsity > 0 and not self.is_gated and settings.residual_decay == 1
        self.keeps = is_selected and not site.is_managed
        self.anchor = zeros(self.n_elems)
        self.velocity = zeros(self.n_elems if settings.outer_momentum else 0)
        # has no model where there are no elements or sites
        self.is_whole = False  # whether every value is sent, and nothing kept
        self.unit = Unit(f"fragment {index}", settings)
        self._gatherer: Gatherer | None = None
        self._gathered = zeros(0)  # (slices, n), if there are several

    def connect(self, comm: Comm, inner: Comm | None, op: str) -> None:
        """Makes its exchange, again for each set of sites where these join and leave. comm: to the other
        sites. inner: of the ranks of this one, if there are several. Collective."""
        self.disconnect()  # if not all fragments could connect before
        if self.n_real:
            starts = [place.start for place in self.places]
            layout = layouts.bucket(self._parameters, comm.world_size, starts, self.n_elems)
            self.unit.model_of(Sum(Levels(None, comm), layout, torch.float32, op))
        if self._n_slices > 1 and inner is not None:
            self._gathered = torch.zeros(self._n_slices, self.n_elems, dtype=torch.float32, device="cpu")
            self._gatherer = Gatherer(inner, self._gathered.numel(), "fp32", tag=self.index)

    def send(self, is_whole: bool) -> None:
        """Chooses whether the next exchange sends every value, in 8 bits at least, or as the options say.
        Collective."""
        if self.keeps and is_whole != self.is_whole and (model := self.unit.model) is not None:
            self.is_whole = is_whole
            self.unit.follower = self._settings.whole() if is_whole else self._settings
            self.unit.close()
            self.unit.model_of(model.sum)

    def tensors(self) -> list[torch.Tensor]:
        """Returns what it holds beside its unit."""
        unsent = self.residuals_on_the_wire() if self.unit.model is None else {}
        return [self.anchor, self.velocity, self._gathered, *unsent.values()]

    def views(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns name of a parameter -> its elements, (length,), of such an array."""
        return {place.trained.name: values[place.at] for place in self.places}

    def sizes(self, kind: str) -> dict[str, int]:
        """Returns name of a parameter -> its elements, of those that have such a state: state.py."""
        kinds = {parameter.name: parameter.kind for parameter in self._parameters}
        named = {place.trained.name: place.length for place in self.places}
        return {name: n for name, n in named.items() if kind != "residual" or kinds[name] == "compressed"}

    def kept(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns what is alike on all sites, sharing its memory, by name."""
        arrays = {"anchor": self.anchor} | (
            {"velocity": self.velocity} if self._settings.outer_momentum else {}
        )
        return {kind: self.views(array) for kind, array in arrays.items()}

    def load(self, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Loads that."""
        for kind, named in self.kept().items():
            for name, values in named.items():
                values.copy_(saved[kind][name])

    # ---- anchor and delta ----

    def take_anchor(self) -> None:
        for place in self.places:
            self.anchor[place.at].copy_(place.read())

    def take_delta(self, delta: torch.Tensor) -> None:
        if self._n_slices > 1:  # there is room between them
            delta.zero_()
        for place in self.places:
            delta[place.at].copy_(place.read())
            torch.sub(place.rounded(self.anchor), delta[place.at], out=delta[place.at])

    def hold_back(
        self, delta: torch.Tensor, residuals: Mapping[str, torch.Tensor], share: float
    ) -> dict[str, torch.Tensor]:
        """Moves the residuals to the delta, and leaves there what changes a weight in bf16. Returns the rest,
        by name of the parameter, which is for the next residual. share: by what the delta was multiplied, as
        a part of a mean."""
        held = {}
        for place, parameter in zip(self.places, self._parameters):
            if parameter.kind != "compressed":
                continue
            total = delta[place.at]
            if (residual := residuals.get(parameter.name)) is not None:
                total.add_(residual)
            stays = total.abs() < half_a_unit(place.rounded(self.anchor)).mul_(share)
            held[parameter.name] = torch.where(stays, total, 0.0)
            total.masked_fill_(stays, 0.0)
        self.set_residuals_on_the_wire({})
        return held

    def restore(self) -> None:
        """Gives the parameters the base. Local, so not for slices of DDP."""
        for place in self.places:
            local = place.trained.local()
            local.copy_(self.anchor[place.at].view(local.shape))

    # ---- the outer step ----

    def apply(self, flight: Flight, is_now: bool) -> None:
        """Takes the outer step. is_now: the parameters have not changed since begin() and become the base,
        the same bits everywhere, less what this site keeps. Otherwise they keep their changes since begin(),
        too, which the next delta contains."""
        mean, momentum, lr = flight.mean, self._settings.outer_momentum, self._settings.outer_lr
        kept = self.residuals_on_the_wire() if self.keeps and not self.is_whole else {}
        lost: dict[str, torch.Tensor] = {}  # of it, where parameters are rounded
        old = [] if is_now else [place.rounded(self.anchor).clone() for place in self.places]
        if momentum:
            self.velocity.mul_(momentum).add_(mean)
            mean.add_(self.velocity * momentum)
        self.anchor.sub_(mean.mul_(lr) if lr != 1 else mean)
        news = mean  # from here on: the value that the parameters get, or that is added to them
        for i, place in enumerate(self.places):
            base = place.rounded(self.anchor)
            new = news[place.at].copy_(base if is_now else base.sub(old[i]).add_(flight.delta[place.at]))
            if (unsent := kept.get(place.trained.name)) is not None:
                new.sub_(unsent)
                if is_now and (dtype := place.trained.parameter.dtype) != torch.float32:
                    lost[place.trained.name] = new.to(dtype).float().sub_(new)
        rows = news.view(1, -1)
        if self._gatherer is not None:
            self._gatherer.run(news, self._gathered.view(-1))
            rows = self._gathered
        for place in self.places:
            local = place.trained.local()
            values = rows[:, place.start : place.start + place.room].reshape(-1)[: local.numel()]
            values = values.view(local.shape).to(local.device)
            local.copy_(values if is_now else local.float().add_(values))
        if kept:
            self.set_residuals_on_the_wire(lost)

    # ---- residuals, as quorums ask for them ----

    def residuals_on_the_wire(self) -> dict[str, torch.Tensor]:
        """Returns name -> copy of the residual, (length,), of each parameter that has one. Local; not while
        the fragment is under way."""
        return self.unit.residuals_on_the_wire()

    def names_of_residuals(self) -> set[str]:
        """Returns the names in residuals_on_the_wire() whose residual is not zero."""
        return {name for name, values in self.residuals_on_the_wire().items() if values.any()}

    def set_residuals_on_the_wire(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replaces all residuals; those not named become zero."""
        self.unit.set_residuals_on_the_wire(values)

    def decay_residual(self) -> None:
        if self.unit.model is not None and self._settings.residual_decay != 1:
            self.unit.scale_residuals(self._settings.residual_decay)

    def checksum(self) -> int:
        """Returns a hash of the bits of anchor and velocity."""
        crc = 0
        for array in filter(torch.numel, (self.anchor, self.velocity)):  # zlib begins anew where nothing is
            crc = zlib.crc32((ctypes.c_char * array.nbytes).from_address(array.data_ptr()), crc)
        return crc

    def disconnect(self) -> None:
        """Ends the exchange and keeps the residuals."""
        self.unit.close()
        self._close_gatherer()

    def close(self) -> None:
        """Makes no tensor, because the garbage collector may call it while torch traces."""
        self.unit.free()
        self._close_gatherer()

    def _close_gatherer(self) -> None:
        if self._gatherer is not None:
            self._gatherer.close()
        self._gatherer = None


class Flight:
    """A fragment under way. Its arrays are made once; fragments use them in turn. is_delayed: whether
    parameters may change before the outer step, which then needs the delta; else the mean takes its place."""

    fragment: Fragment
    step = 0  # of begin()
    failure: Exception | None = None  # sent to the other ranks

    def __init__(self, n_elems: int, is_delayed: bool) -> None:
        self._arrays = [zeros(n_elems) for _ in range(1 + is_delayed)]
        self.delta, self.mean = self._arrays[0], self._arrays[-1]  # as much of them as the fragment has
        self._before: dict[str, torch.Tensor] | None = None  # residuals, once it is launched
        self._held: dict[str, torch.Tensor] = {}  # what changes no weight, and so waits
        self._share, self._is_begun = 1.0, False

    def tensors(self) -> list[torch.Tensor]:
        return [*self._arrays, *(self._before or {}).values(), *self._held.values()]

    def begin(self, fragment: Fragment, step: int, delta: Mapping[str, torch.Tensor] | None = None) -> None:
        """Computes the pseudo-gradient, or takes that of a checkpoint, by name. Local."""
        self.fragment, self.step, self.failure, self._before = fragment, step, None, None
        arrays = [array[: fragment.n_elems] for array in self._arrays]
        self.delta, self.mean = arrays[0], arrays[-1]
        self._held, self._share = {}, 1.0
        if delta is None:
            fragment.take_delta(self.delta)
            return
        for name, values in fragment.views(self.delta).items():
            values.copy_(delta[name])

    def is_finite(self) -> bool:
        """Returns whether the delta is."""
        if self.delta is self.mean:  # nothing has changed since
            self.fragment.take_delta(self.delta)
        return all(bool(values.isfinite().all()) for values in self.fragment.views(self.delta).values())

    def divide(self, n_sites: int) -> None:
        """Makes the delta a part of the mean of so many sites."""
        self.delta.div_(n_sites)
        self._share = 1 / n_sites

    def launch(self, number: int) -> None:
        """Starts exchange `number` of all sites, and returns. Collective in effect."""
        fragment, sent = self.fragment, self.delta
        self._before = fragment.residuals_on_the_wire()
        if fragment.is_gated:
            sent = self.mean.copy_(self.delta)  # where sums come, too
            self._held = fragment.hold_back(sent, self._before, self._share)
        if fragment.unit.model is not None:
            fragment.unit.model.begin(sent, self.mean, number, 1.0)
            self._is_begun = True

    def end(self) -> Stats:
        """Waits for it; Error if it failed."""
        if not self._is_begun or self.fragment.unit.model is None:
            return []
        self._is_begun = False
        stats = self.fragment.unit.model.end()
        if self._held:
            now = self.fragment.residuals_on_the_wire()
            for name, values in self._held.items():
                now[name] = values + now[name] if name in now else values
            self.fragment.set_residuals_on_the_wire(now)
            self._held = {}
        return stats

    def residuals(self) -> dict[str, torch.Tensor]:
        """Returns those of the fragment before the launch."""
        return self.fragment.residuals_on_the_wire() if self._before is None else self._before

    def undo(self) -> None:
        """Restores them, after end()."""
        if self._before is not None:
            self.fragment.set_residuals_on_the_wire(self._before)

    def drop(self) -> None:
        """Waits for it, ignores failures, and undoes it."""
        with contextlib.suppress(Error):
            self.end()
        self.undo()


def half_a_unit(values: torch.Tensor) -> torch.Tensor:
    """Returns half a unit in the last place of each of these values in bf16."""
    near = values.bfloat16()
    further = (near.view(torch.int16) + 1).view(torch.bfloat16)  # the next one away from zero
    return further.float().sub_(near.float()).abs_().mul_(0.5)


def cut(sizes: Sequence[int], n: int) -> list[range]:
    """Splits `sizes` into n ranges of neighbours with about equal sums; none is empty. n is at most
    len(sizes)."""
    total, done, at = sum(sizes), 0, 0
    ranges = []
    for i in range(n):
        begin = at
        most = len(sizes) - (n - i - 1)
        while at < most and (at == begin or i == n - 1 or (done + sizes[at] / 2) * n <= (i + 1) * total):
            done += sizes[at]
            at += 1
        ranges.append(range(begin, at))
    return ranges
