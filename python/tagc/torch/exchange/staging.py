"""Exchanges of tensors on a device: they are copied to pinned memory, exchanged by a thread, and copied back,
all in the order of streams.

    hook        start(), enqueue(): enqueue the work in streams (include/tagc/device.h); the caller's stream
                waits for the result
    thread      runs the exchanges, one after the other, on pinned memory
    end of      finish(): waits until all exchanges are complete, and raises the first failure
    backward

The thread calls nothing of CUDA's. The exchanged values, and so the result, are the same as for tensors in
CPU memory.

start() is for exchanges that libtagc runs by itself (model_exchanges.py). Between the two copies nothing
needs Python, so a hook goes on at once, whatever else it waits for. enqueue() is for those that need Python:
the thread runs a job. Its hook waits until it has run. If the hook went on, torch could allocate with
Python's lock held; the driver may then wait for the device, the device for the job, and the job for the lock.
While it waits, a hook has neither that lock nor any of the driver.

With kernels (libtagc-cuda.so) gradients stay on the device, and only encoded bodies are copied to the host.
start() has the reducers select, encode and add in streams, and the thread sees bodies in pinned memory.
run_here() is for gathers: it runs in the hook, while no exchange is under way.

finish() raises failures. Every rank calls it at the same place: at the end of a backward pass, before an
optimizer's step. So all ranks raise the same Error at the same point of their program, and can continue from
there. After a failure, the remaining exchanges of the pass only report it to the agreement at their start.
Results are then NaN. If a device failed, its tensors are unchanged and this handle is unusable.

Nothing here keeps a tensor: the streams' order protects it (tagc_job_enqueue)."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.exchange import endings
from tagc.torch.exchange.gloo import tensor_at
from tagc.torch.exchange.streams import Cuda

# (source, target, failure)
Run = Callable[["torch.Tensor | None", "torch.Tensor | None", "BaseException | None"], object]


FOR_NOTHING, FOR_RESULT, FOR_INPUT = 0, 1, 2  # tagc_waits

N_BUFFERS = 3  # buffers of pinned memory: one is copied out, one exchanged, one copied back
# with kernels: one exchange encodes while another's bodies are on their way; each buffer has residuals, too
N_BUFFERS_THERE = 2
_LOOK_MS = 100
_ALL = 2**64 - 1  # tickets


def _let_go(queue: ctypes.c_void_p, process: int) -> None:
    """Runs at the end of a process that did not close its handles, because the driver would wait for an
    exchange. Not in forks."""
    if process == os.getpid():
        lib.load().tagc_queue_close(queue)


def spoil(target: torch.Tensor) -> None:
    """Fills results that did not arrive with NaN."""
    if target.is_floating_point() and target.layout == torch.strided:
        with contextlib.suppress(RuntimeError):  # the device failed
            target.detach().fill_(float("nan"))


class _Job:
    """One exchange. The thread calls run(source, target, failure), without tensors if there is a failure. It
    keeps their dtypes and shapes, not the tensors."""

    def __init__(
        self, run: Run, source: torch.Tensor, target: torch.Tensor, failure: BaseException | None
    ) -> None:
        self.run, self.failure = run, failure
        self.source, self.target = (torch.empty_like(one, device="meta") for one in (source, target))


class Kernels:
    """libtagc's kernels on the device of a Staging, for reducers. Error if there are none."""

    def __init__(self, device: ctypes.c_void_p, streams: Cuda) -> None:
        self.streams, self.device, self.handle = streams, streams.device, ctypes.c_void_p()
        lib.call("tagc_kernels_open", device, ctypes.byref(self.handle))

    @property
    def n_bytes(self) -> int:
        """Bytes of device memory that they and their reducers hold."""
        return lib.load().tagc_kernels_bytes(self.handle)

    @property
    def pinned_bytes(self) -> int:
        n_bytes: int = lib.load().tagc_kernels_pinned_bytes(self.handle)
        return n_bytes

    def close(self) -> None:
        lib.load().tagc_kernels_close(self.handle)
        self.handle = ctypes.c_void_p()


class Staging:
    """Of one handle. Its hooks must call enqueue() in the same order on all ranks. streams: of the device,
    from streams.of(). codec: "device": with kernels, or an Error; "host": without; None: with kernels if
    there are any, else why_host holds the reason."""

    def __init__(self, streams: Cuda, codec: str | None = "host") -> None:
        self.streams = streams
        self._device, self._queue = ctypes.c_void_p(), ctypes.c_void_p()
        library = streams.library.encode() if streams.library else None
        lib.call(
            "tagc_device_open", streams.maker.encode(), library, streams.ordinal, ctypes.byref(self._device)
        )
        self.text = lib.load().tagc_device_text(self._device).decode()
        self._handles: dict[tuple[int, int], ctypes.c_void_p] = {}  # (bytes in, bytes out) -> tagc_job
        self._launch = threading.Lock()
        self._jobs: collections.deque[_Job] = collections.deque()  # in the order of tickets
        self._failure: BaseException | None = None
        self.is_closed = self._frees_itself = False
        self.kernels: Kernels | None = None
        self.why_host: Error | None = None
        self._thread: threading.Thread | None = None
        try:
            self._open_kernels(codec)
            self._create_queue()
            # has an address, unlike an empty tensor
            self._nothing = torch.zeros(16, dtype=torch.uint8, device=streams.device)
        except BaseException:
            self.free()
            raise
        self._at_exit = weakref.finalize(self, _let_go, self._queue, os.getpid())
        self._thread = endings.start(self._take_jobs, "tagc-jobs")

    def _open_kernels(self, codec: str | None) -> None:
        try:
            if codec != "host":
                self.kernels = Kernels(self._device, self.streams)
        except Error as problem:
            if codec == "device":
                raise
            self.why_host = problem

    def _create_queue(self) -> None:
        queue = ctypes.byref(self._queue)
        kernels, n_buffers = (self.kernels.handle, N_BUFFERS_THERE) if self.kernels else (None, N_BUFFERS)
        lib.call("tagc_queue_create", self._device, kernels, n_buffers, queue)

    @property
    def queue(self) -> ctypes.c_void_p:
        """libtagc's queue."""
        return self._queue

    @property
    def stream(self) -> int:
        """The handle of the stream that copies results back."""
        return lib.load().tagc_queue_stream(self._queue)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory, also those of the kernels."""
        n_bytes: int = 0 if self.is_closed else lib.load().tagc_queue_pinned_bytes(self._queue)
        return n_bytes + (0 if self.kernels is None else self.kernels.pinned_bytes)

    # ---- for hooks ----

    def enqueue(
        self, source: torch.Tensor, target: torch.Tensor, run: Run, failure: BaseException | None
    ) -> None:
        """Exchanges source into target, both on the device, by run(source, target, failure) with copies in
        pinned memory. Returns when that has run; the result may still be on the way, and later work of the
        current stream waits for it. failure: of this rank; run() reports it to the others and does not read
        the tensors."""
        with self._launch:
            if failure is None:
                try:
                    handle = self._handle(source, target)
                except Error as problem:
                    failure = problem
            if failure is not None:
                spoil(target)
                source, target = self._nothing, self._nothing
                handle = self._handle(source, target)
            self._jobs.append(_Job(run, source, target, failure))  # the thread may read it at once
            ticket = self._launched(handle, source, target)
        self._wait(ticket)

    def start(
        self, begin: Callable[[int, int], object], source: torch.Tensor, target: torch.Tensor, waits: int
    ) -> None:
        """Has begin(stream, waits) exchange source into target, both on the device, as libtagc does it by
        itself. Returns at once. waits: for what later work of the current stream waits: nothing, the result,
        or that the source is read."""
        with self._launch:
            begin(self.streams.current(), int(waits))

    def _launched(self, handle: ctypes.c_void_p, source: torch.Tensor, target: torch.Tensor) -> int:
        """Returns the ticket of an exchange whose work is in the streams now."""
        arrays = [
            item
            for tensor in (source, target)
            for item in (
                tensor.data_ptr() if tensor.numel() else self._nothing.data_ptr(),
                max(1, tensor.nbytes),
            )
        ]
        ticket = ctypes.c_uint64()
        if lib.load().tagc_job_enqueue(
            handle, *arrays, self.streams.current(), int(FOR_RESULT), ctypes.byref(ticket)
        ):
            spoil(target)  # the thread gets the failure with the ticket
        return ticket.value

    def run_here(
        self, source: torch.Tensor, target: torch.Tensor, run: Run, failure: BaseException | None
    ) -> None:
        """Exchanges source into target, both on the device, by run(), which works there: in this thread,
        while no stream waits for it. failure: as of enqueue()."""
        failure = self._wait(_ALL) or self._failure or failure
        try:
            if failure is None:
                run(source, target, None)
                return
            run(None, None, failure)
        except BaseException as problem:
            failure = problem
        spoil(target)
        self._failure = self._failure or failure

    @property
    def failure(self) -> BaseException | None:
        """That of an exchange in Python since finish()."""
        return self._failure

    def wait(self) -> None:
        """Waits until all enqueued exchanges are complete. finish() raises the failures."""
        self._wait(_ALL)

    def finish(self) -> None:
        """Waits until all enqueued exchanges are complete; raises the first failure since the last call, but
        for those of models (model_exchanges.py)."""
        self._wait(_ALL)
        failure, self._failure = self._failure, None
        if not self.is_closed:
            lib.load().tagc_queue_forgive(self._queue)
        if failure is not None:
            raise failure

    def _wait(self, ticket: int) -> Error | None:
        """Waits until the exchanges up to that one are complete. Returns the first failure since finish()."""
        is_over, status = ctypes.c_int(), 0
        while not self.is_closed and not is_over.value:  # in between, Python handles signals
            status = lib.load().tagc_queue_wait(self._queue, ticket, _LOOK_MS, ctypes.byref(is_over))
        if self.is_closed or not status:
            return None
        return Error(status, lib.load().tagc_last_error().decode(errors="replace"))

    def close(self) -> None:
        """Makes exchanges under way fail after the running one."""
        if self.is_closed:
            return
        self.is_closed = True
        self._at_exit.detach()
        lib.load().tagc_queue_close(self._queue)
        thread = self._thread
        if thread is not None and threading.current_thread() is not thread:
            thread.join()

    def reserve(self, n_bytes_in: int, n_bytes_out: int) -> ctypes.c_void_p:
        """Returns the tagc_job for these sizes, which has its pinned memory. Making one waits for all
        exchanges under way."""
        sizes = max(1, n_bytes_in), max(1, n_bytes_out)
        if sizes not in self._handles:
            handle = ctypes.c_void_p()
            lib.call("tagc_job_create", self._queue, 0, *sizes, ctypes.byref(handle))
            self._handles[sizes] = handle
        return self._handles[sizes]

    # ---- private ----

    def _handle(self, source: torch.Tensor, target: torch.Tensor) -> ctypes.c_void_p:
        """Returns the tagc_job for these tensors."""
        for tensor in (source, target):
            if not tensor.is_contiguous():
                raise Error(
                    "unsupported",
                    f"a tensor of strides {tensor.stride()} on {tensor.device}: must be contiguous",
                )
        return self.reserve(source.nbytes, target.nbytes)

    def _take_jobs(self) -> None:
        library = lib.load()
        ticket, tag, source, target = (
            ctypes.c_uint64(),
            ctypes.c_uint64(),
            ctypes.c_void_p(),
            ctypes.c_void_p(),
        )
        outputs = [ctypes.byref(each) for each in (ticket, tag, source, target)]
        while True:
            status = library.tagc_queue_next(self._queue, *outputs)
            if not ticket.value:
                break
            failure: BaseException | None = (
                Error(status, library.tagc_last_error().decode(errors="replace")) if status else None
            )
            failure = self._run(self._jobs.popleft(), failure, source.value, target.value)
            status = 0 if failure is None else lib.STATUSES.index(getattr(failure, "status", "state"))
            library.tagc_queue_finish(self._queue, ticket, status, str(failure).encode(errors="replace"))
            del failure
        self._jobs.clear()
        if self._frees_itself:
            self._free()

    def _run(
        self, job: _Job, failure: BaseException | None, source: Any, target: Any
    ) -> BaseException | None:
        """Returns the failure, if any."""
        failure = self._failure or job.failure or failure
        try:
            if failure is None:
                job.run(tensor_at(source, job.source), tensor_at(target, job.target), None)
                return None
            job.run(None, None, failure)
        except BaseException as problem:
            failure = problem
        self._failure = self._failure or failure
        return failure

    def free(self) -> None:
        """Frees the queue and the device. Call it after close(), when all reducers with its kernels are
        closed."""
        if self._thread is not None and threading.current_thread() is self._thread:
            self._frees_itself = True  # the garbage collector runs in that thread, whose loop uses the queue
        else:
            self._free()

    def _free(self) -> None:
        library = lib.load()
        for handle in self._handles.values():
            library.tagc_job_destroy(handle)
        self._handles.clear()
        library.tagc_queue_destroy(self._queue)
        self._queue = ctypes.c_void_p()
        if self.kernels is not None:
            self.kernels.close()
            self.kernels = None
        library.tagc_device_close(self._device)
        self._device = ctypes.c_void_p()
