"""Shared by the integrations."""

from __future__ import annotations

import os
import pathlib
import warnings

import torch.distributed as dist

from tagc.torch import Compressed

FOLDER = "tagc"  # of a checkpoint's folder


def save(handle: Compressed, checkpoint: str | os.PathLike[str]) -> None:
    handle.save(pathlib.Path(checkpoint) / FOLDER)


def load(handle: Compressed, checkpoint: str | os.PathLike[str]) -> bool:
    """Returns whether the checkpoint has a state of tagc. If not, rank 0 prints that residuals begin at
    zero."""
    folder = pathlib.Path(checkpoint) / FOLDER
    if folder.is_dir():
        handle.load(folder)
        return True
    if dist.get_rank() == 0:
        warnings.warn(
            (
                f"tagc: {checkpoint} has no folder {FOLDER!r}, so it is of a run without tagc: residuals "
                "begin "
                "at zero"
            ),
            stacklevel=3,
        )
    return False
