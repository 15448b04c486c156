"""transport="group": sends gradients in the caller's own process group, in frames of a fixed size
(include/tagc/frames.h): one all-to-all of bytes, for an all-reduce one all-gather of bytes, and one maximum
over ranks of two numbers.

    hook     all ranks agree on the exchange (comm.py, on the host) -> Unit.reduce() -> FrameReducer.begin():
             enqueues the whole step in the kernels' stream, including the group's collectives; the caller's
             stream waits for the result
    end of   runner.Group.finish(): reads the outcome of each exchange, and raises the first failure, the same
             on all ranks
    backward

With NCCL no call waits for a device in the middle of a step. With gloo and CPU tensors the same calls block,
one after the other."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.reducer import Reducer
from tagc.torch.exchange.staging import Staging, Store
from tagc.torch.exchange.waits import Collectives
from tagc.torch.exchange.work import Work

_WORDS = 4  # of tagc_frames_verdict; all ranks take the maximum of the first two


class Link:
    """The Way by the caller's own group: its collectives for tensors on one device. staging: of the device
    where tensors are, with kernels; None: in CPU memory."""

    def __init__(
        self, group: dist.ProcessGroup, comm: Comm, staging: Staging | None, timeout_s: float, work: Work
    ) -> None:
        self.comm, self.staging, self.size, self.work = comm, staging, comm.world_size, work
        self.kernels = kernels = None if staging is None else staging.kernels
        self.collectives = Collectives(group, "gradients, which tagc sends in this group", timeout_s)
        self.device = torch.device("cpu") if kernels is None else kernels.device
        self.verdicts: list[tuple[torch.Tensor, torch.Tensor]] = []  # free ones: (there, on the host)

    def reducer(
        self,
        n_elems: int,
        options: Mapping[str, Any],
        dtype: torch.dtype,
        store: Store | None = None,
        is_probe: bool = False,
    ) -> FrameReducer:
        """is_probe: for the memory that it takes. Local then."""
        dtype = dtype if dtype == torch.bfloat16 else torch.float32
        return FrameReducer(self, n_elems, dtype, store, is_probe, **options)

    def reserve(self, n: int) -> None:
        """Makes verdicts for n more reducers. Call it inside turn()."""
        there = torch.zeros(n, _WORDS, dtype=torch.int64, device=self.device)
        here = there if self.kernels is None else self.kernels.streams.pinned(n * _WORDS).view(n, _WORDS)
        self.verdicts += zip(there, here)

    def turn(self, waits: bool) -> contextlib.AbstractContextManager[object]:
        """Returns a context that enqueues torch's work in the kernels' stream, after the current stream's
        work. waits: the current stream then waits for it."""
        return (
            contextlib.nullcontext()
            if self.kernels is None
            else self.kernels.streams.turn(self.kernels.stream, waits)
        )


class FrameReducer(Reducer):
    """A Reducer that sends by a Link. begin() enqueues the whole step, inside turn(); end(), which returns
    its outcome, is called when the stream has run it."""

    def __init__(
        self,
        link: Link,
        n_elems: int,
        dtype: torch.dtype,
        store: Store | None,
        is_probe: bool,
        **options: Any,
    ) -> None:
        self._link, self._factor, self._is_probe = link, 1.0, is_probe
        # frames use direct: every value in fp32, and the mean taken of the sum, as in dense
        if options["exchange"] == lib.EXCHANGES["dense"]:
            options |= {"exchange": lib.EXCHANGES["direct"], "sparsity": 0.0}
            if options.get("op", lib.OPS["avg"]) == lib.OPS["avg"]:
                options["op"], self._factor = lib.OPS["sum"], 1.0 / link.size
        super().__init__(link.comm, n_elems, link.kernels, dtype, store, **options)
        self.is_in_place = False  # a frame is added when others have come
        self._failure: Error | None = None
        if not is_probe:
            if not link.verdicts:
                link.reserve(1)
            self._verdict, self._copy = link.verdicts.pop()

    def close(self) -> None:
        if self._handle and not self._is_probe:
            self._link.verdicts.append((self._verdict, self._copy))
        super().close()

    def _create(self, fields: lib.ReducerOptions) -> None:
        if self._store is not None:
            name = "tagc_frames_probe_in" if self._is_probe else "tagc_frames_create_in"
            self._handle = self._store.make(name, self._comm, fields)
        else:  # in CPU memory
            out = ctypes.byref(self._handle)
            lib.call("tagc_frames_create", None, self._comm.handle, ctypes.byref(fields), out)

    def lend(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns memory for frames: (sent, received)."""
        n_bytes = self._link.size * max(self._frame_bytes(False), self._frame_bytes(True))
        return self._link.work.lend_frames(self._link.device, n_bytes)

    def _frame_bytes(self, is_sums: bool) -> int:
        return lib.load().tagc_frames_bytes(self._handle, int(is_sums))

    def _try(self, name: str, *arguments: Any) -> None:
        """Calls a function of libtagc, unless one failed before. This rank then still calls the collectives,
        with zeros, because its peers do."""
        if self._failure is None:
            try:
                lib.call(name, self._handle, *arguments)
            except Error as failure:
                self._failure = failure

    def begin(self, gradient: torch.Tensor, output: torch.Tensor) -> None:
        n_ranks, collectives, n_sums = self._link.size, self._link.collectives, self._frame_bytes(True)
        n_bytes = n_ranks * self._frame_bytes(False)
        sent, received = self.lend()
        self._failure, self._under_way = None, (gradient, output)
        pointers = self._pointers(gradient, output)
        self._try("tagc_frames_encode", *pointers, sent.data_ptr(), self._verdict.data_ptr())
        self._zero(sent)
        try:
            collectives.all_to_all(received[:n_bytes], sent[:n_bytes])
            self._try("tagc_frames_add", received.data_ptr(), sent.data_ptr() if n_sums else None)
            if n_sums:
                self._zero(sent)
                collectives.all_gather(received[: n_ranks * n_sums], sent[:n_sums])
                self._try("tagc_frames_decode", received.data_ptr())
            self._say()
            collectives.largest(self._verdict[:2])
        except Error as failure:  # the group is lost: nothing counts on this rank
            self._failure = self._failure or failure
            self._say()
            self._settle(output)
            raise
        self._settle(output)
        if self._factor != 1.0:
            output.mul_(self._factor)

    def _zero(self, sent: torch.Tensor) -> None:
        if self._failure is not None:
            sent.zero_()

    def _say(self) -> None:
        if self._failure is not None:
            status = lib.STATUSES.index(self._failure.status)
            self._verdict[0] = lib.load().tagc_frames_failure(self._handle, status)

    def _settle(self, output: torch.Tensor) -> None:
        if self._failure is not None:
            output.fill_(float("nan"))  # not used for training
        with contextlib.suppress(Error):  # the device failed; report the first failure
            lib.call("tagc_frames_settle", self._handle)
        self._copy.copy_(self._verdict, non_blocking=True)

    def wait(self) -> None:
        """Does nothing: the stream has the step."""

    def end(self) -> lib.ReducerStats:
        stats = lib.initialised(lib.ReducerStats, "tagc_reducer_stats_init")
        self._under_way, failure, self._failure = (), self._failure, None
        try:
            lib.call("tagc_frames_end", self._handle, self._copy.data_ptr(), ctypes.byref(stats))
        except Error as problem:
            raise (
                failure if failure is not None and problem.status in ("state", failure.status) else problem
            ) from None
        return stats
