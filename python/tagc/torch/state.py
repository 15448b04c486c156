"""What a handle remembers while it trains: its units with their residuals, the schedule, and the loss scale.
checkpoint.py saves and loads it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from tagc._library import Error
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.interfaces import Residuals, Wrapped
from tagc.torch.exchange.model import DTYPES, Follower
from tagc.torch.exchange.said import say
from tagc.torch.schedule import schedule
from tagc.torch.schedule.moments import Moments
from tagc.torch.schedule.options import Settings

U = TypeVar("U", bound=Residuals)


class Keeper(NamedTuple):
    """A unit and the parameters whose residuals it keeps. Their wire order has n_chunks chunks. held: the
    numbers of the chunks that residuals are of, one every so many; None: all, without padding."""

    unit: Residuals
    parameters: list[layouts.Parameter]
    n_chunks: int
    held: range | None

    @property
    def place(self) -> int:
        """The number of this rank among `places` that have chunks of their own."""
        return 0 if self.held is None else self.held[0]

    @property
    def places(self) -> int:
        return 1 if self.held is None else self.n_chunks // len(self.held)


class State:
    """Of one handle, which shares it with what its hooks call."""

    def __init__(
        self, model: torch.nn.Module, wrapper: Wrapped, options: Settings, is_fresh: bool = False
    ) -> None:
        self.model, self.wrapper, self.options = model, wrapper, options
        self.schedule = schedule.Schedule(wrapper, options, is_fresh)
        self.moments = Moments(model, wrapper, options, self.schedule)
        self.units: dict[str, Residuals] = {}
        # as add_unit() got them
        self._keepers: dict[str, tuple[list[layouts.Parameter] | None, int, range | None]] = {}
        self.n_steps = 0  # exchanges of the whole model that have started
        self.loaded: int | None = None  # n_steps of the checkpoint that was loaded last
        self.knows_scale = False  # whether the user has set one
        self.loss_scale = 1.0  # the factor by which residuals are multiplied
        self.lock = threading.RLock()  # held while any of it changes
        self.is_closed = self.is_verbose = False
        self._said: set[str] = set()  # by say_once()
        self._left = set(wrapper.left_to_torch().values())  # reasons

    def add_unit(
        self,
        name: str,
        make: Callable[[str, Follower], U],
        parameters: list[layouts.Parameter] | None = None,
        n_chunks: int = 1,
        held: range | None = None,
    ) -> U:
        """Returns make(), which makes the unit. parameters: those of the unit (None: all). n_chunks, held: as
        of a Keeper."""
        unit = make(name, self.schedule)
        self.units[name], self._keepers[name] = unit, (parameters, n_chunks, held)
        return unit

    def remove_unit(self, name: str) -> None:
        del self._keepers[name]
        self.units.pop(name).free()

    def keepers(self) -> list[Keeper]:
        """Returns one of each unit."""
        return [
            Keeper(
                self.units[name],
                self.wrapper.parameters() if parameters is None else parameters,
                n_chunks,
                held,
            )
            for name, (parameters, n_chunks, held) in self._keepers.items()
        ]

    def begin_step(self, loss_scale: float) -> None:
        self.n_steps += 1
        self.set_loss_scale(loss_scale)

    def set_loss_scale(self, scale: float) -> None:
        """Sets the loss scale of the next gradients, and multiplies residuals to fit. Local."""
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
            raise Error("argument", f"loss scale is {scale!r}, must be above 0 and finite")
        with self.lock:
            if scale != self.loss_scale:
                for unit in self.units.values():
                    unit.scale_residuals(scale / self.loss_scale)
                self.schedule.scale(scale / self.loss_scale)
            self.loss_scale = scale

    def discard(self) -> None:
        """Forgets the residuals. Local."""
        with self.lock:
            for unit in self.units.values():
                unit.scale_residuals(0.0)

    def resume(self, n_steps: int, loss_scale: float) -> None:
        """Continues after n_steps exchanges, with residuals of gradients times loss_scale."""
        self.n_steps, self.loss_scale = n_steps, float(loss_scale)
        self.loaded = n_steps

    def is_left_to_torch(self, gradient: torch.Tensor) -> bool:
        """Returns whether compress() has found parameters with such gradients, and left them to torch."""
        if gradient.dtype in DTYPES and gradient.layout == torch.strided:
            return False
        dtype = str(gradient.dtype).removeprefix("torch.")
        # DDP's buckets have complex128 as float64
        return bool(self._left & {"sparse gradient", dtype, dtype.replace("float64", "complex128")})

    def say(self, text: str) -> None:
        if self.is_verbose and self.wrapper.speaks:
            say(text)

    def warn_once(self, text: str) -> None:
        if text not in self._said and self.wrapper.speaks:
            self._said.add(text)
            warnings.warn(text, stacklevel=3)

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)
