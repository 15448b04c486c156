"""A part of the model that the sites of LocalSteps synchronise together: the exchange of its pseudo-gradient,
and the outer step.

    anchor  (n,) fp32   the last synchronised values, the same bits on all sites
    base                the anchor in the parameter's dtype, as the parameter got it
    delta   (n,) fp32   the pseudo-gradient: base - parameter
    mean    (n,) fp32   of the received deltas and residuals of all sites, the same bits on all of them

    velocity <- momentum * velocity + mean        the outer step: SGD with Nesterov's momentum
    anchor   <- anchor - lr * (mean + momentum * velocity)

Each compressed parameter has a reducer of its own, which keeps the residual; all dense ones share one. n is
the number of elements that a rank exchanges of the fragment's parameters, each followed by padding. Sums and
products are separate calls of torch: a fused call rounds once on some processors and twice on others, and
sites may differ in their processors."""

from __future__ import annotations

import contextlib
import ctypes
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.local.sites import Site, Trained
from tagc.torch.extension import Comm, Gatherer, Reducer


class Outer(NamedTuple):
    lr: float
    momentum: float


class Place(NamedTuple):
    """The place of a parameter in a fragment's arrays: `length` elements from `start`. They are the rank's
    elements of the parameter from `first` on. All ranks of a DDP site reserve `room` elements for their
    slice."""

    trained: Trained
    kind: str  # "compressed" or "dense"
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


class Part(NamedTuple):
    """The parameters of one reducer."""

    kind: str
    start: int
    n_elems: int  # with padding
    n_real: int

    @property
    def at(self) -> slice:
        return slice(self.start, self.start + self.n_elems)


class Flight:
    """A fragment under way. Its arrays are made once; fragments use them in turn."""

    def __init__(self, n_elems: int) -> None:
        self.delta, self.mean, self.residual = (
            torch.zeros(n_elems, dtype=torch.float32, device="cpu") for _ in range(3)
        )
        self.fragment: Fragment
        self.step = 0  # of begin()
        self.failure: Exception | None = None  # sent to the other ranks
        self.is_launched = False
        self._begun: list[tuple[Part, Reducer]] = []

    def tensors(self) -> list[torch.Tensor]:
        return [self.delta, self.mean, self.residual]

    def begin(self, fragment: Fragment, step: int) -> None:
        """Computes the pseudo-gradient. Local."""
        self.fragment, self.step, self.failure, self.is_launched = fragment, step, None, False
        fragment.take_delta(self.delta)

    def launch(self) -> None:
        """Starts the exchange, and returns. Collective in effect."""
        self.is_launched = True
        self.fragment.copy_residual(self.residual)
        for part, reducer in zip(self.fragment.parts, self.fragment.reducers):
            reducer.begin(self.delta[part.at], self.mean[part.at])
            self._begun.append((part, reducer))

    def end(
        self, goes_on: Callable[[list[str]], object] | None = None
    ) -> list[tuple[Part, lib.ReducerStats]]:
        """Waits for all reducers, also after a failure, because peers wait for this rank. Raises the first
        failure. goes_on: called with the names of parameters whose exchange is over."""
        stats, failure = [], None
        for part, reducer in self._begun:
            try:
                stats.append((part, reducer.end()))
                if goes_on is not None:
                    goes_on(
                        [
                            place.trained.name
                            for place in self.fragment.places
                            if part.start <= place.start < part.start + part.n_elems
                        ]
                    )
            except Error as problem:
                failure = failure or problem
        self._begun = []
        if failure is not None:
            raise failure
        return stats

    def undo(self) -> None:
        """Restores the residual from before launch(), after end()."""
        self.fragment.set_residual(self.residual)

    def drop(self) -> None:
        """Waits for it, ignores failures, and undoes it."""
        if self.is_launched:
            with contextlib.suppress(Error):
                self.end()
            self.undo()

    def resume(self, fragment: Fragment, step: int, delta: torch.Tensor) -> None:
        """Does what begin() does, with a given delta (n,)."""
        self.fragment, self.step, self.failure, self.is_launched = fragment, step, None, False
        self.delta[: delta.numel()].copy_(delta)

    def residual_before(self) -> torch.Tensor:
        """Returns the residual (n,) of the fragment before launch()."""
        if not self.is_launched:
            self.fragment.copy_residual(self.residual)
        return self.residual


class Fragment:
    """Collective to make. fields(kind) -> those of tagc_reducer_options. kinds: name of a parameter -> class.
    comm: to the other sites; None: there is no connection yet, and no reducer."""

    def __init__(
        self,
        index: int,
        trained: Sequence[Trained],
        kinds: Mapping[str, str],
        site: Site,
        comm: Comm | None,
        inner: Comm | None,
        fields: Callable[[str], dict[str, Any]],
        outer: Outer,
    ) -> None:
        self.index, self.outer, self._n_slices = index, outer, site.n_slices
        self.places, self.parts, self.n_elems = _lay_out(
            trained, kinds, site, 1 if comm is None else comm.world_size
        )
        self.n_real = sum(place.length for place in self.places)
        self.anchor = torch.zeros(self.n_elems, dtype=torch.float32, device="cpu")
        self.velocity = torch.zeros(self.n_elems if outer.momentum else 0, dtype=torch.float32, device="cpu")
        # the residual while there are no reducers
        self._unsent: torch.Tensor | None = (
            torch.zeros(self.n_elems, dtype=torch.float32, device="cpu") if comm is None else None
        )
        self.reducers: list[Reducer] = []
        self._gatherer: Gatherer | None = None
        self._gathered = torch.zeros(
            0, dtype=torch.float32, device="cpu"
        )  # (slices, n), if there are several
        try:
            if comm is not None:
                for part in self.parts:
                    self.reducers.append(
                        Reducer(
                            comm, part.n_elems, output=lib.OUTPUTS["unit"], tag=index, **fields(part.kind)
                        )
                    )
            if self._n_slices > 1 and inner is not None:
                self._gathered = torch.zeros(self._n_slices, self.n_elems, dtype=torch.float32, device="cpu")
                self._gatherer = Gatherer(inner, self._gathered.numel(), "fp32", tag=index)
        except BaseException:
            self.close()
            raise

    def tensors(self) -> list[torch.Tensor]:
        """Returns what it holds beside its reducers."""
        found = [self.anchor, self.velocity, self._gathered]
        return found if self._unsent is None else [*found, self._unsent]

    # ---- anchor and delta ----

    def take_anchor(self) -> None:
        for place in self.places:
            self.anchor[place.at].copy_(place.read())

    def take_delta(self, delta: torch.Tensor) -> None:
        for place in self.places:
            delta[place.at].copy_(place.read())
            torch.sub(place.rounded(self.anchor), delta[place.at], out=delta[place.at])
        self._clear_padding(delta)

    def _clear_padding(self, values: torch.Tensor) -> None:
        end = 0
        for place in self.places:
            values[end : place.start].zero_()
            end = place.start + place.length
        values[end : self.n_elems].zero_()

    def restore(self) -> None:
        """Gives the parameters the base. Local, so not for slices of DDP."""
        for place in self.places:
            local = place.trained.local()
            local.copy_(self.anchor[place.at].view(local.shape))

    # ---- the outer step ----

    def apply(self, flight: Flight, is_now: bool) -> None:
        """Takes the outer step. is_now: the parameters have not changed since begin() and become the base,
        the same bits everywhere. Otherwise they keep their changes since begin(), which the next delta
        contains."""
        mean = flight.mean[: self.n_elems]
        old = [] if is_now else [place.rounded(self.anchor).clone() for place in self.places]
        if self.outer.momentum:
            self.velocity.mul_(self.outer.momentum).add_(mean)
            mean.add_(self.velocity * self.outer.momentum)
        self.anchor.sub_(mean.mul_(self.outer.lr) if self.outer.lr != 1 else mean)
        news = mean  # from here on: the value that the parameters get, or that is added to them
        for i, place in enumerate(self.places):
            base = place.rounded(self.anchor)
            news[place.at].copy_(base if is_now else base.sub(old[i]).add_(flight.delta[place.at]))
        if self._gatherer is not None:
            self._gatherer.run(news, self._gathered.view(-1))
        rows = news.view(1, -1) if self._gatherer is None else self._gathered
        for place in self.places:
            local = place.trained.local()
            values = (
                rows[:, place.start : place.start + place.room]
                .reshape(-1)[: local.numel()]
                .view(local.shape)
                .to(local.device)
            )
            local.copy_(values if is_now else local.float().add_(values))

    # ---- residuals ----

    def copy_residual(self, target: torch.Tensor) -> None:
        """Copies the residual (n,), zeros for dense parameters. Not while the fragment is under way."""
        if self._unsent is not None:
            target[: self.n_elems].copy_(self._unsent)
        for part, reducer in zip(self.parts, self.reducers):
            residual = reducer.residual()
            target[part.at].zero_() if residual is None else target[part.at].copy_(residual)

    def set_residual(self, values: torch.Tensor) -> None:
        if self._unsent is not None:
            self._unsent.copy_(values[: self.n_elems])
        for part, reducer in zip(self.parts, self.reducers):
            if reducer.n_residual:
                reducer.set_residual(values[part.at])

    def decay_residual(self, factor: float) -> None:
        for reducer in self.reducers:
            if reducer.n_residual:
                reducer.scale_residual(factor)

    def residuals_on_the_wire(self) -> dict[str, torch.Tensor]:
        """Returns name -> copy of the residual, (length,), of each compressed parameter. Local."""
        values = torch.zeros(self.n_elems, dtype=torch.float32, device="cpu")
        self.copy_residual(values)
        return {
            place.trained.name: values[place.at].clone()
            for place in self.places
            if place.kind == "compressed"
        }

    def names_of_residuals(self) -> set[str]:
        """Returns the names in residuals_on_the_wire() whose residual is not zero."""
        return {name for name, values in self.residuals_on_the_wire().items() if values.any()}

    def set_residuals_on_the_wire(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replaces all residuals; those not named become zero."""
        residual = torch.zeros(self.n_elems, dtype=torch.float32, device="cpu")
        for place in self.places:
            if place.trained.name in values:
                residual[place.at].copy_(values[place.trained.name])
        self.set_residual(residual)

    # ---- other sites ----

    def disconnect(self) -> None:
        """Ends the reducers and keeps the residuals."""
        if self._unsent is None:
            residual = torch.zeros(self.n_elems, dtype=torch.float32, device="cpu")
            self.copy_residual(residual)
            self._unsent = residual
        self.close()

    def inherit(self, before: Fragment) -> None:
        """Takes the state of a fragment of the same parameters, whose number of sites was another."""
        for place, old in zip(self.places, before.places):
            self.anchor[place.at].copy_(before.anchor[old.at])
            if self.outer.momentum:
                self.velocity[place.at].copy_(before.velocity[old.at])
        self.set_residuals_on_the_wire(before.residuals_on_the_wire())

    def checksum(self) -> int:
        """Returns a hash of the bits of anchor and velocity. It does not depend on the number of sites."""
        crc = 0
        for values in (self.anchor, self.velocity) if self.outer.momentum else (self.anchor,):
            for place in self.places:
                crc = _crc(values[place.at], crc)
        return crc

    def close(self) -> None:
        for reducer in self.reducers:
            reducer.close()
        self.reducers = []
        if self._gatherer is not None:
            self._gatherer.close()
            self._gatherer = None


def _crc(values: torch.Tensor, before: int) -> int:
    n_bytes = values.numel() * values.element_size()
    return (
        zlib.crc32((ctypes.c_char * n_bytes).from_address(values.data_ptr()), before) if n_bytes else before
    )


def _lay_out(
    trained: Sequence[Trained], kinds: Mapping[str, str], site: Site, n_sites: int
) -> tuple[list[Place], list[Part], int]:
    """Lays out compressed parameters first, a part for each; then the dense ones, all in one part."""
    places: list[Place] = []
    parts: list[Part] = []
    multiple, at = 16 * n_sites, 0
    for kind in ("compressed", "dense"):
        begin, n_real = at, 0
        for one in trained:
            n = one.local().numel()
            if kinds[one.name] != kind or n == 0:
                continue
            room = -(-n // site.n_slices)
            first = min(n, site.slice * room)
            places.append(Place(one, kind, at, first, min(room, n - first), room))
            n_real += places[-1].length
            at += room
            if kind == "compressed":
                at = begin + -(-(at - begin) // multiple) * multiple
                parts.append(Part(kind, begin, at - begin, n_real))
                begin, n_real = at, 0
        if at > begin:
            at = begin + -(-(at - begin) // multiple) * multiple
            parts.append(Part(kind, begin, at - begin, n_real))
    return places, parts, at


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
