"""WholePublisher: for trainers that hand out whole tensors, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from tagc.weights.publish import Publisher
from tagc.weights.sync import Sent
from tagc.weights.tensors import Tensors


class WholePublisher:
    """Keeps copies of tensors in CPU memory, and publishes them. tensors: returns those of the store."""

    def __init__(
        self,
        store: str,
        tensors: Callable[[Tensors], Tensors] = lambda held: held,
        *,
        by_magnitude: bool = False,
        keep: int = 32,
        threads: int = 1,
    ) -> None:
        self._make = partial(
            Publisher,
            lambda: tensors(self._held),
            store,
            by_magnitude=by_magnitude,
            keep=keep,
            threads=threads,
        )
        self._held: dict[str, torch.Tensor] = {}
        self._publisher: Publisher | None = None

    @property
    def version(self) -> int:
        """Returns the number of the version that was published last; 0: none."""
        return 0 if self._publisher is None else self._publisher.version

    def publish(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Sent:
        """Publishes these weights, which are all, and returns what that took."""
        for name, tensor in weights:
            if name in self._held:
                self._held[name].copy_(tensor)
            else:
                self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if self._publisher is None:
            self._publisher = self._make()
        self._publisher.publish()
        assert self._publisher.last is not None
        return self._publisher.last
