"""What advise() knows of FullyShardedDataParallel."""

from __future__ import annotations

import math
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from tagc.fsdp1 import internals
from tagc.torch.extension import Looked


def look(model: Any) -> Looked:
    """Returns the units of a model."""
    n_gathers_of = dict(zip(internals.hybrid(), (2, 1))) | {
        ShardingStrategy.FULL_SHARD: 2,
        ShardingStrategy.SHARD_GRAD_OP: 1,
        ShardingStrategy.NO_SHARD: 0,
    }
    mixed, units, gathered, n_gathers = model.mixed_precision, [], [], []
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and (flat := internals.flat_of(module)) is not None:
            named = [(f"{name}.{fqn}" if name else fqn, shape) for fqn, shape in flat.shapes()]
            units.append([one for one, is_trained in zip(named, flat.trained()) if is_trained])
            n_elems = sum(math.prod(shape) for _, shape in named)
            gathered.append([(mixed.param_dtype or flat.dtype, n_elems)])
            n_gathers.append(n_gathers_of[module.sharding_strategy])
    group = model.process_group
    if model.sharding_strategy in internals.hybrid():  # that of replicas, which are on several hosts
        group = internals.replicas(model)
    return Looked(
        units, gathered, n_gathers, (mixed.reduce_dtype or mixed.param_dtype, mixed.param_dtype), group
    )
