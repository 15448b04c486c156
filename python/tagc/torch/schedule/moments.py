"""What a handle knows of its model's optimizers, and how long their moments are for which parameter, when.
adapt.py looks at optimizers and changes them; the schedule says for whom and when."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from tagc._library import Error
from tagc.torch.exchange.interfaces import Wrapped
from tagc.torch.schedule import adapt, policy
from tagc.torch.schedule.options import Settings
from tagc.torch.schedule.schedule import Schedule


class _Pace:
    """Exchanges of finite gradients since a step of any known optimizer, whose hooks have this. Those within
    a step, as LBFGS makes them, do not count."""

    def __init__(self) -> None:
        self.n_exchanges, self.is_stepping = 0, False

    def step(self, begins: bool) -> None:
        self.n_exchanges, self.is_stepping = 0, begins


class Moments:
    """Of one handle. Its hooks in optimizers stay until close()."""

    def __init__(
        self, model: torch.nn.Module, wrapper: Wrapped, options: Settings, schedule: Schedule
    ) -> None:
        self._model, self._wrapper, self._options, self._schedule = model, wrapper, options, schedule
        self._optimizers: dict[int, torch.optim.Optimizer] = {}  # of adapt(), by id
        self._adams: set[int] = set()  # ids of those of these that step with betas of their own
        # id of a parameter -> name, of all that goes from level to level
        self._selected: dict[int, str] = {}
        # names of parameters in groups of param_groups() that no optimizer has stepped yet
        self._promised: set[str] = set()
        self._seen: object = None  # what _look() saw last
        self._missing: set[str] = set()  # names that are trained and in no known optimizer
        self._outside: set[str] | None = None  # names of parameters that no hook gets; None: not looked yet
        self._epoch = -1  # of the schedule, when `memories` was made
        self._removes: list[Callable[[], None]] = []
        self._watched: set[int] = set()  # ids of optimizers whose steps it sees
        self._pace = _Pace()
        # id of a parameter that an Adam steps with betas of its own -> what makes them
        self.memories: dict[int, adapt.Memory] = {}
        self.words = ""  # on what adapt() did

    def go_on(self) -> bool:
        """Goes on after an exchange of the whole model. Returns whether all parameters have just come to
        their last level."""
        if self._optimizers or self._promised:
            self._look()
        is_through = self._schedule.step()
        self._follow()
        return is_through

    def awaits_step(self, is_finite: bool) -> bool:
        """Takes note of an exchange. Returns whether two of finite gradients have come with no step
        between."""
        if self._optimizers and is_finite and not self._pace.is_stepping:
            self._pace.n_exchanges += 1
        return self._pace.n_exchanges == 2

    def has_discarded(self) -> None:
        """Takes note that the user knows of gradients that get no step."""
        self._pace.n_exchanges = 0

    def load(self, about: Mapping[str, Any], with_windows: bool) -> None:
        """Loads the moments. about: of a checkpoint."""
        name, n = self._schedule.load(about, with_windows)
        self._follow()
        if n and self._wrapper.speaks:
            warnings.warn(
                f"tagc: in the run of this checkpoint the optimizer's first moment was short for {name}"
                f"{f' and {n - 1} more' if n > 1 else ''}, and tagc has not been given this run's "
                "optimizer: every value of them travels "
                "again, in 4 bits. To go on where that run was, call compress(model, optimizer), or "
                "handle.adapt(optimizer), or handle.param_groups(), before the checkpoint is loaded",
                stacklevel=4,
            )

    def adapt(self, optimizer: Any) -> None:
        """Does what Compressed.adapt() says."""
        given, deciding = adapt.inner(optimizer), self._deciding()
        known = {**self._optimizers, **{id(one): one for one in given}}
        has_some = adapt.stepped(given) & {id(parameter) for _, parameter in self._wrapper.named_parameters()}
        adapt.check_complete(known.values() if has_some else given, deciding)
        if (
            self._options.gentle
            and self._wrapper.deciders() is None
            and adapt.kinds(known.values(), deciding)[0]
        ):
            raise Error(
                "unsupported",
                "ranks of this model exchange different parameters, no mesh has all of them, and they could "
                "change beta1 at different steps: give compress() no optimizer, and make it from "
                "handle.param_groups()",
            )
        self._optimizers = known
        self._look()
        self._follow()
        self.words = adapt.words(known.values(), deciding, self._options, bool(self._ids("compressed")))

    def _look(self) -> None:
        """Looks at what the optimizers and the model have now: while training runs, a user may unfreeze
        parameters, add or edit groups, or replace parameters."""
        named, known = self._wrapper.named_parameters(), self._optimizers.values()
        seen = (
            [id(parameter) for _, parameter in named if parameter.requires_grad],
            [
                (adapt.traits(optimizer, group), *map(id, group["params"]))
                for optimizer in known
                for group in optimizer.param_groups
            ],
        )
        if seen == self._seen:
            self._warn_of_missing()
            return
        self._seen = seen
        self._selected = self._ids("compressed", with_frozen=True) | self._ids("mild", with_frozen=True)
        can, none = adapt.kinds(known, self._selected)
        if self._wrapper.deciders() is None and self._options.gentle:
            can = set()  # its ranks could change beta1 at different steps
        pace = self._pace
        for key, optimizer in self._optimizers.items():
            if key not in self._watched:
                self._watched.add(key)
                self._removes += [
                    optimizer.register_step_pre_hook(lambda *_: pace.step(True)).remove,
                    optimizer.register_step_post_hook(lambda *_: pace.step(False)).remove,
                ]
            if can and key not in self._adams and adapt.kinds([optimizer], self._selected)[0]:
                self._adams.add(key)
                self._removes.append(adapt.OwnBetas.of(adapt.stepper(optimizer), self.memories))
        stepped = adapt.stepped(known)
        steps = {name for key, name in self._selected.items() if key in stepped}
        self._promised -= steps
        self._missing = set(self._deciding().values()) - self._promised - steps if known else set()
        self._schedule.set_moments(can, none | self._promised)
        self._warn_of_outsiders()

    def _warn_of_missing(self) -> None:
        """Warns, at a second exchange, of parameters that are trained and in no known optimizer."""
        missing, self._missing = sorted(self._missing), set()
        if missing and self._options.gentle and self._wrapper.speaks:
            who = f"{missing[0]} and {n} more are" if (n := len(missing) - 1) else f"{missing[0]} is"
            warnings.warn(
                f"tagc: {who} trained, and in no optimizer that tagc was given: every value travels in 4 "
                "bits. Pass the other optimizer to handle.adapt()",
                stacklevel=4,
            )

    def _warn_of_outsiders(self) -> None:
        """Warns of parameters that no hook gets, other than those of the beginning."""
        if (exchanged := self._wrapper.exchanged()) is None:
            return
        outside = {
            name
            for name, parameter in policy.named_parameters(self._model)
            if parameter.requires_grad and id(parameter) not in exchanged
        }
        known, self._outside = self._outside, outside
        if known is not None and (new := sorted(outside - known)) and self._wrapper.speaks:
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            warnings.warn(
                f"tagc: {new[0]}{more} came into the model after it was wrapped: neither torch nor tagc sums "
                "the gradient over ranks. Wrap the model anew, and call compress() again",
                stacklevel=4,
            )

    def param_groups(
        self,
        betas: tuple[float, float] | None,
        groups: Iterable[dict[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[dict[str, Any]]:
        """Returns what Compressed.param_groups() says."""
        compressed = self._ids("compressed")
        if groups is None:
            groups = [
                {"params": [parameter for parameter in self._model.parameters() if parameter.requires_grad]}
            ]
        split, given = adapt.split_groups(groups, compressed, betas, options)
        deciding = self._deciding()
        kept = {id(p) for group in split for p in group["params"]} & deciding.keys() - given.keys()
        self._promised |= {deciding[key] for key in (*given, *kept)}
        self._seen = None
        self._look()
        self._follow()
        itself = weakref.ref(self)  # torch keeps the hook

        def on_known(optimizer: torch.optim.Optimizer) -> None:
            if (moments := itself()) is not None:
                moments._know(optimizer)

        self._removes.append(adapt.Awaited(given, kept, on_known).remove)
        return split

    def close(self) -> None:
        for remove in self._removes:
            remove()

    def _follow(self) -> None:
        if self._epoch == self._schedule.epoch:
            return
        self._epoch, memories = self._schedule.epoch, self._schedule.memories()
        self.memories.clear()
        self.memories.update(
            {key: memories[name] for key, name in self._selected.items() if name in memories}
        )

    def _ids(self, kind: str, with_frozen: bool = False) -> dict[int, str]:
        """Returns id -> name of those of that class that are trained."""
        kinds = {parameter.name: parameter.kind for parameter in self._wrapper.parameters()}
        names = {}
        for name, parameter in self._wrapper.named_parameters():
            if name not in kinds and self._wrapper.has_flat_parameters:
                raise Error(
                    "unsupported",
                    f"{name} holds parameters of several kinds: wrap the model with use_orig_params=True "
                    "for parameter groups",
                )
            if kinds.get(name) == kind and (parameter.requires_grad or with_frozen):
                names[id(parameter)] = name
        return names

    def deciding(self) -> Collection[str]:
        return self._deciding().values()

    def _deciding(self) -> dict[int, str]:
        """Returns id -> name of what is trained and by whose first moment selection goes on: the compressed;
        where there is none, as with adapters of attention alone, the mild."""
        return self._ids("compressed") or self._ids("mild")

    def _know(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the optimizer that groups of param_groups() went to, at its first step."""
        self._optimizers[id(optimizer)] = optimizer
        self._look()
        self._follow()
        if adapt.is_adam(optimizer) or all(
            adapt.is_short(optimizer, group) for group in optimizer.param_groups
        ):
            return
        stays = not all(adapt.may_keep_it(optimizer, group) for group in optimizer.param_groups)
        if self._wrapper.speaks:
            then = (
                ", and sends every value of its parameters in 4 bits"
                if stays and self._options.gentle
                else ""
            )
            warnings.warn(
                f"tagc: {adapt.name_of(optimizer)} is not an Adam, so tagc gives it back its own betas, in "
                f"place of those that param_groups() set{then}",
                stacklevel=2,
            )
