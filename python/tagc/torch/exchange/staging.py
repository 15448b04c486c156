"""Exchanges of tensors on a device, in the order of its streams (include/tagc/device.h).

    hook        has libtagc enqueue the work (UnitModel.begin()), and goes on at once, whatever else it waits
                for; the caller's stream waits for the result
    thread      runs these exchanges, one after the other, in libtagc: on pinned memory, to which gradients
                are copied and from which sums are copied back, or with kernels (libtagc-cuda.so) on encoded
                bodies alone, while gradients stay on the device
    end of      finish(): waits until all exchanges are complete, and raises the first failure
    backward

The thread calls nothing of CUDA's. The exchanged values, and so the result, are the same as for tensors in
CPU memory.

run() is for gathers, which need Python. It works in the hook, while no exchange is under way: if a thread
gathered and torch allocated meanwhile with Python's lock held, the driver could wait for the device, the
device for the gather, and the gather for the lock.

finish() raises failures. Every rank calls it at the same place: at the end of a backward pass, before an
optimizer's step. So all ranks raise the same Error at the same point of their program, and can continue from
there. After a failure, the remaining exchanges of the pass only report it to the agreement at their start.
Results are then NaN. If a device failed, its tensors are unchanged and this handle is unusable.

Nothing here keeps a tensor: the streams' order protects it."""

from __future__ import annotations

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
from tagc.torch.exchange.streams import Cuda, Pinned

Failure = BaseException | None
# perform(kernels, source, target, failure): kernels of the device where the tensors are; None: they are in
# CPU memory. source, target: None if there is a failure, which this rank only reports. Collective.
Perform = Callable[["Kernels | None", "torch.Tensor | None", "torch.Tensor | None", Failure], object]
Job = Callable[[], torch.Tensor]
Future = torch.futures.Future[torch.Tensor]

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
    """Of one handle. Its hooks must exchange in the same order on all ranks. streams: of the device, from
    streams.of(). codec: "device": with kernels, or an Error; "host": without; None: with kernels if there are
    any, else why_host holds the reason."""

    def __init__(self, streams: Cuda, codec: str | None = "host") -> None:
        self.streams = streams
        self._device, self._queue = ctypes.c_void_p(), ctypes.c_void_p()
        library = streams.library.encode() if streams.library else None
        lib.call(
            "tagc_device_open", streams.maker.encode(), library, streams.ordinal, ctypes.byref(self._device)
        )
        self.text = lib.load().tagc_device_text(self._device).decode()
        self.launch = threading.Lock()  # held while a hook has libtagc enqueue an exchange
        self._pinned = Pinned(streams)  # of gathers
        self._copied: Any = None  # what waits for the last copy from that
        self.failure: BaseException | None = None  # of a gather since finish()
        self.is_closed = self._frees_itself = False
        self.kernels: Kernels | None = None
        self.why_host: Error | None = None
        self._thread: threading.Thread | None = None
        try:
            self._open_kernels(codec)
            self._create_queue()
        except BaseException:
            self.free()
            raise
        self._at_exit = weakref.finalize(self, _let_go, self._queue, os.getpid())
        self._thread = endings.start(self._exchange_all, "tagc-jobs")

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
        return n_bytes + self._pinned.n_bytes + (0 if self.kernels is None else self.kernels.pinned_bytes)

    # ---- for hooks ----

    def run(
        self, perform: Perform, source: torch.Tensor, target: torch.Tensor, failure: Failure, is_there: bool
    ) -> None:
        """Performs a gather of source into target, both on the device: there if is_there and it has kernels,
        else in pinned memory. The result may still be on the way, and later work of the current stream waits
        for it. failure: of this rank, which only reports it then. finish() raises failures. Collective."""
        kernels, lost = self.kernels if is_there else None, self._wait()
        if lost is not None and lost.status == "device":  # others were of gradients alone
            failure = lost
        failure = self.failure or failure
        try:
            if failure is None and kernels is None:
                self._run_in_pinned(perform, source, target)
            elif failure is None:
                perform(kernels, source, target, None)
            else:
                perform(kernels, None, None, failure)
            return
        except BaseException as problem:
            failure = problem
        spoil(target)
        self.failure = self.failure or failure

    def _run_in_pinned(self, perform: Perform, source: torch.Tensor, target: torch.Tensor) -> None:
        try:
            if self._copied is not None:  # in another stream, perhaps
                self._copied.synchronize()
            here, came = self._pinned.like("source", source), self._pinned.like("target", target)
            here.copy_(source, non_blocking=True)
            self.streams.settle()
        except RuntimeError as problem:
            perform(None, None, None, Error("device", f"copying to the host failed: {problem}"))
            raise  # perform() has, unless it takes no part
        perform(None, here, came, None)
        target.copy_(came, non_blocking=True)
        self._copied = self.streams.mark()

    def reserve(self, n_bytes_in: int, n_bytes_out: int) -> None:
        """Takes the pinned memory of a gather."""
        for name, n_bytes in ("source", n_bytes_in), ("target", n_bytes_out):
            self._pinned.reserve(name, n_bytes)

    def future(self, work: Job, is_awaited: bool) -> Future:
        """Does the work, which raises nothing, at once, and where a stream waits within it, in a stream of
        its own. Streams wait for the value."""
        if is_awaited:
            with self.streams.aside() as stream:
                value = work()
            return self.streams.future(value, stream)
        return self.streams.future(work(), self.stream)  # where results come back

    def wait(self) -> None:
        """Waits until all enqueued exchanges are complete. finish() raises the failures."""
        self._wait()

    def finish(self) -> None:
        """Waits until all enqueued exchanges are complete; raises the first failure since the last call, but
        for those of models (model_exchanges.py)."""
        self._wait()
        failure, self.failure = self.failure, None
        if not self.is_closed:
            lib.load().tagc_queue_forgive(self._queue)
        if failure is not None:
            raise failure

    def _wait(self) -> Error | None:
        """Waits until all exchanges are complete. Returns the first failure since finish()."""
        is_over, status = ctypes.c_int(), 0
        while not self.is_closed and not is_over.value:  # in between, Python handles signals
            status = lib.load().tagc_queue_wait(self._queue, _ALL, _LOOK_MS, ctypes.byref(is_over))
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

    # ---- private ----

    def _exchange_all(self) -> None:
        """Runs exchanges until the queue is closed, without Python's lock."""
        lib.load().tagc_queue_run(self._queue)
        if self._frees_itself:
            self._free()

    def free(self) -> None:
        """Frees the queue and the device. Call it after close(), when all reducers with its kernels are
        closed."""
        if self._thread is not None and threading.current_thread() is self._thread:
            self._frees_itself = True  # the garbage collector runs in that thread, which uses the queue
        else:
            self._free()

    def _free(self) -> None:
        library = lib.load()
        self._pinned, self._copied = Pinned(self.streams), None
        library.tagc_queue_destroy(self._queue)
        self._queue = ctypes.c_void_p()
        if self.kernels is not None:
            self.kernels.close()
            self.kernels = None
        library.tagc_device_close(self._device)
        self._device = ctypes.c_void_p()
