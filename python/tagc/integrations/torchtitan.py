"""torchtitan: a model's spec with compressed gradients. This module does not import torchtitan: a spec is a
dataclass whose parallelize_fn wraps the model. post_optimizer_build_fn of a ModelSpec (0.3) gets the
optimizers; build_optimizers_fn of a TrainSpec (0.2) makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tagc.torch as tagc


def compressed(spec: Any, **options: Any) -> Any:
    """Returns the spec, with options of tagc.compress(). If torchtitan splits a model into pipeline stages,
    each of them is a model. `handles` of the spec is a list that is filled when the trainer is made;
    checkpointed(trainer) adds them to checkpoints."""
    handles: list[tagc.Compressed] = []
    models: list[Any] = []
    parallelize = spec.parallelize_fn

    def parallelized(model: Any, *arguments: Any, **named: Any) -> Any:
        models.append(parallelize(model, *arguments, **named))  # on the meta device yet
        return models[-1]

    def compress(optimizers: Any) -> None:
        for model in models:
            own = {id(parameter) for parameter in model.parameters()}
            steppers = [
                one
                for one in optimizers.optimizers
                if any(id(p) in own for g in one.param_groups for p in g["params"])
            ]
            handles.append(tagc.compress(model, steppers, **options))
        models.clear()

    spec = dataclasses.replace(spec, parallelize_fn=parallelized, **_with_optimizers(spec, compress))
    spec.handles = handles
    return spec


def _with_optimizers(spec: Any, call: Callable[[Any], None]) -> dict[str, Any]:
    """Returns the spec's field for optimizers, changed so that call(optimizers) is called with them."""
    if hasattr(spec, "build_optimizers_fn"):
        build = spec.build_optimizers_fn

        def build_optimizers(*arguments: Any, **named: Any) -> Any:
            optimizers = build(*arguments, **named)
            call(optimizers)
            return optimizers

        return {"build_optimizers_fn": build_optimizers}
    built = spec.post_optimizer_build_fn

    def optimizers_built(optimizers: Any, model_parts: Any, *arguments: Any, **named: Any) -> None:
        call(optimizers)
        if built is not None:
            built(optimizers, model_parts, *arguments, **named)

    return {"post_optimizer_build_fn": optimizers_built}


def checkpointed(trainer: Any, spec: Any) -> Any:
    """Adds the handles to torchtitan's checkpoints, if these are enabled. Returns the trainer. Call it before
    trainer.train()."""
    states = getattr(trainer.checkpointer, "states", None)  # a manager of 0.3 that is off has none
    if states is not None:
        for i, handle in enumerate(spec.handles):
            states["tagc" if len(spec.handles) == 1 else f"tagc{i}"] = handle
    return trainer
