"""The exchange of some parameters as libtagc runs it by itself (tagc_model in include/tagc/model.h). A hook
finds their gradients, calls begin() and goes on; end() waits, without Python's lock. Several may be under
way."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.layout import Layout, Parameter, Part
from tagc.torch.exchange.reducer import as_error
from tagc.torch.exchange.unit import stowable

ELEMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
Full = tuple[list[int], list[lib.ScheduleSums]]  # windows: numbers of parameters, and sums of each


class Span(NamedTuple):
    """Elements [first, first + n_elems) of a parameter, number `parameter` of the model's, at `address`."""

    parameter: int
    first: int
    n_elems: int
    address: int


class SentPart(NamedTuple):
    """What statistics are of: parameters of one class and level."""

    kind: str
    level: int
    n_real: int  # elements


# statistics of an exchange, part by part
PartStats = Sequence[tuple[Part | SentPart, lib.ReducerStats]]


class Follower(Protocol):
    """What knows the plans of parameters: schedule.Schedule."""

    def model_options(
        self, parameters: Sequence[Parameter], dtype: torch.dtype
    ) -> tuple[lib.ModelOptions, dict[str, str], object]:
        """Returns options that say how these parameters are sent; the class of each by name, as a model knows
        it; and what must live as long as the options."""
        ...


def _array(spans: Iterable[Span]) -> Any:
    pieces = [lib.Piece(*span) for span in spans]
    return (lib.Piece * len(pieces))(*pieces)


class Model:
    """A tagc_model of one unit. Collective to make.

    shapes: of each parameter; owners get chunks along the first dimension. output: one of lib.OUTPUTS. name:
    for messages; models with different ones share work memory. rests: whether a parameter whose gradient is
    zero keeps its residual."""

    def __init__(
        self,
        comm: Comm,
        parameters: Sequence[Parameter],
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        follower: Follower,
        *,
        output: str = "unit",
        op: str = "avg",
        name: str = "",
        rests: bool = False,
    ) -> None:
        options, kinds, kept = follower.model_options(parameters, dtype)
        options.output, options.op = lib.OUTPUTS[output], lib.OPS[op]
        options.gradient = options.sum = lib.ELEMENTS[ELEMENTS[dtype]]
        options.tag, options.rests, options.name = zlib.crc32(name.encode()), rests, name.encode()
        self.parameters, self.dtype = tuple(parameters), dtype
        is_in_16_bits = (
            options.exchange == lib.EXCHANGES["direct"] and options.residual != lib.FORMATS["fp32"]
        )
        # the smaller of fp32 and bf16 that holds residuals without loss
        self.residual_dtype = torch.bfloat16 if is_in_16_bits else torch.float32
        self._kept: Any = (comm, follower, kept)
        self._arrays: Any = None  # of the exchange under way
        tensors = (lib.Tensor * len(parameters))()
        for tensor, parameter, shape in zip(tensors, parameters, shapes):
            tensor.name = parameter.name.encode()
            tensor.shape, tensor.n_dims = (ctypes.c_uint64 * len(shape))(*shape), len(shape)
            tensor.kind = lib.CLASSES[kinds[parameter.name]]
        self._handle = ctypes.c_void_p()
        lib.call(
            "tagc_model_create",
            None,
            comm.handle,
            tensors,
            len(tensors),
            ctypes.byref(options),
            ctypes.byref(self._handle),
        )

    # ---- an exchange ----

    def set_word(self, word: int) -> None:
        """Sets what all ranks must have alike in the next exchanges."""
        lib.call("tagc_model_set_word", self._handle, 0, word)

    def set_exchanges(self, n_exchanges: int) -> None:
        """Says how many there have been. Local."""
        lib.call("tagc_model_set_exchanges", self._handle, n_exchanges)

    def begin(self, gradients: Iterable[Span], sums: Iterable[Span], step: int) -> None:
        """Starts an exchange, and returns at once. The memory stays as it is until end(). step: its number,
        from which rounding derives. Collective."""
        try:
            self.set_exchanges(step - 1)
            self._arrays = _array(gradients), _array(sums)
        except Exception as problem:  # the others begin
            self.begin_failed(problem)
            return
        given, wanted = self._arrays
        lib.call("tagc_model_begin", self._handle, 0, given, len(given), wanted, len(wanted))

    def begin_failed(self, failure: BaseException) -> None:
        """Tells the others, in the place of begin(), that this rank has failed. Collective."""
        error = as_error(failure)
        status, why = lib.STATUSES.index(error.status), str(error).encode(errors="replace")
        lib.call("tagc_model_begin_failed", self._handle, 0, status, why)

    def end(self) -> list[tuple[SentPart, lib.ReducerStats]]:
        """Waits until the sums are there. Returns the statistics of each part."""
        try:
            lib.call("tagc_model_end", self._handle, 0, None)
        finally:
            self._arrays = None
        return [self._part(i) for i in range(lib.load().tagc_model_n_parts(self._handle, 0))]

    def _part(self, number: int) -> tuple[SentPart, lib.ReducerStats]:
        first, n_elems, plan = ctypes.c_uint32(), ctypes.c_uint64(), lib.SchedulePlan()
        stats = lib.initialised(lib.ReducerStats, "tagc_reducer_stats_init")
        lib.call(
            "tagc_model_part_stats",
            self._handle,
            0,
            number,
            ctypes.byref(first),
            ctypes.byref(n_elems),
            ctypes.byref(stats),
        )
        lib.call("tagc_model_plan", self._handle, first, ctypes.byref(plan))
        return SentPart(self.parameters[first.value].kind, plan.level, n_elems.value), stats

    def take_full(self) -> Full | None:
        """Returns the windows that became full in the exchange that ended, if any did. Local."""
        n = len(self.parameters)
        numbers, sums, n_full = (ctypes.c_uint32 * n)(), (lib.ScheduleSums * n)(), ctypes.c_size_t()
        lib.call("tagc_model_take_full", self._handle, 0, numbers, sums, ctypes.byref(n_full))
        return (numbers[: n_full.value], sums[: n_full.value]) if n_full.value else None

    def follow(self) -> None:
        """Takes up the plans of now. Collective; nothing is under way."""
        lib.call("tagc_model_follow", self._handle)

    # ---- residuals ----

    def has_residual(self, parameter: int) -> bool:
        return bool(lib.load().tagc_model_has_residual(self._handle, parameter))

    def get_residuals(self, spans: Iterable[Span]) -> None:
        """Copies what is not sent yet to fp32 values. Local."""
        pieces = _array(spans)
        lib.call("tagc_model_get_residual", self._handle, 0, pieces, len(pieces))

    def set_residuals(self, spans: Iterable[Span]) -> None:
        """Replaces it by fp32 values; what is not named becomes zero. Local."""
        pieces = _array(spans)
        lib.call("tagc_model_set_residual", self._handle, 0, pieces, len(pieces))

    def scale_residuals(self, factor: float) -> None:
        if factor:
            lib.call("tagc_model_scale", self._handle, factor)
        else:
            lib.call("tagc_model_forget", self._handle)

    def close(self) -> None:
        if self._handle:
            lib.load().tagc_model_destroy(self._handle)
            self._handle = ctypes.c_void_p()


class FlatModel:
    """A Model of an all-reduce: its parameters lie one after the other in one tensor, as in a bucket of DDP.
    It keeps residuals by name, as a unit.Unit does. Collective to make."""

    def __init__(
        self, name: str, comm: Comm, layout: Layout, dtype: torch.dtype, follower: Follower, rests: bool
    ) -> None:
        """layout: of layouts.bucket()."""
        self.name, self.layout, self.dtype = name, layout, dtype
        self._n_bytes = dtype.itemsize
        self._starts = {
            i: layout.pieces_of(i)[0].start
            for i, parameter in enumerate(layout.parameters)
            if parameter.numel
        }
        self._parameters = [layout.parameters[i] for i in self._starts]
        self._stowed: dict[str, torch.Tensor] = {}  # residuals of what keeps none now
        self._is_new = True  # then it stows all, since how a residual rounds depends on the step
        self._model: Model | None = Model(
            comm,
            self._parameters,
            [(parameter.numel,) for parameter in self._parameters],
            dtype,
            follower,
            name=f"gradients of {name}",
            rests=rests,
        )

    @property
    def is_open(self) -> bool:
        return self._model is not None

    @property
    def model(self) -> Model:
        if self._model is None:
            raise Error("state", f"{self.name} is closed")
        return self._model

    def begin(self, values: torch.Tensor, step: int) -> None:
        """Starts to replace the gradients in `values` by their means over ranks. Collective."""
        try:
            self._unstow(step)
        except Exception as problem:  # the others begin
            self.model.begin_failed(problem)
            return
        address = values.data_ptr()
        spans = [
            Span(i, 0, parameter.numel, address + start * self._n_bytes)
            for i, (parameter, start) in enumerate(zip(self._parameters, self._starts.values()))
        ]
        self.model.begin(spans, spans, step)

    def _unstow(self, step: int) -> None:
        """Gives the model what residuals there were before it."""
        if not self._is_new:
            return
        self.model.set_exchanges(step - 1)
        self._is_new = False
        if self._stowed:
            self.set_residuals_on_the_wire(self._stowed)

    def follow(self, layout: Layout) -> None:
        """Takes up the plans of now. layout: with which parameters have them. Collective."""
        self.model.follow()
        self.layout = layout
        if self._stowed:
            self.set_residuals_on_the_wire(self.residuals_on_the_wire())

    # ---- residuals by parameter ----

    def _kept(self) -> dict[str, int]:
        """Returns name -> number of the parameters that keep a residual."""
        if self._model is None:
            return {}
        return {p.name: i for i, p in enumerate(self._parameters) if self._model.has_residual(i)}

    def residuals_on_the_wire(self) -> dict[str, torch.Tensor]:
        """Returns name -> copy of the residual, (numel,), as Unit's. Local."""
        found = {name: values.clone() for name, values in self._stowed.items()}
        kept = {} if self._is_new else self._kept()
        if kept:
            own = {name: _zeros(self._parameters[i].numel) for name, i in kept.items()}
            self.model.get_residuals(_spans(kept, own))
            found |= {name: values.to(self.model.residual_dtype) for name, values in own.items()}
        return found

    def names_of_residuals(self) -> set[str]:
        return self._stowed.keys() | self._kept().keys()

    def set_residuals_on_the_wire(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replaces all residuals by name -> (numel,); those not named become zero."""
        fp32 = {name: tensor.detach().float().contiguous() for name, tensor in values.items()}
        kept = {} if self._is_new else self._kept()
        if kept:
            self.model.set_residuals(_spans({name: i for name, i in kept.items() if name in fp32}, fp32))
        self._stowed = {name: stowable(tensor) for name, tensor in values.items() if name not in kept}

    def scale_residuals(self, factor: float) -> None:
        if self._model is not None:
            self._model.scale_residuals(factor)
        for values in self._stowed.values():
            values.mul_(factor)

    def close(self) -> None:
        """Ends the exchange, and keeps the residuals."""
        if self._model is not None:
            self._stowed = self.residuals_on_the_wire()
            self._model.close()
            self._model = None

    def free(self) -> None:
        """Makes no tensor, because the garbage collector may call it while torch traces."""
        if self._model is not None:
            self._model.close()
        self._model, self._stowed = None, {}


def _zeros(n_elems: int) -> torch.Tensor:
    return torch.full((n_elems,), -0.0, dtype=torch.float32, device="cpu")  # libtagc's zero


def _spans(numbers: Mapping[str, int], values: Mapping[str, torch.Tensor]) -> list[Span]:
    return [Span(i, 0, values[name].numel(), values[name].data_ptr()) for name, i in numbers.items()]
