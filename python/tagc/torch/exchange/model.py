"""The parameters that a hook exchanges together, a Unit: what exchanges them, and their residuals by name.
When its layout becomes another one (a parameter without a gradient, rebuilt buckets), it keeps what was not
sent.

A UnitModel is the exchange as libtagc runs it by itself (tagc_model in include/tagc/model.h): a hook finds
the gradients, calls begin() and goes on; end() waits, without Python's lock. Several may be under way."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.gatherer import as_error
from tagc.torch.exchange.layout import Layout, Parameter, chunked_elems, first_dim

ELEMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = tuple(ELEMENTS)
ReduceOp = dist.ReduceOp


class LocalFailure(Error):
    """A failure of this rank's device, while other ranks wait for its messages."""


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


class Span(NamedTuple):
    """Elements [first, first + n_elems) of a parameter, number `parameter` of the model's, at `address`."""

    parameter: int
    first: int
    n_elems: int
    address: int


class Levels(NamedTuple):
    """Connections over the ranks of this host, if it has several, and over those of this place in all
    hosts."""

    within: Comm | None
    between: Comm

    @property
    def per_host(self) -> int:
        return 1 if self.within is None else self.within.world_size

    @property
    def place(self) -> int:
        return 0 if self.within is None else self.within.rank

    @property
    def world_size(self) -> int:
        return self.between.world_size * self.per_host

    @property
    def rank(self) -> int:
        return self.between.rank * self.per_host + self.place


class SentPart(NamedTuple):
    """What statistics are of: parameters of one class and level."""

    kind: str
    level: int
    n_real: int  # elements that the ranks of this place exchange


# statistics of an exchange, part by part
PartStats = Sequence[tuple[SentPart, lib.ReducerStats]]


class Follower(Protocol):
    """What knows the plans of parameters: schedule.Schedule."""

    def model_options(
        self, parameters: Sequence[Parameter], dtype: torch.dtype
    ) -> tuple[lib.ModelOptions, dict[str, str], object]:
        """Returns options that say how these parameters are sent; the class of each by name, as a model knows
        it; and what must live as long as the options."""
        ...


class Keeper(Protocol):
    """What gets what libtagc has seen of gradients: schedule.Schedule."""

    def keep(self, comm: Comm, own: dict[int, lib.ScheduleSums]) -> None:
        """Keeps sums of windows that became full in an exchange over that connection, by number."""
        ...


class Stream(NamedTuple):
    """A stream of a device, by its handle, and for what its later work waits (staging.FOR_RESULT)."""

    handle: int
    waits: int


def _array(spans: Iterable[Span]) -> Any:
    pieces = [lib.Piece(*span) for span in spans]
    return (lib.Piece * len(pieces))(*pieces)


class Spans:
    """Spans of a flat tensor, wherever it is."""

    def __init__(self, places: Sequence[Span], itemsize: int) -> None:
        """places: with the position in that tensor in the place of an address."""
        self._array = _array(places)
        words = ctypes.sizeof(lib.Piece) // 8
        self._offsets = itemsize * torch.tensor(
            [span.address for span in places], dtype=torch.int64, device="cpu"
        )
        self._addresses = self._offsets  # there are none
        if places:  # a column of the array
            pieces = torch.frombuffer(self._array, dtype=torch.int64).view(-1, words)
            self._addresses = pieces[:, lib.Piece.values.offset // 8]

    def at(self, address: int) -> Any:
        """Returns the array of pieces of a tensor at that address, until the next call."""
        torch.add(self._offsets, address, out=self._addresses)
        return self._array


class Sum(NamedTuple):
    """A sum over ranks of gradients that lie so. op: one of lib.OPS. queue: libtagc's, of the device where
    they are; None: CPU memory."""

    levels: Levels
    layout: Layout
    dtype: torch.dtype
    op: str
    queue: ctypes.c_void_p | None = None


class Unit:
    """name: of the module. follower: says how its parameters are sent. own: has the pieces of every parameter
    that this rank exchanges, where the ranks of a replica have parts of a residual (Place.part); None: all of
    them."""

    rests = False

    def __init__(self, name: str, follower: Follower, own: Layout | None = None) -> None:
        self.name, self.follower, self._own = name, follower, own
        self.model: UnitModel | None = None
        # residuals of parameters that keep none now, in wire order; the model's, too
        self._stowed: dict[str, torch.Tensor] = {}

    # ---- as of interfaces.Exchanged ----

    def find_unit(self) -> Unit | None:
        return self

    def make_unit(self) -> Unit:
        return self

    def model_of(self, wanted: Sum, rests: bool = False) -> UnitModel:
        """Returns what exchanges that, with the residuals that there are, made or changed if need be. rests:
        as of a UnitModel. Collective."""
        model = self.model
        if model is None or not model.is_alike(wanted):
            return self._open_model(wanted, rests)
        if model.layout is not wanted.layout:
            model.follow(wanted.layout)
        return model

    def _open_model(self, wanted: Sum, rests: bool) -> UnitModel:
        try:
            self.close()
        except Error as problem:
            raise LocalFailure(problem.status, str(problem)) from problem
        held, layout, levels = None, wanted.layout, wanted.levels
        are_chunks = not layout.is_cut and not (layout.all_reduce and self._own is not None)
        if levels.within is not None and are_chunks:
            n_owners = levels.per_host if layout.all_reduce else levels.world_size
            held = range(levels.place, n_owners, levels.per_host)
        self.model = UnitModel(self.name, wanted, self.follower, rests, held, self._stowed)
        return self.model

    # ---- residuals by parameter ----

    def residuals_on_the_wire(self) -> dict[str, torch.Tensor]:
        """Returns copies as a UnitModel does. Local."""
        if self.model is not None:
            return self.model.residuals_on_the_wire()
        return {name: values.clone() for name, values in self._stowed.items()}

    def names_of_residuals(self) -> set[str]:
        """Returns the names in residuals_on_the_wire()."""
        return set(self._stowed) if self.model is None else self.model.names_of_residuals()

    def set_residuals_on_the_wire(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replaces all residuals by name -> (numel,) in wire order, of which it takes this rank's part; those
        not named become zero."""
        stowed = {name: stowable(tensor) for name, tensor in values.items()}
        if self._own is not None:
            # a checkpoint of another number of ranks has whole ones, which all ranks of a replica get
            for name, gaps in self._own.gaps_by_name().items():
                for gap in gaps if name in stowed else ():
                    stowed[name][gap].fill_(-0.0)
        if self.model is not None:
            self.model.set_residuals_on_the_wire(stowed)
        else:
            self._stowed.clear()
            self._stowed.update(stowed)

    def scale_residuals(self, factor: float) -> None:
        if self.model is not None:
            self.model.scale_residuals(factor)
            return
        for values in self._stowed.values():
            values.mul_(factor)

    def free(self) -> None:
        """Frees the model and residuals. It makes no tensor, because the garbage collector may call it while
        torch traces."""
        if self.model is not None:
            self.model.free()
        self.model = None
        self._stowed.clear()

    def close(self) -> None:
        """Ends the model, and keeps the residuals for the next one."""
        model, self.model = self.model, None
        if model is not None:
            model.close()


class UnitModel:
    """A tagc_model of one unit, the parameters of a layout, with their residuals by name. Collective to make.
    Units with different names share work memory."""

    # of the exchange that ended last: bytes to ranks of this host, how long it took, and whether this rank
    # failed in it
    n_bytes_within, seconds, failed_here = 0, 0.0, False

    def __init__(
        self,
        name: str,
        wanted: Sum,
        follower: Follower,
        rests: bool = False,
        held: range | None = None,
        stowed: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """wanted: its layout is over all ranks. rests: whether a parameter whose gradient is zero keeps its
        residual. held: of which chunks of a parameter a residual is, one after the other, with padding; None:
        it is of the whole parameter, and zero where other ranks have it. stowed: residuals by name of what
        keeps none now, of those before and after this model, too."""
        levels, layout, dtype, _, queue = wanted
        self.name, self.sum, self._held = name, wanted, held
        self._stowed = {} if stowed is None else stowed
        numbers = [i for i, parameter in enumerate(layout.parameters) if parameter.numel]
        if layout.all_reduce:  # perhaps of one row of what FSDP1 shards
            numbers = [i for i in numbers if layout.pieces_of(i)]
        self._parameters = [layout.parameters[i] for i in numbers]
        n_owners = levels.per_host if layout.all_reduce else levels.world_size
        self._chunks = [chunked_elems(parameter, n_owners) // n_owners for parameter in self._parameters]
        # (first, elements) of what this layout has of each
        self._extents = [layout.extent_of(number) for number in numbers]
        # on a device the caller adds up within hosts (within.py)
        n_summed = levels.per_host if queue is not None else 1
        is_sliced = layout.all_reduce and n_summed > 1
        places = [
            Span(at, piece.offset - self._extents[at][0], n, piece.start)
            for at, number in enumerate(numbers)
            for piece in layout.pieces_of(number)
            if (n := min(piece.length, layout.parameters[number].numel - piece.offset)) > 0
        ]
        if is_sliced:
            places = [
                Span(piece.parameter, piece.offset, piece.length, piece.start)
                for piece in layout.slices_of(n_summed).pieces(levels.place)
            ]
        own = places if layout.all_reduce else _of_row(places, levels.rank, layout.row)
        if not layout.all_reduce and n_summed > 1:
            places = [
                span._replace(address=host * layout.row + span.address % layout.row)
                for span in places
                for host, place in [divmod(span.address // layout.row, n_summed)]
                if place == levels.place
            ]
        self._given, self._wanted = Spans(places, dtype.itemsize), Spans(own, dtype.itemsize)
        self._gaps = [] if is_sliced else _gaps(own, layout.row)  # (start, elements) of sums
        self._is_new = True  # then it stows all, since how a residual rounds depends on the step
        self._is_prepared = queue is None
        self._arrays: Any = None  # of the exchange under way
        options, kinds, kept = follower.model_options(self._parameters, dtype)
        options.layout.output = lib.OUTPUTS[
            "host shard" if is_sliced else "unit" if layout.all_reduce else "shard"
        ]
        ranges = [layout.begins_of(number) for number in numbers] if layout.is_cut else None
        self._set_options(options, kinds, ranges)
        options.hosts.summed, options.rests = n_summed > 1, rests
        self._follows = bool(options.schedule.follows)
        is_in_16_bits = (
            options.exchange == lib.EXCHANGES["direct"] and options.formats.residual != lib.FORMATS["fp32"]
        )
        # the smaller of fp32 and bf16 that holds residuals without loss
        self._residual_dtype = torch.bfloat16 if is_in_16_bits else torch.float32
        self._alive = levels, follower, kept  # as long as the model
        self._handle = self._create(options, kinds)

    def _set_options(
        self, options: lib.ModelOptions, kinds: Mapping[str, str], ranges: Sequence[Sequence[int]] | None
    ) -> None:
        """ranges: of each parameter, what owners get instead of chunks along the first dimension, see
        tagc_model_options."""
        name, dtype, parameters = f"gradients of {self.name}".encode(), self.sum.dtype, self._parameters
        options.op, options.tag, options.name = lib.OPS[self.sum.op], zlib.crc32(name), name
        options.formats.gradient = options.formats.sum = lib.ELEMENTS[ELEMENTS[dtype]]
        # so that nothing is lost within a host
        options.hosts.format = lib.FORMATS["bf16" if dtype == torch.bfloat16 else "fp32"]
        splits = [() if kinds[parameter.name] == "dense" else parameter.split for parameter in parameters]
        numbers = {split: number for number, split in enumerate(sorted(set(splits)))}
        options.layout.apart = (ctypes.c_uint32 * len(splits))(*(numbers[split] for split in splits))
        if ranges is not None:
            begins = [begin for of_owners in ranges for begin in of_owners]
            options.layout.cut = lib.CUTS["ranges"]
            options.layout.ranges = (ctypes.c_uint64 * len(begins))(*begins)

    def _create(self, options: lib.ModelOptions, kinds: Mapping[str, str]) -> ctypes.c_void_p:
        tensors, handle = (lib.Tensor * len(self._parameters))(), ctypes.c_void_p()
        for tensor, parameter, (_, n) in zip(tensors, self._parameters, self._extents):
            shape = first_dim(parameter) if n == parameter.numel else (n,)
            tensor.name = parameter.name.encode()
            tensor.shape, tensor.n_dims = (ctypes.c_uint64 * len(shape))(*shape), len(shape)
            tensor.kind = lib.CLASSES[kinds[parameter.name]]
        levels, queue = self.sum.levels, self.sum.queue
        lib.call(
            *(["tagc_model_create"] if queue is None else ["tagc_model_create_on", queue]),
            levels.within and levels.within.handle,
            levels.between.handle,
            tensors,
            len(tensors),
            ctypes.byref(options),
            ctypes.byref(handle),
        )
        return handle

    @property
    def layout(self) -> Layout:
        return self.sum.layout

    def is_alike(self, wanted: Sum) -> bool:
        """Returns whether it exchanges the same, but for what the schedule says."""
        own, other = (
            [parameter.name for parameter in layout.parameters] + [layout.n_elems, layout.row]
            for layout in (self.layout, wanted.layout)
        )
        return own == other and wanted._replace(layout=self.layout) == self.sum

    def _call(self, name: str, *arguments: Any) -> None:
        """Calls that function of a tagc_model."""
        if not self._handle:
            raise Error("state", f"{self.name} is closed")
        lib.call(f"tagc_model_{name}", self._handle, *arguments)

    # ---- an exchange ----

    def set_word(self, word: int) -> None:
        """Sets what all ranks must have alike in the next exchanges."""
        self._call("set_word", 0, word)

    def ask(self, word: int) -> None:
        """Does nothing if all ranks ask with the same word, else it fails on all. Collective."""
        self._call("ask", 0, word)

    def begin(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        step: int,
        factor: float,
        stream: Stream | None = None,
    ) -> None:
        """Starts to give `target` the sums of the gradients in `source`, times `factor`, and returns at once.
        Both stay as they are until the end, or in the order of a device's stream. There, on hosts of several
        ranks, `source` has the host's sums of what its place exchanges (within.HostSums), and so has `target`
        of an all-reduce. step: the number of the exchange, from which rounding derives. Collective."""
        try:
            self._call("set_exchanges", step - 1)
            is_new, self._is_new = self._is_new, False
            if is_new and self._stowed:
                self.set_residuals_on_the_wire(self._stowed)
            self._call("set_factor", 0, factor)
            self._clear_gaps(source, target)
            self._prepare(source.data_ptr(), target.data_ptr())
            given, wanted = self._given.at(source.data_ptr()), self._wanted.at(target.data_ptr())
        except Exception as problem:  # the others begin
            self.begin_failed(problem)
            return
        arrays = given, len(given), wanted, len(wanted)
        if stream is not None:
            self._call("begin_on", 0, *arrays, *stream)
            return
        self._arrays = given, wanted
        self._call("begin", 0, *arrays)

    def begin_failed(self, failure: BaseException) -> None:
        """Tells the others, in the place of begin(), that this rank has failed. Collective."""
        error = as_error(failure)
        self._call("begin_failed", 0, lib.STATUSES.index(error.status), str(error).encode(errors="replace"))

    def end(self, keeper: Keeper | None = None) -> PartStats:
        """Waits until the sums are there, without Python's lock, and hands over what libtagc has seen of the
        gradient. Returns the statistics of each part; the first one has all sums beyond fp16."""
        total = lib.initialised(lib.ModelStats, "tagc_model_stats_init")
        try:
            self._call("end", 0, ctypes.byref(total))
        finally:
            self._arrays, self.failed_here = None, bool(total.failed_here)
        self.seconds, self.n_bytes_within = total.total_s, total.n_bytes_within
        stats = [self._part(i) for i in range(lib.load().tagc_model_n_parts(self._handle, 0))]
        if stats:
            stats[0][1].n_saturated = total.n_saturated
        if keeper is not None and self._follows:
            n = len(self._parameters)
            numbers, sums, n_full = (ctypes.c_uint32 * n)(), (lib.ScheduleSums * n)(), ctypes.c_size_t()
            self._call("take_full", 0, numbers, sums, ctypes.byref(n_full))
            if n_full.value:
                full = dict(zip(numbers[: n_full.value], sums[: n_full.value]))
                keeper.keep(self.sum.levels.between, full)
        return stats

    def _part(self, number: int) -> tuple[SentPart, lib.ReducerStats]:
        first, n_elems, plan = ctypes.c_uint32(), ctypes.c_uint64(), lib.SchedulePlan()
        stats = lib.initialised(lib.ReducerStats, "tagc_reducer_stats_init")
        outputs = [ctypes.byref(output) for output in (first, n_elems, stats)]
        self._call("part_stats", 0, number, *outputs)
        self._call("plan", first, ctypes.byref(plan))
        n_real = n_elems.value // self.sum.levels.per_host
        return SentPart(self._parameters[first.value].kind, plan.level, n_real), stats

    def _clear_gaps(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if target.data_ptr() == source.data_ptr():
            return
        if self._gaps and self.sum.queue is not None:  # one launch
            target.zero_()
            return
        for start, n in self._gaps:
            target[start : start + n].zero_()

    def prepare(self, is_in_place: bool) -> None:
        """Takes the memory of a device that exchanges of tensors can come to need, whatever the plans will
        be, before the first one. is_in_place: whether sums come where gradients are. Local."""
        n_bytes = self.layout.n_elems * self.sum.dtype.itemsize  # at least
        self._prepare(n_bytes, n_bytes if is_in_place else 2 * n_bytes)  # nothing is read there

    def _prepare(self, source: int, target: int) -> None:
        if not self._is_prepared:
            given, wanted = self._given.at(source), self._wanted.at(target)
            self._call("prepare_on", 0, given, len(given), wanted, len(wanted))
            self._is_prepared = True

    def follow(self, layout: Layout) -> None:
        """Takes up the plans of now. layout: with which parameters have them. Collective; nothing is under
        way."""
        self._call("follow")
        self.sum = self.sum._replace(layout=layout)
        if self._stowed:
            self.set_residuals_on_the_wire(self.residuals_on_the_wire())

    # ---- residuals by parameter ----

    def _kept(self) -> dict[str, int]:
        """Returns name -> number of the parameters that keep a residual."""
        if not self._handle:
            return {}
        has = lib.load().tagc_model_has_residual
        return {p.name: i for i, p in enumerate(self._parameters) if has(self._handle, i)}

    def residuals_on_the_wire(self) -> dict[str, torch.Tensor]:
        """Returns name -> copy of the residual, (numel,) in wire order, of all parameters that have one: in
        bf16, which holds what is stored in 16 bits or fewer without loss, else in fp32. Local."""
        found = {name: values.clone() for name, values in self._stowed.items()}
        kept = {} if self._is_new else self._kept()
        if kept:
            own = {name: _zeros(self._n_kept(i)) for name, i in kept.items()}
            pieces = _array(self._spans(kept, own))
            self._call("get_residual", 0, pieces, len(pieces))
            found |= {name: values.to(self._residual_dtype) for name, values in own.items()}
        return found

    def _n_kept(self, number: int) -> int:
        """Returns the elements of the residual of the parameter with that number."""
        if self._held is None:
            return self._parameters[number].numel
        return len(self._held) * self._chunks[number]

    def _spans(self, numbers: Mapping[str, int], values: Mapping[str, torch.Tensor]) -> list[Span]:
        """Returns spans of fp32 residuals. numbers: name -> number of a parameter."""
        found = []
        for name, i in numbers.items():
            n, chunk, address = self._parameters[i].numel, self._chunks[i], values[name].data_ptr()
            if self._held is None:
                first, n_here = self._extents[i]
                found.append(Span(i, 0, n_here, address + 4 * first))
                continue
            for k, owner in enumerate(self._held):
                if (n_here := min(chunk, n - owner * chunk)) > 0:
                    found.append(Span(i, owner * chunk, n_here, address + 4 * k * chunk))
        return found

    def names_of_residuals(self) -> set[str]:
        return self._stowed.keys() | self._kept().keys()

    def set_residuals_on_the_wire(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replaces all residuals by name -> (numel,); those not named become zero."""
        fp32 = {name: tensor.detach().float().contiguous() for name, tensor in values.items()}
        kept = {} if self._is_new else self._kept()
        if kept:
            pieces = _array(self._spans({name: i for name, i in kept.items() if name in fp32}, fp32))
            self._call("set_residual", 0, pieces, len(pieces))
        self._stow({name: stowable(tensor) for name, tensor in values.items() if name not in kept})

    def _stow(self, values: Mapping[str, torch.Tensor]) -> None:
        self._stowed.clear()
        self._stowed.update(values)

    def scale_residuals(self, factor: float) -> None:
        if self._handle:
            self._call(*(("scale", factor) if factor else ("forget",)))
        for values in self._stowed.values():
            values.mul_(factor)

    def close(self) -> None:
        """Ends the exchange, and stows the residuals."""
        if self._handle:
            self._stow(self.residuals_on_the_wire())
            self._destroy()

    def free(self) -> None:
        """Makes no tensor, because the garbage collector may call it while torch traces."""
        self._destroy()
        self._stowed.clear()

    def _destroy(self) -> None:
        if self._handle:
            lib.load().tagc_model_destroy(self._handle)
            self._handle = ctypes.c_void_p()


def stowable(values: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a residual, in bf16 if it is so, else in fp32."""
    return values.detach().to(values.dtype if values.dtype == torch.bfloat16 else torch.float32, copy=True)


def _zeros(n_elems: int) -> torch.Tensor:
    return torch.full((n_elems,), -0.0, dtype=torch.float32, device="cpu")  # libtagc's zero


def _of_row(spans: Iterable[Span], number: int, row: int) -> list[Span]:
    """Returns those of one row of an input, at their places in the row."""
    first = number * row
    return [s._replace(address=s.address - first) for s in spans if first <= s.address < first + row]


def _gaps(spans: Sequence[Span], n_elems: int) -> list[tuple[int, int]]:
    """Returns (start, elements) of what these spans leave out of a tensor."""
    found, end = [], 0
    for span in [*spans, Span(0, 0, 0, n_elems)]:
        if span.address > end:
            found.append((end, span.address - end))
        end = span.address + span.n_elems
    return found
