"""libtagc-plan.so by ctypes: the planner of the C command. planning/plan/ask.h describes the fields."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_char, c_double, c_int, c_size_t, c_uint64, sizeof
from typing import Any, NamedTuple

from tagc import _library as lib
from tagc._library import Error

FULL, GRAD, NONE, HYBRID = range(4)  # tagc_sharding
GATHERS = {"fp32": 0, "bf16": 1, "int8": 2, "delta8": 3, "delta4": 4, "delta2": 5}  # tagc_gather_kind


class _Question(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("n_layer", c_int), ("n_embd", c_int), ("n_vocab", c_int),
        ("n_batch", c_int),
        ("n_tokens", c_int), ("n_micro_steps", c_int), ("world_size", c_int), ("ranks_per_host", c_int),
        ("n_levels", c_int),
        ("sharding", c_int), ("gather", c_int), ("format", c_int), ("sparsity", c_double),
        ("link_bytes_per_s", c_double), ("latency_s", c_double), ("host_bytes_per_s", c_double),
        ("flops_per_s", c_double), ("codec_s", c_double), ("optimizer_s", c_double),
    ]  # fmt: skip


class _Reply(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("n_params", c_uint64), ("step_s", c_double), ("compute_s", c_double),
        ("exposed_s", c_double), ("gradient_bytes", c_double), ("gather_bytes", c_double),
        ("state_bytes", c_uint64), ("residual_bytes", c_uint64), ("why", c_char * 256),
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


class Forecast(NamedTuple):
    """Of one optimizer step. gradient_bytes and gather_bytes are what a host sends to others; state_bytes and
    residual_bytes are memory of a rank."""

    n_params: int
    step_s: float
    compute_s: float
    exposed_s: float
    gradient_bytes: float
    gather_bytes: float
    state_bytes: int
    residual_bytes: int


class _ExchangeMemory(Structure):
    _fields_ = [("buffers", c_uint64), ("work", c_uint64), ("residual", c_uint64), ("spare", c_uint64)]


class Needs(NamedTuple):
    """Bytes of a rank for reducers. transient: of the exchange under way."""

    residual: int
    buffers: int
    transient: int


_loaded: ctypes.CDLL | None = None


def _load() -> ctypes.CDLL:
    global _loaded
    if _loaded is None:
        path = lib.library_path().with_name("libtagc-plan.so")
        if not path.is_file():
            raise Error("io", f"the planner is not at {path}: install the package with pip")
        library = ctypes.CDLL(str(path))
        library.tagc_plan_ask.argtypes = [POINTER(_Question), POINTER(_Reply)]
        library.tagc_plan_ask.restype = c_int
        library.tagc_plan_mesh.argtypes = [POINTER(_MeshQuestion), POINTER(_MeshReply)]
        library.tagc_plan_mesh.restype = c_int
        library.tagc_plan_reducer_memory.argtypes = [
            POINTER(lib.ReducerOptions),
            c_int,
            c_int,
            POINTER(_ExchangeMemory),
        ]
        library.tagc_plan_reducer_memory.restype = c_int
        library.tagc_plan_work_bytes.argtypes = [c_uint64, c_uint64]
        library.tagc_plan_work_bytes.restype = c_uint64
        _loaded = library
    return _loaded


def ask(gather: str, values: str, **numbers: Any) -> Forecast:
    """Returns the forecast of one way to train. numbers: the other fields of tagc_plan_question, of which
    n_levels is 2 by default."""
    given = {"n_levels": 2, "gather": GATHERS[gather], "format": lib.FORMATS[values]} | numbers
    question = _Question(struct_bytes=sizeof(_Question), **given)
    reply = _Reply(struct_bytes=sizeof(_Reply))
    status = _load().tagc_plan_ask(byref(question), byref(reply))
    if status:
        raise Error(status, reply.why.decode(errors="replace") or "libtagc-plan.so is of another version")
    return Forecast(*(getattr(reply, name) for name in Forecast._fields))


def ask_mesh(gather: str, values: str, forward: str, backward: str, **numbers: Any) -> dict[str, Any]:
    """Returns the plan of one way to train on a mesh: the fields of tagc_mesh_reply. numbers: the other
    fields of tagc_mesh_question and tagc_mesh_model (planning/plan/mesh.h)."""
    model = _MeshModel(**{name: numbers.pop(name) for name in _MODEL})
    formats = {name: lib.FORMATS[text] for name, text in (("forward", forward), ("backward", backward))}
    given = {"gather": GATHERS[gather], "format": lib.FORMATS[values], "block": 64} | formats | numbers
    question = _MeshQuestion(struct_bytes=sizeof(_MeshQuestion), model=model, **given)
    reply = _MeshReply(struct_bytes=sizeof(_MeshReply))
    status = _load().tagc_plan_mesh(byref(question), byref(reply))
    if status:
        raise Error(status, reply.why.decode(errors="replace") or "libtagc-plan.so is of another version")
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


def needs(units: Sequence[Sequence[Mapping[str, Any]]], world_size: int) -> Needs:
    """Returns what the reducers of a model take on each of world_size ranks. units: of each, the fields of
    tagc_reducer_options of its parts."""
    residual = buffers = spares = most = total = 0
    alike: dict[int, int] = {}  # bytes of a residual -> reducers so far
    for unit in units:
        work = 0
        for part in unit:
            fields = lib.initialised(lib.ReducerOptions, "tagc_reducer_options_init")
            for name, value in part.items():
                setattr(fields, name, value)
            found, n_before = _ExchangeMemory(), 0
            for _ in range(2):  # how many have a residual of this size, the first answer tells
                status = _load().tagc_plan_reducer_memory(byref(fields), world_size, n_before, byref(found))
                if status:
                    raise Error(status, f"no reducer has these options: {dict(part)}")
                n_before = alike.get(found.residual, 0)
            alike[found.residual] = n_before + 1
            residual, buffers = residual + found.residual, buffers + found.buffers
            spares, work = spares + found.spare, work + found.work
        most, total = max(most, work), total + work
    return Needs(residual, buffers, spares + int(_load().tagc_plan_work_bytes(most, total)))
