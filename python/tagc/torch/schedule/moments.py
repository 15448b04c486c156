"""What a handle knows of its model's optimizers, and how long their moments are for which parameter, when.
adapt.py looks at optimizers and changes them; the schedule says for whom and when."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tagc._library import Error
from tagc.torch.exchange.interfaces import Wrapped
from tagc.torch.schedule import adapt, policy
from tagc.torch.schedule.options import Options
from tagc.torch.schedule.schedule import Schedule


class Moments:
    """Of one handle. Its hooks in optimizers stay until close()."""

    def __init__(
        self, model: torch.nn.Module, wrapper: Wrapped, options: Options, schedule: Schedule
    ) -> None:
        self._model, self._wrapper, self._options, self._schedule = model, wrapper, options, schedule
        self._optimizers: dict[int, torch.optim.Optimizer] = {}  # of adapt(), by id
        self._adams: dict[int, adapt.OwnBetas] = {}  # of these, by id
        self._compressed: dict[int, str] = {}  # id of a parameter -> name
        self._selected: dict[int, str] = {}  # the same with attention and positions
        # names of parameters that an optimizer other than Adam got from param_groups()
        self._others: set[str] = set()
        self._epoch = -1  # of the schedule, when `memories` was made
        self._removes: list[Callable[[], None]] = []
        # id of a parameter that an Adam steps with betas of its own -> what makes them
        self.memories: dict[int, adapt.Memory] = {}
        self.words = ""  # on what adapt() did

    def go_on(self) -> bool:
        """Goes on after an exchange of the whole model. Returns whether all parameters have just come to
        their last level."""
        is_through = self._schedule.step()
        self._follow()
        return is_through

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
                "handle.adapt(optimizer), "
                "or handle.param_groups(), before the checkpoint is loaded",
                stacklevel=4,
            )

    def adapt(self, optimizer: Any) -> None:
        """Does what Compressed.adapt() says."""
        optimizers, compressed = adapt.inner(optimizer), self._ids("compressed")
        known = {**self._optimizers, **{id(one): one for one in optimizers}}
        adapt.check_complete(known.values(), compressed)
        can, none = adapt.kinds(known.values(), compressed)
        if can and self._options.gentle and self._wrapper.deciders() is None:
            raise Error(
                "unsupported",
                "ranks of this model exchange different parameters, no mesh has all of them, and they could "
                "change beta1 at different steps: give compress() no optimizer, and make it from "
                "handle.param_groups()",
            )
        self._optimizers, self._compressed, self._selected = (
            known,
            compressed,
            {**compressed, **self._ids("mild")},
        )
        for key, one in known.items():
            # one of attention alone, too: its beta2
            if can and key not in self._adams and adapt.kinds([one], self._selected)[0]:
                self._adams[key] = adapt.OwnBetas(adapt.stepper(one), self.memories)
                self._removes.append(self._adams[key].remove)
        self._schedule.set_moments(can, none)
        self._follow()
        self.words = adapt.words(known.values(), compressed, self._options)

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
        self._schedule.none_is_long()
        itself = weakref.ref(self)  # torch keeps the hook

        def on_other(optimizer: torch.optim.Optimizer, ids: set[int]) -> None:
            if (moments := itself()) is not None:
                moments._is_long_after_all(optimizer, ids)

        self._removes.append(adapt.Awaited(given, on_other).remove)
        return split

    def close(self) -> None:
        for remove in self._removes:
            remove()

    def _follow(self) -> None:
        if self._epoch == self._schedule.epoch:
            return
        self._epoch, found = self._schedule.epoch, self._schedule.memories()
        self.memories.clear()
        self.memories.update({key: found[name] for key, name in self._selected.items() if name in found})

    def _ids(self, kind: str) -> dict[int, str]:
        """Returns id -> name of those of that class that are trained."""
        kinds = {parameter.name: parameter.kind for parameter in self._wrapper.parameters()}
        found = {}
        for name, parameter in policy.named_parameters(self._model):
            if name not in kinds and self._wrapper.name == "fsdp1":
                raise Error(
                    "unsupported",
                    f"{name} holds parameters of several kinds: wrap the model with use_orig_params=True "
                    "for parameter groups",
                )
            if kinds.get(name) == kind and parameter.requires_grad:
                found[id(parameter)] = name
        return found

    def _is_long_after_all(self, optimizer: torch.optim.Optimizer, ids: set[int]) -> None:
        """Notes that parameters of param_groups() went to an optimizer that is not an Adam."""
        compressed = self._ids("compressed")
        stays = not all(adapt.may_keep_it(optimizer, group) for group in optimizer.param_groups)
        self._others |= {compressed[key] for key in ids if stays and key in compressed}
        self._schedule.set_moments((), set(compressed.values()) - self._others)
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
