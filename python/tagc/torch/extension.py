"""What annexes take from the core beyond what users call. docs/reference/architecture.md says what it is
for."""

from tagc.torch import checkpoint
from tagc.torch.advise.first_words import about_host, look_fresh
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.agreement import agree_all
from tagc.torch.exchange.comm import Comm, share
from tagc.torch.exchange.gloo import bytes_at
from tagc.torch.exchange.hosts import Cluster, Hosts
from tagc.torch.exchange.interfaces import ExchangeOptions, Kinds, Place, Wrapped, place_of
from tagc.torch.exchange.internals import default_store, unwrapped
from tagc.torch.exchange.runner import Future, Runners
from tagc.torch.exchange.unit import ReduceOp, Unit, check_tensors, scale_of
from tagc.torch.exchange.waits import disconnect, timeout_of, unheard
from tagc.torch.hooks.gathers import AllGather
from tagc.torch.memory import Held, Memory, count
from tagc.torch.passes import Passes
from tagc.torch.schedule import policy
from tagc.torch.schedule.options import (
    Class,
    Exchange,
    Layers,
    Mild,
    Options,
    Parameters,
    Residual,
    Values,
    number,
    unknown_option,
)
from tagc.torch.state import State

# fmt: off
__all__ = [
    # of ranks, before there is a connection
    "about_host", "agree_all", "default_store", "disconnect", "share", "timeout_of", "unheard",
    # of options, and their types
    "Class", "Exchange", "Layers", "Mild", "Options", "Parameters", "Residual", "Values", "number", "policy",
    "unknown_option",
    # of a model and its memory
    "bytes_at", "look_fresh", "unwrapped",
    # of exchanges: a Wrapped says what there is to exchange, Passes exchanges it
    "AllGather", "Cluster", "Comm", "ExchangeOptions", "Future", "Held", "Hosts", "Kinds", "Memory", "Passes",
    "Place", "ReduceOp", "Runners", "State", "Unit", "Wrapped", "check_tensors", "checkpoint", "count",
    "layouts", "place_of", "scale_of",
]
