"""libtagc-plan.so by ctypes: the planner of the C command. _declared_plan.py has its structs and
functions."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import byref, c_char_p, c_double, c_int, c_uint32, sizeof
from typing import Any, NamedTuple

from tagc import _declared_plan as declared
from tagc import _library as lib
from tagc._declared_plan import (
    GATHER_KINDS,
    DeviceMemory,
    HostMemory,
    MeshModel,
    Timed,
    UnitsQuestion,
    UnitsUnit,
)
from tagc._library import Error

__all__ = ["GATHER_KINDS", "Timed", "UnitsQuestion", "UnitsUnit"]  # for those who ask units()


class Plan(NamedTuple):
    """text: to print. json: the plan, None with a help. path: where it goes, None: nowhere."""

    text: str
    json: str | None
    path: str | None


_loaded: ctypes.CDLL | None = None


def _load() -> ctypes.CDLL:
    global _loaded
    if _loaded is None:
        path = lib.library_path().with_name("libtagc-plan.so")
        if not path.is_file():
            raise Error("io", f"the planner is not at {path}: install the package with pip")
        library = ctypes.CDLL(str(path))
        for functions in declared.FUNCTIONS.values():
            for name, (arguments, result) in functions.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, result
        _loaded = library
    return _loaded


def _check(status: int, why: str) -> None:
    if status:
        raise Error(status, why or "libtagc-plan.so is of another version")


def plan(words: Sequence[str]) -> Plan:
    """Returns the plan that these words of a command line ask for. Error "argument" if they are at fault."""
    given = [word.encode() for word in words]
    made = declared.PlanAnswerText(struct_bytes=sizeof(declared.PlanAnswerText))
    status = _load().tagc_plan_words(len(given), (c_char_p * (len(given) + 1))(*given), byref(made))
    _check(status, made.why.decode(errors="replace"))
    json, path = (None if text is None else text.decode() for text in (made.json, made.path))
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


def blocks_ns(values: str) -> float:
    """Returns nanoseconds per value of tagc.blocks on one thread, encoded and decoded."""
    ns = c_double()
    status = _load().tagc_plan_blocks_codec(lib.FORMATS[values], byref(ns))
    _check(status, f"no codec of blocks could be measured with values {values}")
    return ns.value


def tokens(forward: str, backward: str, **numbers: Any) -> declared.TokensReply:
    """Returns what all-to-alls of experts take, by torch and by tagc. numbers: the other fields of
    tagc_tokens_question (planning/sizes/tokens.h)."""
    question = declared.TokensQuestion(struct_bytes=sizeof(declared.TokensQuestion), block=64)
    formats = {"forward": lib.FORMATS[forward], "backward": lib.FORMATS[backward]}
    for name, value in (formats | numbers).items():
        setattr(question, name, value)
    reply = declared.TokensReply(struct_bytes=sizeof(declared.TokensReply))
    _check(_load().tagc_plan_tokens(byref(question), byref(reply)), reply.why.decode(errors="replace"))
    return reply


def gather_ns(parameters: str, threads: int = 1) -> float:
    """Returns nanoseconds per element of a gather in that format, without a network."""
    ns = c_double()
    status = _load().tagc_plan_gather_codec(GATHER_KINDS[parameters], threads, byref(ns))
    _check(status, f"no gather could be measured with parameters {parameters}")
    return ns.value


def units(question: UnitsQuestion) -> declared.UnitsReply:
    """Returns what a step of these units takes, in one way to send them (planning/sizes/units.h)."""
    question.struct_bytes = sizeof(UnitsQuestion)
    reply = declared.UnitsReply(struct_bytes=sizeof(declared.UnitsReply))
    status = _load().tagc_plan_units(byref(question), byref(reply))
    _check(status, reply.why.decode(errors="replace"))
    return reply


def local_s(compute_s: float, exchange_s: float, every: int, fragments: int = 1, delay: int = 0) -> float:
    """Returns the mean seconds of a step, where an exchange of one fragment takes exchange_s and `delay`
    steps hide it."""
    return float(_load().tagc_plan_local_s(compute_s, exchange_s, every, fragments, delay))


def every_of(compute_s: float, exchange_s: float, fragments: int = 1, delay: int = 0) -> int:
    """Returns the fewest steps between exchanges at which these make no difference to a step, or the most
    that are offered."""
    return int(_load().tagc_plan_every(compute_s, exchange_s, fragments, delay))


def pipeline_s(
    schedule: str, n_stages: int, micro_batches: int, compute_s: float, forward_s: float, backward_s: float
) -> float:
    """Returns the seconds of a step of a pipeline, by "1F1B" or "GPipe". compute_s: of a micro-batch in one
    stage; forward_s, backward_s: of a message to the next stage and to the one before."""
    number = declared.MESH_SCHEDULES[schedule.lower()]
    seconds = _load().tagc_plan_pipeline_s(number, n_stages, micro_batches, compute_s, forward_s, backward_s)
    return float(seconds)


def threads_of(cores: int, ranks: int) -> int:
    """Returns the threads of a codec on a host of so many cores and ranks, as compress() takes them."""
    n: int = _load().tagc_plan_threads(cores, ranks)
    return n


def ask_mesh(gather: str, values: str, forward: str, backward: str, **numbers: Any) -> dict[str, Any]:
    """Returns the plan of one way to train on a mesh: the fields of tagc_mesh_reply. numbers: the other
    fields of tagc_mesh_question and tagc_mesh_model (planning/mesh/mesh.h)."""
    model = MeshModel(**{name: numbers.pop(name) for name, *_ in MeshModel._fields_})
    formats = {name: lib.FORMATS[text] for name, text in (("forward", forward), ("backward", backward))}
    formats |= dict.fromkeys(("token_forward", "token_backward"), lib.FORMATS["bf16"])
    given = {"gather": GATHER_KINDS[gather], "format": lib.FORMATS[values], "block": 64} | formats | numbers
    question = declared.MeshQuestion(struct_bytes=sizeof(declared.MeshQuestion), model=model, **given)
    reply = declared.MeshReply(struct_bytes=sizeof(declared.MeshReply))
    _check(_load().tagc_plan_mesh(byref(question), byref(reply)), reply.why.decode(errors="replace"))
    made = {
        name: getattr(reply, name)
        for name in ("n_params", "n_active_params", "n_data", "fullest", "bubble", "in_flight")
    }
    for where in ("device", "host"):
        made[where] = dict(zip(declared.MESH_KINDS, getattr(reply, where)))
    made["legs"] = {
        leg: {name: getattr(moved, name) for name, *_ in declared.MeshBytes._fields_}
        for leg, moved in zip(declared.MESH_LEGS, reply.legs)
    }
    return made


_Parts = Sequence[Mapping[str, Any]]  # the fields of tagc_reducer_options of each part of a unit


def options_of(parts: _Parts) -> ctypes.Array[lib.ReducerOptions]:
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
    return options_of(parts), (c_uint32 * len(parts))(*numbers), len(parts)


def host_memory(units: Sequence[_Parts], world_size: int, n_places: int = 0, n_bytes: int = 4) -> HostMemory:
    """Returns the bytes that the reducers of a model take on each of world_size ranks, that exchange.
    n_places: ranks of each host, if they are those of a tagc_model, which packs nothing; else 0. n_bytes: of
    a value of the gradient, 2 or 4."""
    memory = HostMemory()
    status = _load().tagc_plan_host_memory(*_listed(units), world_size, n_places, n_bytes, byref(memory))
    _check(status, f"no reducer has options that are among these: {units}")
    return memory


def device_memory(
    units: Sequence[_Parts], world_size: int, n_bytes: int = 4, n_sampled: int = 8192
) -> DeviceMemory:
    """Returns the bytes that they take with codec="device", of gradients of n_bytes per value. n_sampled:
    values of the sample that kernels take."""
    memory = DeviceMemory()
    status = _load().tagc_plan_device_memory(*_listed(units), world_size, n_bytes, n_sampled, byref(memory))
    _check(status, f"no reducer has options that are among these: {units}")
    return memory


def pinned_bytes(units: Sequence[_Parts], world_size: int, n_bytes: int = 4) -> int:
    """Returns the bytes of pinned memory with codec="host"."""
    n_pinned: int = _load().tagc_plan_pinned(*_listed(units), world_size, n_bytes)
    return n_pinned
