"""What all ranks must have alike before there is a connection: versions, options, and the table of
parameters."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from tagc._library import Error
from tagc.torch.exchange.arrivals import meet
from tagc.torch.exchange.comm import share

TIMEOUT_S = 300.0  # where the user's is not known


def agree_all(
    group: dist.ProcessGroup | None,
    mine: dict[str, Any],
    failure: Exception | None,
    timeout_s: Any = None,
    call: str = "",
) -> list[dict[str, Any]]:
    """Returns the object of each rank if all ranks have equal settings and no failure; else all raise the
    same Error. Collective. call: what the users of all ranks must have called, if it is not known yet that
    they have."""
    if group is None:
        if failure is not None:
            raise failure
        return [mine]
    status = failure.status if isinstance(failure, Error) else "argument"
    # not compared yet if there was a failure
    is_number = isinstance(timeout_s, (int, float)) and 0 < timeout_s <= 1e6
    wait_s = float(timeout_s) if is_number else TIMEOUT_S
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
    for rank, theirs in enumerate(everyone):
        if theirs["call"] != everyone[0]["call"]:
            raise Error(
                "mismatch",
                f"ranks do not agree: rank 0 has called {everyone[0]['call']}, and rank {rank} has called "
                f"{theirs['call']}",
            )
    for rank, theirs in enumerate(everyone):
        if theirs["failure"]:
            status, text = theirs["failure"]
            raise Error(
                status, text if all(other["failure"] for other in everyone) else f"rank {rank}: {text}"
            ) from failure
    for rank, theirs in enumerate(everyone):
        for what in ("versions", "options"):
            for name, value in everyone[0][what].items():
                if theirs[what][name] != value:
                    raise Error(
                        "mismatch",
                        f"ranks do not agree: {name} is {value!r} on rank 0 and {theirs[what][name]!r} on "
                        f"rank {rank}",
                    )
        if theirs["rows"] != everyone[0]["rows"]:
            raise Error("mismatch", _rows_differ(everyone[0]["rows"], theirs["rows"], rank))
    return everyone


def _rows_differ(rows: list[Any], theirs: list[Any], rank: int) -> str:
    """Returns the first difference of two tables of parameters, of rank 0 and of that rank, in words. Rows
    are of policy.Row, or of advise()'s units."""

    def words(row: Any) -> str:
        return f"{row.name} {row.shape}, {row.class_}" if hasattr(row, "class_") else f"{row[0]} {row[1]}"

    for one, other in zip(rows, theirs):
        if one != other:
            return (
                f"ranks do not agree on parameters: {words(one)} on rank 0 and {words(other)} on rank {rank}"
            )
    longer, shorter, more = (0, rank, rows) if len(rows) > len(theirs) else (rank, 0, theirs)
    first = more[min(len(rows), len(theirs))]
    return (
        f"ranks do not agree on parameters: rank {longer} has {words(first)}, and rank {shorter} has it not"
    )
