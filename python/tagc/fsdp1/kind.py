"""What compress() and advise() know of FullyShardedDataParallel."""

from __future__ import annotations

from typing import Any

from tagc.torch.extension import Advised, Kind, Looked


def _takes(model: Any, between: Any) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(model, FullyShardedDataParallel)


def _wrapper(model: Any, between: None) -> Any:
    from tagc.fsdp1 import wrapper

    return wrapper.Wrapper(model)


def _look(model: Any) -> Looked:
    from tagc.fsdp1 import advice

    return advice.look(model)


def _units_of(n_elems: int) -> str:
    return f"auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params={n_elems})"


KIND = Kind(
    "fsdp1",
    "wrapped in FullyShardedDataParallel",
    _takes,
    _wrapper,
    advised=Advised("units (FullyShardedDataParallel modules)", _units_of, _look, reduces_frozen=True),
)
