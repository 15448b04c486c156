"""What compress() knows of models of data_parallel(), and of torchtitan's."""

from __future__ import annotations

from typing import Any

from tagc.compiled.parametrize import parametrized
from tagc.torch.extension import Kind


def _takes(model: Any, between: Any) -> bool:
    return next(parametrized(model), None) is not None


def _wrapper(model: Any, between: None) -> Any:
    from tagc.compiled import wrapper

    return wrapper.Wrapper(model)


KIND = Kind("simple_fsdp", "sharded by tagc.compiled.data_parallel()", _takes, _wrapper)
