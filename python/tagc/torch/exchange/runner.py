"""Where the exchanges of one handle run. Those of tensors in CPU memory that need Python, or whose end
somebody awaits, have a thread (Host). Those of a device's tensors go on in the order of its streams
(staging.py)."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

import torch

from tagc._library import Error
from tagc.torch.exchange import endings, streams
from tagc.torch.exchange.staging import Future, Job, Kernels, Staging


class Host:
    """A thread for work on tensors in CPU memory, once there is some."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] | None = None
        self._thread: threading.Thread | None = None
        # the last of await_end() and future(), and of future() alone; each keeps a tensor
        self._last: Future | None = None
        self._last_work: Future | None = None
        self._is_closed = False

    def wait_for_jobs(self) -> None:
        """Waits for all work of the thread. In that there is nothing to wait for."""
        if self._last is not None and threading.current_thread() is not self._thread:
            self._last.wait()
            self._last = self._last_work = None

    def wait_for_work(self) -> None:
        """Waits where work that sends messages itself is under way."""
        if self._last_work is not None:
            self.wait_for_jobs()

    def future(self, work: Job) -> Future:
        """Returns a future of work(), which exchanges, and raises nothing. The thread does it, so that the
        caller goes on; when this is closed, the caller does it."""
        self._last_work = future = self.await_end(work)
        return future

    def await_end(self, work: Job) -> Future:
        """As future(), of work that only waits for what is under way."""
        future = self._last = Future()

        def job() -> None:
            future.set_result(work())

        if self._is_closed:
            job()
        else:
            self._hand_over(job)
        return future

    def _hand_over(self, job: Callable[[], object]) -> None:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            jobs = self._jobs
            self._thread = endings.start(lambda: _take_jobs(jobs), "tagc-host")
            endings.add(self)
        self._jobs.put(job)

    def give_up(self) -> None:
        """Ends the thread after the work that it has."""
        self._is_closed = True
        if self._jobs is not None:
            self._jobs.put(None)

    def wait(self, timeout_s: float) -> bool:
        return True  # the thread itself is waited for


def _take_jobs(jobs: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # drops what it keeps alive


class Runners:
    """Those of one handle. staging: of the device where gradients are; None: of the first device that a
    tensor is on. codec: of Staging."""

    def __init__(self, staging: Staging | None, codec: str | None) -> None:
        self.host, self.staging = Host(), staging
        self._codec, self._is_closed = codec, False

    @property
    def kernels(self) -> Kernels | None:
        return None if self.staging is None else self.staging.kernels

    def pinned_bytes(self) -> int:
        return 0 if self.staging is None else self.staging.pinned_bytes

    def find(self, tensor: torch.Tensor) -> tuple[Staging | None, Error | None]:
        """Returns the Staging of that tensor's device, None if it is in CPU memory; and why there should be
        one and is not: then host tells the other ranks."""
        try:
            if self._is_closed:
                return None, None
            if self.staging is None and (found := streams.of(tensor.device)) is not None:
                self.staging = Staging(found, self._codec)
        except Error as problem:
            return None, problem
        is_there = self.staging is not None and tensor.device == self.staging.streams.device
        return (self.staging if is_there else None), None

    def future(self, work: Job, tensor: torch.Tensor, is_awaited: bool = False) -> Future:
        """Returns a future of work(), which exchanges tensors like that one, and raises nothing. is_awaited:
        whether streams wait within it."""
        staging, _ = self.find(tensor)
        return self.host.future(work) if staging is None else staging.future(work, is_awaited)

    def follow(self, result: torch.Tensor) -> None:
        """Makes the current stream wait for a result that is on its way (staging.FOR_INPUT)."""
        staging, _ = self.find(result)
        if staging is not None:
            staging.streams.follow(staging.stream)
            staging.streams.keep(result)

    def keep(self, tensor: torch.Tensor) -> None:
        """Protects a result that torch frees in the order of another stream than the current one."""
        staging, _ = self.find(tensor)
        if staging is not None:
            staging.streams.keep(tensor)

    def finish(self) -> None:
        """Waits for all that is under way on a device, and raises the first failure."""
        if self.staging is not None:
            self.staging.finish()

    def drop(self) -> None:
        """Waits for the exchanges of a failed pass."""
        with contextlib.suppress(BaseException):
            self.finish()

    def wait(self) -> None:
        """Waits for the exchanges that are under way, so that another may use their connection."""
        if self.staging is not None:
            self.staging.wait()

    def close(self) -> None:
        """Makes what is under way fail, after the running exchange."""
        self._is_closed = True
        if self.staging is not None:
            self.staging.close()
        self.host.give_up()

    def free(self) -> None:
        """Frees the device. After close(), when all reducers are closed."""
        if self.staging is not None:
            self.staging.free()
