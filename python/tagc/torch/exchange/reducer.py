"""libtagc's reducer and gatherer as objects. They take fp32 tensors in CPU memory; reducers with kernels take
those of a device. They pass on pointers and do not read the tensors."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.staging import Kernels, Staging, Store
from tagc.torch.exchange.work import Work

WHOLE = (lib.FORMATS["fp32"], lib.FORMATS["bf16"])  # formats that at sparsity 0 send values as they are


def _array(
    tensor: torch.Tensor,
    n_elems: int,
    what: str,
    device: torch.device = torch.device("cpu"),
    dtype: torch.dtype = torch.float32,
) -> tuple[int, int]:
    """Returns the address and the length of a tensor."""
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{what} must be a contiguous {dtype} tensor on {device}, not {tensor.dtype} on {tensor.device}"
        )
    if tensor.numel() != n_elems:
        raise ValueError(f"{what} has {tensor.numel()} elements, must have {n_elems}")
    return tensor.data_ptr(), n_elems


def as_error(problem: BaseException) -> Error:
    """Returns what all ranks raise where this one has failed with `problem`."""
    if isinstance(problem, Error):
        return problem
    is_memory = isinstance(problem, (MemoryError, torch.OutOfMemoryError)) or "can't allocate" in str(problem)
    return Error("memory" if is_memory else "argument", f"{type(problem).__name__}: {problem}")


def _fail(name: str, handle: ctypes.c_void_p, problem: BaseException) -> None:
    """Takes part in an exchange for the others' sake: all ranks fail as this one has."""
    error = as_error(problem)
    with contextlib.suppress(Error):
        lib.call(name, handle, lib.STATUSES.index(error.status), str(error).encode(errors="replace"))


class LocalFailure(Error):
    """A failure of this rank's device, while other ranks wait for its messages."""


def _call(store: Store | None, name: str, *arguments: Any) -> None:
    """Calls a function that is not collective."""
    try:
        lib.call(name, *arguments)
    except Error as failure:
        if store is None or failure.status != "device":
            raise
        raise LocalFailure(failure.status, str(failure)) from failure


def fields_of(n_elems: int, options: Mapping[str, Any], dtype: torch.dtype) -> lib.ReducerOptions:
    fields = lib.initialised(lib.ReducerOptions, "tagc_reducer_options_init")
    fields.n_elems = n_elems
    fields.gradient = lib.FORMATS["bf16" if dtype == torch.bfloat16 else "fp32"]
    for name, value in options.items():
        setattr(fields, name, value)
    return fields


class Reducer:
    """Sums gradients of n_elems values, (W, shard), over ranks, for the owner of each row or for every rank.
    Collective to make.

    options: fields of tagc_reducer_options by name. dtype: of gradients, fp32 or bf16. store: where its
    residual is, on a device, and then its exchanges are those of a task.Task; None: all in CPU memory."""

    def __init__(
        self,
        comm: Comm,
        n_elems: int,
        dtype: torch.dtype = torch.float32,
        store: Store | None = None,
        **options: Any,
    ) -> None:
        fields = fields_of(n_elems, options, dtype)
        self._handle, self._store, self.dtype = ctypes.c_void_p(), store, dtype
        self.device = torch.device("cpu") if store is None else store.device
        self.n_elems = n_elems
        self.n_output = n_elems if fields.output == lib.OUTPUTS["unit"] else n_elems // comm.world_size
        # whether the sums may take the place of the gradient, from its beginning (tagc_reducer_begin)
        has_room = 4 * self.n_output <= dtype.itemsize * n_elems
        is_taken = is_direct(options) and store is None
        self.is_in_place = is_taken and has_room and comm.world_size > 1
        self._under_way: tuple[torch.Tensor, ...] = ()
        self._stats = lib.initialised(lib.ReducerStats, "tagc_reducer_stats_init")
        if store is not None:
            self._handle = store.make("tagc_reducer_create_in", comm, fields)
        else:
            lib.call("tagc_reducer_create", comm.handle, ctypes.byref(fields), ctypes.byref(self._handle))

    def change(self, options: Mapping[str, Any]) -> None:
        """Sends by other options from now on: format, sparsity and block may differ. The residual stays.
        Collective in effect."""
        fields = fields_of(self.n_elems, options, self.dtype)
        _call(self._store, "tagc_reducer_change", self._handle, ctypes.byref(fields))

    def _arrays(self, gradient: torch.Tensor, output: torch.Tensor) -> tuple[int, ...]:
        return (
            *_array(gradient, self.n_elems, "gradient", self.device, self.dtype),
            *_array(output, self.n_output, "output", self.device),
        )

    @property
    def handle(self) -> int | None:
        return self._handle.value

    def begin(self, gradient: torch.Tensor, output: torch.Tensor) -> None:
        """Starts the exchange. Do not use either tensor until wait()."""
        lib.call("tagc_reducer_begin", self._handle, *self._arrays(gradient, output))
        self._under_way = gradient, output

    def fail(self, problem: BaseException) -> None:
        """Instead of begin() and wait(), where this rank cannot begin: the others wait for it."""
        _fail("tagc_reducer_fail", self._handle, problem)

    def wait(self) -> None:
        """Waits until the output is there; Error if it will not be."""
        if not self._under_way:
            return
        self._stats = lib.initialised(lib.ReducerStats, "tagc_reducer_stats_init")
        try:
            lib.call("tagc_reducer_end", self._handle, ctypes.byref(self._stats))
        finally:
            self._under_way = ()

    def end(self) -> lib.ReducerStats:
        """Returns tagc_reducer_stats of the exchange that began last, after wait()."""
        self.wait()
        return self._stats

    @property
    def n_residual(self) -> int:
        """The number of values of the residual; 0 if the exchange has none."""
        n_elems: int = lib.load().tagc_reducer_residual_elems(self._handle)
        return n_elems

    @property
    def residual_dtype(self) -> torch.dtype:
        """The smaller of fp32 and bf16 that holds the residual without loss."""
        is_fp32 = lib.load().tagc_reducer_residual_format(self._handle) == lib.FORMATS["fp32"]
        return torch.float32 if is_fp32 else torch.bfloat16

    def set_steps(self, n_steps: int) -> None:
        """Sets the number of steps that have begun. The rounding of the residual derives from it."""
        _call(self._store, "tagc_reducer_set_steps", self._handle, n_steps)

    def residual(self) -> torch.Tensor | None:
        """Returns a copy of the residual, fp32 in CPU memory; None if the exchange has none."""
        n_elems = self.n_residual
        if not n_elems:
            return None
        values = torch.empty(n_elems, dtype=torch.float32, device="cpu")
        _call(self._store, "tagc_reducer_get_residual", self._handle, values.data_ptr(), n_elems)
        return values

    def residual_square(self) -> float:
        """Returns the sum of the squares of the residual; 0 if the exchange has none."""
        square = ctypes.c_double()
        _call(self._store, "tagc_reducer_residual_square", self._handle, ctypes.byref(square))
        return square.value

    def set_residual(self, values: torch.Tensor) -> None:
        _call(
            self._store,
            "tagc_reducer_set_residual",
            self._handle,
            *_array(values, values.numel(), "residual"),
        )

    def scale_residual(self, factor: float) -> None:
        _call(self._store, "tagc_reducer_scale_residual", self._handle, factor)

    def close(self) -> None:
        if self._handle:
            lib.load().tagc_reducer_destroy(self._handle)
            self._handle = ctypes.c_void_p()


def is_direct(options: Mapping[str, Any]) -> bool:
    """Returns whether a reducer of these options encodes by direct: whole values need no kernels, and are
    read as fp32."""
    is_whole = options.get("sparsity") == 0 and options.get("format") in WHOLE
    return bool(options.get("exchange", lib.EXCHANGES["direct"]) == lib.EXCHANGES["direct"] and not is_whole)


def dtype_read(options: Mapping[str, Any], dtype: torch.dtype) -> torch.dtype:
    """Returns what a reducer of these options reads where gradients are of dtype."""
    return torch.bfloat16 if is_direct(options) and dtype == torch.bfloat16 else torch.float32


class Probe:
    """What a Reducer in that store would be, for the memory that a task.Task of it takes."""

    def __init__(
        self, comm: Comm, n_elems: int, dtype: torch.dtype, store: Store, options: Mapping[str, Any]
    ) -> None:
        fields = fields_of(n_elems, options, dtype_read(options, dtype))
        is_unit = fields.output == lib.OUTPUTS["unit"]
        self.n_elems, self.n_output = n_elems, n_elems if is_unit else n_elems // comm.world_size
        self._handle = store.make("tagc_reducer_probe_in", comm, fields)

    @property
    def handle(self) -> int | None:
        return self._handle.value

    def close(self) -> None:
        lib.load().tagc_reducer_destroy(self._handle)
        self._handle = ctypes.c_void_p()


class Way(NamedTuple):
    """Where the reducers of a unit work, and what sends their messages.

    work: memory that its exchanges share, because they run one after the other. kernels: of the device where
    tensors are; None: CPU memory. staging: in whose queue their reducers have stores; None: reducers work in
    CPU memory."""

    comm: Comm
    work: Work
    kernels: Kernels | None = None
    staging: Staging | None = None

    def reducer(
        self, n_elems: int, options: Mapping[str, Any], dtype: torch.dtype, store: Store | None = None
    ) -> Reducer:
        """Returns a new reducer. options: fields of tagc_reducer_options. dtype: of the hook's gradient,
        which need not be the reducer's own. store: of reducers with kernels. Collective."""
        store = store if is_direct(options) else None
        return Reducer(self.comm, n_elems, dtype_read(options, dtype), store, **options)


class Gatherer:
    """Gathers parameters of n_elems values, (W, shard), from the owner of each row to every rank. Collective
    to make."""

    def __init__(
        self,
        comm: Comm,
        n_elems: int,
        wire: str,
        tag: int,
        n_threads: int = 1,
        kernels: Kernels | None = None,
        seed: int | None = None,
    ) -> None:
        """kernels: as of a Reducer; deltas. seed: of whole int8 that is rounded at random; None: to the
        nearest."""
        fields = lib.initialised(lib.GathererOptions, "tagc_gatherer_options_init")
        format, fields.delta, fields.lossless = lib.GATHERS[wire]
        fields.n_elems, fields.format, fields.tag = n_elems, lib.FORMATS[format], tag
        self.n_elems, self.n_shard = n_elems, n_elems // comm.world_size
        self.is_delta = wire.startswith("delta")
        # of what comes: bf16 where it holds what was sent
        self.dtype = torch.bfloat16 if self.is_delta or format == "bf16" else torch.float32
        fields.full_format = lib.FORMATS["bf16" if self.dtype == torch.bfloat16 else "fp32"]
        fields.check_every = 100 if self.is_delta else 0
        fields.n_threads = n_threads
        if seed is not None:
            fields.rounding, fields.rounding_seed = lib.ROUNDINGS["stochastic"], seed
        self._handle, self.n_begun = ctypes.c_void_p(), 0
        self._device = torch.device("cpu") if kernels is None else kernels.device
        if kernels is None:
            lib.call("tagc_gatherer_create", comm.handle, ctypes.byref(fields), ctypes.byref(self._handle))
        else:
            lib.call(
                "tagc_gatherer_create_on",
                kernels.handle,
                comm.handle,
                ctypes.byref(fields),
                ctypes.byref(self._handle),
            )

    def run(self, shard: torch.Tensor, full: torch.Tensor) -> None:
        """Gathers shard (shard,), fp32, into full (W * shard,), of self.dtype, blocking. For deltas, full
        must hold the result of the last run."""
        arrays = (
            *_array(shard, self.n_shard, "shard", self._device),
            *_array(full, self.n_elems, "full", self._device, self.dtype),
        )
        self.n_begun += 1
        lib.call("tagc_gatherer_begin", self._handle, *arrays)
        lib.call("tagc_gatherer_end", self._handle)

    def fail(self, problem: BaseException) -> None:
        """Instead of run(), where this rank cannot begin: the others wait for it."""
        self.n_begun += 1
        _fail("tagc_gatherer_fail", self._handle, problem)

    def reset(self) -> None:
        """Makes the next run send whole values, not changes."""
        lib.call("tagc_gatherer_reset", self._handle)

    def n_gathers(self) -> int:
        """Returns the gathers so far, where the next run sends a delta; else 0."""
        n_gathers = ctypes.c_uint64()
        lib.load().tagc_gatherer_replica(self._handle, ctypes.byref(n_gathers))
        return n_gathers.value

    def set_replica(self, full: torch.Tensor, n_gathers: int) -> None:
        """Makes the next run send a delta to `full`, as the one after n_gathers of them. The same on all
        ranks."""
        lib.call(
            "tagc_gatherer_set_replica",
            self._handle,
            *_array(full, self.n_elems, "full", self._device, self.dtype),
            n_gathers,
        )

    def close(self) -> None:
        if self._handle:
            lib.load().tagc_gatherer_destroy(self._handle)
            self._handle = ctypes.c_void_p()
