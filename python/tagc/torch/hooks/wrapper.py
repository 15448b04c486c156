"""What compress() asks of a wrapper: fsdp2.py, ddp.py and fsdp1.py have one each."""

from __future__ import annotations

from tagc.torch.exchange.interfaces import Wrapped
from tagc.torch.handle import Compressed


class Wrapper(Wrapped):
    """A wrapped model, for compress()."""

    def install(self, handle: Compressed) -> None:
        """Installs tagc's hooks. Collective."""
        raise NotImplementedError
