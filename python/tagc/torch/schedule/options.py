"""The options of compress(): their checks, and their translation to fields of tagc_reducer_options."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.schedule import policy

EVERY_VALUE = ("int4", 0)  # without selection, and of LocalSteps


@functools.cache
def constants() -> lib.ScheduleConstants:
    """Returns the numbers of libtagc's schedule."""
    return lib.initialised(lib.ScheduleConstants, "tagc_schedule_constants_init")


@functools.cache
def defaults() -> lib.ScheduleOptions:
    """Returns what libtagc's schedule comes to, if nobody says otherwise."""
    return lib.initialised(lib.ScheduleOptions, "tagc_schedule_options_init")


TRANSPORTS = ("host", "gloo", "native")
RESIDUALS = ("fp32", "int8", "int4")
OF_STAGES = ("forward", "backward", "block")  # what only a stage of a pipeline has
NOT_GIVEN: Any = None  # Settings replaces it by a value

# What users write, for their editors and type checkers; Settings checks it at run time.
Values = Literal["fp32", "bf16", "int8", "int4", "int2"]
Mild = Literal["dense"] | Values
Exchange = Literal["direct", "packed", "sketch", "dense"]
Parameters = Literal["fp32", "bf16", "lossless", "int8", "delta8", "delta4", "delta2"]
Residual = Literal["fp32", "int8", "int4"]
Class = Literal["compressed", "mild", "dense"]
Layers = Literal["non-attention-linear", "all", "none"] | Callable[[str, torch.Tensor], str]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of compress() for experiments, and for what tagc finds out by itself.

    Args:
        exchange: "direct"; "packed" or "sketch", the paper's; or "dense", which is direct with every value
            whole: nothing is compressed.
        mild, mild_sparsity: format and sparsity of attention and positions: "dense" or a format; default
            "int4" at 0.85. More costs loss there than in other parameters.
        residual: how "direct" stores what was not sent between steps: "int8" (default), "int4" or "fp32", in
            1, 0.5 or 4 bytes per value. Rounding is stochastic: what it loses is zero on average.
        codec: for gradients on a GPU: "device" (libtagc-cuda.so selects and encodes there, and only encoded
            bytes are copied), "host" (they are copied to the host and back), or None (default): "device" if
            possible, else rank 0 says why not. Ranks may differ.
        transport: by what encoded gradients travel. "host": libtagc's own TCP connections, where many
            messages are under way at once, if every rank can; else a gloo group of tagc's own, and rank 0
            says why. "native" and "gloo": that one.
        threads: of the codec on the host. Default: half of this rank's share of the cores of its host, at
            most 8. Results do not depend on it."""

    exchange: Exchange = "direct"
    mild: Mild | None = None
    mild_sparsity: float | None = None
    residual: Residual | None = None
    codec: Literal["host", "device"] | None = None
    transport: Literal["host", "gloo", "native"] = "host"
    threads: int | None = None


def grouped(words: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of compress(), from all of them by their names alone, as a command line has them."""
    names = [field.name for field in dataclasses.fields(Options)]
    inner = {name: words[name] for name in names if name in words}
    return {name: value for name, value in words.items() if name not in inner} | (
        {"options": Options(**inner)} if inner else {}
    )


def spread(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all options by their names alone, of those of compress()."""
    words = dict(options)
    inner = words.pop("options", None)
    if inner is not None and not isinstance(inner, Options):
        raise TypeError(f"options is {inner!r}, must be a tagc.torch.Options")
    return words | vars(inner or Options())


def check_known(function: Callable[..., object], names: Iterable[str]) -> None:
    """Raises a TypeError, as Python does, if a function was called with options that it has not, and says
    which may have been meant. Local: other ranks hear of it as of any program that ends."""
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    inner = {field.name for field in dataclasses.fields(Options)} if "options" in known else set()
    for name in sorted(names):
        if name in inner:
            raise TypeError(
                f"{function.__name__}() has {name!r} among its options=: write "
                f"options=tagc.Options({name}=...)"
            )
        if name in OF_STAGES and "options" in known:
            raise TypeError(f"{name!r} is an option of compress_stage(), not of {function.__name__}()")
        near = difflib.get_close_matches(name, known, n=2) or [
            other for other in known if name in other or other in name
        ]
        meant = f": did you mean {' or '.join(map(repr, near))}?" if near else ";"
        raise TypeError(
            f"{function.__name__}() has no option {name!r}{meant} {'It' if near else 'it'} has "
            f"{', '.join(known)}"
        )


def choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raises an Error that names the option, unless its value is one of these."""
    if value not in allowed:
        raise Error("argument", f"{name} is {value!r}, must be one of {', '.join(repr(a) for a in allowed)}")


def number(name: str, value: Any, low: float, high: float, kind: type[int] | type[float] = float) -> None:
    """Raises an Error that names the option, unless the value is in range, and an int if `kind` is: libtagc's
    functions take no 2.0."""
    if not isinstance(value, (int, kind)) or isinstance(value, bool) or not low <= value <= high:
        raise Error(
            "argument",
            f"{name} is {value!r}, must be {'a whole number' if kind is int else 'a number'} from "
            f"{low} to {high}",
        )


def sparsity_in_range(name: str, value: Any) -> None:
    """Raises an Error unless the value is a sparsity."""
    number(name, value, 0, 1)
    if value == 1:
        raise Error("argument", f"{name} is {value!r}, at which nothing would ever be sent: must be below 1")


def of_whole(dtype: torch.dtype) -> dict[str, Any]:
    """Returns fields of tagc_reducer_options that send every value as it is, in fp32 or bf16: what the word
    "dense" means as a class and as an exchange."""
    return of_direct("bf16" if dtype == torch.bfloat16 else "fp32", 0.0)


def of_direct(values: str, sparsity: float) -> dict[str, Any]:
    """Returns fields of tagc_reducer_options for the exchange direct."""
    block = {"block": constants().block_of_every} if (values, sparsity) == EVERY_VALUE else {}
    return {"exchange": lib.EXCHANGES["direct"], "sparsity": sparsity, "format": lib.FORMATS[values]} | block


@dataclasses.dataclass
class Settings:
    """Defaults are libtagc's: direct, 95 % sparsity, 2-bit values; mild: 85 %, 4-bit values."""

    sparsity: float = NOT_GIVEN
    values: str = NOT_GIVEN
    layers: Layers = "non-attention-linear"
    rules: Mapping[str, str] | None = None
    mild: str = NOT_GIVEN
    mild_sparsity: float = NOT_GIVEN
    exchange: str = "direct"
    parameters: str | None = None
    threads: int | None = None  # until compress() knows the host: one
    timeout_s: float = NOT_GIVEN
    gentle: bool = NOT_GIVEN
    codec: str | None = None
    transport: str = "host"
    hosts: int | None = None
    residual: str | None = None

    def __post_init__(self) -> None:
        choice("exchange", self.exchange, ("dense", *lib.EXCHANGES))
        is_direct = self.exchange == "direct"
        choice("gentle", self.gentle, (None, True, False))
        choice("codec", self.codec, (None, "device", "host"))
        choice("transport", self.transport, TRANSPORTS)
        if self.codec == "device" and not is_direct:
            raise Error(
                "argument",
                f"codec is 'device', which is for exchange 'direct'; this one is {self.exchange!r}",
            )
        if self.gentle is None:
            self.gentle = is_direct and self.sparsity is None
        if self.gentle and not is_direct:
            raise Error(
                "argument", f"gentle is True, which is for exchange 'direct'; this one is {self.exchange!r}"
            )
        if self.sparsity is None:
            self.sparsity = defaults().sparsity if is_direct else 0.9875
        sparsity_in_range("sparsity", self.sparsity)
        if self.values is not None and not is_direct:
            raise Error(
                "argument",
                f"values is {self.values!r}, which is for exchange 'direct'; this one is {self.exchange!r}",
            )
        if self.values is None:
            self.values = "int2" if self.sparsity > 0 else "fp32"
        choice("values", self.values, tuple(lib.FORMATS))
        if self.mild is None:
            self.mild = ("fp32" if self.sparsity == 0 else "int4") if is_direct else "dense"
        choice("mild", self.mild, ("dense", *lib.FORMATS))
        if self.mild_sparsity is not None and self.mild == "dense":
            raise Error(
                "argument", f"mild_sparsity is {self.mild_sparsity!r}, and mild is 'dense', which sends all"
            )
        if self.mild_sparsity is None:
            self.mild_sparsity = min(defaults().mild_sparsity, self.sparsity)
        sparsity_in_range("mild_sparsity", self.mild_sparsity)
        if self.parameters is not None:
            choice("parameters", self.parameters, (None, *lib.GATHERS))
        if self.threads is not None:
            number("threads", self.threads, 1, 256, int)
        if self.hosts is not None:
            number("hosts", self.hosts, 1, 10**6, int)
        if self.timeout_s is not None:  # else whoever knows the group sets it
            number("timeout_s", self.timeout_s, 0.001, 1e6)
        choice("residual", self.residual, (None, *RESIDUALS))
        if self.residual not in (None, "fp32") and not is_direct:
            raise Error(
                "argument",
                f"residual is {self.residual!r}, which is for exchange 'direct'; this one is "
                f"{self.exchange!r}",
            )
        if not callable(self.layers):
            choice("layers", self.layers, policy.LAYERS)

    def stored(self) -> dict[str, int]:
        """Returns the field of tagc_reducer_options that says how residuals are stored, if it was given:
        libtagc's default is int8."""
        return {} if self.residual is None else {"residual": lib.FORMATS[self.residual]}

    def codec_on(self) -> str | None:
        """Returns the same options for gradients on a device."""
        return self.codec if self.exchange == "direct" else "host"

    def is_scheduled(self, kind: str) -> bool:
        """Returns whether the schedule follows parameters of that class."""
        return kind == "compressed" and self.exchange != "dense" or kind == "mild" and self.mild != "dense"

    def has_levels(self, kind: str) -> bool:
        """Returns whether a parameter of that class begins gently, and goes on from level to level."""
        sparsity = {"compressed": self.sparsity, "mild": self.mild_sparsity}.get(kind, 0.0)
        return self.gentle and self.is_scheduled(kind) and sparsity > 0

    def mild_levels(self) -> tuple[float, int]:
        """Returns (sparsity, format) of the last level of the class mild."""
        return (
            (0.0, lib.FORMATS["fp32"])
            if self.mild == "dense"
            else (self.mild_sparsity, lib.FORMATS[self.mild])
        )

    def reducer(self, kind: str, dtype: torch.dtype) -> dict[str, Any]:
        """Returns fields of tagc_reducer_options for parts of that class at its last level. dtype: of
        gradients."""
        exchange = "dense"
        if kind == "compressed":
            exchange = self.exchange
        elif kind == "mild" and self.mild != "dense":
            exchange = "direct"
        fields: dict[str, Any] = {"n_threads": self.threads or 1}
        if exchange == "dense":
            return fields | of_whole(dtype)
        if kind == "mild":
            return fields | of_direct(self.mild, self.mild_sparsity) | self.stored()
        if exchange == "direct":
            return fields | of_direct(self.values, self.sparsity) | self.stored()
        return fields | {"exchange": lib.EXCHANGES[exchange], "sparsity": self.sparsity}

    def feeds_back(self, kind: str) -> bool:
        """Returns whether unsent values of that class become a residual."""
        fields = self.reducer(kind, torch.float32)
        is_exact = fields["sparsity"] == 0 and fields.get("format") in (
            lib.FORMATS["fp32"],
            lib.FORMATS["bf16"],
        )
        return not is_exact or fields["exchange"] != lib.EXCHANGES["direct"]

    def travels(self, kind: str) -> str:
        """Returns how a class is sent, as text."""
        if kind == "compressed" and self.exchange != "dense":
            values = f", {self.values}" if self.exchange == "direct" else ""
            return f"{self.exchange}, {100 * self.sparsity:g} % zero{values}"
        if kind == "mild" and self.mild != "dense" and self.exchange != "dense":
            return f"direct, {100 * self.mild_sparsity:g} % zero, {self.mild}"
        return "dense"

    def fingerprint(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks, by name."""
        fields = dict(vars(self))  # asdict() would copy a bound function's object, such as the model
        del fields["threads"], fields["timeout_s"], fields["codec"]
        if callable(self.layers):
            fields["layers"] = "a function"  # its choices are compared parameter by parameter
        return fields
