"""What the integrations share."""

import pathlib
import warnings

import torch.distributed as dist

FOLDER = "tagc"  # of a checkpoint's folder


def save(handle, checkpoint):
    handle.save(pathlib.Path(checkpoint) / FOLDER)


def load(handle, checkpoint):
    """False, and rank 0 says so, where the checkpoint has no state of tagc: residuals then begin at zero."""
    folder = pathlib.Path(checkpoint) / FOLDER
    if folder.is_dir():
        handle.load(folder)
        return True
    if dist.get_rank() == 0:
        warnings.warn(f"tagc: {checkpoint} has no folder {FOLDER!r}, so it is of a run without tagc: residuals begin at zero", stacklevel=3)
    return False
