"""The measurements of advise(): link, codec, and torch's own collectives on the model's own group. What a
step takes with these, the planner says. It does not change the model."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tagc import _library as lib
from tagc import _planner as planner
from tagc.torch.advise import own_work
from tagc.torch.advise.shape import Shape, n_of
from tagc.torch.exchange import internals
from tagc.torch.exchange.comm import Comm, share
from tagc.torch.exchange.hosts import Hosts
from tagc.torch.exchange.staging import FOR_RESULT, Staging
from tagc.torch.exchange.streams import Cuda
from tagc.torch.exchange.waits import timeout_of
from tagc.torch.hooks.replicas import fingerprint
from tagc.torch.schedule.options import Settings

N_SMALL = 4096
N_RUNS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LONG_S = 0.3  # of messages that show the rate of a link
MOST_BYTES = 1 << 26  # of a rank to each other


# From the mildest to the strongest. The first is lossless: gloo's own collectives do not always fill a link.
# Settings with selection are forecast as after their gentle start.
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

AGAIN = "gather, nothing has changed"


def parts_of(options: Mapping[str, Any], dtype: str) -> list[dict[str, Any]]:
    """Returns fields of tagc_reducer_options for those options of compress(), of each class."""
    settings = Settings(**options)
    return [settings.reducer(kind, DTYPES[dtype]) for kind in lib.CLASSES]


def codec_of(part: Mapping[str, Any], on_device: bool = False) -> str:
    """Returns the name of the codec of such a part, among what is measured."""
    values = next(name for name, number in lib.FORMATS.items() if number == part["format"])
    return f"{values}, {100 * part['sparsity']:g} % zero" + (", on the device" if on_device else "")


def own_gathers(n_gathers: int) -> int:
    """Returns as how many gathers of a unit in a step those count, for FSDP2's own work: 0 to 2."""
    return min(n_gathers, 2)


def own_work_of(n_gathers: int) -> str:
    return f"FSDP2's own work, {own_gathers(n_gathers)} gathers"


def measure_link(comm: Comm, group: dist.ProcessGroup, n_peers: int) -> tuple[float, float, float]:
    """Returns (seconds of an empty message, bytes per second that a rank sends to n_peers others together,
    how many times as long as the fastest of the large messages the slowest took). Collective over the group,
    whose ranks each have a comm to their peers, all at once."""

    def gather(n_bytes: int) -> float:
        sent, received = (torch.zeros(n, dtype=torch.uint8) for n in (n_bytes, (1 + n_peers) * n_bytes))
        share(group, None)  # ranks start together
        begin = time.perf_counter()
        lib.call(
            "tagc_comm_all_gather",
            comm.handle,
            sent.data_ptr(),
            n_bytes,
            received.data_ptr(),
            received.numel(),
        )
        return max(share(group, time.perf_counter() - begin))

    gather(1)
    latency_s = sorted(gather(1) for _ in range(5))[2]
    n_bytes = 1 << 16
    while (seconds := gather(n_bytes)) < LONG_S and n_bytes < MOST_BYTES:
        n_bytes *= 4
    fastest_s, middle_s, slowest_s = sorted([seconds, gather(n_bytes), gather(n_bytes)])
    return latency_s, n_peers * n_bytes / max(middle_s - latency_s, 1e-9), slowest_s / fastest_s


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
        self.group, self.shape, self.threads = group, shape, threads
        self.world_size, self.rank = shape.world_size, dist.get_rank(group)
        self.hosts = Hosts.flat(group) if hosts is None or not hosts.is_two_level else hosts
        self.comm, self.streams = Comm(group, timeout_s), streams
        self._between = self.comm if self.hosts.is_flat else Comm(self.hosts.between, timeout_s)
        self.times: dict[str, dict[int, list[float]]] = {}
        self.codec: dict[str, float] = {}  # seconds per element
        self.link = 0.0, 0.0  # seconds of a message, bytes per second
        self._staging = None if streams is None else Staging(streams, None)
        self._random = torch.Generator().manual_seed(1234 + self.rank)  # keeps the user's random numbers

    def __enter__(self) -> Survey:
        return self

    def __exit__(self, *_: object) -> None:
        if self._staging is not None:
            self._staging.close()
        for comm in {self.comm, self._between}:
            comm.close()
        if self._staging is not None:
            self._staging.free()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.streams is None else self.streams.device

    def run(self, seconds: float, with_local: bool = False) -> None:
        """Measures everything that forecast() needs, in about that time. with_local: and what local steps
        need."""
        shape, n = self.shape, self._size(seconds)
        self.link = measure_link(self._between, self.group, self.hosts.n_hosts - 1)[:2]
        has_gathers = shape.wrap == "fsdp2" and any(shape.n_gathers)
        for size in (self._rounded(N_SMALL), n):
            if self.streams is not None:
                for what, copy_s in zip(("copy out", "copy back"), self.streams.copy_seconds(4 * size)):
                    self.times.setdefault(what, {})[size] = [copy_s]
            for dtype in DTYPES:
                self.torch_reduce(size, dtype, shape.all_reduce)
                if any(shape.n_gathers):
                    self.torch_gather(size, dtype)
            if self.hosts.within is not None:
                self._within(size, self.hosts.within)
            for n_gathers in sorted(set(map(own_gathers, shape.n_gathers)) - {0}) if has_gathers else ():
                self.own_work(size, n_gathers)
        settings = [*GRADIENTS, *([LOCAL_OPTIONS] if with_local else [])]
        self._codecs([part for options in settings for part in parts_of(options, shape.reduce)], n)
        self._gather_codecs(sorted({shape.gather, *WIRES}) if has_gathers else ())

    def results(self) -> dict[str, Any]:
        """Returns seconds by what and elements, median of the runs, of the slowest rank; seconds per element
        of the codec; and "spread", the slowest run over the fastest, the median of what was measured. The
        same on all ranks. Collective."""
        seconds_here = {
            what: {n: statistics.median(samples) for n, samples in by_size.items()}
            for what, by_size in self.times.items()
        }
        runs = [samples for by_size in self.times.values() for samples in by_size.values()]
        spread = statistics.median(max(one) / max(min(one), 1e-9) for one in runs if len(one) > 1)
        everyone = share(self.group, (seconds_here, self.codec, spread))
        seconds = {
            what: {n: max(theirs[what][n] for theirs, *_ in everyone) for n in by_size}
            for what, by_size in seconds_here.items()
        }
        codec = {what: max(theirs[what] for _, theirs, _ in everyone) for what in self.codec}
        spread = max(theirs for *_, theirs in everyone)
        return {"seconds": seconds, "link": self.link, "codec": codec, "spread": spread}

    def time(self, what: str, n: int, run: Callable[[], object]) -> list[float]:
        """Returns seconds of each run on the model's device, until that has finished."""
        samples = []
        for _ in range(1 + N_RUNS):
            self.comm.agree("advise()", {"elements": n})  # ranks start together
            start = time.perf_counter()
            run()
            if self.streams is not None:
                self.streams.synchronize()
            samples.append(time.perf_counter() - start)
        self.times.setdefault(what, {})[n] = samples[1:]
        return samples[1:]

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

    # ---- torch ----

    def torch_reduce(self, n: int, dtype: str, all_reduce: bool) -> list[float]:
        source = self._zeros(n, dtype)
        if all_reduce:
            return self.time(f"torch reduce {dtype}", n, lambda: dist.all_reduce(source, group=self.group))
        target = self._zeros(n // self.world_size, dtype)
        return self.time(
            f"torch reduce {dtype}", n, lambda: internals.reduce_scatter(target, source, group=self.group)
        )

    def torch_gather(self, n: int, dtype: str) -> list[float]:
        full, shard = self._zeros(n, dtype), self._zeros(n // self.world_size, dtype)
        return self.time(
            f"torch gather {dtype}", n, lambda: internals.all_gather(full, shard, group=self.group)
        )

    def _within(self, n: int, group: dist.ProcessGroup) -> None:
        """Times what the ranks of a host do around tagc's exchange: sums of gradients, and results for
        all."""
        whole, part = (self._zeros(n_own, self.shape.reduce) for n_own in (n, n // self.hosts.per_host))
        self.time("sum within", n, lambda: internals.reduce_scatter(part, whole, group=group))
        self.time("share within", n, lambda: internals.all_gather(whole, part, group=group))

    def own_work(self, n: int, n_gathers: int) -> None:
        """Times what FSDP2 adds to the computing of a unit, without its communication."""
        what, dtypes = own_work_of(n_gathers), (DTYPES[self.shape.gather], DTYPES[self.shape.reduce])
        plain_s, wrapped_s = (
            statistics.median(self.time(what, n, run))
            for run in own_work.passes(n, n_gathers, self.group, dtypes, self.device)
        )
        self.times[what][n] = [max(0.0, wrapped_s - plain_s) / own_work.N_UNITS]

    def _zeros(self, n: int, dtype: str) -> torch.Tensor:
        return torch.zeros(n, dtype=DTYPES[dtype], device=self.device)

    # ---- the codec ----

    def _codecs(self, parts: Iterable[Mapping[str, Any]], n: int) -> None:
        """Times each codec: of all ranks of a host at once, as in training."""
        has_kernels = all(share(self.group, self._staging is not None and self._staging.kernels is not None))
        for part in parts:
            values = next(name for name, number in lib.FORMATS.items() if number == part["format"])
            if (what := codec_of(part)) not in self.codec:
                share(self.group, None)
                self.codec[what] = 1e-9 * planner.codec_ns(values, part["sparsity"], self.threads)
                if has_kernels and values not in DTYPES:
                    self.codec[codec_of(part, True)] = self._on_device(part, n)

    def _gather_codecs(self, wires: Iterable[str]) -> None:
        for wire in wires:
            share(self.group, None)
            self.codec[f"gather {wire}"] = 1e-9 * planner.gather_ns(wire, self.threads)
            shard = torch.ones(1 << 18, dtype=torch.float32)
            replica = torch.ones(1 << 19, dtype=torch.bfloat16)
            output, samples = torch.empty(replica.numel(), dtype=torch.float32), []
            for _ in range(1 + N_RUNS):  # as the hook does, which finds that nothing has changed
                start = time.perf_counter()
                fingerprint(shard)
                output.copy_(replica)
                samples.append((time.perf_counter() - start) / replica.numel())
            self.codec[AGAIN] = statistics.median(samples[1:])

    def _on_device(self, part: Mapping[str, Any], n: int) -> float:
        """Returns seconds per element of an exchange whose codec is on the device, but for its messages.
        Collective."""
        assert self._staging is not None and self.streams is not None  # with kernels
        n = n // self.hosts.per_host // (16 * self.hosts.n_hosts) * (16 * self.hosts.n_hosts)
        schedule = lib.initialised(lib.ScheduleOptions, "tagc_schedule_options_init")
        schedule.gentle, schedule.sparsity, schedule.format = 0, part["sparsity"], part["format"]
        options = lib.initialised(lib.ModelOptions, "tagc_model_options_init")
        options.schedule.options, options.layout.output = ctypes.pointer(schedule), lib.OUTPUTS["shard"]
        lengths = (ctypes.c_uint64 * 1)(n)
        tensor = lib.Tensor(name=b"advise", shape=lengths, n_dims=1, kind=lib.CLASSES["compressed"])
        sums = self._zeros(n // self.hosts.n_hosts, "fp32")
        gradient = torch.randn(n, generator=self._random, dtype=torch.float32).to(self.device)
        given = lib.Piece(0, 0, n, gradient.data_ptr())
        wanted = lib.Piece(0, self.hosts.host * sums.numel(), sums.numel(), sums.data_ptr())
        model = ctypes.c_void_p()
        model_of = (
            self._staging.queue,
            None,
            self._between.handle,
            ctypes.byref(tensor),
            1,
            ctypes.byref(options),
        )
        lib.call("tagc_model_create_on", *model_of, ctypes.byref(model))

        def run() -> None:
            stream = self.streams.current() if self.streams is not None else 0
            pieces = ctypes.byref(given), 1, ctypes.byref(wanted), 1
            lib.call("tagc_model_begin_on", model, 0, *pieces, stream, FOR_RESULT)
            lib.call("tagc_model_end", model, 0, None)

        try:
            seconds = statistics.median(self.time(codec_of(part, True), n, run))
        finally:
            lib.load().tagc_model_destroy(model)
        unit = planner.UnitsUnit(trained=(n, 0, 0))
        question = planner.UnitsQuestion(
            units=ctypes.pointer(unit),
            n_units=1,
            world_size=self.hosts.n_hosts,
            ranks_per_host=1,
            n_passes=1,
            parameters=-1,
            gradients=planner.options_of([part] * len(lib.CLASSES)),
        )
        question.times.latency_s, question.times.bytes_per_s = self.link
        return max(0.0, seconds - planner.units(question).gradients_s) / n
