"""libtagc's gatherer as an object. It passes on pointers and does not read the tensors."""

from __future__ import annotations

import contextlib
import ctypes

import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.staging import Kernels


def _array(
    tensor: torch.Tensor, n_elems: int, what: str, device: torch.device, dtype: torch.dtype = torch.float32
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
        """kernels: of the device where the tensors are, for deltas; None: CPU memory. seed: of whole int8
        that is rounded at random; None: to the nearest."""
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
        error = as_error(problem)
        status, text = lib.STATUSES.index(error.status), str(error).encode(errors="replace")
        with contextlib.suppress(Error):  # which all ranks get, and this one has already
            lib.call("tagc_gatherer_fail", self._handle, status, text)

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
