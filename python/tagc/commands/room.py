"""What a rank needs in memory for a GPT of some shape, by ways to train it, and in which GPUs it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tagc import _library as lib
from tagc.commands import planner

SIZES_GB = (24, 40, 80)


def _units(n_layer: int, width: int, n_vocab: int, is_ddp: bool) -> list[dict[str, int]]:
    """Returns values by class of each unit: of a block, or under DDP of a bucket, which holds one matrix."""
    square = width * width
    if is_ddp:
        block = [
            {"mild": 3 * square},
            {"mild": square},
            {"compressed": 4 * square},
            {"compressed": 4 * square},
        ]
    else:
        block = [{"compressed": 8 * square, "mild": 4 * square, "dense": 13 * width}]
    return block * n_layer + [{"compressed": n_vocab * width}] * 2


def _parts(unit: dict[str, int], ranks: int, per_host: int, is_ddp: bool) -> list[dict[str, Any]]:
    """Returns the options of a unit's reducers, with every value in 4 bits."""
    parts = []
    for kind, n in unit.items():
        shard = -(-n // (ranks * per_host * 16)) * 16
        part: dict[str, Any] = {"n_elems": shard * ranks}
        if is_ddp:
            part["output"] = lib.OUTPUTS["unit"]
        if kind == "dense":
            part["exchange"] = lib.EXCHANGES["dense"]
        else:
            part |= {"exchange": lib.EXCHANGES["direct"], "format": lib.FORMATS["int4"], "sparsity": 0.0}
        parts.append(part)
    return parts


def packed_bytes(unit: Sequence[Mapping[str, Any]], ranks: int, is_ddp: bool, n_bytes: int = 4) -> int:
    """Returns the bytes in which an exchange packs gradients of n_bytes per value, 2 or 4, and their sums, as
    Unit.reduce() does: the largest part stays in the gradient itself, and sums take the place of gradients.
    Dense parts are read as fp32, and their sums lie apart. unit: the options of its reducers."""
    dense = [part["n_elems"] for part in unit if part["exchange"] == lib.EXCHANGES["dense"]]
    others = [part["n_elems"] for part in unit if part["exchange"] != lib.EXCHANGES["dense"]]
    apart = dense + (others if is_ddp and n_bytes < 4 else [])  # sums
    if len(unit) == 1 and n_bytes == 4 and not is_ddp:
        apart = []  # they are written to where the caller wants them
    gradients = [4 * n for n in dense] + [n_bytes * n for n in others]
    stays = max([n_bytes * n for n in others + (dense if n_bytes == 4 else [])], default=0)
    return sum(gradients) - stays + 4 * sum(apart) // (1 if is_ddp else ranks)


def _row(
    name: str,
    shape: tuple[int, int, int],
    hosts: int,
    per_host: int,
    is_ddp: bool,
    levels: int,
    has_deltas: bool,
) -> dict[str, Any]:
    """levels: 0: without tagc; 1: each rank by itself; 2: sums within hosts first."""
    units = _units(*shape, is_ddp)
    n = sum(sum(unit.values()) for unit in units)
    split = 1 if is_ddp else hosts * per_host
    row: dict[str, Any] = {
        "name": name,
        "parameters": 4 * n // split,
        "gradients": 4 * n // split,
        "adam": 8 * n // split,
        "residual": 0,
        "replicas": 0,
        "transient": 0,
    }
    if levels:
        inside = per_host if levels == 2 else 1
        ranks = hosts * per_host // inside
        parts = [_parts(unit, ranks, inside, is_ddp) for unit in units]
        for i, unit in enumerate(parts):
            for part in unit:
                part["tag"] = i
        needs = planner.needs(parts, ranks)
        row["residual"] = needs.residual + needs.buffers
        row["replicas"] = 2 * n // inside if has_deltas else 0
        row["transient"] = needs.transient + max(packed_bytes(unit, ranks, is_ddp) for unit in parts)
    row["all"] = sum(value for key, value in row.items() if key != "name")
    row["fits"] = [size for size in SIZES_GB if row["all"] <= size * 1e9]
    return row


def rows(shape: tuple[int, int, int], hosts: int, per_host: int) -> list[dict[str, Any]]:
    """Returns a row per way. shape: layers, width, vocabulary."""
    level = 2 if per_host > 1 else 1
    where = ", in two levels" if per_host > 1 else ""
    ways = [("FSDP2", False, 0, False), ("FSDP2, tagc, each rank by itself", False, 1, False)]
    if per_host > 1:
        ways.append(("FSDP2, tagc, in two levels", False, 2, False))
    ways += [
        (f'FSDP2, tagc{where}, parameters="delta4"', False, level, True),
        ("DDP", True, 0, False),
        (f"DDP, tagc{where}", True, level, False),
    ]
    return [
        _row(name, shape, hosts, per_host, is_ddp, levels, has_deltas)
        for name, is_ddp, levels, has_deltas in ways
    ]


def lines(made: Sequence[dict[str, Any]], text_of: Any) -> list[str]:
    columns = ("parameters", "gradients", "adam", "residual", "replicas", "transient", "all")
    wide = max(len(row["name"]) for row in made)
    found = [
        "",
        "memory of a rank, without activations; what tagc holds for one unit at a time is transient",
        f"{'':{wide}} " + " ".join(f"{column:>10}" for column in columns) + "  fits in",
    ]
    for row in made:
        fits = ", ".join(f"{size} GB" for size in row["fits"]) or "none of " + ", ".join(
            f"{size} GB" for size in SIZES_GB
        )
        cells = " ".join(f"{text_of(row[column]):>10}" for column in columns)
        found.append(f"{row['name']:{wide}} {cells}  {fits}")
    return found
