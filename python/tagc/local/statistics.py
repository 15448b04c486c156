"""Statistics of local steps as a dict of numbers; LocalSteps.stats() describes the keys."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from tagc import _library as lib
from tagc.local.fragments import Part


class Recorder:
    """Counts the exchanges of one handle."""

    def __init__(self, n_sites: int) -> None:
        self.n_sites = n_sites
        self.n_elems = self.n_steps = 0  # of the model, on this rank; since the handle was made
        self._n_bits = 0.0  # before the factor (W-1)/W
        self._last: dict[str, Any] = {}

    def last(self) -> dict[str, Any]:
        return copy.deepcopy(self._last)

    def add(
        self,
        stats: Iterable[tuple[Part, lib.ReducerStats]],
        n_bytes_control: int,
        counts: Mapping[str, float],
    ) -> dict[str, Any]:
        """Counts an exchange. stats: [(part, tagc_reducer_stats)] of one fragment. n_bytes_control: sent by
        its agreement. counts: further numbers."""
        now: dict[str, Any] = dict(counts) | {
            "world_size": self.n_sites,
            "bytes_by_leg": dict.fromkeys(lib.LEGS, 0),
            "bytes_received": n_bytes_control,
            "time_s": dict.fromkeys(lib.PHASES, 0.0),
            "n_compressed": 0,
            "exchange_s": 0.0,
        }
        now["bytes_by_leg"]["control"] = n_bytes_control
        n_sent = 0
        for part, one in stats:
            for leg, sent in zip(lib.LEGS, one.n_bytes_sent):
                now["bytes_by_leg"][leg] += sent
            now["bytes_received"] += sum(one.n_bytes_received)
            for phase, seconds in zip(lib.PHASES, one.time_s):
                now["time_s"][phase] += seconds
            now["exchange_s"] = max(now["exchange_s"], one.total_s)
            if part.kind == "compressed":
                n_sent += min(one.n_sent, part.n_real)
                now["n_compressed"] += part.n_real
        now["sparsity"] = 1 - n_sent / now["n_compressed"] if now["n_compressed"] else 0.0
        now["bytes_sent"] = sum(now["bytes_by_leg"].values())
        n_bits = 8 * now["bytes_sent"] * self.n_sites / (self.n_sites - 1) if self.n_sites > 1 else 0.0
        self._n_bits += n_bits
        now["bits_per_param"] = n_bits / now["n_elems"] if now["n_elems"] else 0.0
        n = self.n_elems * self.n_steps
        now["bits_per_param_and_step"] = self._n_bits / n if n else 0.0
        self._last = now
        return self.last()
