"""python -m tagc plan: `tagc plan` for a model and a cluster by size (command/cluster)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tagc.commands import planner

_ABOUT = """python -m tagc plan: memory, bytes and simulated time of a training step. Nothing is trained.

usage: python -m tagc plan [options]
"""


def run(words: Sequence[str]) -> int:
    made = planner.plan(words)
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
