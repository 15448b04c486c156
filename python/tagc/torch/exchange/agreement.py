"""What all ranks must have alike before there is a connection: versions, options, and the table of
parameters."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from tagc import _library
from tagc._library import Error
from tagc.torch.exchange.arrivals import meet
from tagc.torch.exchange.comm import share
from tagc.torch.exchange.waits import timeout_of


def all_ranks() -> dist.ProcessGroup:
    """Returns the group of all ranks."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        raise Error("state", "torch.distributed is not initialised: call init_process_group() first")
    return world


def versions() -> dict[str, str]:
    """Returns those that all ranks must have alike."""
    return {"libtagc": _library.version(), "torch": torch.__version__}


def agree_all(
    group: dist.ProcessGroup | None,
    mine: dict[str, Any],
    failure: Exception | None,
    timeout_s: Any = None,
    call: str = "",
) -> list[dict[str, Any]]:
    """Returns the object of each rank if all ranks have equal "versions", "options" and "rows", as far as
    they are there, and no failure; else all raise the same Error. Collective. call: what the users of all
    ranks must have called, if it is not known yet that they have."""
    if group is None:
        if failure is not None:
            raise failure
        return [mine]
    status = failure.status if isinstance(failure, Error) else "argument"
    # not compared yet if there was a failure
    is_number = isinstance(timeout_s, (int, float)) and 0 < timeout_s <= 1e6
    wait_s = float(timeout_s) if is_number else timeout_of(group)
    if call:
        try:
            meet(group, call, wait_s)
        except Error as silence:
            raise failure or silence from None
    everyone = share(
        group,
        {"failure": (status, f"{failure}") if failure else None, "call": call, **mine},
        datetime.timedelta(seconds=wait_s),
    )
    ranks = dist.get_process_group_ranks(group)  # messages have the job's
    for rank, theirs in zip(ranks, everyone):
        if theirs["call"] != everyone[0]["call"]:
            raise Error(
                "mismatch",
                f"ranks do not agree: rank {ranks[0]} has called {everyone[0]['call']}, and rank "
                f"{rank} has called {theirs['call']}",
            )
    for rank, theirs in zip(ranks, everyone):
        if theirs["failure"]:
            status, text = theirs["failure"]
            raise Error(
                status, text if all(other["failure"] for other in everyone) else f"rank {rank}: {text}"
            ) from failure
    for rank, theirs in zip(ranks, everyone):
        for what in ("versions", "options"):
            for name, value in everyone[0].get(what, {}).items():
                if theirs[what][name] != value:
                    raise Error(
                        "mismatch",
                        f"ranks do not agree: {name} is {value!r} on rank {ranks[0]} and "
                        f"{theirs[what][name]!r} on rank {rank}",
                    )
        rows, others = (one.get("rows", []) for one in (everyone[0], theirs))
        if rows != others:
            raise Error("mismatch", _rows_differ(rows, others, ranks[0], rank))
    return everyone


def _rows_differ(rows: list[Any], theirs: list[Any], first_rank: int, rank: int) -> str:
    """Returns the first difference of two tables of parameters, of these ranks, in words. Rows
    are of policy.Row, or of advise()'s units."""

    def words(row: Any) -> str:
        return f"{row.name} {row.shape}, {row.class_}" if hasattr(row, "class_") else f"{row[0]} {row[1]}"

    for one, other in zip(rows, theirs):
        if one != other:
            return (
                f"ranks do not agree on parameters: {words(one)} on rank {first_rank} and {words(other)} on "
                f"rank {rank}"
            )
    longer, shorter, more = (
        (first_rank, rank, rows) if len(rows) > len(theirs) else (rank, first_rank, theirs)
    )
    first = more[min(len(rows), len(theirs))]
    return (
        f"ranks do not agree on parameters: rank {longer} has {words(first)}, and rank {shorter} has it not"
    )
