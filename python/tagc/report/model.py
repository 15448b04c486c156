"""The data of a report: all inputs in one form. docs/reference/results-format.md describes the files. Unknown
numbers are NaN; unknown spreads have n = 0."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tagc.report.reading import Node

LEGS = ("index", "values", "leftover", "result", "gather", "control")
GATHER, CONTROL = LEGS.index("gather"), LEGS.index("control")
MEMORIES = ("parameters", "gradients", "optimizer", "residuals", "buffers")
PARTS = ("computes", "waits for parameters", "waits for gradients", "optimizer", "other")
MOST_INPUTS = 256

Units = Sequence[str] | None  # whose backward pass the timeline shows; None: two in the middle


@dataclass(frozen=True)
class Spread:
    """middle: the median of times, the mean of losses."""

    middle: float = math.nan
    least: float = math.nan
    most: float = math.nan
    n: int = 0

    def times(self, factor: float) -> Spread:
        return Spread(factor * self.middle, factor * self.least, factor * self.most, self.n)


def spread_of(values: Iterable[float], is_mean: bool = False) -> Spread:
    """Returns the spread of the finite values."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return Spread()
    middle = (
        statistics.fmean(finite)
        if is_mean
        else finite[(len(finite) - 1) // 2] / 2 + finite[len(finite) // 2] / 2
    )
    return Spread(middle, finite[0], finite[-1], len(finite))


def only(value: float) -> Spread:
    return Spread(value, value, value, 1) if math.isfinite(value) else Spread()


def finite_sum(values: Iterable[float]) -> float:
    return sum(max(value, 0.0) for value in values if math.isfinite(value))


def divided(a: float, b: float) -> float:
    return a / b if b and math.isfinite(b) else math.nan


@dataclass(slots=True)
class Step:
    """An optimizer step of a run. bits: by leg, per parameter, before the factor (W-1)/W."""

    step: float
    loss: float
    wall_s: float
    compute_s: float
    wait_gather_s: float
    wait_reduce_s: float
    optimizer_s: float
    bits: tuple[float, ...]

    @property
    def exposed_s(self) -> float:
        return self.wait_gather_s + self.wait_reduce_s


@dataclass
class Run:
    """A run of a folder, or one of the lab, whose single steps are unknown."""

    label: str
    world_size: int = 1
    n_params: float = math.nan
    n_compressed: float = math.nan
    seed: float = math.nan
    is_torn: bool = False  # the last line was incomplete and was ignored
    about: dict[str, Any] = field(default_factory=dict)  # the first entry of type "run"
    steps: list[Step] = field(default_factory=list)
    evals: list[tuple[float, float]] = field(default_factory=list)  # (step, validation loss)
    is_torch: bool = False  # of PyTorch: handle.record() or on_step wrote it
    # of PyTorch: by group of parameters, (step, mean level)
    levels: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    place: int = 0  # of the lab: its case, from 1; of a folder: 0
    bits: list[float] = field(default_factory=lambda: [math.nan] * len(LEGS))  # of the lab: mean over steps
    total_s: Spread = Spread()  # of the lab: of a step

    @property
    def options(self) -> dict[str, Any]:
        options = self.about.get("options")
        return options if isinstance(options, dict) else {}

    @property
    def warm_steps(self) -> list[Step]:
        """All steps but the first two, which fill caches."""
        return self.steps[2:] if len(self.steps) > 4 else self.steps

    def loss_at(self, step: float) -> float:
        return next((loss for at, loss in reversed(self.evals) if at == step), math.nan)


@dataclass
class Group:
    """One arm: runs that differ only in their seeds. base: the group that this one is compared with."""

    name: str
    runs: list[Run]
    base: Group | None = None

    @property
    def first(self) -> Group:
        return self.base or self


@dataclass
class Result:
    """One way to train: measured once, or predicted."""

    name: str
    n_runs: int = 1
    total_s: Spread = Spread()
    exposed_s: Spread = Spread()
    speedup: Spread = Spread()  # over the first arm of the set
    part_s: list[float] = field(default_factory=lambda: [math.nan] * len(PARTS))
    bits: list[float] = field(default_factory=lambda: [math.nan] * len(LEGS))
    memory: list[float] = field(default_factory=lambda: [math.nan] * len(MEMORIES))
    loss: Spread = Spread()  # validation, at the last common step
    gap: Spread = Spread()  # to the first arm, as a share
    n_params: float = math.nan
    n_compressed: float = math.nan
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def gradient_bits(self) -> float:
        return sum(bits for leg, bits in enumerate(self.bits) if leg != GATHER)

    @property
    def all_bits(self) -> float:
        return sum(self.bits)


@dataclass
class ArmSet:
    """Arms that may be compared; all are compared with the first. kind: runs or bench."""

    kind: str
    title: str
    results: list[Result] = field(default_factory=list)
    bench: Node | None = None
    world_size: float = math.nan
    n_hosts: float = math.nan
    bits_per_s: float = math.nan
    place: int = 0


@dataclass
class LabCase:
    experiment: str
    title: str
    settings: dict[str, Any]
    n_ranks: float
    rate: str
    mtu: float
    tcp_one_way: tuple[float, float]  # bit/s: least and most of the hosts
    tcp_both_ways: tuple[float, float]
    sent_bytes: float  # of all interfaces
    received_bytes: float
    overhead: float
    arms: ArmSet | None = None


@dataclass
class Source:
    path: str
    what: str
    origin: dict[str, Any] = field(default_factory=dict)
    run: Run | None = None


@dataclass
class Report:
    sources: list[Source] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    sets: list[ArmSet] = field(default_factory=list)
    traces: list[Any] = field(default_factory=list)  # traces.Trace
    cases: list[LabCase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # notes on the inputs, for the reader
    names: dict[str, int] = field(default_factory=dict)  # of arms: a name has one colour on the whole page
    seen: set[tuple[int, int]] = field(default_factory=set)

    def color(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def add_result(self, arms: ArmSet, name: str) -> Result:
        self.color(name)
        arms.results.append(Result(name))
        return arms.results[-1]
