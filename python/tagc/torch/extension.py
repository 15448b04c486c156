"""What annexes take from the core beyond what users call. docs/reference/architecture.md says what it is
for."""

from tagc.torch import checkpoint
from tagc.torch.advise.choice import bytes_text, check_seconds, choose, factor_of, off, seconds_text
from tagc.torch.advise.first_words import about_host, look_fresh
from tagc.torch.exchange import cores, streams
from tagc.torch.exchange import layout as layouts
from tagc.torch.exchange.agreement import agree_all, all_ranks, versions
from tagc.torch.exchange.comm import Comm, Disagreement, Way, agree_in_turn, share
from tagc.torch.exchange.gatherer import Gatherer
from tagc.torch.exchange.gloo import Gloo, bytes_at
from tagc.torch.exchange.hosts import Cluster, Hosts
from tagc.torch.exchange.identity import identity
from tagc.torch.exchange.interfaces import ALONE, Exchanged, Expected, Kinds, Place, Wrapped, place_of
from tagc.torch.exchange.internals import ALL as TESTED
from tagc.torch.exchange.internals import all_gather, ddp_hooks, default_store, n_changes, reader, unwrapped
from tagc.torch.exchange.model import DTYPES, Follower, Levels, ReduceOp, Sum, Unit, check_tensors, scale_of
from tagc.torch.exchange.model_exchanges import Gradient
from tagc.torch.exchange.runner import Host, Runners
from tagc.torch.exchange.said import say
from tagc.torch.exchange.staging import Future, Kernels
from tagc.torch.exchange.streams import Pinned
from tagc.torch.exchange.waits import add_up, disconnect, timeout_of, unheard
from tagc.torch.hooks.gathers import AllGather, GatheringWrapper
from tagc.torch.hooks.kinds import Advised, Kind, Looked, check_model, group_of, kinds_of
from tagc.torch.hooks.replicas import fingerprint
from tagc.torch.hooks.wrapper import Wrapper as AnyWrapper
from tagc.torch.hooks.wrapper import words_of_slow_sums
from tagc.torch.memory import Held, Memory, count
from tagc.torch.passes import Passes
from tagc.torch.schedule import policy
from tagc.torch.schedule.adapt import inner
from tagc.torch.schedule.options import (
    Class,
    Exchange,
    Layers,
    Mild,
    Parameters,
    Residual,
    Settings,
    Values,
    check_known,
    choice,
    number,
    of_direct,
    sparsity_in_range,
)
from tagc.torch.state import State

# fmt: off
__all__ = [
    # of ranks, before there is a connection
    "about_host", "agree_all", "all_ranks", "cores", "default_store", "disconnect", "identity", "share",
    "timeout_of", "unheard", "versions",
    # of options, and their types
    "Class", "Exchange", "Layers", "Mild", "Settings", "Parameters", "Residual", "Values", "check_known",
    "choice", "number", "of_direct", "policy", "sparsity_in_range",
    # of a model and its memory
    "Advised", "Kind", "Looked", "bytes_at", "check_model", "fingerprint", "group_of", "inner", "kinds_of",
    "look_fresh", "unwrapped",
    # of exchanges: a Wrapped says what there is to exchange, Passes exchanges it
    "ALONE", "AllGather", "AnyWrapper", "Cluster", "Comm", "DTYPES", "Disagreement", "Exchanged",
    "Expected", "Follower", "Future", "GatheringWrapper", "Gatherer", "Gloo", "Gradient", "Held", "Host",
    "Hosts", "Kinds", "Levels", "Memory", "Passes", "Place", "ReduceOp", "Runners", "State", "Sum",
    "Unit", "Way", "Wrapped", "add_up", "agree_in_turn", "check_tensors", "checkpoint", "count", "layouts",
    "place_of", "scale_of", "words_of_slow_sums",
    # of arrays on a device
    "Kernels", "Pinned", "streams",
    # of words
    "bytes_text", "check_seconds", "choose", "factor_of", "off", "say", "seconds_text",
    # of torch
    "TESTED", "all_gather", "ddp_hooks", "n_changes", "reader",
]
