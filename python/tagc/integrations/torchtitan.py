"""torchtitan: a model's spec with compressed gradients. Nothing of torchtitan is imported: a spec is a dataclass whose
parallelize_fn wraps the model and whose post_optimizer_build_fn sees the optimizers."""

from __future__ import annotations

import dataclasses
from typing import Any

import tagc.torch as tagc


def compressed(spec: Any, **options: Any) -> Any:
    """The spec, with options of tagc.compress(). Where torchtitan splits a model into pipeline stages, each of them is one model.
    Its `handles` is a list, filled when the trainer is made; checkpointed(trainer) puts them into checkpoints."""
    handles: list[tagc.Compressed] = []
    parallelize, built = spec.parallelize_fn, spec.post_optimizer_build_fn

    def parallelized(model: Any, *arguments: Any, **named: Any) -> Any:
        wrapped = parallelize(model, *arguments, **named)
        handles.append(tagc.compress(wrapped, **options))
        return wrapped

    def optimizers_built(optimizers: Any, model_parts: Any, *arguments: Any, **named: Any) -> None:
        for handle in handles:
            own = {id(parameter) for parameter in handle.model.parameters()}
            handle.adapt([one for one in optimizers.optimizers if any(id(p) in own for g in one.param_groups for p in g["params"])])
        if built is not None:
            built(optimizers, model_parts, *arguments, **named)

    spec = dataclasses.replace(spec, parallelize_fn=parallelized, post_optimizer_build_fn=optimizers_built)
    spec.handles = handles
    return spec


def checkpointed(trainer: Any, spec: Any) -> Any:
    """Before trainer.train(): residuals and stages are saved and loaded with torchtitan's own checkpoints."""
    for i, handle in enumerate(spec.handles):
        trainer.checkpointer.states["tagc" if len(spec.handles) == 1 else f"tagc{i}"] = handle
    return trainer
