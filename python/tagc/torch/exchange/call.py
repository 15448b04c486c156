"""What a hook asks a runner for, and the agreement of all ranks before it."""

from __future__ import annotations

import functools
import struct
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.exchange.comm import Comm, compared
from tagc.torch.exchange.interfaces import Exchanged
from tagc.torch.exchange.layout import Layout
from tagc.torch.exchange.model import Levels, PartStats
from tagc.torch.exchange.reducer import LocalFailure, Way
from tagc.torch.exchange.rows import Rows
from tagc.torch.exchange.staging import Staging
from tagc.torch.exchange.task import Sampler, Task
from tagc.torch.exchange.unit import Resting, Unit, check_tensors, scale_of

FindLayout = Callable[[], "Layout | None"]  # of the gradient; None: its parameters are unknown
# of all of it, True; or of what the ranks of this rank's place exchange of it, False
FindLayouts = Callable[[bool], "Layout | None"]
# (outcome, seconds of the exchange, seconds of the agreement)
Record = Callable[[PartStats, float, float], object]


class Call:
    """comm: over which ranks agree and tagc sends. failure: of this rank; perform() tells the
    others. waits: whether later work of the current stream waits for the result. wants_kernels: whether it
    runs on the tensors' device, if that has kernels."""

    # whether it has a connection of its own, so that it need not wait for one that lasts
    runs_beside = False

    def __init__(
        self, comm: Comm, failure: BaseException | None = None, waits: int = True, wants_kernels: bool = True
    ) -> None:
        self.comm, self.failure, self.waits, self.wants_kernels = comm, failure, waits, wants_kernels

    def perform(
        self,
        way: Way,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        failure: BaseException | None,
    ) -> Callable[[], object]:
        """Runs it, after the agreement of all ranks. Collective. source, target: None if there is a failure,
        which this rank only reports. Returns a function for when the way has finished, which raises a failure
        that shows only then."""
        raise NotImplementedError

    def task(self, way: Way, staging: Staging) -> Task | None:
        """Returns what libtagc runs by itself in place of perform(), if it can; None: it cannot. Local."""
        return None

    def begin_task(self, task: Task) -> None:
        """Prepares its next exchange, in the hook. Local."""
        raise NotImplementedError

    def make_task(self, way: Way, staging: Staging, source: torch.Tensor) -> Task | None:
        """Agrees with all ranks on this exchange, makes what it needs, and returns what libtagc runs by
        itself, begun; None: nothing was done, and perform() is the way. Collective; nothing is under
        way."""
        return None


class Reduction(Call):
    """Of a gradient. It checks everything that must be checked in the hook itself.

    rows: where gradients are added up within hosts first. source is what that gives then, rows.sums, and comm
        is between hosts.
    within: over the ranks of the host, where libtagc adds up within hosts; comm is between hosts.
    loaded: of which exchange the state is that this rank has loaded.
    begin: (begin, take_back). begin(self, source) is called under the lock when all ranks have agreed. It
        returns the unit and the layout of the exchange, and a function that is called with its outcome.
        Before libtagc runs an exchange by itself, begin(self, None) is called before the agreement;
        take_back(), if it opened a step and the ranks did not agree."""

    schedule: Sampler  # that sees the gradient
    opens_step = False  # whether it is the first of an exchange of the whole model
    is_agreed = False  # whether all ranks have agreed on it
    step = 0  # the number of that exchange, which _begin knows
    number: int | None = None  # instead of it, of a call that belongs to no step
    agrees_first = True  # by messages of its own, before the exchange
    agree_s = 0.0  # how long that took

    def __init__(
        self,
        unit: Exchanged,
        comm: Comm,
        source: torch.Tensor,
        target: torch.Tensor,
        op: Any,
        find_layout: FindLayout,
        loss_scale: Callable[[], float],
        begin: tuple[
            Callable[[Reduction, torch.Tensor | None], tuple[Exchanged, Layout, Record]], Callable[[], object]
        ],
        lock: threading.RLock,
        failure: BaseException | None = None,
        waits: int = True,
        rows: Rows | None = None,
        loaded: int | None = None,
        within: Comm | None = None,
    ) -> None:
        super().__init__(comm, failure, waits)
        self.within = within if rows is None else rows.comm
        self.levels = Levels(within, comm)  # over which its elements are summed
        # bytes to ranks of the host
        self.n_within = 0 if rows is None else rows.n_bytes + rows.comm.agreement_bytes
        (self._begin, self._take_back), self._lock = begin, lock
        self.n_elems, self.dtype = source.numel(), source.dtype
        self.n_bytes = self.n_elems * source.element_size()
        self._is_plain = False
        # rows_wait: whether they are to be added up after the agreement, by perform()
        self.rows, self.rows_wait = rows, rows is not None
        self.unit, self.op, self.is_all_reduce = unit, op, source.numel() == target.numel()
        self.layout: Layout | None = None
        self.loss_scale, self._numbers = 1.0, dict[str, Any]()
        try:
            if failure is not None:
                return
            check_tensors(source, target, "gradient")
            for tensor in (source, target):
                if tensor.layout != torch.strided or not tensor.is_contiguous():
                    raise Error("unsupported", f"a gradient of {tensor.layout}: must be dense and contiguous")
            layout = self.layout = find_layout()
            n_output = source.numel() if layout is None or layout.all_reduce else layout.row
            world_size = self.levels.world_size
            if target.numel() != n_output and (layout or target.numel() * world_size != n_output):
                raise Error("mismatch", f"the output has {target.numel()} elements, must have {n_output}")
            self._is_plain = source.numel() > 0
            self.loss_scale = loss_scale()
            self._numbers = {
                "elements": source.numel(),
                "dtype": source.dtype,
                "parameters": _fingerprint(layout),
                "factor of op": scale_of(op, world_size),
                "loss scale": self.loss_scale,
                "loaded at exchange": loaded,
            }
        except Exception as problem:
            self.failure = problem

    def perform(
        self,
        way: Way,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        failure: BaseException | None,
    ) -> Callable[[], object]:
        agree_s = self._agree(failure or self.failure)
        assert source is not None and target is not None  # or that has raised
        begin = time.perf_counter()
        with self._lock:
            try:
                unit, layout, record = self._begin(self, source)
            except Exception as problem:
                self.comm.abort(f"{self.unit.name}: {problem}")
                raise
            try:
                end = unit.reduce(way, layout, source, target, self.op, step=self.step)
            except Exception as problem:
                self._abort_unless_told(problem)
                raise
        seconds = time.perf_counter() - begin
        return lambda: record(end(), seconds, agree_s)

    def _abort_unless_told(self, problem: Exception) -> None:
        """Ends the connection where peers wait for messages of this rank's that will not come."""
        if not isinstance(problem, Error) or isinstance(problem, LocalFailure):
            self.comm.abort(f"{self.unit.name}: {problem}")

    def task(self, way: Way, staging: Staging) -> Task | None:
        unit = None if self.layout is None else self.unit.find_unit()
        if unit is None or self.layout is None or not self._is_plain or self.failure or self.rows_wait:
            return None
        if self.unit.rests or not unit.is_ready(way, self.layout, self.op, self.dtype):
            return None
        return self._task_of(unit, self.layout, way, staging)

    def _task_of(self, unit: Unit, layout: Layout, way: Way, staging: Staging) -> Task | None:
        comms = [self.comm] if self.rows is None else [self.rows.comm, self.comm]
        sizes = self.n_elems, self.n_elems if self.is_all_reduce else layout.row
        return unit.task(staging, way, self.what, comms, self.op, self.dtype, sizes, self.schedule)

    def make_task(self, way: Way, staging: Staging, source: torch.Tensor) -> Task | None:
        if self.layout is None or not self._is_plain or self.failure or self.rows_wait:
            return None
        self._agree(None)
        with self._lock:
            try:
                _, layout, record = self._begin(self, None)
                unit = self.unit.make_unit()
                unit.prepare(way, layout, self.op, self.dtype, self.step)
                task, resting = self._local_task(unit, layout, way, staging, source)
            except Exception as problem:
                self._abort_unless_told(problem)
                raise
        self._put(task, layout, record, functools.partial(unit.put_back, resting))
        return task

    def _local_task(
        self, unit: Unit, layout: Layout, way: Way, staging: Staging, source: torch.Tensor
    ) -> tuple[Task, Resting]:
        """Returns also the residuals that are not sent."""
        try:
            task = self._task_of(unit, layout, way, staging)
            assert task is not None  # nothing is under way
            return task, unit.withdraw(source) if self.unit.rests else []
        except Error as problem:
            raise LocalFailure(problem.status, str(problem)) from problem

    def begin_task(self, task: Task) -> None:
        """Begins an exchange that libtagc runs by itself. Its end is called at the end of the pass."""
        with self._lock:
            _, layout, record = self._begin(self, None)
        self._put(task, layout, record)

    def _put(
        self, task: Task, layout: Layout, record: Record, put_back: Callable[[], object] = lambda: None
    ) -> None:
        words, text = compared(self.what, self._numbers)

        def end() -> None:
            put_back()
            if not task.is_agreed and self.opens_step:
                self._take_back()
            if (found := task.full_windows()) is not None:
                self.schedule.note(self.comm, layout, *found)
            task.check()
            record(task.stats(), task.exchange_s, task.agree_s)

        task.begin(words, text, self.step, end, self.is_agreed)

    def word(self) -> int:
        """Returns a checksum of what all ranks must have alike, for libtagc to compare."""
        data = struct.pack("=7q", *compared(self.what, self._numbers)[0])
        return int(lib.load().tagc_checksum(data, len(data)))

    def agree(self) -> None:
        """Makes all ranks agree on it, or raise the same Error, also of one that has failed. Collective."""
        self.agree_s = self._agree(self.failure)

    @property
    def what(self) -> str:
        return f"gradients of {self.unit.name}"

    def _agree(self, failure: BaseException | None) -> float:
        """Returns the seconds that the agreement took. Collective: over the ranks of the host, of which one
        may have failed, and then over those of this place in all hosts."""
        begin, within_s, what = time.perf_counter(), 0.0, self.what
        if self.within is not None:
            try:
                self.within.agree(what, self._numbers, failure)
                if self.rows is not None and self.rows_wait:
                    within_s = self._add_up(self.rows)
            except Exception as problem:  # the other hosts learn of it below
                failure = failure or problem
        self.comm.agree(what, self._numbers, failure)
        self.is_agreed = True
        return time.perf_counter() - begin - within_s

    def add_up_now(self) -> None:
        """Adds the rows up in the hook, on the caller's stream, before perform() in a thread. Collective."""
        self.rows_wait = False
        try:
            if self.rows is not None and self.failure is None:
                self.rows.add_up()
        except Exception as problem:
            self.failure = problem

    @staticmethod
    def _add_up(rows: Rows) -> float:
        begin = time.perf_counter()
        rows.add_up()
        return time.perf_counter() - begin


def _fingerprint(layout: Layout | None) -> str:
    if layout is None:
        return (
            "unknown, because some got no gradient (model.set_reduce_scatter_unused_params(True), of torch "
            "2.13 or newer, gives them zeros)"
        )
    names = zlib.crc32(
        "\n".join(
            f"{parameter.name} {parameter.level} {parameter.sparsity}" for parameter in layout.parameters
        ).encode()
    )
    return f"{len(layout.parameters)} ({names:08x})"
