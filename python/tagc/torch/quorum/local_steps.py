"""LocalSteps with torchft's Manager as an option: what the user gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tagc.torch.local import steps
from tagc.torch.quorum import exchanges


class LocalSteps(steps.LocalSteps):
    __doc__ = steps.LocalSteps.__doc__

    def _check_manager(self, manager: Any, optimizer: Any, between: Any, delay: Any) -> None:
        exchanges.check(manager, optimizer, between, delay)

    def _join(self, manager: Any, fingerprint: Mapping[str, Any]) -> exchanges.Exchanges:
        return exchanges.Exchanges(self, manager, fingerprint)
