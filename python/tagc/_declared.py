"""Written by scripts/declare.py from include/tagc: change those, and run it.
tagc._library has the functions of libtagc."""

from __future__ import annotations

# fmt: off
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

STATUS_NUMBERS = {
    "ok": 0, "argument": 1, "state": 2, "memory": 3, "mismatch": 4, "transport": 5, "corrupt": 6,
    "unsupported": 7, "device": 10, "timeout": 11,
}
LEGS = ("index", "values", "leftover", "result", "gather", "control")
PHASES = ("select", "index", "encode", "decode", "wait")
EXCHANGES = {"sketch": 1, "packed": 2, "direct": 3}
FORMATS = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3, "int2": 4}
ROUNDINGS = {"nearest": 0, "stochastic": 1}
OPS = {"avg": 0, "sum": 1}
OUTPUTS = {"shard": 0, "unit": 1, "host shard": 2}
LEVELS = {"fresh": 0, "every": 1, "largest": 2, "last": 3}
MOMENTS = {"stays": 0, "shortens": 1, "none": 2}
CLASSES = {"compressed": 0, "mild": 1, "dense": 2}
ELEMENTS = {"fp32": 0, "bf16": 1, "fp16": 2}
CUTS = {"rows": 0, "flat": 1, "flat arrays": 2, "ranges": 3}
N_LEGS = 6
MAX_LEGS = 16
N_PHASES = 5
MAX_PHASES = 16
RESIDUAL_NONE = -2
SCHEDULE_SAMPLE = 512
N_ALARM_KINDS = 3
TRANSPORT_ABI = 1


class Event(Structure):
    _fields_ = [
        ("stream", c_char_p), ("name", c_char_p), ("start_s", c_double), ("end_s", c_double),
        ("n_bytes", c_uint64), ("tag", c_uint64),
    ]


class CommOptions(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("timeout_s", c_double), ("trace", c_void_p), ("trace_context", c_void_p),
        ("total_timeout_s", c_double), ("names", POINTER(c_int32)), ("more_work_bytes", c_uint64),
    ]


class ReducerResultOptions(Structure):
    _fields_ = [("format", c_int), ("sparsity", c_double)]


class ReducerOptions(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("n_elems", c_uint64), ("tag", c_uint64), ("exchange", c_int),
        ("format", c_int), ("sparsity", c_double), ("op", c_int), ("output", c_int),
        ("result", ReducerResultOptions), ("block", c_int), ("n_threads", c_int), ("paper", c_void_p),
        ("residual", c_int), ("gradient", c_int), ("rounding_seed", c_uint64),
    ]


class ReducerStats(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("n_bytes_sent", c_uint64 * 16), ("n_bytes_received", c_uint64 * 16),
        ("time_s", c_double * 16), ("total_s", c_double), ("n_sent", c_uint64), ("n_union", c_uint64),
        ("n_returned", c_uint64), ("sparsity", c_double), ("n_cells", c_uint64), ("load", c_double),
        ("n_unpeeled", c_uint64), ("n_lost", c_uint64), ("peel_rounds", c_int), ("nonfinite", c_int),
    ]
    n_saturated = 0  # not libtagc"s: a unit counts it


class GathererOptions(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("n_elems", c_uint64), ("tag", c_uint64), ("format", c_int),
        ("delta", c_int), ("check_every", c_uint64), ("n_threads", c_uint64), ("full_format", c_uint64),
        ("rounding", c_uint64), ("rounding_seed", c_uint64), ("lossless", c_uint64),
    ]


class Memory(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("residual_bytes", c_uint64), ("spare_bytes", c_uint64),
        ("work_bytes", c_uint64), ("buffer_bytes", c_uint64), ("device_residual_bytes", c_uint64),
        ("device_spare_bytes", c_uint64),
    ]


class Part(Structure):
    _fields_ = [("peer", c_int32), ("n_bytes", c_uint64), ("offset", c_uint64)]


class Transfer(Structure):
    _fields_ = [
        ("lane", c_uint32), ("n_sends", c_uint32), ("n_receives", c_uint32), ("sends", POINTER(Part)),
        ("receives", POINTER(Part)), ("send", c_void_p), ("recv", c_void_p), ("round_bytes", c_uint64),
    ]


class Failure(Structure):
    _fields_ = [("status", c_int), ("rank", c_int), ("reason", c_char_p)]


EXCHANGE_FN = CFUNCTYPE(c_int, c_void_p, POINTER(Transfer))
ABORT_FN = CFUNCTYPE(None, c_void_p, POINTER(Failure))


class CallbackOps(Structure):
    _fields_ = [("abi", c_uint32), ("exchange", EXCHANGE_FN), ("abort", ABORT_FN)]


class NativeOptions(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("local", c_char_p), ("family", c_int), ("n_sockets", c_int),
        ("names", POINTER(c_int32)), ("tls", c_uint64), ("n_threads", c_uint64),
    ]


class ScheduleOptions(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("gentle", c_int), ("fresh", c_int), ("sparsity", c_double),
        ("format", c_int), ("mild_sparsity", c_double), ("mild_format", c_int), ("short_beta1", c_double),
    ]


class ScheduleConstants(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("window", c_int), ("fresh_windows", c_int), ("largest_share", c_double),
        ("most_share", c_double), ("block_of_every", c_int),
    ]


class ScheduleParameter(Structure):
    _fields_ = [("name", c_char_p), ("n_elems", c_uint64), ("kind", c_int)]


class ScheduleSums(Structure):
    _fields_ = [
        ("signal", c_double), ("weight", c_double), ("square", c_double), ("n_square", c_double),
        ("residual", c_double), ("gradient", c_double),
    ]


class ScheduleLosses(Structure):
    _fields_ = [("sum", c_double), ("squares", c_double), ("n", c_double)]


class SchedulePlan(Structure):
    _fields_ = [
        ("level", c_int), ("format", c_int), ("block", c_int), ("sparsity", c_double), ("moment", c_double),
        ("n_selected", c_uint64),
    ]


class Alarm(Structure):
    _fields_ = [("kind", c_int), ("n_parameters", c_size_t), ("worst", c_size_t), ("value", c_double)]


class Tensor(Structure):
    _fields_ = [
        ("name", c_char_p), ("shape", POINTER(c_uint64)), ("n_dims", c_size_t), ("unit", c_uint32),
        ("kind", c_int),
    ]


class Piece(Structure):
    _fields_ = [("tensor", c_uint32), ("first", c_uint64), ("n_elems", c_uint64), ("values", c_void_p)]


class ModelScheduleOptions(Structure):
    _fields_ = [
        ("options", POINTER(ScheduleOptions)), ("moment", c_int), ("follows", c_void_p),
        ("numbers", POINTER(c_uint32)),
    ]


class ModelLayoutOptions(Structure):
    _fields_ = [
        ("output", c_int), ("cut", c_int), ("ranges", POINTER(c_uint64)), ("min_elems", c_uint64),
        ("apart", POINTER(c_uint32)),
    ]


class ModelFormatOptions(Structure):
    _fields_ = [
        ("gradient", c_int), ("sum", c_int), ("dense", c_int), ("residual", c_int), ("block", c_int),
        ("result", c_int), ("result_sparsity", c_double),
    ]


class ModelHostOptions(Structure):
    _fields_ = [("format", c_int), ("summed", c_int)]


class ModelOptions(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("schedule", ModelScheduleOptions), ("layout", ModelLayoutOptions),
        ("formats", ModelFormatOptions), ("hosts", ModelHostOptions), ("exchange", c_int), ("op", c_int),
        ("paper", c_void_p), ("n_threads", c_int), ("rests", c_int), ("tag", c_uint64), ("name", c_char_p),
    ]


class ModelStats(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("n_bytes_sent", c_uint64), ("n_bytes_received", c_uint64),
        ("n_bytes_within", c_uint64), ("n_sent", c_uint64), ("n_elems", c_uint64), ("total_s", c_double),
        ("nonfinite", c_uint64), ("n_saturated", c_uint64), ("failed_here", c_uint64),
    ]


class BlocksOptions(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("format", c_int), ("block", c_int), ("element", c_int),
        ("rounding", c_int), ("seed", c_uint64),
    ]


class AllToAllOptions(Structure):
    _fields_ = [("struct_bytes", c_size_t), ("tag", c_uint64), ("min_elems", c_uint64)]


class AllToAllCall(Structure):
    _fields_ = [
        ("struct_bytes", c_size_t), ("input", c_void_p), ("n_input", c_uint64), ("output", c_void_p),
        ("n_output", c_uint64), ("sends", POINTER(c_uint64)), ("receives", POINTER(c_uint64)),
        ("n_counts", c_uint64), ("blocks", POINTER(BlocksOptions)), ("element_bytes", c_uint64),
        ("sent_word", c_uint64), ("expected_word", c_uint64),
    ]


# header -> name -> (arguments, result)
FUNCTIONS: dict[str, dict[str, tuple[list[Any], Any]]] = {
    "tagc.h": {
        "tagc_version": ([], c_char_p),
        "tagc_version_number": ([], c_int),
        "tagc_checksum": ([c_void_p, c_uint64], c_uint64),
        "tagc_status_name": ([c_int], c_char_p),
        "tagc_last_error": ([], c_char_p),
        "tagc_leg_name": ([c_int], c_char_p),
        "tagc_comm_options_init_sized": ([POINTER(CommOptions), c_size_t], None),
        "tagc_local_group_create": ([c_int, POINTER(c_void_p)], c_int),
        "tagc_local_group_destroy": ([c_void_p], None),
        "tagc_comm_create_local": ([c_void_p, c_int, POINTER(CommOptions), POINTER(c_void_p)], c_int),
        "tagc_comm_rank": ([c_void_p], c_int),
        "tagc_comm_world_size": ([c_void_p], c_int),
        "tagc_comm_bytes": ([c_void_p, POINTER(c_uint64), POINTER(c_uint64), c_int], None),
        "tagc_comm_is_idle": ([c_void_p], c_int),
        "tagc_comm_all_gather": ([c_void_p, c_void_p, c_size_t, c_void_p, c_size_t], c_int),
        "tagc_comm_barrier": ([c_void_p], c_int),
        "tagc_comm_abort": ([c_void_p, c_char_p], None),
        "tagc_comm_failed_rank": ([c_void_p], c_int),
        "tagc_comm_destroy": ([c_void_p], None),
        "tagc_time_s": ([], c_double),
        "tagc_reducer_options_init_sized": ([POINTER(ReducerOptions), c_size_t], None),
        "tagc_padded_elems": ([c_uint64, c_int], c_uint64),
        "tagc_phase_name": ([c_int], c_char_p),
        "tagc_reducer_stats_init_sized": ([POINTER(ReducerStats), c_size_t], None),
        "tagc_reducer_create": ([c_void_p, POINTER(ReducerOptions), POINTER(c_void_p)], c_int),
        "tagc_reducer_begin": ([c_void_p, c_void_p, c_uint64, c_void_p, c_uint64], c_int),
        "tagc_reducer_fail": ([c_void_p, c_int, c_char_p], c_int),
        "tagc_reducer_test": ([c_void_p, POINTER(c_int)], c_int),
        "tagc_reducer_end": ([c_void_p, POINTER(ReducerStats)], c_int),
        "tagc_reducer_run": ([
            c_void_p, c_void_p, c_uint64, c_void_p, c_uint64, POINTER(ReducerStats),
        ], c_int),
        "tagc_reducer_set_sparsity": ([c_void_p, c_double], c_int),
        "tagc_reducer_change": ([c_void_p, POINTER(ReducerOptions)], c_int),
        "tagc_reducer_residual_elems": ([c_void_p], c_uint64),
        "tagc_reducer_get_residual": ([c_void_p, c_void_p, c_uint64], c_int),
        "tagc_reducer_residual_square": ([c_void_p, POINTER(c_double)], c_int),
        "tagc_reducer_scale_residual": ([c_void_p, c_double], c_int),
        "tagc_reducer_set_residual": ([c_void_p, c_void_p, c_uint64], c_int),
        "tagc_reducer_steps": ([c_void_p], c_uint64),
        "tagc_reducer_set_steps": ([c_void_p, c_uint64], c_int),
        "tagc_reducer_state_bytes": ([c_void_p], c_uint64),
        "tagc_reducer_state_save": ([c_void_p, c_void_p, c_uint64], c_int),
        "tagc_reducer_state_load": ([c_void_p, c_void_p, c_uint64], c_int),
        "tagc_reducer_destroy": ([c_void_p], None),
        "tagc_gatherer_options_init_sized": ([POINTER(GathererOptions), c_size_t], None),
        "tagc_gatherer_create": ([c_void_p, POINTER(GathererOptions), POINTER(c_void_p)], c_int),
        "tagc_gatherer_begin": ([c_void_p, c_void_p, c_uint64, c_void_p, c_uint64], c_int),
        "tagc_gatherer_fail": ([c_void_p, c_int, c_char_p], c_int),
        "tagc_gatherer_test": ([c_void_p, POINTER(c_int)], c_int),
        "tagc_gatherer_end": ([c_void_p], c_int),
        "tagc_gatherer_reset": ([c_void_p], c_int),
        "tagc_gatherer_replica": ([c_void_p, POINTER(c_uint64)], c_void_p),
        "tagc_gatherer_set_replica": ([c_void_p, c_void_p, c_uint64, c_uint64], c_int),
        "tagc_gatherer_destroy": ([c_void_p], None),
        "tagc_memory_init_sized": ([POINTER(Memory), c_size_t], None),
        "tagc_comm_memory": ([c_void_p, POINTER(Memory)], c_int),
        "tagc_verdict_of": ([c_double, c_double, c_double], c_int),
        "tagc_verdict_name": ([c_int], c_char_p),
    },
    "transport.h": {
        "tagc_find_part": ([POINTER(Part), c_uint32, c_int], POINTER(Part)),
        "tagc_report": ([c_int, c_char_p], c_int),
        "tagc_report_rank": ([c_int, c_int, c_char_p], c_int),
        "tagc_comm_create": ([
            c_void_p, c_void_p, c_int, c_int, POINTER(CommOptions), POINTER(c_void_p),
        ], c_int),
        "tagc_comm_create_callback": ([
            POINTER(CallbackOps), c_void_p, c_int, c_int, POINTER(CommOptions), POINTER(c_void_p),
        ], c_int),
    },
    "native.h": {
        "tagc_native_options_init_sized": ([POINTER(NativeOptions), c_size_t], None),
        "tagc_native_open": ([POINTER(NativeOptions), c_int, c_int, POINTER(c_void_p)], c_int),
        "tagc_native_address": ([c_void_p, c_void_p], c_int),
        "tagc_native_connect": ([c_void_p, c_void_p, c_void_p, c_double], c_int),
        "tagc_native_refused": ([c_void_p], c_uint64),
        "tagc_comm_create_native": ([c_void_p, POINTER(CommOptions), POINTER(c_void_p)], c_int),
        "tagc_native_destroy": ([c_void_p], None),
    },
    "policy.h": {
        "tagc_classify": ([
            c_char_p, POINTER(c_uint64), c_size_t, c_uint64, POINTER(c_int), POINTER(c_char_p),
        ], c_int),
        "tagc_clean_name": ([c_char_p, c_char_p, c_size_t], c_int),
    },
    "schedule.h": {
        "tagc_level_name": ([c_int], c_char_p),
        "tagc_schedule_options_init_sized": ([POINTER(ScheduleOptions), c_size_t], None),
        "tagc_schedule_constants_init_sized": ([POINTER(ScheduleConstants), c_size_t], None),
        "tagc_schedule_create": ([
            POINTER(ScheduleOptions), POINTER(ScheduleParameter), c_size_t, POINTER(c_void_p),
        ], c_int),
        "tagc_schedule_destroy": ([c_void_p], None),
        "tagc_schedule_set_moment": ([c_void_p, c_size_t, c_int], c_int),
        "tagc_schedule_positions": ([c_uint64, POINTER(c_uint64), POINTER(c_size_t)], None),
        "tagc_schedule_add": ([
            c_void_p, POINTER(c_uint32), POINTER(c_uint32), c_size_t, c_void_p, POINTER(c_uint32),
            POINTER(c_size_t),
        ], c_int),
        "tagc_schedule_take": ([c_void_p, POINTER(c_uint32), c_size_t, POINTER(ScheduleSums)], c_int),
        "tagc_schedule_see": ([
            c_void_p, POINTER(c_uint32), c_size_t, POINTER(ScheduleSums), c_uint32,
        ], c_int),
        "tagc_schedule_add_loss": ([c_void_p, c_double], None),
        "tagc_schedule_take_losses": ([c_void_p, POINTER(ScheduleLosses)], None),
        "tagc_schedule_see_losses": ([c_void_p, POINTER(ScheduleLosses)], c_int),
        "tagc_schedule_step": ([c_void_p, POINTER(c_int), POINTER(c_int)], c_int),
        "tagc_schedule_scale": ([c_void_p, c_double], c_int),
        "tagc_schedule_get_plan": ([
            c_void_p, POINTER(c_uint32), POINTER(c_uint64), c_size_t, POINTER(SchedulePlan),
        ], c_int),
        "tagc_schedule_plan_of_level": ([
            POINTER(ScheduleOptions), c_int, c_int, POINTER(SchedulePlan),
        ], c_int),
        "tagc_schedule_betas": ([
            c_void_p, c_double, c_uint64, c_double, c_double, POINTER(c_double), POINTER(c_double),
        ], None),
        "tagc_schedule_take_alarms": ([c_void_p, POINTER(Alarm), POINTER(c_size_t)], None),
        "tagc_schedule_alarm_text": ([c_void_p, POINTER(Alarm), c_char_p, c_size_t], None),
        "tagc_schedule_save": ([c_void_p, c_int, c_void_p, c_size_t, POINTER(c_size_t)], c_int),
        "tagc_schedule_load": ([
            c_void_p, c_void_p, c_size_t, c_int, POINTER(c_size_t), POINTER(c_size_t),
        ], c_int),
    },
    "model.h": {
        "tagc_model_options_init_sized": ([POINTER(ModelOptions), c_size_t], None),
        "tagc_model_create": ([
            c_void_p, c_void_p, POINTER(Tensor), c_size_t, POINTER(ModelOptions), POINTER(c_void_p),
        ], c_int),
        "tagc_model_destroy": ([c_void_p], None),
        "tagc_model_owned": ([c_void_p, c_int, c_uint32, POINTER(c_uint64), POINTER(c_uint64)], c_int),
        "tagc_model_class": ([c_void_p, c_uint32], c_int),
        "tagc_model_plan": ([c_void_p, c_uint32, POINTER(SchedulePlan)], c_int),
        "tagc_model_begin": ([c_void_p, c_uint32, POINTER(Piece), c_size_t, POINTER(Piece), c_size_t], c_int),
        "tagc_model_begin_failed": ([c_void_p, c_uint32, c_int, c_char_p], c_int),
        "tagc_model_set_word": ([c_void_p, c_uint32, c_uint64], c_int),
        "tagc_model_ask": ([c_void_p, c_uint32, c_uint64], c_int),
        "tagc_model_set_factor": ([c_void_p, c_uint32, c_double], c_int),
        "tagc_model_test": ([c_void_p, c_uint32, POINTER(c_int)], c_int),
        "tagc_model_stats_init_sized": ([POINTER(ModelStats), c_size_t], None),
        "tagc_model_end": ([c_void_p, c_uint32, POINTER(ModelStats)], c_int),
        "tagc_model_n_parts": ([c_void_p, c_uint32], c_uint32),
        "tagc_model_part_stats": ([
            c_void_p, c_uint32, c_uint32, POINTER(c_uint32), POINTER(c_uint64), POINTER(ReducerStats),
        ], c_int),
        "tagc_model_step": ([c_void_p, c_double], c_int),
        "tagc_model_betas": ([
            c_void_p, c_uint32, c_double, c_double, POINTER(c_double), POINTER(c_double),
        ], c_int),
        "tagc_model_set_moment": ([c_void_p, c_uint32, c_int], c_int),
        "tagc_model_scale": ([c_void_p, c_double], c_int),
        "tagc_model_set_exchanges": ([c_void_p, c_uint64], c_int),
        "tagc_model_memory": ([c_void_p, POINTER(Memory)], c_int),
        "tagc_model_take_full": ([
            c_void_p, c_uint32, POINTER(c_uint32), POINTER(ScheduleSums), POINTER(c_size_t),
        ], c_int),
        "tagc_model_follow": ([c_void_p], c_int),
        "tagc_model_has_residual": ([c_void_p, c_uint32], c_int),
        "tagc_model_get_residual": ([c_void_p, c_uint32, POINTER(Piece), c_size_t], c_int),
        "tagc_model_set_residual": ([c_void_p, c_uint32, POINTER(Piece), c_size_t], c_int),
        "tagc_model_forget": ([c_void_p], c_int),
        "tagc_model_save": ([c_void_p, c_void_p, c_size_t, POINTER(c_size_t)], c_int),
        "tagc_model_load": ([c_void_p, POINTER(c_void_p), POINTER(c_size_t), c_size_t], c_int),
    },
    "blocks.h": {
        "tagc_blocks_options_init_sized": ([POINTER(BlocksOptions), c_size_t], None),
        "tagc_blocks_bytes": ([POINTER(BlocksOptions), c_uint64, POINTER(c_uint64)], c_int),
        "tagc_blocks_encode": ([POINTER(BlocksOptions), c_void_p, c_uint64, c_void_p, c_uint64], c_int),
        "tagc_blocks_decode": ([POINTER(BlocksOptions), c_void_p, c_uint64, c_void_p, c_uint64], c_int),
    },
    "all_to_all.h": {
        "tagc_all_to_all_options_init_sized": ([POINTER(AllToAllOptions), c_size_t], None),
        "tagc_all_to_all_call_init_sized": ([POINTER(AllToAllCall), c_size_t], None),
        "tagc_all_to_all_create": ([c_void_p, POINTER(AllToAllOptions), POINTER(c_void_p)], c_int),
        "tagc_all_to_all_begin": ([c_void_p, POINTER(AllToAllCall)], c_int),
        "tagc_all_to_all_fail": ([c_void_p, c_int, c_char_p], c_int),
        "tagc_all_to_all_end": ([c_void_p], c_int),
        "tagc_all_to_all_run": ([c_void_p, POINTER(AllToAllCall)], c_int),
        "tagc_all_to_all_destroy": ([c_void_p], None),
    },
    "changes.h": {
        "tagc_changes_max_bytes": ([c_int, c_uint64, POINTER(c_uint64)], c_int),
        "tagc_changes_encode": ([
            c_int, c_void_p, c_void_p, c_uint64, c_int, c_void_p, c_uint64, POINTER(c_uint64),
            POINTER(c_uint64),
        ], c_int),
        "tagc_changes_check": ([c_int, c_void_p, c_uint64, c_uint64, POINTER(c_int)], c_int),
        "tagc_changes_apply": ([c_int, c_void_p, c_uint64, c_void_p, c_uint64], c_int),
    },
    "device.h": {
        "tagc_device_open": ([c_char_p, c_char_p, c_int, POINTER(c_void_p)], c_int),
        "tagc_device_text": ([c_void_p], c_char_p),
        "tagc_device_close": ([c_void_p], None),
        "tagc_queue_create": ([c_void_p, c_void_p, c_int, POINTER(c_void_p)], c_int),
        "tagc_queue_run": ([c_void_p], c_int),
        "tagc_queue_wait": ([c_void_p, c_uint64, c_uint32, POINTER(c_int)], c_int),
        "tagc_queue_forgive": ([c_void_p], None),
        "tagc_queue_pinned_bytes": ([c_void_p], c_uint64),
        "tagc_queue_stream": ([c_void_p], c_void_p),
        "tagc_queue_close": ([c_void_p], None),
        "tagc_queue_destroy": ([c_void_p], None),
        "tagc_model_create_on": ([
            c_void_p, c_void_p, c_void_p, POINTER(Tensor), c_size_t, POINTER(ModelOptions), POINTER(c_void_p),
        ], c_int),
        "tagc_model_prepare_on": ([
            c_void_p, c_uint32, POINTER(Piece), c_size_t, POINTER(Piece), c_size_t,
        ], c_int),
        "tagc_model_begin_on": ([
            c_void_p, c_uint32, POINTER(Piece), c_size_t, POINTER(Piece), c_size_t, c_void_p, c_int,
        ], c_int),
        "tagc_kernels_open": ([c_void_p, POINTER(c_void_p)], c_int),
        "tagc_gatherer_create_on": ([c_void_p, c_void_p, POINTER(GathererOptions), POINTER(c_void_p)], c_int),
        "tagc_kernels_bytes": ([c_void_p], c_uint64),
        "tagc_kernels_pinned_bytes": ([c_void_p], c_uint64),
        "tagc_blocks_encode_on": ([
            c_void_p, POINTER(BlocksOptions), c_void_p, c_uint64, c_void_p, c_uint64, c_void_p, c_void_p,
        ], c_int),
        "tagc_blocks_decode_on": ([
            c_void_p, POINTER(BlocksOptions), c_void_p, c_uint64, c_void_p, c_uint64, c_uint64, c_void_p,
            c_void_p,
        ], c_int),
        "tagc_kernels_close": ([c_void_p], None),
    },
}
