"""What the process that ranks are forks of (ranks.py) imports before them. The garbage collector has no part
in it: it would look through all of this again and again, and a fork that does so copies the memory that it
shares."""

import gc
import importlib

gc.disable()

import numpy  # noqa: F401
import pytest  # noqa: F401
import source_tree  # noqa: F401
import torch

# torch imports them by itself when a model is wrapped, and at the first torch.compile(), which takes as long
# as all that a short test does
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.nn.parallel  # noqa: F401

import tagc.torch  # 100 files, which each file of tests and each of its ranks would compile or read anew
import tagc.torch.hooks.fsdp2  # noqa: F401
from tagc import _annexes

for _name in _annexes.with_part("kind"):  # compress() asks each whether a model is its own
    importlib.import_module(f"tagc.{_name}.kind")

gc.collect()
gc.freeze()
gc.enable()
