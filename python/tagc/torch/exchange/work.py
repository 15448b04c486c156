"""Memory that only an exchange under way needs: gradients packed by class, and sums before they are unpacked.
The units of a runner exchange one after the other, so they share it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Want = tuple[torch.device, int]  # fp32 values there


class Work:
    """Of one runner: an array per device, as large as the largest exchange so far needed."""

    def __init__(self) -> None:
        self._arrays: dict[torch.device, torch.Tensor] = {}

    def lend(self, wanted: Sequence[Want]) -> list[torch.Tensor]:
        """Returns an fp32 array for each (device, elements), undefined, until the next call."""
        begins, ends = [], dict[torch.device, int]()
        for device, n_elems in wanted:
            begins.append(ends.get(device, 0))
            ends[device] = begins[-1] + -(-n_elems // 16) * 16  # 64 bytes
        for device, end in ends.items():
            if device not in self._arrays or self._arrays[device].numel() < end:
                self._arrays.pop(device, None)  # freed before the larger one is made
                self._arrays[device] = torch.empty(end, dtype=torch.float32, device=device)
        return [self._arrays[device][at : at + n] for (device, n), at in zip(wanted, begins)]

    def n_bytes(self, is_on_host: bool) -> int:
        """Returns the bytes that it holds in host memory, or on devices."""
        return sum(
            array.nbytes for array in self._arrays.values() if (array.device.type == "cpu") == is_on_host
        )
