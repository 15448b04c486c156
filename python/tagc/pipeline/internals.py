"""The private attributes of torch that pipelines need."""

from __future__ import annotations

import sys
from typing import Any

from tagc.torch.extension import reader

SEEN = {
    "torch.distributed.pipelining.stage._PipelineStageBase": "2.9 to 2.14",
    "_PipelineStageBase._stage_meta": "2.13 to 2.14",
}
_get, _find = reader(SEEN)


def is_pipeline_stage(model: object) -> bool:
    """Returns whether it is a stage of torch.distributed.pipelining, made by hand or by its build_stage()."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    return module is not None and isinstance(
        model, _get(module, "torch.distributed.pipelining.stage._PipelineStageBase")
    )


def stage_sends(stage: Any, is_forward: bool) -> list[Any] | None:
    """Returns what the stage on the other side expects, with `shape` and `dtype`: of each output, or each
    gradient of an input. None where torch does not say."""
    found = _find(stage, "_PipelineStageBase._stage_meta")
    metas = None if found is None else found.outputs if is_forward else found.input_grads
    return None if metas is None else [meta for meta in metas if meta is not None]
