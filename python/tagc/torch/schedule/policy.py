"""Chooses the class of each parameter by name and shape, and prints the table of classes.

A pure function of names and shapes, so all ranks get the same. A class is

    "compressed"  most of the gradient is not sent and becomes the residual
    "mild"        a milder code, for attention and positions: the strong one increases their loss
    "dense"       every value is sent: norms, biases, routers, small matrices

Names are read from the innermost module outwards. So `layers.0.self_attn.o_proj.weight` is a projection, and
`attn_model.layers.0.mlp.fc1.weight` is not attention."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from tagc import Error

CLASSES = ("compressed", "mild", "dense")
LAYERS = ("non-attention-linear", "all", "none")

# 4096 fp32 gradients are 16 KiB: 13 us at 10 Gbit/s, less than the overhead of a message, so compressing a
# smaller matrix saves no time. Selection also has little choice: 5 % of 4096 are 200 values, over all owners.
# Such small matrices are mostly tables of biases or types, whose values matter more. The matrices of a model
# of width 32 are larger than this.
MIN_ELEMS = 4096

# Parts of names that FSDP1, activation checkpointing and torch.compile insert.
_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}

_WEIGHT = re.compile(r"^(weight(_[gv])?|kernel|original\d?|parametrizations)$")
_NORM = re.compile(r"norm|^ln(_|\d|$)|_ln$")
# the decay of a state space has one value per channel and state, like a bias
_BIAS = re.compile(r"bias$|^a_log$|^dt_bias$")
_POSITION = re.compile(r"(^|_)(w?pe|pos|rel_?pos|posit\w*)(_|$)|position")
_EMBEDDING = re.compile(r"^wte$|embed|^tok_emb|^shared$|^emb$")
_HEAD = re.compile(r"^(lm_?)?head$|^embed_out$|^lm_head_proj$|^vocab_proj$")
_ATTENTION = re.compile(r"attn|attention|^mha$|^attns?$")
_FEED_FORWARD = re.compile(
    r"mlp|^ffn?s?($|_)|feed_?forward|experts?$|densereludense|^moe$|_moe$|^intermediate$"
)
_FEED_FORWARD_MATRIX = re.compile(
    r"^(c_?fc|fc\d?|fc_(in|out)|fc_?proj|lin(ear)?_?[12]|w[123]|wi(_[01])?|gate_proj|up_proj|down_proj|gate_up_proj"
    r"|dense_h_to_4h|dense_4h_to_h)w?$"
)
_PROJECTION = re.compile(
    r"^(o|w_?o|o_?proj|out|output|out_?proj|to_out|out_lin|c_proj|proj|dense|linear_out|att_?projw?)$"
)
_QKV = r"q|k|v|qk|kv|qv|qkv|query|key|value|queries|keys|values|query_key_value"
_QKV_WORDS = re.compile(rf"(^|_)(w|c|to)?({_QKV})(_|\d|w?$)")  # inside attention any such word matches
_QKV_NAME = re.compile(
    rf"^(w_?|c_|to_)?({_QKV})(_(a_|b_)?(proj|lin))?(_weight)?w?$|^c_attn$|^attn_qkv$|^q_attn$"
)


class Row(NamedTuple):
    """One parameter. `name` is without wrappers' prefixes."""

    name: str
    shape: tuple[int, ...]
    n_elems: int
    class_: str
    reason: str


def clean_name(name: str) -> str:
    """Returns the name without the parts that _WRAPPERS lists."""
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS) or name


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
    min_elems: int = MIN_ELEMS,
) -> list[Row]:
    """Returns a Row for each of `parameters`, (name, shape) or (name, parameter) in any order.

    `rules`, {pattern: class}, are tried first, in order; then `layers`: one of LAYERS or a callable (name,
    parameter) -> class. An Error names what is not allowed, including a rule without effect."""
    named = [(_name(name), what, _shape(name, what)) for name, what in parameters]
    _check_unique([name for name, _, _ in named])
    if not callable(layers) and layers not in LAYERS:
        raise Error(
            "argument",
            f"layers is {layers!r}, allowed are {', '.join(map(repr, LAYERS))} and a callable "
            "(name, parameter) -> class",
        )
    if isinstance(min_elems, bool) or not isinstance(min_elems, int) or min_elems < 0:
        raise Error("argument", f"min_elems is {min_elems!r}, allowed are integers from 0 on")
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
            class_, reason = _by_name(name, shape, n_elems, min_elems)
        else:
            class_, reason = ("compressed" if layers == "all" else "dense"), f"layers={layers}"
        rows.append(Row(name, shape, n_elems, class_, reason))
    return rows


def _allowed() -> str:
    return ", ".join(map(repr, CLASSES))


def _name(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise Error(
            "argument", f"the name of a parameter is {name!r}, it has to be a string with something in it"
        )
    return clean_name(name)


def _check_unique(names: list[str]) -> None:
    """Raises an Error if two parameters have one name, by which residuals and checkpoints know them."""
    if twice := next((name for name, n in collections.Counter(names).items() if n > 1), None):
        raise Error(
            "argument",
            f"two parameters are called {twice} once tagc leaves out the parts of names that torch's "
            f"wrappers insert ({', '.join(sorted(_WRAPPERS))}): rename the module of yours that is called "
            "like one",
        )


def _shape(name: str, what: Any) -> tuple[int, ...]:
    try:
        shape = tuple(int(n) for n in getattr(what, "shape", what))
    except (TypeError, ValueError):
        shape = None
    if shape is None or isinstance(what, str) or min(shape, default=0) < 0:
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


def _by_name(name: str, shape: tuple[int, ...], n_elems: int, min_elems: int) -> tuple[str, str]:
    words = name.lower().split(".")
    owner = words.pop()  # the name of its module, or its own name if that is more specific
    while words and _WEIGHT.search(owner):
        owner = words.pop()
    if sum(n > 1 for n in shape) < 2:
        return "dense", "norm" if _NORM.search(owner) else "bias" if _BIAS.search(owner) else "vector"
    if _NORM.search(owner):
        return "dense", "norm"
    if _BIAS.search(owner):
        return "dense", "bias"
    # A feed-forward gate has at least as many rows as columns; a router has one row per expert.
    if owner == "router" or "router" in words or (owner == "gate" and 4 * shape[0] <= shape[-1]):
        return "dense", "router"
    if n_elems < min_elems:
        return "dense", f"below {min_elems} elements"
    if _POSITION.search(owner):
        return "mild", "positions"
    if _HEAD.search(owner) or (owner == "output" and not any(word.isdigit() for word in words)):
        return "compressed", "head"
    if _EMBEDDING.search(owner):
        return "compressed", "embedding"
    return _inside(words, owner, shape)


def _inside(words: list[str], owner: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """Returns the class of a matrix: by its modules, the innermost first, then by its own name."""
    place = next(
        (kind for word in reversed(words) for kind, pattern in _PLACES if pattern.search(word)), None
    )
    inner = words[-1] if words else ""
    if place == "attention":
        if owner in ("c_attn", "in_proj", "in_proj_weight") or _QKV_WORDS.search(owner):
            return "mild", "attention"
        if _PROJECTION.search(owner) or (owner.isdigit() and _PROJECTION.search(inner)):
            return "compressed", "attention projection"
        return "mild", "attention, unknown use"
    by_name = _FEED_FORWARD_MATRIX.search(owner) or _FEED_FORWARD.search(owner)
    if place == "feed-forward" or by_name or (owner == "dense" and inner == "output"):
        return "compressed", "feed-forward"
    if _QKV_NAME.search(owner) or owner == "in_proj_weight":
        return "mild", "attention"
    if _PROJECTION.search(owner) and owner.startswith("att"):
        return "compressed", "attention projection"
    return "compressed", "unknown matrix" if len(shape) == 2 else f"unknown, {len(shape)} dimensions"


_PLACES = (("feed-forward", _FEED_FORWARD), ("attention", _ATTENTION))


def table(rows: list[Row], travels: Mapping[str, tuple[str, float | None]] | None = None) -> str:
    """Returns a table of `rows` of at most 100 columns: one line per kind of name, over all layers.

    `travels`, {class: (how, bits per element)}, describes each class."""
    travels = travels or {}
    total = sum(row.n_elems for row in rows)
    lines = []
    for class_ in CLASSES:
        own = [row for row in rows if row.class_ == class_]
        if not own:
            continue
        how, bits = travels.get(class_, ("", None))
        head = class_ if how in ("", class_) else f"{class_}: {how}"
        if bits is not None:
            head += f", {bits:.3g} bits per element"
        lines.append(_line(head, own, total, ""))
        lines += [_line("  " + what, group, total, group[0].reason) for what, group in _kinds(own)]
    n = sum(row.n_elems for row in rows if row.class_ != "dense")
    summary = f"{n:,} of {total:,} elements compressed ({_share(n, total).strip()})"
    if total and all(
        class_ in travels and travels[class_][1] is not None for class_ in {row.class_ for row in rows}
    ):
        bits = sum(row.n_elems * (travels[row.class_][1] or 0) for row in rows) / total
        summary += f", {bits:.3g} bits per element on average"
    return "\n".join(lines + [summary])


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
