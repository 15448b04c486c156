"""Where work of Python's runs that exchanges tensors, in two versions; nothing else asks which one it is.

    Host      tensors in CPU memory: run() blocks until the result is there
    Staged    a device's tensors: run() hands them to a thread, in pinned memory (staging.py), and streams
              wait for the result; with kernels it runs in the hook

Failures are raised by run(), or by Runners.finish() at the end of a backward pass. Runners of all ranks must
get the same calls in the same order."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from tagc.torch.exchange import endings, streams
from tagc.torch.exchange.staging import Kernels, Staging

Failure = BaseException | None
# perform(kernels, source, target, failure): kernels of the device where the tensors are; None: they are in
# CPU memory. source, target: None if there is a failure, which this rank only reports. Collective.
Perform = Callable[["Kernels | None", "torch.Tensor | None", "torch.Tensor | None", Failure], object]
Job = Callable[[], torch.Tensor]
Future = torch.futures.Future[torch.Tensor]


class Runner:
    """Of one handle."""

    def run(
        self,
        perform: Perform,
        source: torch.Tensor,
        target: torch.Tensor,
        failure: Failure = None,
        wants_kernels: bool = False,
    ) -> None:
        """Performs an exchange of source into target. failure: of this rank. wants_kernels: whether it runs
        on the tensors' device, if that has kernels. Collective."""
        raise NotImplementedError

    def future(self, work: Job, is_awaited: bool = False) -> Future:
        """Returns a future of work(), which begins exchanges for whose results no stream waits, and raises
        nothing. is_awaited: the current stream waits for them, because work() goes on with them."""
        raise NotImplementedError

    def close(self) -> None:
        """Makes what is under way fail, after the running exchange."""


class Host(Runner):
    """settle: called before each exchange, and waits for those of other runners."""

    def __init__(self, settle: Callable[[], object]) -> None:
        self._settle = settle
        # of a thread, once there is one
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] | None = None
        self._thread: threading.Thread | None = None
        # the last of await_end() and future(), and of future() alone; each keeps a tensor
        self._last: Future | None = None
        self._last_work: Future | None = None
        self._is_closed = False

    def run(
        self,
        perform: Perform,
        source: torch.Tensor,
        target: torch.Tensor,
        failure: Failure = None,
        wants_kernels: bool = False,
    ) -> None:
        self._settle()
        perform(None, source, target, failure)

    def wait_for_jobs(self) -> None:
        """Waits for all work of the thread. In that there is nothing to wait for."""
        if self._last is not None and threading.current_thread() is not self._thread:
            self._last.wait()
            self._last = self._last_work = None

    def wait_for_work(self) -> None:
        """Waits where work that sends messages itself is under way."""
        if self._last_work is not None:
            self.wait_for_jobs()

    def future(self, work: Job, is_awaited: bool = False) -> Future:
        """Hands the work to a thread, so that the caller goes on; when this is closed, the caller does it."""
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

    def close(self) -> None:
        self.give_up()

    def give_up(self) -> None:
        self._is_closed = True
        if self._jobs is not None:
            self._jobs.put(None)

    def wait(self, timeout_s: float) -> bool:
        return True  # the thread itself is waited for


def _take_jobs(jobs: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # drops what it keeps alive


class Staged(Runner):
    def __init__(self, staging: Staging) -> None:
        self.staging = staging

    def run(
        self,
        perform: Perform,
        source: torch.Tensor,
        target: torch.Tensor,
        failure: Failure = None,
        wants_kernels: bool = False,
    ) -> None:
        kernels = self.staging.kernels if wants_kernels else None
        run = functools.partial(perform, kernels)
        if kernels is not None:
            self.staging.run_here(source, target, run, failure)
        else:
            self.staging.enqueue(source, target, run, failure)

    def future(self, work: Job, is_awaited: bool = False) -> Future:
        """Does the work at once, and where a stream waits within it, in a stream of its own. Streams wait for
        the value."""
        if is_awaited:
            with self.staging.streams.aside() as stream:
                value = work()
            return self.staging.streams.future(value, stream)
        value = work()
        return self.staging.streams.future(value, self.staging.stream)  # where results come back

    def finish(self) -> None:
        self.staging.finish()

    def drop(self) -> None:
        """Waits for the exchanges of a failed pass."""
        with contextlib.suppress(BaseException):
            self.finish()

    def close(self) -> None:
        self.staging.close()


class Runners:
    """Those of one handle. staging: of the device where gradients are; None: of the first device that a
    tensor is on. codec: of Staging."""

    def __init__(self, staging: Staging | None, codec: str | None) -> None:
        self.host = Host(self.finish)
        self.staged = None if staging is None else Staged(staging)
        self._codec, self._is_closed = codec, False

    @property
    def staging(self) -> Staging | None:
        return None if self.staged is None else self.staged.staging

    @property
    def kernels(self) -> Kernels | None:
        return None if self.staging is None else self.staging.kernels

    def pinned_bytes(self) -> int:
        return 0 if self.staging is None else self.staging.pinned_bytes

    def of(self, tensor: torch.Tensor) -> Runner:
        """Returns the one for gradients like that. Error if there should be one and cannot: host then tells
        the other ranks."""
        if self._is_closed:
            return self.host
        if self.staged is None and (found := streams.of(tensor.device)) is not None:
            self.staged = Staged(Staging(found, self._codec))
        return self.host if self.staged is None or not self.is_on_device(tensor) else self.staged

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return self.staging is not None and tensor.device == self.staging.streams.device

    def future(self, result: torch.Tensor, stream: int | None = None) -> Future:
        """Returns a future of a result that is on its way, on a device. stream: in which it comes, by its
        handle; None: that which copies results back."""
        assert self.staging is not None
        return self.staging.streams.future(result, self.staging.stream if stream is None else stream)

    def aside(self) -> contextlib.AbstractContextManager[int]:
        """Returns a context in which another stream is the current one. There is a device."""
        assert self.staging is not None
        return self.staging.streams.aside()

    def follow(self, result: torch.Tensor) -> None:
        """Makes the current stream wait for a result that is on its way (staging.FOR_INPUT)."""
        if self.staging is not None and self.is_on_device(result):
            self.staging.streams.follow(self.staging.stream)
        self.keep(result)

    def behind(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which that stream of torch's is the current one. There is a device."""
        assert self.staging is not None
        return self.staging.streams.behind(stream)

    def keep(self, tensor: torch.Tensor) -> None:
        """Protects a result that torch frees in the order of another stream than the current one."""
        if self.staging is not None and self.is_on_device(tensor):
            self.staging.streams.keep(tensor)

    def finish(self) -> None:
        """Waits for all that is under way on a device, and raises the first failure."""
        if self.staged is not None:
            self.staged.finish()

    def drop(self) -> None:
        if self.staged is not None:
            self.staged.drop()

    def wait(self) -> None:
        """Waits for the exchanges that are under way, so that another may use their connection."""
        if self.staging is not None:
            self.staging.wait()

    def close(self) -> None:
        self._is_closed = True
        for runner in (self.staged, self.host):
            if runner is not None:
                runner.close()

    def free(self) -> None:
        """Frees the device. After close(), when all reducers are closed."""
        if self.staging is not None:
            self.staging.free()
