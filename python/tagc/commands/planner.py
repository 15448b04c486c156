"""libtagc-plan.so by ctypes: the planner of the C command, and what this module tells of it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_size_t,
    c_uint32,
    c_uint64,
    sizeof,
)  # fmt: skip
from typing import Any, NamedTuple

from tagc import _library as lib
from tagc._library import Error
from tagc.commands.parser import UsageError

GATHERS = {name: kind for kind, name in enumerate(lib.GATHERS)}  # tagc_gather_kind


class _Words(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("text", c_char_p), ("json", c_char_p), ("path", c_char_p),
        ("why", c_char * 512),
    ]  # fmt: skip


_KINDS = ("parameters", "gradients", "optimizer", "residual", "replicas", "buffers", "activations")
_LEGS = ("tensor", "context", "expert", "pipeline", "gradients", "parameters", "offload")
_BYTES = ("rank", "host", "all", "between")
_MODEL = (
    "n_layer n_embd n_head n_kv_head n_ffn n_vocab n_positions is_gated has_bias n_experts n_active"
).split()


class _MeshModel(Structure):
    _fields_ = [(name, c_int) for name in _MODEL]


class _MeshQuestion(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("model", _MeshModel), ("world_size", c_int), ("ranks_per_host", c_int),
        ("n_tensor", c_int), ("n_context", c_int), ("n_pipeline", c_int), ("n_expert", c_int),
        ("sequence", c_int), ("placement", c_int), ("n_sequences", c_int), ("n_tokens", c_int),
        ("n_micro_batches", c_int), ("schedule", c_int), ("n_stages_per_rank", c_int), ("recompute", c_int),
        ("keeps_scores", c_int), ("has_dropout", c_int), ("offload", c_int), ("codec_on_host", c_int),
        ("format", c_int), ("sparsity", c_double), ("gather", c_int), ("forward", c_int), ("backward", c_int),
        ("block", c_int),
    ]  # fmt: skip


class _MeshBytes(Structure):
    _fields_ = [(name, c_double) for name in _BYTES]


class _MeshReply(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("n_params", c_uint64), ("n_active_params", c_uint64), ("n_data", c_int),
        ("fullest", c_int), ("device", c_double * len(_KINDS)), ("host", c_double * len(_KINDS)),
        ("legs", _MeshBytes * len(_LEGS)), ("bubble", c_double), ("in_flight", c_double),
        ("why", c_char * 256),
    ]  # fmt: skip


class _HostMemory(Structure):
    _fields_ = [("residual", c_uint64), ("buffers", c_uint64), ("transient", c_uint64)]


class _DeviceMemory(Structure):
    _fields_ = [("residual", c_uint64), ("buffers", c_uint64), ("pinned", c_uint64)]


class Plan(NamedTuple):
    """text: to print. json: the plan, None with a help. path: where it goes, None: nowhere."""

    text: str
    json: str | None
    path: str | None


class HostMemory(NamedTuple):
    """Bytes of a rank for reducers. transient: of the exchange under way."""

    residual: int
    buffers: int
    transient: int


class DeviceMemory(NamedTuple):
    """Bytes of a rank for reducers with their codec on the GPU. pinned: in the host's memory."""

    residual: int
    buffers: int
    pinned: int


_loaded: ctypes.CDLL | None = None


def _load() -> ctypes.CDLL:
    global _loaded
    if _loaded is None:
        path = lib.library_path().with_name("libtagc-plan.so")
        if not path.is_file():
            raise Error("io", f"the planner is not at {path}: install the package with pip")
        library = ctypes.CDLL(str(path))
        library.tagc_plan_words.argtypes = [c_int, POINTER(c_char_p), POINTER(_Words)]
        library.tagc_plan_words_free.argtypes = [POINTER(_Words)]
        library.tagc_plan_words_free.restype = None
        library.tagc_plan_mesh.argtypes = [POINTER(_MeshQuestion), POINTER(_MeshReply)]
        library.tagc_plan_shape.argtypes = [c_double, POINTER(c_int), POINTER(c_int)]
        library.tagc_plan_shape.restype = None
        library.tagc_plan_codec.argtypes = [c_int, c_double, c_int, POINTER(c_double)]
        reducers = POINTER(lib.ReducerOptions)
        library.tagc_plan_host_memory.argtypes = [
            reducers,
            POINTER(c_uint32),
            c_size_t,
            c_int,
            c_int,
            c_int,
            POINTER(_HostMemory),
        ]
        library.tagc_plan_packed.argtypes = [reducers, c_size_t, c_int, c_int, c_int]
        library.tagc_plan_packed.restype = c_uint64
        library.tagc_plan_device_memory.argtypes = [
            reducers, POINTER(c_uint32), c_size_t, c_int, c_int, c_uint32, POINTER(_DeviceMemory)
        ]  # fmt: skip
        library.tagc_plan_pinned.argtypes = [reducers, POINTER(c_uint32), c_size_t, c_int, c_int]
        library.tagc_plan_pinned.restype = c_uint64
        _loaded = library
    return _loaded


def _check(status: int, why: str) -> None:
    if status:
        raise Error(status, why or "libtagc-plan.so is of another version")


def plan(words: Sequence[str]) -> Plan:
    """Returns the plan that these words of a command line ask for. UsageError if they are at fault."""
    given = [word.encode() for word in words]
    made = _Words(struct_bytes=sizeof(_Words))
    status = _load().tagc_plan_words(len(given), (c_char_p * (len(given) + 1))(*given), byref(made))
    why = made.why.decode(errors="replace")
    if status and lib.STATUSES[status] == "argument":
        raise UsageError(why)
    _check(status, why)
    json, path = (None if found is None else found.decode() for found in (made.json, made.path))
    answer = Plan(made.text.decode(), json, path)
    _load().tagc_plan_words_free(byref(made))
    return answer


def shape_of(n_params: float) -> tuple[int, int]:
    """Returns layers and width of a GPT of about so many parameters."""
    n_layer, width = c_int(), c_int()
    _load().tagc_plan_shape(n_params, byref(n_layer), byref(width))
    return n_layer.value, width.value


def codec_ns(values: str, sparsity: float, threads: int = 1) -> float:
    """Returns nanoseconds per element of selecting, encoding and decoding on threads of this processor."""
    ns = c_double()
    status = _load().tagc_plan_codec(lib.FORMATS[values], sparsity, threads, byref(ns))
    _check(status, f"no codec could be measured with values {values}, sparsity {sparsity}")
    return ns.value


def threads_of(cores: int, ranks: int) -> int:
    """Returns the threads of a codec on a host of so many cores and ranks, as compress() takes them."""
    n: int = _load().tagc_plan_threads(cores, ranks)
    return n


def ask_mesh(gather: str, values: str, forward: str, backward: str, **numbers: Any) -> dict[str, Any]:
    """Returns the plan of one way to train on a mesh: the fields of tagc_mesh_reply. numbers: the other
    fields of tagc_mesh_question and tagc_mesh_model (planning/mesh/mesh.h)."""
    model = _MeshModel(**{name: numbers.pop(name) for name in _MODEL})
    formats = {name: lib.FORMATS[text] for name, text in (("forward", forward), ("backward", backward))}
    given = {"gather": GATHERS[gather], "format": lib.FORMATS[values], "block": 64} | formats | numbers
    question = _MeshQuestion(struct_bytes=sizeof(_MeshQuestion), model=model, **given)
    reply = _MeshReply(struct_bytes=sizeof(_MeshReply))
    _check(_load().tagc_plan_mesh(byref(question), byref(reply)), reply.why.decode(errors="replace"))
    made = {
        name: getattr(reply, name)
        for name in ("n_params", "n_active_params", "n_data", "fullest", "bubble", "in_flight")
    }
    for where in ("device", "host"):
        made[where] = dict(zip(_KINDS, getattr(reply, where)))
    made["legs"] = {
        leg: {name: getattr(found, name) for name in _BYTES} for leg, found in zip(_LEGS, reply.legs)
    }
    return made


_Parts = Sequence[Mapping[str, Any]]  # the fields of tagc_reducer_options of each part of a unit


def _options(parts: _Parts) -> ctypes.Array[lib.ReducerOptions]:
    made = (lib.ReducerOptions * len(parts))()
    for fields, part in zip(made, parts):
        initial = lib.initialised(lib.ReducerOptions, "tagc_reducer_options_init")
        ctypes.memmove(byref(fields), byref(initial), sizeof(initial))
        for name, value in part.items():
            setattr(fields, name, value)
    return made


def _listed(units: Sequence[_Parts]) -> tuple[Any, Any, int]:
    """Returns options of all parts, their units, and how many they are."""
    parts = [part for unit in units for part in unit]
    numbers = [i for i, unit in enumerate(units) for _ in unit]
    return _options(parts), (c_uint32 * len(parts))(*numbers), len(parts)


def host_memory(units: Sequence[_Parts], world_size: int, n_places: int = 0, n_bytes: int = 4) -> HostMemory:
    """Returns what the reducers of a model take on each of world_size ranks, that exchange. n_places: ranks
    of each host, if they are those of a tagc_model, which packs nothing; else 0. n_bytes: of a value of the
    gradient, 2 or 4."""
    found = _HostMemory()
    status = _load().tagc_plan_host_memory(*_listed(units), world_size, n_places, n_bytes, byref(found))
    _check(status, f"no reducer has options that are among these: {units}")
    return HostMemory(found.residual, found.buffers, found.transient)


def device_memory(
    units: Sequence[_Parts], world_size: int, n_bytes: int = 4, n_sampled: int = 8192
) -> DeviceMemory:
    """Returns what they take with codec="device", of gradients of n_bytes per value. n_sampled: values of the
    sample that kernels take."""
    found = _DeviceMemory()
    status = _load().tagc_plan_device_memory(*_listed(units), world_size, n_bytes, n_sampled, byref(found))
    _check(status, f"no reducer has options that are among these: {units}")
    return DeviceMemory(found.residual, found.buffers, found.pinned)


def pinned_bytes(units: Sequence[_Parts], world_size: int, n_bytes: int = 4) -> int:
    """Returns the bytes of pinned memory with codec="host"."""
    found: int = _load().tagc_plan_pinned(*_listed(units), world_size, n_bytes)
    return found


def packed_bytes(unit: _Parts, world_size: int, is_ddp: bool, n_bytes: int = 4) -> int:
    """Returns the bytes in which an exchange packs gradients of n_bytes per value, 2 or 4, and their sums."""
    return int(_load().tagc_plan_packed(_options(unit), len(unit), world_size, is_ddp, n_bytes))
