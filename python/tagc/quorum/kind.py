"""What compress() knows of models under torchft, whose replicas join and leave."""

from __future__ import annotations

from typing import Any

from tagc._library import Error
from tagc.quorum.torchft import is_managed_group, is_manager, manager_of
from tagc.torch.extension import Kind, kinds_of


def _takes(model: Any, between: Any) -> bool:
    return manager_of(model) is not None or is_manager(between) or is_managed_group(between)


def _wrapper(model: Any, between: Any) -> Any:
    manager = manager_of(model)
    if is_managed_group(between):
        raise Error(
            "unsupported",
            "between is one of torchft's process groups: under torchft, tagc takes "
            "torchft.DistributedDataParallel, or fully_shard() with between=manager",
        )
    if manager is not None:
        if between is not None:
            raise Error(
                "argument",
                "between is given, and torchft, which wraps the model, has a Manager: leave between out",
            )
        from tagc.quorum import managed

        return managed.Wrapper(model, manager)
    if [kind.name for kind in kinds_of(model)] != ["fsdp2"]:
        raise Error(
            "argument",
            f"between is a Manager, and this model is a {type(model).__name__}: it must be fully_shard()-ed; "
            "wrap others in torchft.DistributedDataParallel",
        )
    from tagc.quorum import fsdp2

    return fsdp2.Wrapper(model, between)


KIND = Kind(
    "torchft",
    "wrapped in torchft.DistributedDataParallel",
    _takes,
    _wrapper,
    takes_between=True,
    goes_first=True,
    needs_init=False,
)
