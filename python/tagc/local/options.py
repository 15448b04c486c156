"""The options of LocalSteps: their checks, and their translation to those of a tagc_model."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.extension import Layers, choice, layouts, number, of_direct, policy, sparsity_in_range

# A share of zeros with which libtagc selects: of n values at most n - 1, and never a zero.
ALL_BUT_ZEROS = 1e-9


@dataclasses.dataclass
class Settings:
    """The options of LocalSteps, checked."""

    every: int
    fragments: int
    delay: int
    outer_lr: float
    outer_momentum: float
    residual_decay: float
    sparsity: float
    values: str
    gate: str | None
    layers: Layers
    rules: Mapping[str, str] | None
    threads: int
    timeout_s: float

    def __post_init__(self) -> None:
        number("every", self.every, 1, 10**6, int)
        number("fragments", self.fragments, 1, self.every, int)
        number("delay", self.delay, 0, self.every - 1, int)
        number("outer_lr", self.outer_lr, 0, 10)
        number("outer_momentum", self.outer_momentum, 0, 1)
        if self.outer_lr == 0 or self.outer_momentum == 1:
            raise Error(
                "argument",
                f"outer_lr is {self.outer_lr!r} and outer_momentum {self.outer_momentum!r}: must be above 0, "
                "and below 1",
            )
        number("residual_decay", self.residual_decay, 0, 1)
        sparsity_in_range("sparsity", self.sparsity)
        choice("values", self.values, tuple(lib.FORMATS))
        choice("gate", self.gate, (None, "bf16"))
        if not callable(self.layers):
            choice("layers", self.layers, policy.LAYERS)
        number("threads", self.threads, 1, 256, int)
        number("timeout_s", self.timeout_s, 0.001, 1e6)

    def whole(self) -> Settings:
        """Returns those that send every value, in 8 bits at least."""
        values = "int8" if self.values in ("int2", "int4") else self.values
        return dataclasses.replace(self, sparsity=0.0, values=values)

    def model_options(
        self, parameters: Sequence[layouts.Parameter], dtype: torch.dtype
    ) -> tuple[lib.ModelOptions, dict[str, str], object]:
        """Returns how fragments are sent, as model.Follower says."""
        options = lib.initialised(lib.ModelOptions, "tagc_model_options_init")
        sent = lib.initialised(lib.ScheduleOptions, "tagc_schedule_options_init")
        sparsity = self.sparsity or (ALL_BUT_ZEROS if self.gate else 0.0)
        sent.gentle, sent.sparsity, sent.format = 0, sparsity, lib.FORMATS[self.values]
        options.schedule.options = ctypes.pointer(sent)
        options.formats.block = of_direct(self.values, sparsity).get("block", 0)
        if self.gate and sparsity < 0.5:  # by default all sums would be sent, zeros too
            options.formats.result_sparsity = ALL_BUT_ZEROS
        # exchanges are rare, residual_decay would round each time, and there are anchors of 4 bytes anyway
        options.formats.residual, options.n_threads = lib.FORMATS["fp32"], self.threads
        return options, {parameter.name: parameter.kind for parameter in parameters}, sent

    def due(self) -> list[int]:
        """Returns when each fragment is due: steps modulo `every`."""
        return [(i + 1) * self.every // self.fragments % self.every for i in range(self.fragments)]

    def n_flights(self) -> int:
        """Returns how many fragments are under way at most."""
        due = self.due()
        return max(sum((step - one) % self.every < max(1, self.delay) for one in due) for step in due)

    def travels(self) -> str:
        how = (
            f"{100 * self.sparsity:g} % zero, {self.values}"
            if self.sparsity
            else f"every value as {self.values}"
        )
        return f"direct, {how}" + (f" that changes weights in {self.gate}" if self.gate else "")

    def fingerprint(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks, by name."""
        fields = dict(vars(self))
        del fields["threads"], fields["timeout_s"]
        return fields | ({"layers": "a function"} if callable(self.layers) else {})
