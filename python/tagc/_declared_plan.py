"""Written by scripts/declare.py from headers of the planner: change those, and run it.
tagc._planner has the functions of libtagc-plan.so."""

from __future__ import annotations

# fmt: off
from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_int, c_size_t, c_uint32, c_uint64
from typing import Any

from tagc._declared import ReducerOptions

MESH_KINDS = ("parameters", "gradients", "optimizer", "residual", "replicas", "buffers", "activations")
MESH_LEGS = ("tensor", "context", "expert", "pipeline", "gradients", "parameters", "offload")
GATHER_KINDS = {"fp32": 0, "bf16": 1, "lossless": 2, "int8": 3, "delta8": 4, "delta4": 5, "delta2": 6}
MESH_SCHEDULES = {"gpipe": 0, "1f1b": 1, "interleaved": 2, "zero bubble": 3}


class MeshModel(Structure):
    _fields_ = [
        ("n_layer", c_int), ("n_embd", c_int), ("n_head", c_int), ("n_kv_head", c_int), ("n_ffn", c_int),
        ("n_vocab", c_int), ("n_positions", c_int), ("is_gated", c_int), ("has_bias", c_int),
        ("n_experts", c_int), ("n_active", c_int),
    ]


class MeshQuestion(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("model", MeshModel), ("world_size", c_int), ("ranks_per_host", c_int),
        ("n_tensor", c_int), ("n_context", c_int), ("n_pipeline", c_int), ("n_expert", c_int),
        ("sequence", c_int), ("sharding", c_int), ("n_sequences", c_int), ("n_tokens", c_int),
        ("n_micro_batches", c_int), ("schedule", c_int), ("n_stages_per_rank", c_int), ("recompute", c_int),
        ("keeps_scores", c_int), ("has_dropout", c_int), ("offload", c_int), ("codec_on_host", c_int),
        ("format", c_int), ("sparsity", c_double), ("gather", c_int), ("forward", c_int), ("backward", c_int),
        ("token_forward", c_int), ("token_backward", c_int), ("block", c_int),
    ]


class MeshBytes(Structure):
    _fields_ = [("rank", c_double), ("host", c_double), ("all", c_double), ("between", c_double)]


class MeshReply(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("n_params", c_uint64), ("n_active_params", c_uint64), ("n_data", c_int),
        ("fullest", c_int), ("device", c_double * 7), ("host", c_double * 7), ("legs", MeshBytes * 7),
        ("bubble", c_double), ("in_flight", c_double), ("why", c_char * 256),
    ]


class DeviceMemory(Structure):
    _fields_ = [("residual", c_uint64), ("buffers", c_uint64), ("pinned", c_uint64)]


class HostMemory(Structure):
    _fields_ = [("residual", c_uint64), ("buffers", c_uint64), ("transient", c_uint64)]


class TokensQuestion(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("world_size", c_int), ("ranks_per_host", c_int), ("n_experts", c_int),
        ("n_active", c_int), ("n_tokens", c_double), ("width", c_int), ("element_bytes", c_int),
        ("n_forward", c_double), ("n_backward", c_double), ("forward", c_int), ("backward", c_int),
        ("block", c_int), ("codec_s", c_double * 2), ("latency_s", c_double), ("bytes_per_s", c_double),
        ("torch_bytes_per_s", c_double), ("compute_s", c_double),
    ]


class TokensReply(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("host_bytes", c_double * 2), ("comm_s", c_double * 2),
        ("verdict", c_int), ("why", c_char * 256),
    ]


class Timed(Structure):
    _fields_ = [("n", c_double * 2), ("s", c_double * 2)]


class UnitsUnit(Structure):
    _fields_ = [
        ("trained", c_double * 3), ("fp32", c_double), ("bf16", c_double), ("n_other_bytes", c_double),
        ("n_gathers", c_int),
    ]


class UnitsTimes(Structure):
    _fields_ = [
        ("latency_s", c_double), ("bytes_per_s", c_double), ("reduce", Timed * 2), ("gather", Timed * 2),
        ("own", Timed * 2), ("copy_out", Timed), ("copy_back", Timed), ("sum_within", Timed),
        ("share_within", Timed),
    ]


class UnitsQuestion(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("units", POINTER(UnitsUnit)), ("n_units", c_size_t),
        ("joined", c_double), ("world_size", c_int), ("ranks_per_host", c_int), ("is_ddp", c_int),
        ("is_all_reduce", c_int), ("reduces_frozen", c_int), ("n_passes", c_int), ("compute_s", c_double),
        ("times", UnitsTimes), ("reduce", c_int), ("narrows", c_int), ("parameters", c_int),
        ("codec_on_host", c_int), ("gradients", POINTER(ReducerOptions)), ("codec_s", c_double * 3),
        ("gather_s", c_double), ("again_s", c_double),
    ]


class UnitsReply(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("n_units", c_size_t), ("gradients_s", c_double),
        ("parameters_s", c_double), ("exposed_s", c_double), ("own_s", c_double), ("step_s", c_double),
        ("host_bytes", c_double), ("why", c_char * 256),
    ]


class PlanAnswerText(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("text", c_char_p), ("json", c_char_p), ("path", c_char_p),
        ("why", c_char * 512),
    ]


# header -> name -> (arguments, result)
FUNCTIONS: dict[str, dict[str, tuple[list[Any], Any]]] = {
    "mesh.h": {
        "tagc_plan_mesh": ([POINTER(MeshQuestion), POINTER(MeshReply)], c_int),
        "tagc_plan_pipeline_s": ([c_int, c_int, c_int, c_double, c_double, c_double], c_double),
    },
    "bytes.h": {
        "tagc_plan_device_memory": ([
            POINTER(ReducerOptions), POINTER(c_uint32), c_size_t, c_int, c_int, c_uint32,
            POINTER(DeviceMemory),
        ], c_int),
        "tagc_plan_pinned": ([POINTER(ReducerOptions), POINTER(c_uint32), c_size_t, c_int, c_int], c_uint64),
    },
    "catalogue.h": {
        "tagc_plan_shape": ([c_double, POINTER(c_int), POINTER(c_int)], None),
    },
    "codec.h": {
        "tagc_plan_codec": ([c_int, c_double, c_int, POINTER(c_double)], c_int),
        "tagc_plan_gather_codec": ([c_int, c_int, POINTER(c_double)], c_int),
        "tagc_plan_blocks_codec": ([c_int, POINTER(c_double)], c_int),
        "tagc_plan_threads": ([c_int, c_int], c_int),
    },
    "memory.h": {
        "tagc_plan_host_memory": ([
            POINTER(ReducerOptions), POINTER(c_uint32), c_size_t, c_int, c_int, c_int, POINTER(HostMemory),
        ], c_int),
    },
    "tokens.h": {
        "tagc_plan_tokens": ([POINTER(TokensQuestion), POINTER(TokensReply)], c_int),
    },
    "units.h": {
        "tagc_plan_units": ([POINTER(UnitsQuestion), POINTER(UnitsReply)], c_int),
        "tagc_plan_local_s": ([c_double, c_double, c_int, c_int, c_int], c_double),
        "tagc_plan_every": ([c_double, c_double, c_int, c_int], c_int),
    },
    "ask.h": {
        "tagc_plan_words": ([c_int, POINTER(c_char_p), POINTER(PlanAnswerText)], c_int),
        "tagc_plan_words_free": ([POINTER(PlanAnswerText)], None),
    },
}
