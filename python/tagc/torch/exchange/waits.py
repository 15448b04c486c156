"""Waits for peers, up to a time-out, in torch's calls and in tagc's."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout

from tagc._library import Error
from tagc.torch.exchange import endings, internals

SOON = datetime.timedelta(seconds=1)
TIMEOUT_S = 300.0  # of groups that do not say theirs
MOST_S = 1e6  # of any time-out of tagc's
NCCL_TIMES = 4  # as long as tagc's own
# of groups that are made without one; a torch without NCCL has None
NCCL_DEFAULT_S = (default_pg_nccl_timeout or datetime.timedelta(minutes=10)).total_seconds()
_NEVER_SENT = 2**31 - 1  # a tag

T = TypeVar("T")


def soon(ask: Callable[[], T]) -> T | None:
    """Returns the answer of ask(), or None if it takes longer than SOON or fails. For questions to the store,
    which the silent rank may host."""
    answers = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception:
            pass  # no answer

    thread = endings.start(run, "tagc-asks")
    thread.join(1.5 * SOON.total_seconds())
    return answers[0] if answers else None


def unheard(store: dist.Store, own: int, ranks: Iterable[int]) -> str:
    """Returns "rank 1, 3": those that do not report soon that they are waiting, too. "" if all do, or if the
    store does not answer."""

    def ask() -> set[int]:
        store.set(f"waits {own}", "")
        others, end = set(ranks) - {own}, time.monotonic() + SOON.total_seconds()
        while others and time.monotonic() < end:
            others = {rank for rank in others if not store.check([f"waits {rank}"])}
            time.sleep(0.05)
        return others

    silent = soon(ask)
    return f"rank {', '.join(map(str, sorted(silent)))}" if silent else ""


_CPU = torch.device("cpu")


def gloo_of(group: dist.ProcessGroup | None, device: torch.device = _CPU) -> dist.ProcessGroupGloo | None:
    """Returns the gloo backend of a group for tensors on that device; None if it has another."""
    if isinstance(group, dist.ProcessGroupGloo):  # of tagc's own
        return group
    backend = internals.backend_of(dist.group.WORLD if group is None else group, device)
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def disconnect(gloo: dist.ProcessGroupGloo | None) -> None:
    """Closes all connections of a gloo group, which ends its transfers here and those of its peers with this
    rank. Gloo closes them if a message does not arrive in time, and no message has this tag."""
    if gloo is not None and gloo.size() > 1:
        backend: Any = gloo  # recv() is missing in the stubs of torch
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            backend.recv([nothing], (gloo.rank() + 1) % gloo.size(), _NEVER_SENT).wait(
                datetime.timedelta(milliseconds=1)
            )
        except RuntimeError:
            pass


def _lost(
    group: dist.ProcessGroup | None,
    what: str,
    timeout: datetime.timedelta,
    begin: float,
    failure: Exception | None,
    ranks: Sequence[int] | None = None,
) -> Error:
    """Returns the Error for a failed wait. It ends what is still under way; otherwise the process could not
    exit. It names ranks that are silent: the others report in torch's store that they have failed, too.
    ranks: of a group that torch.distributed does not know."""
    is_late = time.monotonic() - begin >= 0.99 * timeout.total_seconds()
    disconnect(gloo_of(group))
    group = dist.group.WORLD if group is None else group
    assert group is not None  # a collective of it has failed
    ranks = dist.get_process_group_ranks(group) if ranks is None else ranks
    store = dist.PrefixStore(f"tagc/{','.join(map(str, ranks))}", internals.default_store())
    silent = unheard(store, dist.get_rank(), ranks)
    if is_late:
        why = f"no answer{f' from {silent}' if silent else ''} within {timeout.total_seconds():g} s"
    else:
        why = f"{silent or 'a rank'} ended or cannot be reached any more: {failure}"
    return Error("timeout" if is_late else "transport", f"{what}: {why}")


def within(
    timeout: datetime.timedelta, group: dist.ProcessGroup | None, what: str, collective: Callable[[], object]
) -> None:
    """Runs collective(), a blocking one of torch's over `group`; Error if it does not end in time. If CPU
    tensors do not use gloo, the group's own time-out applies."""
    if gloo_of(group) is None:
        collective()
        return
    failures: list[Exception] = []

    def run() -> None:
        try:
            collective()
        except Exception as failure:
            failures.append(failure)

    begin = time.monotonic()
    thread = endings.start(run, "tagc-waits")
    thread.join(timeout.total_seconds())
    if thread.is_alive() or failures:
        raise _lost(group, what, timeout, begin, failures[0] if failures else None) from (
            failures[0] if failures else None
        )


def timeout_of(group: Any) -> float:
    """Returns the seconds after which torch's collectives over a group give up: what the user gave
    init_process_group(), or the group. The default of `timeout_s` everywhere."""
    if isinstance(group, dist.ProcessGroup):
        for device in ("cpu", "cuda"):
            backend = internals.backend_of(group, torch.device(device))
            if (found := internals.timeout_of(backend)) is not None:
                return min(found.total_seconds(), MOST_S)
    return TIMEOUT_S


def patience_of_group(backend: str, timeout_s: float) -> datetime.timedelta:
    """Returns the time-out of a process group that tagc makes. NCCL's watchdog counts from when a collective
    was enqueued, which may be long before its turn comes, and ends the process; tagc counts how long a peer
    is silent, and raises an Error. So NCCL waits much longer, and never shorter than it does by default."""
    seconds = timeout_s
    if "nccl" in backend:
        seconds = max(NCCL_TIMES * timeout_s, NCCL_DEFAULT_S)
    return datetime.timedelta(seconds=min(seconds, MOST_S))


def _failure_of(wait: Callable[[], object]) -> Exception | None:
    try:
        wait()
    except RuntimeError as failure:
        return failure
    return None


class _Work(dist.Work):
    """A torch Work whose waits end at the time-out."""

    def __init__(
        self,
        work: dist.Work,
        group: dist.ProcessGroup,
        what: str,
        timeout: datetime.timedelta,
        ranks: Sequence[int] | None = None,
        keeps_time: bool = True,
    ) -> None:
        """keeps_time: whether its own wait() ends at a time-out."""
        super().__init__()
        self._work, self._group, self._what, self._timeout = work, group, what, timeout
        self._ranks, self._keeps_time = ranks, keeps_time

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        begin, failure = time.monotonic(), self._wait()
        if failure is not None:
            raise _lost(self._group, self._what, self._timeout, begin, failure, self._ranks) from failure
        return True

    def _wait(self) -> Exception | None:
        """Returns why it did not end well, or not in time."""
        if self._keeps_time:
            return _failure_of(lambda: self._work.wait(self._timeout))
        failures: list[Exception | None] = []
        thread = endings.start(lambda: failures.append(_failure_of(self._work.wait)), "tagc-waits")
        thread.join(self._timeout.total_seconds())
        return failures[0] if failures else TimeoutError(f"{self._what} goes on")

    def is_completed(self) -> bool:
        return self._work.is_completed()


class FsdpComm:
    """What FSDP2 wants of a reduce-scatter and of an all-gather."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Comm(FsdpComm):
    _ranks: Sequence[int] | None = None  # of a group that torch.distributed does not know

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name, self._timeout = name, datetime.timedelta(seconds=timeout_s)

    def _start(
        self,
        what: str,
        begin: Callable[[bool], dist.Work | None],
        group: dist.ProcessGroup,
        async_op: bool,
        device: torch.device,
        keeps_time: bool = True,
    ) -> dist.Work | None:
        if gloo_of(group, device) is None:  # NCCL's wait with a time-out would block the host
            return begin(async_op)
        begun = begin(True)
        assert begun is not None  # this rank is in the group
        work = _Work(begun, group, f"{what} of {self._name}", self._timeout, self._ranks, keeps_time)
        if async_op:
            return work
        work.wait()
        return None


class ReduceScatter(_Comm):
    """For set_custom_reduce_scatter(): torch's own, with a time-out, and by gloo with every op."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        is_gloo = gloo_of(group, input_tensor.device) is not None
        if op == dist.ReduceOp.PREMUL_SUM and is_gloo:  # which gloo does not have
            input_tensor, op = input_tensor * op.__getstate__()[1], dist.ReduceOp.SUM
        return self._start(
            "torch's reduce-scatter of the gradients",
            lambda is_async: internals.reduce_scatter(
                output_tensor, input_tensor, group=group, op=op, async_op=is_async
            ),
            group,
            async_op,
            input_tensor.device,
            keeps_time=False,  # gloo's waits as long as its group does
        )


class Collectives(_Comm):
    """Of a group whose other users are in the same thread, or that orders its collectives on a stream
    (groups.py)."""

    def __init__(self, group: dist.ProcessGroup, name: str, timeout_s: float) -> None:
        super().__init__(name, timeout_s)
        self._group: Any = group

    def is_gloo(self, device: torch.device) -> bool:
        """Returns whether gloo moves tensors of that device, which has few collectives."""
        return gloo_of(self._group, device) is not None

    def _run(
        self, what: str, begin: Callable[[bool], Any], device: torch.device, keeps_time: bool = True
    ) -> None:
        self._start(what, begin, self._group, False, device, keeps_time)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_splits: Sequence[int] = (),
        sent_splits: Sequence[int] = (),
    ) -> None:
        """Splits: rows for each rank; without them all have as many."""
        splits = list(received_splits) or None, list(sent_splits) or None
        self._run(
            "the all-to-all",
            lambda is_async: dist.all_to_all_single(
                received, sent, *splits, group=self._group, async_op=is_async
            ),
            sent.device,
        )

    def reduce_scatter(self, target: torch.Tensor, source: torch.Tensor, op: Any) -> None:
        ReduceScatter(self._name, self._timeout.total_seconds())(target, source, self._group, op)

    def reduce_scatter_rows(self, sums: torch.Tensor, source: torch.Tensor, op: Any) -> None:
        """Reduce-scatters each row of the source, (n, ranks * row), into that of the sums, (n, row)."""
        self._run(
            "the reduce-scatter",
            lambda is_async: internals.reduce_scatter_rows(sums, source, op, self._group, is_async),
            source.device,
        )

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        self._run(
            "torch's all-reduce",
            lambda is_async: dist.all_reduce(tensor, op, group=self._group, async_op=is_async),
            tensor.device,
        )

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        self._start_gather(received, sent, False)

    def _start_gather(self, received: torch.Tensor, sent: torch.Tensor, async_op: bool) -> dist.Work | None:
        return self._start(
            "the all-gather",
            lambda is_async: self._gather(received, sent, is_async),
            self._group,
            async_op,
            sent.device,
        )

    def _gather(self, received: torch.Tensor, sent: torch.Tensor, is_async: bool) -> Any:
        return internals.all_gather(received, sent, group=self._group, async_op=is_async)

    def gather_rows(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Gathers each row of (n, row) from all ranks into that of the target, (n, ranks * row)."""
        if not self.is_gloo(rows.device):
            internals.all_gather_rows(target, rows, self._group)
            return
        for work in [self._start_gather(*pair, True) for pair in zip(target, rows)]:
            assert work is not None  # it was begun
            work.wait()


class OwnCollectives(Collectives):
    """Of a gloo group that torch.distributed does not know, over these ranks: in CPU memory, from any thread
    of the handle that has it."""

    def __init__(self, gloo: Any, ranks: Sequence[int], name: str, timeout_s: float) -> None:
        super().__init__(gloo, name, timeout_s)
        self._ranks = ranks

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_splits: Sequence[int] = (),
        sent_splits: Sequence[int] = (),
    ) -> None:
        splits = list(received_splits), list(sent_splits)
        self._run("the all-to-all", lambda _: self._group.alltoall_base(received, sent, *splits), sent.device)

    def reduce_scatter(self, target: torch.Tensor, source: torch.Tensor, op: Any) -> None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        self._run(
            "the reduce-scatter",
            lambda _: internals.gloo_reduce_scatter(self._group)(target, source, options),
            source.device,
            keeps_time=False,
        )

    def reduce_scatter_rows(self, sums: torch.Tensor, source: torch.Tensor, op: Any) -> None:
        for mine, row in zip(sums, source):
            self.reduce_scatter(mine, row, op)

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._run("torch's all-reduce", lambda _: self._group.allreduce([tensor], options), tensor.device)

    def _gather(self, received: torch.Tensor, sent: torch.Tensor, is_async: bool) -> Any:
        return internals.gloo_gather(self._group)(received, sent)


def add_up(
    source: torch.Tensor, target: torch.Tensor, op: Any, collectives: Collectives, n_ranks: int
) -> None:
    """Lets torch exchange gradients that tagc does not know, of unusual dtypes or sparse ones: an all-reduce
    if target is as large as source, else a reduce-scatter."""
    if target.layout == torch.strided and target.numel() < source.numel():
        collectives.reduce_scatter(target, source, op)
        return
    mean = op == dist.ReduceOp.AVG
    target.copy_(source)
    collectives.all_reduce(target, dist.ReduceOp.SUM if mean else op)
    if mean:  # which gloo does not have
        target.div_(n_ranks)
