"""The exchange of a unit as libtagc runs it by itself, without Python's lock (tagc_unit in
include/tagc/device.h): agreement, packing, reducers. A hook prepares it, and its outcome is read at the end
of the pass.

Python does the same for what has no Task (Unit.reduce()): without kernels the first exchange of a layout that
compress() has not prepared, which makes its reducers; gradients of unknown parameters; a failure that is
known in the hook; and all in CPU memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.layout import Layout, Part, Run
from tagc.torch.exchange.reducer import Probe, Reducer
from tagc.torch.exchange.work import Work

TaskPart = tuple[Part, Reducer | Probe, Sequence[Run]]
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Sampler(Protocol):
    """What sees samples of gradients: schedule.Schedule."""

    def sampling(self, layout: Layout) -> tuple[ctypes.c_void_p, Any]: ...

    def largest(self, part: Part, dtype: torch.dtype) -> list[dict[str, Any]]: ...

    def has_levels(self, kind: str) -> bool: ...

    def note(
        self,
        comm: Comm,
        layout: Layout,
        full: Sequence[int],
        sums: Iterable[lib.ScheduleSums],
        squares: Sequence[tuple[float, float]],
    ) -> None: ...


def _runs(runs: Sequence[Run]) -> Any:
    return (lib.Run * max(1, len(runs)))(*(lib.Run(*run) for run in runs))


class Task:
    """Of one unit with one layout. parts: (part, its reducer, the copies from its output). what: for
    messages. sizes: elements of input and output. comms: over which the ranks agree, one after the other.
    work: memory that exchanges of the queue share; none is under way now."""

    def __init__(
        self,
        queue: ctypes.c_void_p,
        what: str,
        layout: Layout,
        parts: Sequence[TaskPart],
        dtype: torch.dtype,
        sizes: tuple[int, int],
        factor: float,
        comms: Sequence[Comm],
        sampler: Sampler,
        work: Work,
    ) -> None:
        self._parts = [part for part, _, _ in parts]
        self._end: Callable[[], object] | None = None
        schedule, sample = sampler.sampling(layout)
        n, n_sampled = len(parts), len(sample.numbers)
        options = lib.UnitOptions(
            struct_bytes=ctypes.sizeof(lib.UnitOptions),
            what=what.encode(errors="replace"),
            element=_ELEMENTS[dtype],
            has_gaps=bool(layout.gaps),
            factor=factor,
            n_parts=n,
            n_input=sizes[0],
            n_output=sizes[1],
            n_comms=len(comms),
            n_sampled=n_sampled,
            schedule=schedule,
        )
        kept: list[Any] = [options]  # while libtagc copies it
        fields = (lib.UnitPart * n)()
        for field, (part, reducer, outputs) in zip(fields, parts):
            field.reducer = reducer.handle
            field.n_gradient, field.n_output = reducer.n_elems, reducer.n_output
            packs, unpacks = _runs(part.runs), _runs(outputs)
            field.packs, field.n_packs = packs, len(part.runs)
            field.unpacks, field.n_unpacks = unpacks, len(outputs)
            kept += [packs, unpacks]
        options.parts = fields
        for i, comm in enumerate(comms):
            options.comms[i] = comm.handle.value
        for name in ("numbers", "counts"):
            values = (ctypes.c_uint32 * max(1, n_sampled))(*getattr(sample, name))
            setattr(options, name, ctypes.addressof(values))
            kept.append(values)
        options.places = sample.places.data_ptr() or None
        self._handle = ctypes.c_void_p()
        lib.call("tagc_unit_create", queue, ctypes.byref(options), ctypes.byref(self._handle))
        n_gradients, n_outputs = ctypes.c_uint64(), ctypes.c_uint64()
        lib.load().tagc_unit_work(self._handle, ctypes.byref(n_gradients), ctypes.byref(n_outputs))
        self._work, self._n_lent = work, (n_gradients.value, n_outputs.value)
        self._lend()
        self._stats = (lib.ReducerStats * n)()
        self._full = (ctypes.c_uint32 * max(1, n_sampled))()
        self._sums = (lib.ScheduleSums * max(1, n_sampled))()
        self._squares = (ctypes.c_double * (2 * n))()
        self._step = lib.UnitStep(stats=self._stats, full=self._full, sums=self._sums, squares=self._squares)

    def _lend(self) -> list[torch.Tensor]:
        return self._work.lend([(torch.device("cpu"), n) for n in self._n_lent])

    # ---- in the hook ----

    @property
    def is_under_way(self) -> bool:
        return self._end is not None

    def begin(
        self,
        words: Sequence[int],
        text: str,
        number: int,
        end: Callable[[], object],
        has_agreed: bool = False,
    ) -> None:
        """Prepares an exchange. end: called by end(), when it is finished. number: of the exchange; 0: the
        reducers count by themselves. has_agreed: the ranks have agreed on it already."""
        step, self._end = self._step, end
        step.gradients, step.outputs = (array.data_ptr() or None for array in self._lend())
        step.n_gradients, step.n_outputs = self._n_lent
        step.words[:] = [*words, 0]
        step.text, step.number, step.n_full = text.encode(errors="replace"), number, 0
        step.has_agreed = step.is_agreed = has_agreed
        step.status, step.why = lib.STATUSES.index("state"), b"the exchange has not run"
        for i in range(len(self._parts)):
            self._stats[i] = lib.initialised(lib.ReducerStats, "tagc_reducer_stats_init")

    def enqueue(
        self, source: torch.Tensor, target: torch.Tensor, stream: int, waits: int
    ) -> tuple[int, bool]:
        """Returns the ticket of the exchange, and whether its work is in the streams."""
        ticket = ctypes.c_uint64()
        arrays = source.data_ptr(), source.numel(), target.data_ptr(), target.numel()
        status = lib.load().tagc_unit_enqueue(
            self._handle, ctypes.byref(self._step), *arrays, stream, int(waits), ctypes.byref(ticket)
        )
        if not ticket.value:
            raise Error(status, lib.load().tagc_last_error().decode(errors="replace"))
        return ticket.value, status == 0

    # ---- at the end of the pass ----

    def end(self) -> None:
        """Hands the outcome over; raises Error if the exchange has failed."""
        end, self._end = self._end, None
        if end is not None:
            end()

    @property
    def is_agreed(self) -> bool:
        return bool(self._step.is_agreed)

    @property
    def agree_s(self) -> float:
        return float(self._step.agree_s)

    @property
    def exchange_s(self) -> float:
        return float(self._step.exchange_s)

    def check(self) -> None:
        if self._step.status:
            raise Error(self._step.status, self._step.why.decode(errors="replace"))

    def stats(self) -> list[tuple[Part, lib.ReducerStats]]:
        return list(zip(self._parts, self._stats))

    def full_windows(self) -> tuple[list[int], list[lib.ScheduleSums], list[tuple[float, float]]] | None:
        """Returns (numbers of the parameters whose windows are full, sums of these, squares of each part's
        residual and gradient), or None."""
        n, squares = self._step.n_full, self._squares
        if not n:
            return None
        sums = [lib.ScheduleSums.from_buffer_copy(one) for one in self._sums[:n]]
        return self._full[:n], sums, list(zip(squares[::2], squares[1::2]))

    def close(self) -> None:
        lib.load().tagc_unit_destroy(self._handle)
        self._handle = ctypes.c_void_p()
