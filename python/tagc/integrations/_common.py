"""Shared by the integrations."""

from __future__ import annotations

import os
import pathlib
import warnings

import torch.distributed as dist

from tagc.torch import Compressed, Error, flat

FOLDER = "tagc"  # of a checkpoint's folder
# Of stats(): what changes from step to step and tells whether all is well. A trainer prints each number in
# every line of its log.
LOGGED = ("bits_per_param", "sparsity", "ratio", "exchange_s", "n_nonfinite")
LOGGED_OF_GATHERS = ("gather_bits", "gather_s")  # where parameters are compressed


def check_started(how: str) -> None:
    """Raises an Error that says how, unless the loop's library has initialised torch.distributed, which it
    does for several processes."""
    if not dist.is_initialized():
        raise Error("state", f"torch.distributed is not initialised, since this is one process: {how}")


def logged(handle: Compressed) -> dict[str, float]:
    """Returns what a trainer's log gets of the last step, as tagc/<name>; {} before the first."""
    stats = handle.stats()
    keys = LOGGED + (LOGGED_OF_GATHERS if stats.get("n_gathered") else ())
    return {key: float(value) for key, value in flat({key: stats[key] for key in keys if stats}).items()}


def save(handle: Compressed, checkpoint: str | os.PathLike[str]) -> None:
    handle.save(pathlib.Path(checkpoint) / FOLDER)


def load(handle: Compressed, checkpoint: str | os.PathLike[str] | None) -> bool:
    """Returns whether the checkpoint has a state of tagc. If not, or if the checkpoint is not known, rank 0
    prints that residuals begin at zero."""
    if checkpoint is not None and (folder := pathlib.Path(checkpoint) / FOLDER).is_dir():
        handle.load(folder)
        return True
    why = (
        "the checkpoint of this resumed run is not known, give TagcCallback its resume_from="
        if checkpoint is None
        else f"{checkpoint} has no folder {FOLDER!r}, so it is of a run without tagc"
    )
    if dist.get_rank() == 0:
        warnings.warn(f"tagc: {why}: residuals begin at zero", stacklevel=3)
    return False
