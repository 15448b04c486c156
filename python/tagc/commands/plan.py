"""python -m tagc plan: `tagc plan` for a model and a cluster by size (command/cluster)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tagc import _planner as planner
from tagc._library import Error
from tagc.commands.parser import UsageError

_ABOUT = """python -m tagc plan: memory, bytes and simulated time of a training step. Nothing is trained.

usage: python -m tagc plan [options]
"""


def made_of(words: Sequence[str]) -> planner.Plan:
    """Returns the plan that these words ask for. UsageError if they are at fault."""
    try:
        return planner.plan(words)
    except Error as problem:
        if problem.status == "argument":
            raise UsageError(str(problem)) from None
        raise


def run(words: Sequence[str]) -> int:
    made = made_of(words)
    if made.json is None:
        sys.stdout.write(_ABOUT + made.text.replace("  tagc plan ", "  python -m tagc plan "))
    elif made.path == "-":
        sys.stdout.write(made.json)
    else:
        if made.path is not None:
            with open(made.path, "w", encoding="utf-8") as file:
                file.write(made.json)
        sys.stdout.write(made.text)
    return 0
