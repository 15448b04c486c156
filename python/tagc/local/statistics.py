"""Statistics of local steps as a dict of numbers; LocalSteps.stats() describes the keys."""

from __future__ import annotations

import copy
from typing import Any

from tagc import _library as lib
from tagc.local.fragments import Stats


class Recorder:
    """Counts the exchanges of one handle, which exchanges n_elems parameters of the model on this rank."""

    def __init__(self, n_elems: int) -> None:
        self._n_elems = n_elems
        self._n_bits = 0.0  # before the factor (W-1)/W
        self._last: dict[str, Any] = {}

    def last(self) -> dict[str, Any]:
        return copy.deepcopy(self._last)

    def add(
        self, parts: Stats, n_sites: int, n_steps: int, n_bytes_control: int, **counts: float
    ) -> dict[str, Any]:
        """Counts an exchange of one fragment. n_steps: since the handle was made. n_bytes_control: sent by
        its agreement. counts: further numbers."""
        n_bytes, time_s = dict.fromkeys(lib.LEGS, 0), dict.fromkeys(lib.PHASES, 0.0)
        n_bytes["control"] = n_received = n_bytes_control
        n_sent = n_compressed = 0
        for part, stats in parts:
            for leg, sent in zip(lib.LEGS, stats.n_bytes_sent):
                n_bytes[leg] += sent
            n_received += sum(stats.n_bytes_received)
            for phase, seconds in zip(lib.PHASES, stats.time_s):
                time_s[phase] += seconds
            if part.kind == "compressed":
                n_sent += min(stats.n_sent, part.n_real)
                n_compressed += part.n_real
        total = sum(n_bytes.values())
        n_bits = 8 * total * n_sites / (n_sites - 1) if n_sites > 1 else 0.0
        self._n_bits += n_bits
        n_exchanged, n_stepped = counts["n_elems"], self._n_elems * n_steps
        self._last = {
            **counts,
            "world_size": n_sites,
            "n_compressed": n_compressed,
            "sparsity": 1 - n_sent / n_compressed if n_compressed else 0.0,
            "bytes_sent": total,
            "bytes_received": n_received,
            "bytes_by_leg": n_bytes,
            "bits_per_param": n_bits / n_exchanged if n_exchanged else 0.0,
            "bits_per_param_and_step": self._n_bits / n_stepped if n_stepped else 0.0,
            "exchange_s": max((stats.total_s for _, stats in parts), default=0.0),
            "time_s": time_s,
        }
        return self.last()
