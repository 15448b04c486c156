"""One exchange of several parameters: packed by class, reduced, unpacked. Every hook calls Unit.reduce().

When a hook's layout changes (a parameter without a gradient, rebuilt buckets), the unit makes new reducers
and keeps residuals by parameter."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange import memory_ahead
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.exchanged_part import Arrays, ExchangedPart
from tagc.torch.exchange.model import Follower, Levels, UnitModel, stowable
from tagc.torch.exchange.reducer import LocalFailure, Way, as_error, dtype_read, fields_of
from tagc.torch.exchange.staging import Staging, Store
from tagc.torch.exchange.task import Sampler, Task, TaskPart
from tagc.torch.exchange.work import Work

Stats = list[tuple[layouts.Part, lib.ReducerStats]]
Resting = list[tuple[ExchangedPart, torch.Tensor]]  # (exchange, residual) that it does not send
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ReduceOp = dist.ReduceOp


def scale_of(op: Any, world_size: int) -> float:
    """Returns the factor of the sum over ranks: for AVG, SUM or PREMUL_SUM."""
    if op == ReduceOp.AVG:
        return 1.0 / world_size
    if op == ReduceOp.SUM:
        return 1.0
    if op == ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        return float(factor)
    raise Error("unsupported", f"reduce op {op}: tagc has AVG, SUM and PREMUL_SUM")


def kind_of(op: Any, world_size: int) -> tuple[str, float]:
    """Returns the op of reducers, and the factor that their sums get."""
    factor = scale_of(op, world_size)
    return ("avg", 1.0) if factor == 1.0 / world_size else ("sum", factor)


def check_tensors(source: torch.Tensor, target: torch.Tensor, what: str) -> None:
    for tensor in (source, target):
        if tensor.dtype not in DTYPES:
            raise Error("unsupported", f"{what} of {tensor.dtype}: must be fp32, bf16 or fp16")
    if source.dtype != target.dtype:
        raise Error("unsupported", f"{what} of {source.dtype} into {target.dtype}: must be the same")
    if source.device != target.device:
        raise Error("unsupported", f"{what} on {source.device} into {target.device}: must be the same")


def _zeros(n_elems: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((n_elems,), -0.0, dtype=dtype, device="cpu")  # libtagc's zero: adding it changes no bit


def _is_zero(values: torch.Tensor) -> bool:
    return not values[:64].any() and not values.any()


def _square(values: torch.Tensor) -> float:
    return torch.linalg.vector_norm(values, dtype=torch.float32).item() ** 2


def _rounding_seed(way: Way, part: layouts.Part) -> int:
    """Returns a number of its own for each reducer of a rank, and for ranks of one host, which exchange other
    slices of the same parameters. It is the same in a run that goes on, whatever the units were before, and
    on ranks of tensor parallelism, where copies of a parameter must stay equal."""
    return zlib.crc32(f"{min(part.weights)} {way.comm.place}".encode())


class Unit:
    """name: of the module. follower: says how its parameters are sent. own: has the pieces of every parameter
    that this rank exchanges, where the ranks of a replica have parts of a residual (Place.part); None: all of
    them."""

    rests = False

    def __init__(self, name: str, follower: Follower, own: layouts.Layout | None = None) -> None:
        self.name, self.follower, self._own = name, follower, own
        self.options = follower.fields
        self._tag = zlib.crc32(name.encode())  # its reducers have work memory at the same time
        self._layout: layouts.Layout | None = None
        self._key: tuple[str, bool, Way] | None = None
        self._exchanges: list[ExchangedPart] = []
        self.model: UnitModel | None = None  # which exchanges in the place of these
        # residuals of parameters without a reducer now, in wire order
        self._stowed: dict[str, torch.Tensor] = {}
        self._task: Task | None = None  # of these reducers, with this layout
        self._task_key: tuple[Any, ...] = ()
        self._store: Store | None = None  # of reducers with kernels
        self._reserved: tuple[Any, ...] = ()  # the _task_key whose memory there is, at every level

    # ---- the step ----

    def reduce(
        self,
        way: Way,
        layout: layouts.Layout,
        source: torch.Tensor,
        target: torch.Tensor,
        op: Any,
        *,
        step: int = 0,
        rests: bool = False,
    ) -> Callable[[], Stats]:
        """Exchanges source into target. Collective; all ranks must have agreed on the layout. Returns a
        function for when the way has finished: it returns [(part, tagc_reducer_stats)], or raises the first
        failure.

        source (n_elems,); target (row,), or for an all-reduce (n_elems,), which may be source. Both have the
        same dtype, one of DTYPES, and are where the way's reducers work. In CPU memory the values of source
        are lost. step: the number of this exchange, from which the rounding of residuals derives; 0: reducers
        count by themselves. rests: if this rank's gradient of a parameter is zero, its residual is not
        sent."""
        kind, factor = kind_of(op, way.comm.world_size)
        self._prepare(way, layout, kind, source.dtype, step)
        begun: list[ExchangedPart] = []
        resting: Resting = []

        def end() -> Stats:
            stats, failure = [], None
            for exchange in begun:
                try:
                    stats.append((exchange.part, exchange.reducer.end()))
                    stats[-1][1].n_saturated = exchange.n_saturated
                except Error as problem:
                    failure = failure or problem
            self.put_back(resting)
            if failure is not None:
                raise failure
            return stats

        if rests:
            resting += self.withdraw(source)
        failure: BaseException | None = None
        arrays: dict[ExchangedPart, Arrays] = {}
        try:
            arrays = self._pack(way.work, source, target)
            for exchange in self._exchanges:
                exchange.reducer.begin(*arrays[exchange])
                begun.append(exchange)
        except BaseException as problem:
            failure = as_error(problem) if isinstance(problem, Exception) else problem
            # libtagc has told them of one that it would not begin
            is_told = isinstance(problem, Error) and bool(arrays)
            for exchange in self._exchanges[len(begun) + is_told :]:
                exchange.reducer.fail(failure)
        is_apart = target.data_ptr() != source.data_ptr()
        if layout.gaps and is_apart and failure is None:
            target.zero_()
        # All of them, also after a failure, because peers wait. The one that was packed last comes first:
        # others may be put to where it is read.
        for exchange in sorted(begun, key=list(arrays).index, reverse=True):
            try:
                exchange.wait()
                if failure is None:
                    exchange.put(arrays[exchange][1], target, factor)
            except Error as problem:
                failure = failure or problem
        if failure is None:
            for run in () if is_apart else layout.gaps:
                target[run.target : run.target + run.length].zero_()
        if failure is not None:
            with contextlib.suppress(Error):
                end()
            raise failure
        return end

    # ---- the step as libtagc runs it by itself ----

    def find_unit(self) -> Unit | None:
        return self

    def make_unit(self) -> Unit:
        return self

    def prepare(self, way: Way, layout: layouts.Layout, op: Any, dtype: torch.dtype, step: int = 0) -> None:
        """Makes the reducers of a first reduce() like that. step: its number. Collective."""
        self._prepare(way, layout, kind_of(op, way.comm.world_size)[0], dtype, step)

    def is_ready(self, way: Way, layout: layouts.Layout, op: Any, dtype: torch.dtype) -> bool:
        """Returns whether reduce() would use the reducers that there are, as they are."""
        key = (kind_of(op, way.comm.world_size)[0], dtype == torch.bfloat16, way)
        return self._layout is layout and self._key == key

    def task(
        self,
        staging: Staging,
        way: Way,
        what: str,
        comms: Sequence[Comm],
        op: Any,
        dtype: torch.dtype,
        sizes: tuple[int, int],
        sampler: Sampler,
    ) -> Task | None:
        """Returns what runs reduce() of a unit that is_ready(), with tensors of that dtype and sizes; None
        while it is under way. Local."""
        assert self._layout is not None  # is_ready()
        factor = kind_of(op, way.comm.world_size)[1]
        wanted = (what, tuple(comms), factor, dtype, sizes)
        if self._task is not None and self._task_key != wanted:
            self._forget_task()
        if self._task is None:
            parts = [(each.part, each.reducer, each.outputs) for each in self._exchanges]
            staging.wait()  # for what uses the work memory
            make = functools.partial(
                self._make_task, staging, way, what, self._layout, dtype, sizes, factor, comms, sampler
            )
            if self._store is not None and self._reserved != wanted:
                options = functools.partial(self._reducer_options, way)
                for grouped, fields in memory_ahead.all_levels(self._layout, dtype, sampler):
                    own = self._store, options, self._exchanges
                    memory_ahead.take(make, way, grouped, fields, dtype, *own)
                self._reserved = wanted
            self._task, self._task_key = make(parts), wanted
        return None if self._task.is_under_way else self._task

    @staticmethod
    def _make_task(
        staging: Staging,
        way: Way,
        what: str,
        layout: layouts.Layout,
        dtype: torch.dtype,
        sizes: tuple[int, int],
        factor: float,
        comms: Sequence[Comm],
        sampler: Sampler,
        parts: Sequence[TaskPart],
    ) -> Task:
        return Task(staging.queue, what, layout, parts, dtype, sizes, factor, comms, sampler, way.work)

    def _forget_task(self) -> None:
        if self._task is not None:
            self._task.close()
            self._task = None

    def _pack(self, work: Work, source: torch.Tensor, target: torch.Tensor) -> dict[ExchangedPart, Arrays]:
        """Returns the arrays of all parts, packed. The largest part that can stays in the source. It is the
        last one here, but not the last to begin, because ranks may differ in it."""
        able = [each for each in self._exchanges if each.packs(source) and each.can_stay(source)]
        stays = max(able, key=lambda each: each.part.n_elems, default=None)
        order = sorted(self._exchanges, key=lambda each: each is stays)
        lent = work.lend([want for each in order for want in each.wants(source, target, each is stays)])
        return {
            each: each.pack(source, target, arrays, each is stays)
            for each, arrays in zip(order, zip(lent[::2], lent[1::2]))
        }

    def _prepare(self, way: Way, layout: layouts.Layout, op: str, dtype: torch.dtype, step: int) -> None:
        key = (op, dtype == torch.bfloat16, way)
        if self._layout is layout and self._key == key:
            self._set_steps(step)
            return
        self._forget_task()
        self._close_model()
        options = [
            {**self._reducer_options(way, layout, part, self.options(part, dtype)), "op": lib.OPS[op]}
            for part in layout.parts
        ]
        made: list[ExchangedPart | None] = self._change(way, layout, options) if key == self._key else []
        made = made or [None] * len(options)
        self._stow([exchange for exchange in self._exchanges if exchange not in made])
        try:
            store = self._open_store(way, layout, dtype)
            for i, part in enumerate(layout.parts):
                if made[i] is None:
                    reducer = way.reducer(part.n_elems, options[i], dtype, store)
                    made[i] = ExchangedPart(layout, part, way.comm.rank, reducer, options[i])
        except BaseException:  # the next reduce() makes new reducers; residuals stay
            self._exchanges = [exchange for exchange in made if exchange is not None]
            self.close()
            raise
        self._layout, self._key = layout, key
        self._exchanges = [exchange for exchange in made if exchange is not None]
        self._set_steps(step)
        self._unstow()

    def _reducer_options(
        self, way: Way, layout: layouts.Layout, part: layouts.Part, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            **fields,
            "output": lib.OUTPUTS["unit" if layout.all_reduce else "shard"],
            "tag": self._tag,
            "rounding_seed": _rounding_seed(way, part),
        }

    def _open_store(self, way: Way, layout: layouts.Layout, dtype: torch.dtype) -> Store | None:
        """Returns that of the reducers, with room for whatever parts the layout can have; None: there is
        none."""
        if way.staging is None:
            self._close_store()
            return None
        self._store = self._store or Store(way.staging)
        single = layout.regrouped(range(len(layout.parameters)))
        fields = [
            fields_of(
                part.n_elems,
                self._reducer_options(way, single, part, self.options(part, dtype)),
                dtype_read(self.options(part, dtype), dtype),
            )
            for part in single.parts
        ]
        self._store.expect(way.comm, fields)
        return self._store

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store, self._reserved = None, ()

    def _set_steps(self, step: int) -> None:
        """Makes the next exchange number `step`: residuals round as in a run that was not interrupted."""
        for exchange in self._exchanges if step else ():
            exchange.reducer.set_steps(step - 1)

    def _change(
        self, way: Way, layout: layouts.Layout, options: list[dict[str, Any]]
    ) -> list[ExchangedPart | None]:
        """Changes exchanges to those of another layout where they can become that. Returns one, or None, for
        each part. Collective in effect."""
        free, made = list(self._exchanges), list[ExchangedPart | None]()
        for part, wanted in zip(layout.parts, options):
            found = next((each for each in free if each.can_become(layout, part, wanted)), None)
            if found is not None:
                free.remove(found)
            made.append(found)
        failure: BaseException | None = None
        has_changed = False
        for exchange, part, wanted in zip(made, layout.parts, options):
            try:
                if exchange is not None and failure is None:
                    has_changed |= exchange.options != wanted
                    exchange.change(layout, part, wanted)
            except Error as problem:
                failure = problem
        if has_changed:
            try:
                way.comm.agree(f"a change of {self.name}", {}, failure)
            except Error:
                self.close()
                raise
        return made

    def withdraw(self, source: torch.Tensor) -> Resting:
        """Takes the residuals of parameters with a zero gradient out of the reducers."""
        taken = []
        for exchange in self._exchanges:
            residual = exchange.reducer.residual()
            if residual is None:
                continue
            used = {
                piece.parameter
                for piece, _ in exchange.part.pieces
                if not _is_zero(source[piece.start : piece.start + piece.length])
            }
            pieces = [(piece, at) for piece, at in exchange.part.pieces if piece.parameter not in used]
            if pieces:
                left, values = residual, _zeros(exchange.part.n_elems)
                for piece, at in pieces:
                    values[at : at + piece.length].copy_(left[at : at + piece.length])
                    left[at : at + piece.length].fill_(-0.0)
                exchange.reducer.set_residual(left)
                taken.append((exchange, values))
        return taken

    @staticmethod
    def put_back(resting: Resting) -> None:
        """Puts back what withdraw() took."""
        for exchange, values in resting:
            residual = exchange.reducer.residual()
            exchange.reducer.set_residual(values if residual is None else values.add_(residual))

    def squares(self, layout: layouts.Layout, source: torch.Tensor) -> list[tuple[float, float]]:
        """Returns [(sum of squares of the residual, of the gradient)] of each of the layout's parts, before
        its next reduce(); zeros if the last reduce() had another layout. Local."""
        if self._layout is not layout:
            return [(0.0, 0.0)] * len(layout.parts)
        return [
            (
                exchange.reducer.residual_square(),
                sum(_square(source[run.start : run.start + run.length]) for run in exchange.part.runs),
            )
            for exchange in self._exchanges
        ]

    # ---- by a model of libtagc's ----

    def model_of(
        self,
        levels: Levels,
        layout: layouts.Layout,
        dtype: torch.dtype,
        op: str,
        rests: bool,
        queue: ctypes.c_void_p | None = None,
    ) -> UnitModel:
        """Returns what exchanges that layout, over all ranks, with the residuals that there are, made or
        changed if need be. op: one of lib.OPS. queue: of the device where gradients are. Collective."""
        model = self.model
        if model is None or not model.is_alike(levels, layout, dtype, op, queue):
            return self._open_model(levels, layout, dtype, op, rests, queue)
        if model.layout is not layout:
            model.follow(layout)
        return model

    def _open_model(
        self,
        levels: Levels,
        layout: layouts.Layout,
        dtype: torch.dtype,
        op: str,
        rests: bool,
        queue: ctypes.c_void_p | None,
    ) -> UnitModel:
        try:
            self.close()
        except Error as problem:
            raise LocalFailure(problem.status, str(problem)) from problem
        held = None
        are_chunks = not layout.is_cut and not (layout.all_reduce and self._own is not None)
        if levels.within is not None and are_chunks:
            n_owners = levels.per_host if layout.all_reduce else levels.world_size
            held = range(levels.place, n_owners, levels.per_host)
        self.model = UnitModel(self.name, levels, layout, dtype, op, self.follower, rests, held, queue)
        self.model.set_residuals_on_the_wire(self._stowed)
        self._stowed = {}
        return self.model

    def _close_model(self) -> None:
        """Keeps its residuals."""
        model, self.model = self.model, None
        if model is not None:
            model.close()
            self._stowed |= model.residuals_on_the_wire()

    # ---- residuals by parameter ----

    def _stow(self, exchanges: list[ExchangedPart]) -> None:
        """Keeps the residuals of these reducers, and ends them, one after the other."""
        self._forget_task()
        try:
            for exchange in exchanges:
                self._read(exchange, self._stowed)
                exchange.close()
        finally:
            for exchange in exchanges:
                exchange.close()
            self._exchanges = [exchange for exchange in self._exchanges if exchange not in exchanges]

    def _unstow(self) -> None:
        """Gives the reducers the stowed residuals of their parameters."""
        for exchange in self._exchanges:
            if not exchange.reducer.n_residual:
                continue
            found = self._stowed.keys() & exchange.part.weights.keys()
            if not found:
                continue
            values = _zeros(exchange.part.n_elems)
            for piece, at in exchange.part.pieces:
                name = exchange.layout.parameters[piece.parameter].name
                if name in found:
                    real = self._stowed[name][piece.offset : piece.offset + piece.length]
                    values[at : at + real.numel()].copy_(real)
            exchange.reducer.set_residual(values)
            for name in found:
                del self._stowed[name]

    def residuals_on_the_wire(self) -> dict[str, torch.Tensor]:
        """Returns name -> copy of the residual, (numel,) in wire order, of all parameters that have one: in
        bf16, which holds what is stored in 16 bits or fewer without loss, else in fp32. Local."""
        found = {name: values.clone() for name, values in self._stowed.items()}
        for exchange in self._exchanges:
            self._read(exchange, found)
        return found if self.model is None else found | self.model.residuals_on_the_wire()

    @staticmethod
    def _read(exchange: ExchangedPart, found: dict[str, torch.Tensor]) -> None:
        residual = exchange.reducer.residual()
        if residual is None:
            return
        for piece, at in exchange.part.pieces:
            parameter = exchange.layout.parameters[piece.parameter]
            if parameter.name not in found:
                found[parameter.name] = _zeros(parameter.numel, exchange.reducer.residual_dtype)
            values = found[parameter.name]
            real = values[piece.offset : piece.offset + piece.length]
            real.copy_(residual[at : at + real.numel()])

    def names_of_residuals(self) -> set[str]:
        """Returns the names in residuals_on_the_wire()."""
        return (
            (set() if self.model is None else self.model.names_of_residuals())
            | set(self._stowed)
            | {
                exchange.layout.parameters[piece.parameter].name
                for exchange in self._exchanges
                if exchange.reducer.n_residual
                for piece, _ in exchange.part.pieces
            }
        )

    def set_residuals_on_the_wire(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replaces all residuals by name -> (numel,) in wire order, of which it takes this rank's part; those
        not named become zero."""
        for exchange in self._exchanges:
            if exchange.reducer.n_residual:
                exchange.reducer.set_residual(_zeros(exchange.part.n_elems))
        self._stowed = {name: stowable(tensor) for name, tensor in values.items()}
        if self._own is not None:
            # a checkpoint of another number of ranks has whole ones, which all ranks of a replica get
            for name, gaps in self._own.gaps_by_name().items():
                for gap in gaps if name in self._stowed else ():
                    self._stowed[name][gap.target : gap.target + gap.length].fill_(-0.0)
        if self.model is not None:
            self.model.set_residuals_on_the_wire(self._stowed)
            self._stowed = {}
        if self._layout is not None:
            self._unstow()

    def scale_residuals(self, factor: float) -> None:
        if self.model is not None:
            self.model.scale_residuals(factor)
        for exchange in self._exchanges:
            if exchange.reducer.n_residual:
                exchange.reducer.scale_residual(factor)
        for values in self._stowed.values():
            values.mul_(factor)

    def free(self) -> None:
        """Frees reducers and residuals. It makes no tensor, because the garbage collector may call it while
        torch traces."""
        self._forget_task()
        for exchange in self._exchanges:
            exchange.close()
        self._close_store()
        if self.model is not None:
            self.model.free()
        self.model, self._exchanges, self._stowed = None, [], {}
        self._layout = self._key = None

    def close(self) -> None:
        """Keeps the residuals for the reducers that a later reduce() makes, or the model of model_of()."""
        self._close_model()
        try:
            self._stow(self._exchanges)
        finally:
            self._close_store()
            self._layout = self._key = None
