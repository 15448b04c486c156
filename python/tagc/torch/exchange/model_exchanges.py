"""Exchanges of gradients by models of libtagc: a hook hands over a Gradient, and goes on. Several are under
way at once. They end in the order in which they began, so that all ranks tell the schedule the same in the
same order.

In CPU memory a gradient and its sums stay until the end. On a device the order of streams protects them, and
nothing here keeps them: what ends at the end of the pass is what the schedule and statistics get, and the
failure."""

from __future__ import annotations

import collections
import contextlib
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tagc import _library as lib
from tagc._library import LOST, Error
from tagc.torch.exchange.comm import Comm, agree_in_turn, compared
from tagc.torch.exchange.interfaces import Exchanged
from tagc.torch.exchange.layout import Layout
from tagc.torch.exchange.model import (
    Keeper,
    Levels,
    LocalFailure,
    PartStats,
    Stream,
    Sum,
    Unit,
    UnitModel,
    check_tensors,
    kind_of,
    scale_of,
)
from tagc.torch.exchange.staging import Staging, spoil
from tagc.torch.exchange.within import op_between

# Gradients whose exchanges are under way, beside one of any size: a rank that computes faster than it sends
# would keep its whole gradient otherwise.
MOST_BYTES = 32 << 20
MOST_BYTES_OF_HOSTS = 1 << 20  # where ranks share the memory of a host, also for what exchanges take

_NOTHING = torch.empty(0, device="cpu")


FindLayout = Callable[[], "Layout | None"]  # of the gradient; None: its parameters are unknown
Record = Callable[["Reduction", PartStats, float], object]  # of its outcome, and how long it took


class Gradient(NamedTuple):
    """What a hook hands over, and how it is to be exchanged.

    group: over whose ranks it is summed.
    find_layout() -> the layout of `source`; None if some parameters are missing: then this exchange is dense
        and residuals do not change.
    waits: whether later work of the current stream waits for the result; or staging.FOR_INPUT.
    recurs: whether this unit comes once in a step.
    number: from which rounding derives, of a call that belongs to no step; None: the step's.
    agrees: whether, in CPU memory, ranks agree before it by messages of its own, because they may come with
        other calls.
    may_last: whether, in CPU memory, the sums need be there at the end of the pass alone."""

    unit: Exchanged
    group: Any
    source: torch.Tensor
    target: torch.Tensor
    op: Any
    find_layout: FindLayout
    waits: int = True
    recurs: bool = True
    number: int | None = None
    agrees: bool = False
    may_last: bool = False


class Reduction:
    """The exchange of a gradient, which it does not keep. It checks everything that must be checked in the
    hook itself.

    failure: of this rank, which tells the others.
    loaded: of which exchange the state is that this rank has loaded.
    opens_step: whether it is the first of an exchange of the whole model.
    agrees_first: whether ranks agree by messages of their own, before the exchange."""

    is_agreed = False  # whether all ranks have
    agree_s = 0.0  # how long that took
    n_within = 0  # bytes to ranks of the host
    step = 0  # the number of that exchange of the model, which whoever begins it sets

    def __init__(
        self,
        gradient: Gradient,
        levels: Levels,
        loss_scale: Callable[[], float],
        failure: BaseException | None,
        loaded: int | None,
        opens_step: bool,
        agrees_first: bool,
    ) -> None:
        source, target = gradient.source, gradient.target
        self.unit, self.op, self.number, self.waits = (
            gradient.unit, gradient.op, gradient.number, gradient.waits
        )  # fmt: skip
        self.levels, self.failure = levels, failure
        self.opens_step, self.agrees_first = opens_step, agrees_first
        self.n_elems, self.dtype = source.numel(), source.dtype
        self.n_bytes = self.n_elems * source.element_size()
        self.is_all_reduce = source.numel() == target.numel()
        self.layout: Layout | None = None
        self.loss_scale, self._numbers = 1.0, dict[str, Any]()
        try:
            if failure is not None:
                return
            check_tensors(source, target, "gradient")
            for tensor in (source, target):
                if tensor.layout != torch.strided or not tensor.is_contiguous():
                    raise Error("unsupported", f"a gradient of {tensor.layout}: must be dense and contiguous")
            layout = self.layout = gradient.find_layout()
            n_output = source.numel() if layout is None or layout.all_reduce else layout.row
            world_size = levels.world_size
            if target.numel() != n_output and (layout or target.numel() * world_size != n_output):
                raise Error("mismatch", f"the output has {target.numel()} elements, must have {n_output}")
            self.loss_scale = loss_scale()
            self._numbers = {
                "elements": source.numel(),
                "dtype": source.dtype,
                "parameters": _fingerprint(layout),
                "factor of op": scale_of(self.op, world_size),
                "loss scale": self.loss_scale,
                "loaded at exchange": loaded,
            }
        except Exception as problem:
            self.failure = problem

    @property
    def comm(self) -> Comm:
        """The connection between hosts."""
        return self.levels.between

    @property
    def what(self) -> str:
        return f"gradients of {self.unit.name}"

    def word(self) -> int:
        """Returns a checksum of what all ranks must have alike, for libtagc to compare."""
        data = struct.pack("=7q", *compared(self.what, self._numbers)[0])
        return int(lib.load().tagc_checksum(data, len(data)))

    def agree(self) -> None:
        """Makes all ranks agree on it, or raise the same Error, also of one that has failed. Collective: over
        the ranks of the host, of which one may have failed, and then over those of this place in all
        hosts."""
        begin = time.perf_counter()
        agree_in_turn(self.levels, self.what, self._numbers, self.failure)
        self.is_agreed, self.agree_s = True, time.perf_counter() - begin


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


class Contents(NamedTuple):
    """What is exchanged: the unit of the hook, or where the hook's layout is not known, another one."""

    unit: Unit
    layout: Layout


class Start(NamedTuple):
    """What begins. own: the unit of the hook. contents: None if this rank has a failure. staging: of the
    device where source and target are, and where the current stream waits as the call says; None: they are in
    CPU memory. source, target: as of UnitModel.begin()."""

    call: Reduction
    own: Unit
    contents: Contents | None
    source: torch.Tensor
    target: torch.Tensor
    staging: Staging | None


class Waiting(NamedTuple):
    """An exchange under way that nobody has waited for yet. n_bytes: of the gradient that its end() keeps.
    target: what becomes NaN if it fails; None: the device does that."""

    end: Callable[[], None]
    n_bytes: int
    target: torch.Tensor | None


class Failed(NamedTuple):
    """An exchange that has ended so. is_own: whether libtagc says that this rank failed in it."""

    start: Start
    failure: BaseException
    is_own: bool


class ModelExchanges:
    """Those of one handle. record: gets the outcome of each. wait_for_jobs: waits for a thread's, where that
    ends them. wait_for_device: until a device's are over."""

    def __init__(
        self,
        schedule: Keeper,
        record: Record,
        wait_for_jobs: Callable[[], object],
        wait_for_device: Callable[[], object] = lambda: None,
    ) -> None:
        self._schedule, self._record = schedule, record
        self._wait_for_jobs, self._wait_for_device = wait_for_jobs, wait_for_device
        self._waiting: collections.deque[Waiting] = collections.deque()
        self._n_bytes = 0  # of their sources
        self._failed: list[Failed] = []  # in this pass, in order
        # what this rank has told the others of in the place of an exchange on a device
        self.told: BaseException | None = None

    def begin(self, start: Start) -> Callable[[], None]:
        """Begins an exchange. Returns what waits for its end, in any thread, and raises its failure. Raises a
        LocalFailure where the others wait for this rank's messages. Collective."""
        failure, model = self._begin(start)
        if start.staging is not None:
            if failure is not None or start.contents is None:
                spoil(start.target)
                self.told = self.told or start.call.failure
            start = start._replace(source=_NOTHING, target=_NOTHING)  # end() keeps both in CPU memory alone

        def end() -> None:
            try:
                if failure is not None:
                    raise failure
                call, seconds = start.call, 0.0
                stats: PartStats = []
                if model is not None:
                    stats, seconds = model.end(self._schedule), model.seconds
                    call.n_within += model.n_bytes_within
                self._record(call, stats, seconds)
            except BaseException as problem:
                is_own = failure is None and model is not None and model.failed_here
                self._failed.append(Failed(start, problem, is_own))
                raise

        return end

    def _begin(self, start: Start) -> tuple[Error | None, UnitModel | None]:
        """Returns a failure of libtagc's, of which all ranks learn; and what has begun, or None if there are
        no elements."""
        call, own, contents = start.call, start.own.model, start.contents
        word = call.word()
        model = own
        try:
            if contents is not None:
                op, n_ranks = call.op, call.levels.world_size
                if (
                    start.staging is not None and call.levels.within is not None
                ):  # which has been over the host
                    op, n_ranks = op_between(op), call.comm.world_size
                kind, factor = kind_of(op, n_ranks)
                model = self._model_of(start, contents, word, kind)
                if model is None:
                    return None, None
            assert model is not None  # without one, all ranks have agreed, and none has failed
            model.set_word(word)
            if contents is None:
                assert call.failure is not None
                model.begin_failed(call.failure)
            else:
                self._put(model, start, factor)
        except LocalFailure:
            raise
        except Error as problem:
            return problem, model
        return None, model

    @staticmethod
    def _put(model: UnitModel, start: Start, factor: float) -> None:
        source, target, call, staging = start.source, start.target, start.call, start.staging
        if staging is None:
            model.begin(source, target, call.step, factor)
            return
        with staging.launch:
            stream = Stream(staging.streams.current(), int(call.waits))
            model.begin(source, target, call.step, factor, stream)

    def _model_of(self, start: Start, contents: Contents, word: int, kind: str) -> UnitModel | None:
        """Returns that which exchanges it, made or changed if need be; None: there is nothing to exchange.
        kind: one of lib.OPS. Collective."""
        call, own, model = start.call, start.own.model, contents.unit.model
        queue = None if start.staging is None else start.staging.queue
        wanted = Sum(call.levels, contents.layout, call.dtype, kind, queue)
        is_same = model is not None and own is model and model.is_alike(wanted)
        if own is not None and not (is_same and own.layout is contents.layout) and not call.is_agreed:
            self.settle()
            own.ask(word)  # a rank that has begun what it exchanged before fails, too
        return contents.unit.model_of(wanted, call.unit.rests) if contents.layout.n_elems else None

    # ---- what is under way ----

    def leave(self, end: Callable[[], None], source: torch.Tensor, target: torch.Tensor) -> None:
        """Leaves an exchange under way until settle(). If it fails, the target becomes NaN."""
        self._waiting.append(Waiting(end, source.nbytes, target))
        self._n_bytes += source.nbytes

    def leave_on_device(self, end: Callable[[], None]) -> None:
        """Likewise, on a device."""
        self._waiting.append(Waiting(end, 0, None))

    def make_room(self, n_bytes: int, shares_host: bool) -> None:
        """Waits for the oldest ones, so that one of a gradient of n_bytes may begin. shares_host: whether its
        host has other ranks."""
        most = MOST_BYTES_OF_HOSTS if shares_host else MOST_BYTES
        while self._waiting and self._n_bytes + n_bytes > most:
            self._end_oldest()

    def settle(self) -> None:
        """Waits for all. Their failures stay until finish()."""
        if self._waiting:
            self._wait_for_device()  # while Python handles signals
        while self._waiting:
            self._end_oldest()
        self._wait_for_jobs()

    def _end_oldest(self) -> None:
        oldest = self._waiting.popleft()
        self._n_bytes -= oldest.n_bytes
        try:
            oldest.end()
        except Error:
            if oldest.target is not None and oldest.target.is_floating_point():  # else that is the failure
                oldest.target.fill_(float("nan"))

    # ---- the end of a pass ----

    def finish(self, take_back: Callable[[], object]) -> None:
        """Waits for all, and raises the first failure, the same on all ranks. take_back: takes a step back on
        which they did not agree. Collective after a failure."""
        self.settle()
        self.told = None
        if self._failed:
            _explain(self._failed[0], take_back)

    def drop(self) -> None:
        """Waits for those of a failed pass."""
        while self._waiting:
            with contextlib.suppress(BaseException):
                self._end_oldest()
        self._failed, self.told = [], None


def _explain(failed: Failed, take_back: Callable[[], object]) -> None:
    """Raises the failure of an exchange that has ended, or what the ranks tell each other of it.
    Collective."""
    start, failure, is_own = failed
    call = start.call
    if not isinstance(failure, Error) or failure.status in LOST:
        raise failure
    # its device's: the others know no more than the status
    if start.staging is not None and is_own and failure.status != "mismatch":
        text = str(failure).removeprefix(f"{call.what}: ")
        call.failure = call.failure or Error(failure.status, text)
    try:
        call.agree()
    except Error as told:
        if call.opens_step and told.status == "mismatch":
            take_back()
        raise (failure if told.status in LOST else told) from None
    raise failure
