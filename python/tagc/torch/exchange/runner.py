"""One way to run an exchange, in two versions. A hook makes a Call and hands it to a runner with two
tensors; nothing else asks which one it is.

    Host      tensors in CPU memory: run() blocks until the result is there
    Staged    a device's tensors: run() hands them to a thread, in pinned memory (staging.py), and streams
              wait for the result; it returns at once where no Python is needed for that (task.py)

Failures are raised by run(), or by Runners.finish() at the end of a backward pass. Runners of all ranks must
get the same calls in the same order."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from tagc._library import Error
from tagc.torch.exchange import endings, streams
from tagc.torch.exchange.call import Call
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.reducer import Way
from tagc.torch.exchange.staging import Kernels, Staging
from tagc.torch.exchange.work import Work

Job = Callable[[], torch.Tensor]
Future = torch.futures.Future[torch.Tensor]


class Runner:
    """Of one handle. work: memory of its exchanges, which run one after the other."""

    def __init__(self) -> None:
        self.work = Work()

    def run(self, call: Call, source: torch.Tensor, target: torch.Tensor) -> None:
        """Exchanges source into target. Collective."""
        raise NotImplementedError

    def future(self, work: Job, is_awaited: bool = False) -> Future:
        """Returns a future of work(), which calls run() of calls for whose results no stream waits, and
        raises nothing. is_awaited: the current stream waits for them, because work() goes on with them."""
        raise NotImplementedError

    def close(self) -> None:
        """Makes what is under way fail, after the running exchange."""


class Host(Runner):
    """settle: called before each exchange, and waits for those of other runners."""

    def __init__(self, settle: Callable[[], object]) -> None:
        super().__init__()
        self._settle, self.work_beside = settle, Work()
        # of a thread, once there is one
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] | None = None
        self._thread: threading.Thread | None = None
        # the last of await_end() and future(), and of future() alone; each keeps a tensor
        self._last: Future | None = None
        self._last_work: Future | None = None
        self._is_closed = False

    def run(self, call: Call, source: torch.Tensor, target: torch.Tensor) -> None:
        self._settle()
        work = self.work_beside if call.runs_beside else self.work
        call.perform(Way(call.comm, work), source, target, call.failure)()

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
        super().__init__()
        self.staging = staging

    def way(self, comm: Comm) -> Way:
        """Returns that of gradients' tasks."""
        kernels = self.staging.kernels
        return Way(comm, self.work, kernels, None if kernels is None else self.staging)

    def run(self, call: Call, source: torch.Tensor, target: torch.Tensor) -> None:
        way = self.way(call.comm) if call.wants_kernels else Way(call.comm, self.work)

        def perform(
            source: torch.Tensor | None, target: torch.Tensor | None, failure: BaseException | None
        ) -> None:
            call.perform(way._replace(staging=None), source, target, failure)()

        def perform_here(
            source: torch.Tensor | None, target: torch.Tensor | None, failure: BaseException | None
        ) -> None:
            task = None
            if failure is None and source is not None:
                task = call.make_task(way, self.staging, source)
            if task is None or source is None or target is None:
                perform(source, target, failure)
            else:
                self.staging.start_task(task, source, target, call.waits)

        task = None
        if not self.staging.has_failed:  # else perform() tells the other ranks
            try:
                task = call.task(way, self.staging)
            except Error as problem:  # perform() tells the other ranks
                call.failure = call.failure or problem
        if task is not None:
            call.begin_task(task)
            self.staging.start_task(task, source, target, call.waits)
            return
        if way.kernels is not None:
            self.staging.run_here(source, target, perform_here, call.failure)
            return
        self.staging.enqueue(source, target, perform, call.failure, call.waits)
        if call.failure is None and not self.staging.has_failed:  # so that the next one takes no memory
            with contextlib.suppress(Error):
                call.task(way, self.staging)

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

    def works(self) -> list[Work]:
        """Returns the work memory of all of them."""
        staged = [] if self.staged is None else [self.staged.work]
        return [self.host.work, self.host.work_beside, *staged]

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
