"""What compress() asks of a wrapper: fsdp2.py, ddp.py and fsdp1.py have one each."""

from __future__ import annotations

from typing import Any

import torch

from tagc.torch.exchange.interfaces import Wrapped
from tagc.torch.handle import Compressed
from tagc.torch.schedule import policy


class Wrapper(Wrapped):
    """A wrapped model, for compress()."""

    _model: Any  # a torch.nn.Module, of the wrapper's class

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [*policy.named_parameters(self._model)]

    def install(self, handle: Compressed) -> None:
        """Installs tagc's hooks. Collective."""
        raise NotImplementedError
