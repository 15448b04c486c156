"""libtagc-plan.so by ctypes: the planner of the C command. _declared_plan.py has its structs and
functions."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import byref, c_char_p, c_double, sizeof
from typing import Any, NamedTuple

from tagc import _declared_plan as declared
from tagc import _library as lib
from tagc._declared_plan import GATHER_KINDS, Timed, UnitsQuestion, UnitsUnit
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


def options_of(parts: Sequence[Mapping[str, Any]]) -> ctypes.Array[lib.ReducerOptions]:
    """Returns options with the fields of each of these parts of a unit."""
    made = (lib.ReducerOptions * len(parts))()
    for fields, part in zip(made, parts):
        initial = lib.initialised(lib.ReducerOptions, "tagc_reducer_options_init")
        ctypes.memmove(byref(fields), byref(initial), sizeof(initial))
        for name, value in part.items():
            setattr(fields, name, value)
    return made
