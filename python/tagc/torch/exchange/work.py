"""Memory that only an exchange under way needs: gradients packed by class, sums before they are unpacked, and
frames. The units of a runner exchange one after the other, so they share it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Lent(NamedTuple):
    """What one exchange uses, fp32 on one device. It is undefined before, and belongs to the next exchange
    after."""

    gradient: torch.Tensor
    output: torch.Tensor


class Work:
    """Of one runner: a pair of arrays per device, as large as the largest exchange so far needed."""

    def __init__(self) -> None:
        self._pairs: dict[torch.device, Lent] = {}
        self._frames: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}  # of group.Link

    def lend(self, device: torch.device, n_gradient: int, n_output: int) -> Lent:
        """Returns arrays of at least so many values, until the next call. Call it inside the turn() of a Way,
        because a device's allocator gives memory to streams."""
        pair = self._pairs.pop(device, None)
        sizes = [n_gradient, n_output]
        if pair is not None:
            sizes = [max(n, array.numel()) for n, array in zip(sizes, pair)]
        if pair is None or sizes != [array.numel() for array in pair]:
            pair = None  # freed before the larger one is made
            pair = Lent(*(torch.empty(n, dtype=torch.float32, device=device) for n in sizes))
        self._pairs[device] = pair
        return pair

    def lend_frames(self, device: torch.device, n_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (sent, received), of at least so many bytes, as lend() does."""
        if device not in self._frames or self._frames[device][0].numel() < n_bytes:
            self._frames.pop(device, None)
            sent, received = (torch.zeros(n_bytes, dtype=torch.uint8, device=device) for _ in range(2))
            self._frames[device] = sent, received
        return self._frames[device]

    def n_bytes(self, is_on_host: bool) -> int:
        """Returns the bytes that it holds in host memory, or on devices."""
        return sum(
            array.nbytes
            for arrays in (self._pairs, self._frames)
            for device, pair in arrays.items()
            if (device.type == "cpu") == is_on_host
            for array in pair
        )
