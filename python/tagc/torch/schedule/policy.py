"""Chooses the class of each parameter by name and shape, and prints the table of classes.

libtagc decides by name (include/tagc/policy.h explains the classes); here are the user's own rules and
choices, which come before it."""

from __future__ import annotations

import collections
import ctypes
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from tagc import _library as lib
from tagc._library import Error

CLASSES = tuple(lib.CLASSES)
LAYERS = ("non-attention-linear", "all", "none")
MIN_ELEMS = 4096  # TAGC_CLASS_MIN_ELEMS


class Row(NamedTuple):
    """One parameter. `name` is without wrappers' prefixes."""

    name: str
    shape: tuple[int, ...]
    n_elems: int
    class_: str
    reason: str


def clean_name(name: str) -> str:
    """Returns the name without the parts that FSDP1, activation checkpointing and torch.compile insert."""
    encoded = _encoded(name)
    clean = ctypes.create_string_buffer(len(encoded) + 1)
    lib.call("tagc_clean_name", encoded, clean, len(clean))
    return clean.value.decode()


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields (name, parameter) of all parameters of a model, with their names in the model itself. DDP puts
    "module." before each; where it did not, a "module" is the user's own."""
    prefix = "module." if isinstance(model, torch.nn.parallel.DistributedDataParallel) else ""
    for name, parameter in model.named_parameters():
        yield clean_name(name.removeprefix(prefix)), parameter


def classify(
    parameters: Iterable[tuple[str, Any]],
    layers: str | Callable[[str, Any], str] = "non-attention-linear",
    rules: Mapping[str, str] | None = None,
) -> list[Row]:
    """Returns a Row for each of `parameters`, (name, shape) or (name, parameter) in any order.

    `rules`, {pattern: class}, are tried first, in order; then `layers`: one of LAYERS or a callable (name,
    parameter) -> class. An Error names what is not allowed, including a rule without effect."""
    named = [(name, what, _shape(name, what)) for name, what in _cleaned(parameters)]
    if not callable(layers) and layers not in LAYERS:
        raise Error(
            "argument",
            f"layers is {layers!r}, allowed are {', '.join(map(repr, LAYERS))} and a callable "
            "(name, parameter) -> class",
        )
    rules = _checked_rules(rules, [name for name, _, _ in named])
    rows = []
    for name, what, shape in named:
        n_elems = math.prod(shape)
        pattern = next((p for p in rules if fnmatchcase(name, p)), None)
        if n_elems == 0:
            class_, reason = "dense", "empty"
        elif pattern is not None:
            class_, reason = rules[pattern], f"rule {pattern}"
        elif callable(layers):
            class_, reason = layers(name, what), "layers()"
            if not isinstance(class_, str) or class_ not in CLASSES:
                raise Error("argument", f"layers() gives {class_!r} for {name}, allowed are {_allowed()}")
        elif layers == "non-attention-linear":
            class_, reason = _by_name(name, shape)
        else:
            class_, reason = ("compressed" if layers == "all" else "dense"), f"layers={layers}"
        rows.append(Row(name, shape, n_elems, class_, reason))
    return rows


def _allowed() -> str:
    return ", ".join(map(repr, CLASSES))


def _encoded(name: str) -> bytes:
    """Returns the name as C takes it."""
    try:
        encoded = name.encode() if isinstance(name, str) else b""
    except UnicodeEncodeError:
        encoded = b""
    if not encoded or b"\0" in encoded:
        raise Error(
            "argument",
            f"the name of a parameter is {name!r}, it has to be a string with something in it, which is "
            "UTF-8 and has no NUL",
        )
    return encoded


def _cleaned(parameters: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Returns `parameters` with clean names. Error if two get one name, by which residuals and checkpoints
    know them."""
    cleaned = [(clean_name(name), what) for name, what in parameters]
    names = collections.Counter(name for name, _ in cleaned)
    if twice := next((name for name, n in names.items() if n > 1), None):
        raise Error(
            "argument",
            f"two parameters are called {twice} once tagc leaves out the parts of names that torch's "
            "wrappers insert, such as _orig_mod: rename the module of yours that is called like one",
        )
    return cleaned


def _shape(name: str, what: Any) -> tuple[int, ...]:
    try:
        shape = tuple(int(n) for n in getattr(what, "shape", what))
    except (TypeError, ValueError):
        shape = None
    if shape is None or isinstance(what, str) or not all(0 <= n < 2**64 for n in shape):
        raise Error(
            "argument", f"{name} is given as {what!r}, allowed are a shape and what has one"
        ) from None
    return shape


def _checked_rules(rules: Mapping[str, str] | None, names: list[str]) -> dict[str, str]:
    if rules is None:
        return {}
    if not hasattr(rules, "items"):
        raise Error("argument", f"rules is {rules!r}, it has to be a dict {{pattern: class}}")
    taken: set[str] = set()
    for pattern, class_ in rules.items():
        if not isinstance(pattern, str) or not pattern:
            raise Error(
                "argument", f"a pattern of rules is {pattern!r}, it has to be a string with something in it"
            )
        if not isinstance(class_, str) or class_ not in CLASSES:
            raise Error("argument", f"rules[{pattern!r}] is {class_!r}, allowed are {_allowed()}")
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            raise Error(
                "argument",
                f"rules[{pattern!r}] matches no parameter, of {len(names)} such as "
                f"{', '.join(names[:3]) or '(none)'}; it has to match one",
            )
        if matched <= taken:
            raise Error(
                "argument",
                f"rules[{pattern!r}] has no effect: earlier rules match all that it matches, such as "
                f"{sorted(matched)[0]}; put it in front of them",
            )
        taken |= matched
    return dict(rules)


def _by_name(name: str, shape: tuple[int, ...]) -> tuple[str, str]:
    class_, reason = ctypes.c_int(), ctypes.c_char_p()
    lengths = (ctypes.c_uint64 * len(shape))(*shape)
    lib.call(
        "tagc_classify",
        _encoded(name),
        lengths,
        len(shape),
        MIN_ELEMS,
        ctypes.byref(class_),
        ctypes.byref(reason),
    )
    return CLASSES[class_.value], (reason.value or b"").decode()


def table(rows: list[Row], travels: Mapping[str, str]) -> str:
    """Returns a table of `rows` of at most 100 columns: one line per kind of name, over all layers. travels:
    how each class is sent."""
    total = sum(row.n_elems for row in rows)
    lines = []
    for class_ in CLASSES:
        of_class = [row for row in rows if row.class_ == class_]
        if not of_class:
            continue
        head = class_ if travels[class_] == class_ else f"{class_}: {travels[class_]}"
        lines.append(_line(head, of_class, total, ""))
        lines += [_line("  " + what, group, total, group[0].reason) for what, group in _kinds(of_class)]
    n = sum(row.n_elems for row in rows if row.class_ != "dense")
    return "\n".join([*lines, f"{n:,} of {total:,} elements compressed ({_share(n, total).strip()})"])


def _kinds(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yields groups of rows of one kind, in order of appearance. All vectors are one kind, because there are
    many."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        vector = row.class_ == "dense" and row.reason in ("norm", "bias", "vector")
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", row.name)
        groups.setdefault(("vectors", "") if vector else (kind, row.reason), []).append(row)
    for (kind, _), group in groups.items():
        if kind == "vectors":
            counts = [
                (sum(row.reason == name for row in group), name, plural)
                for name, plural in (("norm", "norms"), ("bias", "biases"), ("vector", "other vectors"))
            ]
            text = ", ".join(f"{n} {name if n == 1 else plural}" for n, name, plural in counts if n)
            yield text, [row._replace(reason="") for row in group]
        else:
            count = f" x {len(group)}" if len(group) > 1 else ""
            yield _shortened(kind if count else group[0].name, 50 - len(count)) + count, group


def _shortened(name: str, n: int) -> str:
    """Returns at most n characters: drops uninformative parts first, then the middle."""
    if len(name) > n:
        name = name.removesuffix(".weight")
    if len(name) > n:
        name = name[: n // 2 - 1] + ".." + name[n // 2 + 1 - n :]
    return name


def _share(n: int, total: int) -> str:
    return f"{100 * n / total if total else 0:5.1f} %"


def _line(what: str, rows: list[Row], total: int, why: str) -> str:
    n = sum(row.n_elems for row in rows)
    why = why if len(why) <= 22 else why[:20] + ".."
    return f"{_shortened(what, 52):52} {n:>15,} {_share(n, total)}  {why}".rstrip()
