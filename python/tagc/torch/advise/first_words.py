"""Notes that compress() prints once, on rank 0: a model that has not learnt yet, and ranks on one host.
Whether compression pays, tagc.advise() says. look_fresh() also decides at which level parameters begin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tagc.torch.exchange import cores
from tagc.torch.exchange.identity import identity
from tagc.torch.schedule.policy import Row


def about_host() -> dict[str, Any]:
    """Returns what ranks exchange about their host. Local."""
    return {"host": identity()} | cores.about()


def look_fresh(rows: Iterable[Row], named: Iterable[tuple[str, torch.Tensor]]) -> bool | None:
    """Returns whether no trained norm has learnt yet: all elements of each are equal. rows: of policy;
    named: (name, parameter), of which it reads this rank's shards. None if this rank has none."""
    norms = {row.name for row in rows if row.reason == "norm"}
    seen = False
    for name, parameter in named:
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if (
            name not in norms
            or not parameter.requires_grad
            or local.device.type == "meta"
            or local.numel() < 2
        ):
            continue
        if not bool((local.detach() == local.detach().flatten()[0]).all()):
            return False
        seen = True
    return seen or None


def line(
    hosts: Sequence[Mapping[str, Any]], is_fresh: bool, is_gentle: bool | None, n_given: int | None = None
) -> str:
    """Returns the notes, or "". hosts: about_host() of each rank; n_given: compress(hosts=)."""
    parts = []
    if len(hosts) > 1 and len({host["host"] for host in hosts}) == 1:
        count = "each counts as a host" if n_given is None else f"they count as {n_given} hosts"
        parts.append(
            f"all {len(hosts)} ranks that exchange gradients are on one host, where compression gains "
            f"nothing: {count}, as for a trial"
        )
    if is_fresh and is_gentle:
        parts.append(
            "the weights look fresh: tagc sends every value for some hundred steps, until gradients are "
            "mostly noise"
        )
    elif is_fresh:
        parts.append(
            "the weights look fresh, and selection costs a model that has just begun some of its loss: "
            "without sparsity= tagc begins gently"
        )
    return f"tagc: {'; '.join(parts)}; tagc.advise(model) measures what to expect" if parts else ""
