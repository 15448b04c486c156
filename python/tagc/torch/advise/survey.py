"""The measurements of advise(): the time of a model's communication here.

It measures what training would run: torch's collectives on the model's own group, and tagc's exchange and
gather of a unit with this model's mix of classes, over a connection of its own. It does not change the
model."""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tagc import _library as lib
from tagc.torch.advise import own_work
from tagc.torch.advise.shape import Shape, n_of
from tagc.torch.exchange import internals
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.comm import Comm, compared, share
from tagc.torch.exchange.hosts import Hosts
from tagc.torch.exchange.reducer import Gatherer, Way
from tagc.torch.exchange.rows import Rows
from tagc.torch.exchange.staging import Kernels, Staging
from tagc.torch.exchange.streams import Cuda
from tagc.torch.exchange.unit import Stats, Unit
from tagc.torch.exchange.waits import Collectives, timeout_of
from tagc.torch.exchange.work import Work
from tagc.torch.hooks.replicas import CHANGED, Gathers
from tagc.torch.schedule.options import Settings
from tagc.torch.schedule.samples import Sample

N_SMALL = 4096
N_RUNS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# From the mildest to the strongest. The first is lossless: gloo's own collectives do not always fill a link.
# Settings with selection are measured as after their gentle start.
GRADIENTS: tuple[dict[str, Any], ...] = (
    {"exchange": "dense", "mild": "dense"},
    {"sparsity": 0, "values": "int8", "mild": "int8"},
    {"sparsity": 0.9, "gentle": True},
    {"sparsity": 0.95, "gentle": True},
    {"sparsity": 0.9875, "gentle": True},
)

# Formats of parameters, beside the one that torch gathers them in.
WIRES = ("bf16", "lossless", "delta4")

# whose exchange is an all-reduce of everything that is compressed, in LocalSteps' own settings
LOCAL = "local steps"
LOCAL_OPTIONS: dict[str, Any] = {"sparsity": 0, "values": "int4", "mild": "int4", "mild_sparsity": 0}


def by_codec(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns those options, and for exchange direct the same with the codec on the device."""
    on_device = [] if options.get("exchange") == "dense" else [{**options, "codec": "device"}]
    return [dict(options), *on_device]


def name_of(options: Mapping[str, Any]) -> str:
    """Returns options of compress() as text."""
    if options.get("exchange") == "dense":
        what = "uncompressed"
    else:
        what = "every value as int8" if options["sparsity"] == 0 else f"{100 * options['sparsity']:g} % zero"
    parameters = f", parameters {options['parameters']}" if options.get("parameters") else ""
    on_device = ", codec on the device" if options.get("codec") == "device" else ""
    return f"tagc, {what}{on_device}{parameters}"


def own_gathers(n_gathers: int) -> int:
    """Returns as how many gathers of a unit in a step those count, for FSDP2's own work: 0 to 2."""
    return min(n_gathers, 2)


def own_work_of(n_gathers: int) -> str:
    return f"FSDP2's own work, {own_gathers(n_gathers)} gathers"


# ---- measuring ----


class _Unsampled:
    """In the place of a schedule, for task.Task: nothing follows the gradients."""

    def __init__(self, options: Settings) -> None:
        self._options = options

    def sampling(self, layout: layouts.Layout) -> tuple[ctypes.c_void_p, Sample]:
        return ctypes.c_void_p(), Sample((), (), torch.empty(0, dtype=torch.long))

    def largest(self, part: layouts.Part, dtype: torch.dtype) -> list[dict[str, Any]]:
        return [self._options.reducer(part.kind, dtype)]

    def has_levels(self, kind: str) -> bool:
        return False

    def note(self, *_: object) -> None:
        """Is never called: there are no windows."""


class Survey:
    """Times on this rank, {what: {elements: [seconds]}}; each measurement is collective. group: of the
    gradients' exchange. hosts: those of the group; None: each rank counts as one."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        shape: Shape,
        threads: int = 1,
        timeout_s: float | None = None,
        streams: Cuda | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        """streams: of the model's device; None: CPU memory."""
        timeout_s = timeout_of(group) if timeout_s is None else timeout_s
        self.group, self.shape, self.threads, self.timeout_s = group, shape, threads, timeout_s
        self.has_gathers = shape.wrap == "fsdp2" and any(shape.n_gathers)
        self.world_size, self.rank = shape.world_size, dist.get_rank(group)
        self.comm, self.streams = Comm(group, timeout_s), streams
        flat = Hosts.flat(group)
        self.hosts = flat if hosts is None or not hosts.is_two_level else hosts
        # of the exchanges of gradients: by its hosts
        self._comms = {flat: self.comm, self.hosts: self.comm}
        self._within: Comm | None = None
        if self.hosts.within is not None:
            self._comms = {flat: self.comm, self.hosts: Comm(self.hosts.between, timeout_s)}
            self._within = Comm(self.hosts.within, timeout_s)
        self._flat = flat
        self.times: dict[str, dict[int, list[float]]] = {}
        self.phases: dict[str, dict[str, float]] = {}  # what -> seconds per element
        self.bits: dict[str, float] = {}  # what -> sent per element, of the host of rank 0
        self._staging = None if streams is None else Staging(streams, None)
        self._random = torch.Generator().manual_seed(1234 + self.rank)  # keeps the user's random numbers

    def __enter__(self) -> Survey:
        return self

    def __exit__(self, *_: object) -> None:
        if self._staging is not None:
            self._staging.close()
        for comm in {*self._comms.values(), self._within}:
            if comm is not None:
                comm.close()
        if self._staging is not None:
            self._staging.free()

    def _of_host(self, device: torch.device) -> Collectives:
        """Returns collectives of the ranks of this host."""
        assert self._within is not None  # hosts have several ranks
        return self.hosts.collectives(self._within, device, "advise()", self.timeout_s)

    @property
    def _kernels(self) -> Kernels | None:
        return None if self._staging is None else self._staging.kernels

    def _is_measured(self, options: Mapping[str, Any], have_kernels: bool) -> bool:
        """Returns whether it is measured, the same on all ranks."""
        return have_kernels or "codec" not in options

    def run(self, seconds: float, with_local: bool = False) -> None:
        """Measures everything that forecast() needs, in about that time. with_local: and the exchange of
        local steps."""
        n = self._size(seconds)
        self._link(n)
        all_reduce, have_kernels = self.shape.all_reduce, all(share(self.group, self._kernels is not None))
        for size in (self._rounded(N_SMALL), n):
            if self.streams is not None:
                for what, copy_s in zip(("copy out", "copy back"), self.streams.copy_seconds(4 * size)):
                    self.times.setdefault(what, {})[size] = [copy_s]
            for dtype in DTYPES:
                self.torch_reduce(size, dtype, all_reduce)
                if any(self.shape.n_gathers):
                    self.torch_gather(size, dtype)
            for options in itertools.chain(*map(by_codec, GRADIENTS)):
                if self._is_measured(options, have_kernels):
                    self.reduce(size, Settings(**options, threads=self.threads), name_of(options), all_reduce)
            if with_local:
                local = Settings(**LOCAL_OPTIONS, residual="fp32", threads=self.threads)
                self.reduce(size, local, LOCAL, True, self._flat)
            for wire in sorted({self.shape.gather, *WIRES}) if self.has_gathers else ():
                self._gather(size, wire)
            for n_gathers in (
                sorted(set(map(own_gathers, self.shape.n_gathers)) - {0}) if self.has_gathers else ()
            ):
                self.own_work(size, n_gathers)

    def found(self) -> dict[str, Any]:
        """Returns seconds by what and elements, median of the runs, of the slowest rank; and "spread", the
        slowest run over the fastest, the median of what was measured. The same on all ranks. Collective."""
        mine = {
            what: {n: statistics.median(samples) for n, samples in by_size.items()}
            for what, by_size in self.times.items()
        }
        runs = [samples for by_size in self.times.values() for samples in by_size.values()]
        spread = statistics.median(max(one) / max(min(one), 1e-9) for one in runs if len(one) > 1)
        everyone = share(self.group, (mine, self.phases, self.bits, spread))
        worst = {
            what: {n: max(theirs[what][n] for theirs, *_ in everyone) for n in by_size}
            for what, by_size in mine.items()
        }
        phases = {
            what: {phase: max(theirs[what][phase] for _, theirs, *_ in everyone) for phase in by_phase}
            for what, by_phase in self.phases.items()
        }
        spread = max(theirs for *_, theirs in everyone)
        return {"seconds": worst, "codec": phases, "bits": everyone[0][2], "spread": spread}

    def time(
        self,
        what: str,
        n: int,
        run: Callable[[], object],
        n_warm: int = 1,
        n_runs: int = N_RUNS,
        before: Callable[[], object] = lambda: None,
    ) -> list[float]:
        """Returns seconds of each run. before: is called before each of them."""
        samples = []
        for number in range(n_warm + n_runs):
            before()
            self.comm.agree("advise()", {"elements": n})  # ranks start together
            start = time.perf_counter()
            run()
            if number >= n_warm:
                samples.append(time.perf_counter() - start)
        self.times.setdefault(what, {})[n] = samples
        self.n_warm_of_last = n_warm
        return samples

    def _rounded(self, n: int) -> int:
        multiple = 16 * self.world_size
        return max(1, n // multiple) * multiple

    def _size(self, seconds: float) -> int:
        """Returns a unit's typical size, or less if the link is slow."""
        n_gathered = sum(map(n_of, self.shape.held)) if any(self.shape.n_gathers) else 0
        mean = max(self.shape.n_elems, n_gathered) // max(1, len(self.shape.units))
        n, n_before, before_s = self._rounded(min(mean, 1 << 16)), 0, 0.0
        while True:
            samples = self.torch_reduce(n, "fp32", self.shape.all_reduce)
            slowest_s = max(share(self.group, statistics.median(samples)))
            if slowest_s > seconds / 60:
                # of an exchange that is mostly latency, twice as many elements take hardly longer
                per_elem_s = max(slowest_s - before_s, 1e-9) / (n - n_before)
                n = n_before + int(max(0.0, seconds / 60 - before_s) / per_elem_s)
            if slowest_s > seconds / 60 or n >= self._rounded(mean):
                break
            n, n_before, before_s = self._rounded(min(mean, 4 * n)), n, slowest_s
        self.times.clear()
        return self._rounded(max(2 * N_SMALL, min(mean, n)))

    def _link(self, n: int) -> None:
        """Times tagc's connection alone: an agreement, and as many bytes for each peer as a dense unit
        sends."""
        self.time("agree", 0, lambda: None, n_runs=1)
        start = time.perf_counter()
        for _ in range(10):
            self.comm.agree("advise()", {})
        self.times["agree"] = {0: [(time.perf_counter() - start) / 10]}
        self.all_to_all(n)

    def all_to_all(self, n: int) -> list[float]:
        """Times an exchange in which each rank sends its n / W fp32 values to all others."""
        sizes = n // self.world_size, n // self.world_size * self.world_size
        mine, everyone = (torch.zeros(size, dtype=torch.float32) for size in sizes)
        call = (
            "tagc_comm_all_gather",
            self.comm.handle,
            mine.data_ptr(),
            4 * mine.numel(),
            everyone.data_ptr(),
            4 * everyone.numel(),
        )
        return self.time("all-to-all", n, lambda: lib.call(*call))

    def torch_reduce(self, n: int, dtype: str, all_reduce: bool) -> list[float]:
        source = self._on_device(n, dtype)
        if all_reduce:
            return self._time_torch(
                f"torch reduce {dtype}", n, lambda: dist.all_reduce(source, group=self.group)
            )
        target = self._on_device(n // self.world_size, dtype)
        return self._time_torch(
            f"torch reduce {dtype}", n, lambda: internals.reduce_scatter(target, source, group=self.group)
        )

    def torch_gather(self, n: int, dtype: str) -> list[float]:
        full, shard = self._on_device(n, dtype), self._on_device(n // self.world_size, dtype)
        return self._time_torch(
            f"torch gather {dtype}", n, lambda: internals.all_gather(full, shard, group=self.group)
        )

    def own_work(self, n: int, n_gathers: int) -> None:
        """Times what FSDP2 adds to the computing of a unit, without its communication."""
        what, device = (
            own_work_of(n_gathers),
            torch.device("cpu") if self.streams is None else self.streams.device,
        )
        dtypes = DTYPES[self.shape.gather], DTYPES[self.shape.reduce]
        plain_s, wrapped_s = (
            statistics.median(self._time_torch(what, n, run))
            for run in own_work.passes(n, n_gathers, self.group, dtypes, device)
        )
        self.times[what][n] = [max(0.0, wrapped_s - plain_s) / own_work.N_UNITS]

    def _on_device(self, n: int, dtype: str) -> torch.Tensor:
        return torch.zeros(
            n, dtype=DTYPES[dtype], device=None if self.streams is None else self.streams.device
        )

    def _time_torch(self, what: str, n: int, run: Callable[[], object]) -> list[float]:
        """Times a function on the model's device, until the device has finished."""
        if (streams := self.streams) is None:
            return self.time(what, n, run)

        def run_through() -> None:
            run()
            streams.synchronize()

        return self.time(what, n, run_through)

    def _gradient(self, n: int) -> torch.Tensor:
        """Returns values with heavy tails, like gradients: normal values, each with a random scale."""
        values, scales = (torch.randn(n, generator=self._random, dtype=torch.float32) for _ in range(2))
        return values.mul_(scales.exp_())

    def reduce(
        self, n: int, options: Settings, what: str, all_reduce: bool = False, hosts: Hosts | None = None
    ) -> list[float]:
        """Times tagc's exchange of a unit of about n elements with the model's mix of classes, in two levels
        over hosts of several ranks. hosts: other ones."""
        hosts, parameters = hosts or self.hosts, []
        for kind, part in self.shape.mix.items():
            n_kind = self._rounded(int(n * part)) // hosts.per_host if part else 0
            if n_kind:
                parameters.append(layouts.Parameter(kind, (n_kind,), kind))
        layout = (
            layouts.bucket(parameters, hosts.n_hosts)
            if all_reduce
            else layouts.chunked(parameters, hosts.n_hosts)
        )
        kernels = self._kernels if options.codec == "device" else None
        source = self._gradient(layout.n_elems).to(DTYPES[self.shape.reduce])
        source = source if kernels is None else source.to(kernels.device)
        gradient, target = source.clone(), source if all_reduce else source.new_empty(layout.row)
        comm = self._comms[hosts]
        way = Way(comm, Work(), kernels, None if kernels is None else self._staging)
        whole = None if hosts.is_flat else self._on_device(layout.n_elems * hosts.per_host, self.shape.reduce)
        unit = Unit("advise()", lambda part, dtype: options.reducer(part.kind, dtype))
        stats: list[Stats] = []

        def run() -> None:
            if whole is not None and self._within is not None:
                Rows(hosts, self._within, whole, dist.ReduceOp.AVG, "advise()", self.timeout_s).add_up()
            if way.staging is None:
                found = unit.reduce(way, layout, source, target, dist.ReduceOp.AVG)()
            else:
                found = self._by_libtagc(unit, way, options, source, target)
            if whole is not None and all_reduce:
                self._of_host(target.device).all_gather(whole, target)
            stats.append(found)

        try:
            unit.prepare(way, layout, dist.ReduceOp.AVG, source.dtype)
            # an exchange does not keep its source
            seconds = self.time(what, n, run, n_warm=2, before=lambda: source.copy_(gradient))
        finally:
            unit.close()
        self.phases[what] = {
            phase: statistics.median(sum(step.time_s[i] for _, step in run) for run in stats)
            / (layout.n_elems * hosts.per_host)
            for i, phase in enumerate(lib.PHASES)
            if phase != "wait"
        }
        self.bits[what] = (
            8
            * statistics.median(sum(sum(step.n_bytes_sent) for _, step in run) for run in stats)
            / layout.n_elems
        )
        return seconds

    @staticmethod
    def _by_libtagc(
        unit: Unit, way: Way, options: Settings, source: torch.Tensor, target: torch.Tensor
    ) -> Stats:
        """Exchanges arrays on a device, as hooks have it done, and waits for the result."""
        what, op, sizes = "advise()", dist.ReduceOp.AVG, (source.numel(), target.numel())
        assert way.staging is not None  # with kernels
        task = unit.task(way.staging, way, what, [way.comm], op, source.dtype, sizes, _Unsampled(options))
        assert task is not None  # none is under way
        task.begin(*compared(what, {}), 0, task.check)
        way.staging.start_task(task, source, target, waits=True)
        way.staging.finish()
        return [(part, lib.ReducerStats.from_buffer_copy(stats)) for part, stats in task.stats()]

    def _gather(self, n: int, wire: str) -> None:
        """Times tagc's gather of changed parameters, including the hook's vote and copies; in two levels over
        hosts of several ranks."""
        hosts, n_shard = self.hosts, n // self.world_size
        comm, n_came = self._comms[hosts], n_shard * hosts.n_hosts
        shard, output = self._gradient(n_shard), torch.zeros(n_came, dtype=torch.float32)
        change = self._gradient(n_shard).mul_(1e-3)
        gatherer = Gatherer(comm, n_came, wire, 0)
        gathers = Gathers(gatherer.is_delta)
        rows, whole = (
            self._on_device(size, self.shape.gather).view(hosts.n_hosts, -1)
            for size in ((n_came, n_came * hosts.per_host) if hosts.within is not None else (0, 0))
        )

        def run(vote: int = CHANGED) -> None:
            found = gathers.vote(shard)[1]
            before = comm.bytes_sent()["gather"]
            gathers.run(gatherer, shard, output, None, vote, found)
            if vote:
                self.bits[f"gather {wire}"] = 8 * (comm.bytes_sent()["gather"] - before) / n_came
            if self._within is not None:
                self._of_host(rows.device).gather_rows(whole, rows)

        def run_changed() -> None:
            run()
            shard.add_(change)

        try:
            self.time(f"gather {wire}", n, run_changed, n_warm=2)
            if gatherer.is_delta:  # backward gathers after forward: nothing has changed
                self.time(f"gather {wire} again", n, lambda: run(vote=0))
        finally:
            gatherer.close()
