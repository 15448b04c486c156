"""The properties of a model that determine its communication: what each unit gathers, in which dtypes, and
what of it is trained, and so reduced."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tagc._library import Error
from tagc.torch.hooks.kinds import Advised, kinds
from tagc.torch.schedule import policy

BUCKET_BYTES = 25 << 20  # DDP's

Held = dict[str, int]  # elements that a gather of a unit sends, by dtype; OTHER: bytes
OTHER = "other"


def is_one(held: Held) -> bool:
    """Returns whether tagc can gather it: torch sends several dtypes as bytes."""
    return len(held) == 1 and OTHER not in held


@dataclasses.dataclass
class Shape:
    """The properties of a model that determine its communication. A unit may hold parameters that are not
    trained: they are gathered, and have no gradient."""

    wrap: str  # "fsdp2", "ddp" or another kind
    world_size: int
    units: list[dict[str, int]]  # elements of each exchange, by class; {} of a unit that is not trained
    n_gathers: list[int]  # of each unit in a step
    reduce: str = "fp32"  # dtype of exchanged gradients now
    gather: str = "fp32"  # and of most parameters
    all_reduce: bool = False  # gradients go to every rank
    held: list[Held] = dataclasses.field(default_factory=list)  # not given: of each unit what is trained
    n_params: int = 0  # of the model; not given: those that are trained
    accumulate: int = 1  # passes of a step: each gathers parameters, the last one exchanges gradients

    def __post_init__(self) -> None:
        self.held = self.held or [{self.gather: sum(unit.values())} for unit in self.units]
        self.n_params = self.n_params or self.n_elems

    @property
    def n_elems(self) -> int:
        """Elements of the gradients."""
        return sum(sum(unit.values()) for unit in self.units)

    @property
    def mix(self) -> dict[str, float]:
        """Class -> its share of all elements."""
        return {
            kind: sum(unit.get(kind, 0) for unit in self.units) / max(1, self.n_elems)
            for kind in policy.CLASSES
        }


def _sums(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in (*one, *other)}


def advised(kind: str) -> Advised:
    """Returns what advise() knows of a kind."""
    return next((one.advised for one in kinds() if one.name == kind and one.advised), Advised())


Named = list[tuple[str, Sequence[int]]]  # (name, shape) of each parameter of a unit


def look(model: Any, kind: str, between: dist.ProcessGroup | None = None) -> tuple[Shape, dist.ProcessGroup]:
    """Returns (Shape, process group of the gradients' exchange) of a model; kind: its wrapper."""
    group: dist.ProcessGroup
    held: list[Held] = []
    if kind == "fsdp2":
        units, held, n_gathers, dtypes, group = _fsdp2(model)
        reduce, gather = map(_short, dtypes)
    elif kind == "ddp":
        units, group, reduce, gather = _ddp(model), model.process_group, None, None
        n_gathers = [0] * len(units)
    else:
        if (advised_kind := advised(kind)).look is None:
            raise Error(
                "unsupported",
                f"advise() does not know models of {kind}: ask for the same model with fully_shard()",
            )
        seen = advised_kind.look(model)
        units, n_gathers, group = [[*unit] for unit in seen.units], seen.n_gathers, seen.group
        reduce, gather = map(_short, seen.dtypes)
        for sends in seen.gathered:
            held.append({})
            for dtype, n in sends:
                _count(held[-1], dtype, n)
    divided_by = 1
    if between is not None:  # only shards, over another group; legs inside a host do not change
        divided_by, group, n_gathers, held = group.size(), between, [0] * len(units), []
    sizes = []
    for named in units:
        size: dict[str, int] = {}
        for row in policy.classify(named):
            size[row.class_] = size.get(row.class_, 0) + -(-row.n_elems // divided_by)
        sizes.append(size)
    shape = Shape(
        kind,
        group.size(),
        sizes,
        n_gathers,
        reduce or _most(_dtypes(p for p in model.parameters() if p.requires_grad)),
        gather or _most(_sum_of(held)),
        all_reduce=between is not None or not any(n_gathers),
        held=held,
        n_params=sum(p.numel() for p in model.parameters())
        if kind in ("fsdp2", "ddp")
        else sum(map(n_of, held)),
    )
    return shape, group


def n_of(held: Mapping[str, int]) -> int:
    return sum(held.values())


def _sum_of(helds: Sequence[Held]) -> Held:
    return functools.reduce(_sums, helds, {})


def _most(held: Mapping[str, int]) -> str:
    """Returns the dtype of most elements, of those that tagc can send."""
    known = {dtype: n for dtype, n in held.items() if dtype != OTHER}
    return max(known, key=lambda dtype: known[dtype]) if known else "fp32"


def _dtypes(parameters: Iterable[torch.Tensor]) -> Held:
    """Returns their elements by dtype."""
    n_elems: Held = {}
    for parameter in parameters:
        _count(n_elems, parameter.dtype, parameter.numel())
    return n_elems


def _count(held: Held, dtype: torch.dtype | None, n_elems: int) -> None:
    key = _short(dtype) or OTHER
    n = n_elems if key != OTHER or dtype is None else n_elems * dtype.itemsize
    held[key] = held.get(key, 0) + n


def _ddp(model: torch.nn.Module) -> list[Named]:
    trained: Named = [
        (name, parameter.shape)
        for name, parameter in policy.named_parameters(model)
        if parameter.requires_grad
    ]
    return _shared_out(trained, BUCKET_BYTES)


def _fsdp2(
    model: torch.nn.Module,
) -> tuple[
    list[Named], list[Held], list[int], tuple[torch.dtype | None, torch.dtype | None], dist.ProcessGroup
]:
    from tagc.torch.hooks.fsdp2 import modules_of

    modules = modules_of(model)
    if not modules:
        raise Error("argument", "this model has no parameters")
    units: list[Named] = [
        [(parameter.name, parameter.shape) for parameter in one.trainable()] for one in modules
    ]
    held: list[Held] = []
    for one in modules:
        held.append({})
        for parameter, dtype in zip(one.parameters, one.group.gather_dtypes()):
            _count(held[-1], dtype, parameter.numel)
    # of a mesh of two dimensions that of replicas, which are on several hosts where shards are inside one
    groups = (one.group.replica_group if one.has_two_sums else one.only_group() for one in modules)
    group = max((group for group in groups if group is not None), key=lambda group: group.size())
    return units, held, [one.group.n_gathers for one in modules], modules[-1].group.dtypes(), group


def _short(dtype: torch.dtype | None) -> str | None:
    return (
        None
        if dtype is None
        else {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}.get(dtype)
    )


def _shared_out(named: Named, n_bytes: int) -> list[Named]:
    """Returns buckets of about n_bytes of fp32, starting with the last parameter."""
    groups: list[Named] = []
    n_left = 0
    for name, shape in reversed(named):
        if n_left <= 0 or not groups:
            groups.append([])
            n_left = n_bytes
        groups[-1].append((name, shape))
        n_left -= 4 * math.prod(shape)
    return groups
