"""A GPT by size."""

from __future__ import annotations

from tagc.commands import planner
from tagc.report.parser import UsageError

N_VOCAB = 32_000
LEAST = 1e7  # parameters: the embedding and the head of a smaller model are most of it


def shape_of(n_params: float) -> tuple[int, int]:
    """Returns layers and width of a GPT of about so many parameters, in usual proportions."""
    if n_params < LEAST:
        raise UsageError(f"--params is {n_params:g}, allowed: {LEAST:g} or more")
    return planner.shape_of(n_params)
