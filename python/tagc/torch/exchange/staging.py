"""Exchanges of tensors on a device: they are copied to pinned memory, exchanged by a thread, and copied back,
all in the order of streams.

    hook        enqueue(): enqueues the work in streams (include/tagc/device.h); the caller's stream waits for
                the result; the hook returns
    thread      runs the jobs of enqueue(), one after the other, with tensors in pinned memory
    end of      finish(): waits until all jobs are complete, and raises the first failure
    backward

With kernels (libtagc-cuda.so) gradients stay on the device: the thread gets the tensors themselves, its
reducers select, encode and add there, and only encoded bodies are copied to the host. The order of streams is
the same.

No hook waits for a device or for another rank. The exchanged values, and so the result, are the same as for
tensors in CPU memory.

finish() raises failures. Every rank calls it at the same place: at the end of a backward pass, before an
optimizer's step. So all ranks raise the same Error at the same point of their program, and can continue from
there. After a failure, the remaining exchanges of the pass only report it: a job gets the failure and passes
it to the agreement at the start of its exchange. Results are then NaN. If a device failed, its tensors are
unchanged and this handle is unusable."""

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

N_BUFFERS = 3  # buffers of pinned memory: one is copied out, one exchanged, one copied back


def _let_go(queue: ctypes.c_void_p, process: int) -> None:
    """Runs at the end of a process that did not close its handles, because the driver would wait for an
    exchange. Not in forks."""
    if process == os.getpid():
        lib.load().tagc_queue_close(queue)


def _spoil(target: torch.Tensor) -> None:
    """Fills results that did not arrive with NaN."""
    if target.is_floating_point() and target.layout == torch.strided:
        with contextlib.suppress(RuntimeError):  # the device failed
            target.detach().fill_(float("nan"))


class _Job:
    """One exchange. The thread calls run(source, target, failure), without tensors if there is a failure.
    stays: the tensors are not copied."""

    def __init__(
        self, run: Run, source: torch.Tensor, target: torch.Tensor, failure: BaseException | None, stays: bool
    ) -> None:
        self.run, self.source, self.target, self.failure, self.stays = run, source, target, failure, stays


class Kernels:
    """libtagc's kernels on the device of a Staging, for reducers. Error if there are none."""

    def __init__(self, device: ctypes.c_void_p, streams: Cuda) -> None:
        self.streams, self.device, self.handle = streams, streams.device, ctypes.c_void_p()
        lib.call("tagc_kernels_open", device, ctypes.byref(self.handle))

    @property
    def stream(self) -> int:
        """The handle of their stream."""
        return lib.load().tagc_kernels_stream(self.handle)

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

    def __init__(self, streams: Cuda, codec: str | None = "host", n_buffers: int = N_BUFFERS) -> None:
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
        # (ticket, tensors) that the device may still use
        self._in_use: collections.deque[tuple[int, torch.Tensor, torch.Tensor]] = collections.deque()
        self._n_enqueued = self._n_finished = 0
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self.is_closed = False
        self.kernels: Kernels | None = None
        self.why_host: Error | None = None
        try:
            self._open_kernels(codec)
            lib.call("tagc_queue_create", self._device, n_buffers, ctypes.byref(self._queue))
            # has an address, unlike an empty tensor
            self._nothing = torch.zeros(16, dtype=torch.uint8, device=streams.device)
        except BaseException:
            self._destroy()
            self.free()
            raise
        self._at_exit = weakref.finalize(self, _let_go, self._queue, os.getpid())
        self._thread = endings.start(self._work, "tagc-jobs")

    def _open_kernels(self, codec: str | None) -> None:
        try:
            if codec != "host":
                self.kernels = Kernels(self._device, self.streams)
        except Error as problem:
            if codec == "device":
                raise
            self.why_host = problem

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
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        run: Run,
        failure: BaseException | None = None,
        waits: bool = True,
        stays: bool = False,
    ) -> None:
        """Exchanges source into target, both on the device, by run(source, target, failure) with copies in
        pinned memory, or with stays with the tensors themselves. Returns at once. failure: of this rank;
        run() reports it to the others and does not read the tensors.
        waits: later work of the current stream waits for the result."""
        with self._launch:
            self._release()
            if failure is None:
                try:
                    handle = self._handle(source, target, stays)
                except Error as problem:
                    failure = problem
            if failure is not None:
                _spoil(target)
                source, target, stays = self._nothing, self._nothing, False
                handle = self._handle(source, target)
            job = _Job(run, source, target, failure, stays)
            pointers = [
                tensor.data_ptr() if tensor.numel() else self._nothing.data_ptr()
                for tensor in (source, target)
            ]
            ticket = ctypes.c_uint64()
            with self._changed:
                self._n_enqueued += 1
            self._jobs.append(job)  # the thread may read it before the next call returns
            if lib.load().tagc_job_enqueue(
                handle, *pointers, self.streams.current(), int(waits), ctypes.byref(ticket)
            ):
                _spoil(target)  # the thread gets the failure with the ticket
            self._in_use.append((ticket.value, source, target))

    def finish(self) -> None:
        """Waits until all enqueued exchanges are complete; raises the first failure since the last call."""
        with self._changed:
            self._changed.wait_for(lambda: self._n_finished == self._n_enqueued or self.is_closed)
            failure, self._failure = self._failure, None
        with self._launch:
            if not self.is_closed:
                self._release()
        if failure is not None:
            raise failure

    @property
    def is_idle(self) -> bool:
        with self._changed:
            return self._n_finished == self._n_enqueued

    def close(self) -> None:
        """Makes exchanges under way fail after the running one."""
        if self.is_closed:
            return
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        self._at_exit.detach()
        lib.load().tagc_queue_close(self._queue)
        if threading.current_thread() is not self._thread:  # else the garbage collector runs in that thread
            self._thread.join()

    # ---- private ----

    def _handle(self, source: torch.Tensor, target: torch.Tensor, stays: bool = False) -> ctypes.c_void_p:
        """Returns the tagc_job for these sizes. Making one waits for all exchanges under way."""
        for tensor in (source, target):
            if not tensor.is_contiguous():
                raise Error(
                    "unsupported",
                    f"a tensor of strides {tensor.stride()} on {tensor.device}: must be contiguous",
                )
        sizes = (0, 0) if stays else (max(1, source.nbytes), max(1, target.nbytes))
        if sizes not in self._handles:
            handle = ctypes.c_void_p()
            lib.call("tagc_job_create", self._queue, 0, *sizes, ctypes.byref(handle))
            self._handles[sizes] = handle
        return self._handles[sizes]

    def _release(self) -> None:
        """Releases tensors that the device no longer uses."""
        retired = lib.load().tagc_queue_retired(self._queue)
        while self._in_use and self._in_use[0][0] <= retired:
            self._in_use.popleft()

    def _work(self) -> None:
        with self.streams.own() if self.kernels is not None else contextlib.nullcontext():
            self._take_jobs()

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
                self._destroy()
                return
            failure: BaseException | None = (
                Error(status, library.tagc_last_error().decode(errors="replace")) if status else None
            )
            failure = self._run(self._jobs.popleft(), failure, source.value, target.value)
            status = 0 if failure is None else lib.STATUSES.index(getattr(failure, "status", "state"))
            library.tagc_queue_finish(self._queue, ticket, status, str(failure).encode(errors="replace"))
            del failure
            with self._changed:
                self._n_finished += 1
                self._changed.notify_all()

    def _run(
        self, job: _Job, failure: BaseException | None, source: Any, target: Any
    ) -> BaseException | None:
        """Returns the failure, if any."""
        try:
            if failure is None and job.failure is None and self._failure is None:
                if job.stays:
                    job.run(job.source, job.target, None)
                    self.streams.settle()
                else:
                    job.run(tensor_at(source, job.source), tensor_at(target, job.target), None)
                return None
            failure = self._failure or job.failure or failure
            job.run(None, None, failure)
        except BaseException as problem:
            failure = problem
        if job.stays:
            _spoil(job.target)
            with contextlib.suppress(RuntimeError):  # the device failed
                self.streams.settle()
        with self._changed:
            self._failure = self._failure or failure
        return failure

    def _destroy(self) -> None:
        library = lib.load()
        for handle in self._handles.values():
            library.tagc_job_destroy(handle)
        library.tagc_queue_destroy(self._queue)
        self._in_use.clear()
        self._jobs.clear()

    def free(self) -> None:
        """Frees the device. Call it after close(), when all reducers with its kernels are closed."""
        if self.kernels is not None:
            self.kernels.close()
            self.kernels = None
        lib.load().tagc_device_close(self._device)
        self._device = ctypes.c_void_p()
