"""How many threads the codec on the host takes unless `threads` says it: half of a rank's share of the cores
of its host. The other half is for the rank's own work, and a codec of 8 threads is limited by memory."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

MOST = 8


def about(cgroup: pathlib.Path = pathlib.Path("/sys/fs/cgroup")) -> dict[str, Any]:
    """Returns what ranks exchange about the cores of theirs: their numbers, and how many the
    container grants to all of its processes; None: any number. Local."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = os.sched_getaffinity(0) if has_affinity else range(os.cpu_count() or 1)
    granted: float | None = None
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        granted = int(quota) / int(period)
    except (OSError, ValueError):
        pass  # no container, or no limit
    return {"cores": tuple(sorted(cores)), "granted": granted}


def threads(mine: Mapping[str, Any], everyone: Iterable[Mapping[str, Any]]) -> int:
    """Returns the threads of a rank. mine: about() of it, and "host", its identity(); everyone: of all ranks,
    itself among them. Ranks that are bound to cores of their own do not share them."""
    cores = set(mine["cores"])
    of_host = [theirs for theirs in everyone if theirs["host"] == mine["host"]]
    n_on_mine = sum(not cores.isdisjoint(theirs["cores"]) for theirs in of_host)
    share = len(cores) / max(1, n_on_mine)
    if mine["granted"] is not None:
        share = min(share, mine["granted"] / max(1, len(of_host)))
    return max(1, min(MOST, int(share / 2)))
