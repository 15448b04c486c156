"""Which stage each parameter is in, and how long its Adam's moments are to be (adapt.Memory). Options.stages() names the stages;
tagc.torch.schedule.watch tells when a parameter may go on.

The first moment becomes short step by step, and selection waits for that. A model trains where its steps are just small enough not
to oscillate, and a short moment tolerates less: if it becomes short at once, or while values begin to wait, the loss jumps. What keeps
a weak direction, as a head does, keeps its moment, too. With a long moment it goes no further than LARGEST.

A parameter begins anew where compression fails it: its residual outgrows its gradient, its gradient points one way again, or
the loss rises. Each time, it waits for twice as many windows of noise before it goes on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.interfaces import Exchanged, Kinds
from tagc.torch.exchange.layout import Layout, Parameter
from tagc.torch.schedule import kept
from tagc.torch.schedule.adapt import Memory, doubled
from tagc.torch.schedule.losses import Losses, fits_losses
from tagc.torch.schedule.options import Options
from tagc.torch.schedule.watch import WINDOW, Watch, coherence_of, fits_window, pooled

FIRST, GENTLE = 0, 1  # stages: of a model with random weights, and of every other one and of what begins anew; then LARGEST
FRESH_WINDOWS = 3  # that the first stage lasts: a rounding error of 4 bits can make the loss of an unclipped run jump then
MOST_COHERENCE = 1.3  # of a parameter that may go on; 1 is noise
WEAK_COHERENCE = 2.2  # of one that may leave GENTLE once most others have: LARGEST tolerates that, and a long first moment
ALARM = 2.6  # of one that has gone on, and begins anew
MOST_GROWTH = 20.0  # of a residual's norm, in gradients' norms, at the ends of two windows in a row; of noise it is about two
FADING = 10  # windows over which a first moment becomes short in a model with random weights
FADING_OF_TRAINED = 2  # and in every other one
MOST_DOUBLINGS = 6  # of the windows of noise that a parameter waits for, one each time that it begins anew


# Words in checkpoints, of sets of names and of numbers by name.
_SETS = {"seen": "_seen", "noisy": "_noisy", "grown": "_grown"}
_NUMBERS = {"calm": "_calm", "failures": "_failures", "ages": "_ages", "fading": "_fading", "squares": "_squares"}


def fits(about: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's words on stages are such."""
    stages, windows = about.get("stages", {}), about.get("windows", {})
    if not isinstance(stages, dict) or not isinstance(windows, dict):
        return False
    if not all(_are_names(about.get(names, [])) for names in (*_SETS, "without_moment")):
        return False
    if not all(isinstance(about.get(flag, True), bool) for flag in ("moment", "is_fresh")):
        return False
    if not all(_are_numbers(about.get(numbers, {})) for numbers in (*_NUMBERS, "kept")) or not fits_losses(about.get("losses", {})):
        return False
    return (all(isinstance(stage, int) and not isinstance(stage, bool) and stage >= 0 for stage in stages.values())
            and all(fits_window(window) for window in windows.values()))


def _are_names(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


def _are_numbers(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(number, (int, float)) and 0 <= number < math.inf for number in found.values())


def _said(why: str, names: Mapping[str, float]) -> str:
    name = max(names, key=names.__getitem__)
    all_of_them = f"{name}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
    if why == "growth":
        text = f"residuals of {all_of_them} have grown to {names[name]:.0f} times the gradient (allowed are {MOST_GROWTH:g})"
    elif why == "loss":
        return (f"the loss has risen by {100 * names[name]:.3g} % since it was least: compression may be the cause, and every value of "
                f"{all_of_them} travels for a while")
    else:
        text = f"gradients of {all_of_them} point one way again ({names[name]:.1f} times what noise would, allowed are {ALARM})"
    return f"{text}: compression falls behind, and every value travels for a while"


def _words(values: str, sparsity: float) -> str:
    return f"{100 * sparsity:g} % zero, {values}" if sparsity else f"every value in {values}"


class _Parameters(Protocol):
    """What stages ask of a wrapper."""

    def parameters(self) -> list[Parameter]: ...

    def set_kinds(self, kinds: Kinds) -> None: ...


class Stages:
    """Of one model. All ranks that exchange a parameter decide alike: they decide from sums over ranks."""

    def __init__(self, wrapper: _Parameters, options: Options, is_fresh: bool = False) -> None:
        """is_fresh: whether the model has random weights; the same on all ranks."""
        self._wrapper, self._options = wrapper, options
        self._kinds = {p.name: p.kind for p in wrapper.parameters() if options.stages(p.kind)}
        self._has_long_moments = True  # the optimizer has a long first moment of what is compressed, as far as is known
        self._can_shorten: frozenset[str] = frozenset()  # names of those whose first moment can become short, one by one
        self._never_long: frozenset[str] = frozenset()  # and of those that have none
        self._fading: dict[str, int] = {}  # name of one whose does -> windows until it is short
        self._is_fresh = is_fresh
        self.unknown: frozenset[str] = frozenset()  # of load()
        self._next: dict[str, int] = {}  # name -> the stage from the next exchange of the whole model on
        self._seen: set[str] = set()  # names that had a gradient over a window: those frozen or never used hold nothing up
        self._noisy: set[str] = set()  # of these, whose last window was mostly noise
        self._grown: set[str] = set()  # and at whose end the residual was too large
        self._calm: dict[str, int] = {}  # name -> windows of noise in a row
        self._failures: dict[str, int] = {}  # name -> how often it began anew
        self._ages: dict[str, int] = {}  # name -> windows so far
        self._sizes = {p.name: p.numel for p in wrapper.parameters()}
        self._squares: dict[str, float] = {}  # name -> mean square of its gradient, of late
        self._kept: dict[str, float] = {}  # name -> layout.Parameter.kept, where that is not 1
        self._full: dict[str, tuple[int, ...]] = {}  # name whose window was full in this exchange of the whole model -> ranks
        self._alarms: dict[str, dict[str, float]] = {}  # why -> {name: by how much}, of those that begin anew
        self._watch, self._losses = Watch(self._kinds), Losses()
        self._put(dict.fromkeys(self._kinds, FIRST if is_fresh else GENTLE))

    def _last(self, name: str) -> int:
        return len(self._options.stages(self._kinds[name])) - 1

    def _has_none(self, name: str) -> bool:
        """Whether it has no long first moment, and never had one here."""
        return not self._has_long_moments or name in self._never_long

    def _may_go_on(self, name: str) -> bool:
        is_free = self._has_none(name) or self._is_short(name)
        return self._now[name] < self._last(name) and (is_free or self._may_follow(name))

    def _may_follow(self, name: str) -> bool:
        """Whether a weak direction is enough to leave its stage: half of what is compressed is further. With a long first moment it leaves
        GENTLE only; if it is noise, it waits until its own moment is short."""
        if name in self._fading or (name in self._noisy and name in self._can_shorten):
            return False
        if self._now[name] != GENTLE and not self._has_none(name):
            return False
        compressed = self._compressed(self._seen)
        return 2 * sum(self._now[other] > self._now[name] for other in compressed) >= len(compressed) > 0

    def _is_short(self, name: str) -> bool:
        return self._fading.get(name) == 0

    def _compressed(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if self._kinds[name] == "compressed"}

    def _waiting(self) -> list[str]:
        return [name for name, stage in self._now.items() if stage < self._last(name) and name in self._seen]

    def all_are_short(self) -> None:
        """The first moment of all that is compressed is short, or there is none."""
        self._has_long_moments = False

    def set_moments(self, can_shorten: Iterable[str], never_long: Iterable[str]) -> None:
        """Names of what is compressed: whose first moment can become short, and which has none or a short one. The others keep theirs, and
        do not go beyond GENTLE."""
        self._can_shorten, self._never_long = frozenset(can_shorten), frozenset(never_long)
        self._has_long_moments = not self._compressed(self._kinds) <= self._never_long
        self._fading = {name: left for name, left in self._fading.items() if name in self._can_shorten}

    def with_short_moment(self) -> frozenset[str]:
        """Names of what is compressed and has no long first moment any more."""
        return frozenset(filter(self._is_short, self._fading))

    def memories(self) -> dict[str, Memory]:
        """Of every parameter whose Adam should have betas of its own."""
        found = {name: Memory(self._fading.get(name, FADING) / FADING, self._n_updates(name)) for name in self._kinds}
        return {name: memory for name, memory in found.items() if memory != Memory()}

    def _n_updates(self, name: str) -> int:
        """Exchanges of a parameter whose values are selected; 0 for the others."""
        return doubled(WINDOW * self._ages.get(name, 0)) if self._now[name] > GENTLE else 0

    def are_ripe(self) -> bool:
        """Whether a long first moment of what is compressed is all that holds selection up."""
        compressed = self._compressed(self._seen)
        ripe = self.with_short_moment() | (self._never_long & self._noisy)
        return self._has_long_moments and bool(compressed) and compressed <= ripe

    def watch_loss(self, loss: float | torch.Tensor) -> None:
        if self._kinds:
            self._losses.add(loss)

    def look(self, comm: Comm, layout: Layout, gradient: torch.Tensor, unit: Exchanged) -> int:
        """Before unit.reduce() of that gradient. Collective where a window is full. Returns the bytes that this rank sent."""
        names = self._watch.add(layout, gradient)
        if not names:
            return 0
        samples = [*self._watch.squares(names), *self._watch.take(names)]
        mine = [*self._losses.take(), *itertools.chain(*samples, *unit.squares(layout, gradient))]
        losses, found = (pool := pooled(comm, mine))[:3], pool[3:]
        for i, name in enumerate(names):
            self._see(name, found[2 * i] / max(1.0, found[2 * i + 1]), comm.ranks)
        found = found[2 * len(names):]
        if (rise := self._losses.rise(*losses)) is not None:
            for name in [name for name, stage in self._now.items() if stage > GENTLE]:
                self._begin_anew(name, "loss", rise)
        for i, name in enumerate(names):
            self._ages[name] = self._ages.get(name, 0) + 1
            if self._now[name] == FIRST and self._ages[name] >= FRESH_WINDOWS:
                self._next[name] = GENTLE
            if (coherence := coherence_of(*found[2 * i:2 * i + 2])) is not None:
                self._decide(name, coherence)
        squares = found[2 * len(names):]
        for part, residual, own in zip(layout.parts, squares[0::2], squares[1::2]):
            growth = math.sqrt(residual / own) if 0 < own < math.inf else 0.0  # NaN decides nothing, either
            self._check({layout.parameters[piece.parameter].name for piece, _ in part.pieces} & set(names), growth)
        return 8 * len(mine) * (comm.world_size - 1)

    def _see(self, name: str, square: float, ranks: tuple[int, ...]) -> None:
        """Its gradient's mean square over a window, and over the ranks that exchange it."""
        if math.isfinite(square):
            self._squares[name] = (self._squares.get(name, square) + square) / 2
            self._full[name] = ranks

    def _divide(self, stages: Mapping[str, int]) -> dict[str, float]:
        """name -> share of its values that is to be sent, of what _see() saw since the last call. Ranks that exchange one of these exchange all
        that it is divided with, and so divide alike."""
        together: dict[tuple[tuple[int, ...], str, int], list[str]] = {}
        for name, ranks in self._full.items():
            together.setdefault((ranks, self._kinds[name], stages[name]), []).append(name)
        self._full = {}
        found: dict[str, float] = {}
        for (_, kind, stage), names in together.items():
            sparsity = self._options.stages(kind)[stage][1]
            if sparsity > 0:
                most = min(kept.MOST, 1 / (1 - sparsity)) if sparsity < 1 else kept.MOST
                found |= kept.factors({name: self._squares[name] for name in names}, self._sizes, most)
            else:
                found |= dict.fromkeys(names, 1.0)
        return found

    def _decide(self, name: str, coherence: float) -> None:
        is_noise = coherence < MOST_COHERENCE
        self._seen.add(name)
        (self._noisy.add if is_noise else self._noisy.discard)(name)
        is_calm = is_noise or (coherence < WEAK_COHERENCE and self._may_follow(name))
        self._calm[name] = self._calm.get(name, 0) + 1 if is_calm else 0
        if self._now[name] == FIRST:
            return
        if name in self._fading:
            self._fading[name] = max(0, self._fading[name] - self._fades())
        if self._calm[name] >= 2 ** min(self._failures.get(name, 0), MOST_DOUBLINGS) and self._may_go_on(name):
            self._next[name] = self._now[name] + 1
            self._calm[name] = 0
        elif coherence > ALARM:
            self._fading.pop(name, None)
            if self._now[name] > GENTLE:
                self._begin_anew(name, "direction", coherence)

    def _fades(self) -> int:
        return 1 if self._is_fresh else FADING // FADING_OF_TRAINED

    def _check(self, names: set[str], growth: float) -> None:
        """The residual of these, which are exchanged as one, came to that many gradients."""
        if not growth > MOST_GROWTH:
            self._grown -= names
            return
        for name in names:
            if name in self._grown and self._now[name] > GENTLE:
                self._begin_anew(name, "growth", growth)
        self._grown ^= names  # those that begin anew are given time

    def _begin_anew(self, name: str, why: str, value: float) -> None:
        if self._next.get(name) != GENTLE:
            self._failures[name] = self._failures.get(name, 0) + 1
        self._next[name], self._calm[name] = GENTLE, 0
        self._noisy.discard(name)
        self._fading.pop(name, None)
        self._alarms.setdefault(why, {})[name] = value

    def go_on(self) -> bool:
        """An exchange of the whole model is over. Returns whether all are in their last stage now, and were not before."""
        for name in self._compressed(self._noisy) & self._can_shorten - self._fading.keys():
            if self._now[name] > FIRST:
                self._fading[name] = FADING - self._fades()
        now, moves = self._now | self._next, bool(self._next)
        shares = self._divide(now)
        if moves or kept.differ(self._kept, shares):
            self._kept |= shares
            self._next = {}
            self._put(now)
        return moves and not self._waiting()

    def take_alarms(self) -> list[str]:
        """A message about parameters that have begun anew since the last call."""
        alarms, self._alarms = self._alarms, {}
        return [_said(why, names) for why, names in alarms.items()]

    def _put(self, stages: dict[str, int]) -> None:
        self._now = stages
        self._wrapper.set_kinds({p.name: {"stage": stages.get(p.name, 0), "kept": self._kept.get(p.name, 1.0)}
                                 for p in self._wrapper.parameters()})

    def scale(self, factor: float) -> None:
        """Gradients are multiplied with that from now on."""
        self._watch.scale(factor)
        self._squares = {name: factor**2 * square for name, square in self._squares.items()}

    def __str__(self) -> str:
        used = {(kind, *self._options.stages(kind)[self._now[name]]) for name, kind in self._kinds.items()}
        return ", ".join(f"{kind}: {_words(values, sparsity)}" for kind, values, sparsity in sorted(used))

    def words(self) -> str:
        """For the table."""
        if not self._kinds:
            return ""
        first, gentle = (_words(*found) for found in self._options.stages(next(iter(self._kinds.values())))[:GENTLE + 1])
        if FIRST in self._now.values():
            gentle = f"{first} for {FRESH_WINDOWS * WINDOW} exchanges, then {gentle}"
        if self._has_long_moments and not self._can_shorten | self._never_long:
            return (f"\nfor now {gentle}, since the optimizer may have a long first moment of it all: compress(model, optimizer)"
                    "\nmakes that short for what is compressed, and goes on to the above when gradients are mostly noise")
        return f"\ngently: {gentle}, and the above when gradients are mostly noise"

    # ---- in checkpoints ----

    def state(self, with_windows: bool = True) -> dict[str, Any]:
        if not self._now:
            return {}
        about = {"is_fresh": self._is_fresh, "moment": self._has_long_moments, "stages": self._now, "kept": dict(self._kept),
                 "windows": self._watch.state() if with_windows else {}, "losses": self._losses.state(with_windows)}
        about |= {key: sorted(getattr(self, attribute)) for key, attribute in _SETS.items()}
        return about | {key: dict(getattr(self, attribute)) for key, attribute in _NUMBERS.items()}

    def load(self, about: Mapping[str, Any], with_windows: bool) -> bool:
        """about: of a checkpoint; one that has no stages is of a run that was in the last one from the beginning. Returns whether
        the first moment of all that is compressed was short already. That of `unknown` was, and is not known to be here: these
        begin anew, and with them all that is not compressed."""
        if not self._now:
            return False
        were_short = not about.get("moment", True)
        fading = {**dict.fromkeys(about.get("without_moment", ()), 0), **about.get("fading", {})}  # the first is of an earlier tagc
        short = self._compressed(self._kinds) if were_short else self._kinds.keys() & fading
        self.unknown = frozenset(short - self._can_shorten - self._never_long) if self._has_long_moments else frozenset()
        anew = self.unknown | (self._kinds.keys() - self._compressed(self._kinds) if self.unknown else set())
        self._next, stages = {}, about.get("stages", {})
        last = {name: len(self._options.stages(kind)) - 1 for name, kind in self._kinds.items()}
        if "ages" not in about:  # before there was a first stage
            stages = {name: stage + GENTLE for name, stage in stages.items()}
        self._full = {}
        self._kept = {name: min(kept.MOST, max(kept.LEAST, share)) for name, share in about.get("kept", {}).items() if name in self._kinds}
        self._put({name: GENTLE if name in anew else min(stages.get(name, n), n) for name, n in last.items()})
        self._watch.load(about.get("windows", {}) if with_windows else {})
        for key, attribute in _SETS.items():
            setattr(self, attribute, self._kinds.keys() & set(about.get(key, ())))
        for key, attribute in _NUMBERS.items():
            setattr(self, attribute, dict(about.get(key, {})))
        self._losses.load(about.get("losses", {}), with_windows)
        self._fading = {name: min(int(left), FADING) for name, left in fading.items() if name in short - self.unknown}
        self._is_fresh = about.get("is_fresh", "ages" in about and FIRST in stages.values())
        return were_short and not self.unknown
