"""tagc for PyTorch: one line for models under FSDP2, DDP or FSDP1.

    import tagc.torch as tagc
    handle = tagc.compress(model)

It neither patches torch nor compiles an extension against it: it uses torch's own hooks, and libtagc by
ctypes. In this folder a file names no file of a folder to the right of it:

    exchange <- schedule <- state, statistics <- log <- passes <- handle <- hooks <- advise <-
    compress <- extension, this file"""

from __future__ import annotations

import importlib.util

try:
    import torch  # noqa: F401

    if importlib.util.find_spec("numpy") is None:  # torch does not ask for it
        raise ModuleNotFoundError(name="numpy")
except ModuleNotFoundError as missing:
    if missing.name not in ("torch", "numpy"):
        raise
    what = "PyTorch" if missing.name == "torch" else "NumPy, which torch's collectives of objects use"
    raise ModuleNotFoundError(
        f'tagc.torch needs {what}, and this Python has none: pip install "tagc-train[torch]"',
        name=missing.name,
    ) from missing

from tagc._library import Error
from tagc.torch.advise.advice import advise
from tagc.torch.compress import check_options, compress, ddp_state, hosts_of, param_groups
from tagc.torch.handle import Compressed
from tagc.torch.hooks.bucketing import buckets
from tagc.torch.hooks.ddp import ddp_hook
from tagc.torch.schedule.options import Options, grouped
from tagc.torch.statistics import flat

__all__ = [
    "Compressed",
    "Error",
    "Options",
    "advise",
    "buckets",
    "check_options",
    "compress",
    "ddp_hook",
    "ddp_state",
    "flat",
    "grouped",
    "hosts_of",
    "param_groups",
]
