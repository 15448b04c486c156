"""The private attributes of torch, and of torchft, that replicas need beside those of tagc.torch."""

from __future__ import annotations

from typing import Any

from tagc.torch.extension import reader

SEEN = {
    "DistributedDataParallel._remove_autograd_hooks": "2.9 to 2.14",
    "DistributedDataParallel._build_params_for_reducer": "2.9 to 2.14",
    "DistributedDataParallel._build_debug_param_to_name_mapping": "2.9 to 2.14",
    "DistributedDataParallel._ddp_init_helper": "2.9 to 2.14",
}
_get, _find = reader(SEEN)


def renew_ddp_reducer(model: Any) -> None:
    """Gives a DistributedDataParallel a new reducer with the same settings and without a hook, because a
    reducer accepts only one. DDP's list of hooks keeps the old one's."""
    _get(model, "DistributedDataParallel._remove_autograd_hooks")()
    parameters, expect_sparse = _get(model, "DistributedDataParallel._build_params_for_reducer")()
    names = _get(model, "DistributedDataParallel._build_debug_param_to_name_mapping")(parameters)
    _get(model, "DistributedDataParallel._ddp_init_helper")(
        parameters, expect_sparse, names, model.static_graph
    )


def has_async_quorum(manager: Any) -> bool:
    """Returns whether torchft's Manager looks for a quorum while the forward pass runs. torchft has no public
    name for it."""
    return bool(getattr(manager, "_use_async_quorum", False))
