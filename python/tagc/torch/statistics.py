"""Statistics of one exchange of the whole model as a dict of numbers; Compressed.stats() describes the
keys."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tagc import _library as lib
from tagc.torch.exchange.comm import Comm
from tagc.torch.exchange.model import PartStats
from tagc.torch.exchange.model_exchanges import Reduction
from tagc.torch.schedule.schedule import EVERY


class Recorder:
    """Counts everything between two calls of end() for one step."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}
        self._now: dict[str, Any] | None = None
        self._n_exchanges, self._sum_of_bits = 0, 0.0
        self._lock = threading.Lock()

    @property
    def last(self) -> dict[str, Any]:
        return copy.deepcopy(self._last)

    def add(
        self, call: Reduction, stats: PartStats, exchange_s: float, gentle: Callable[[str], object]
    ) -> None:
        """Counts an exchange. stats: [(part, tagc_reducer_stats)] of its unit, of which each rank of a host
        exchanges as many values. gentle(kind): whether that class has a gentle start."""
        comm, per_host = call.comm, call.levels.per_host
        n_bytes_control = comm.agreement_bytes if call.agrees_first else 0
        n_bytes = call.n_bytes // per_host  # that this rank exchanges
        n_bytes_dense = (1 + call.is_all_reduce) * n_bytes * (comm.world_size - 1) // comm.world_size
        with self._lock:
            now = self._open()
            now["world_size"] = comm.world_size * per_host
            now["ranks_per_host"] = per_host
            now["bytes_within"] += call.n_within
            now["n_units"] += 1
            now["n_elems"] += call.n_elems
            now["exchange_s"] += exchange_s
            self._agreed(now, n_bytes_control, call.agree_s)
            now["_gradient_bytes"] += n_bytes_control
            now["_host_bytes"] += n_bytes_control * per_host
            now["dense_bytes"] += n_bytes_dense
            now["_share"] = (comm.world_size - 1) / comm.world_size
            for part, step in stats:
                for leg, sent in zip(lib.LEGS, step.n_bytes_sent):
                    now["bytes_by_leg"][leg] += sent
                now["bytes_sent"] += sum(step.n_bytes_sent)
                now["_gradient_bytes"] += sum(step.n_bytes_sent)
                now["_host_bytes"] += sum(step.n_bytes_sent) * per_host
                now["bytes_received"] += sum(step.n_bytes_received)
                for phase, seconds in zip(lib.PHASES, step.time_s):
                    now["time_s"][phase] += seconds
                n_real = part.n_real * per_host
                now["n_gentle"] += n_real if part.level <= EVERY and gentle(part.kind) else 0
                if part.kind == "compressed":
                    now["_sent"] += min(step.n_sent * per_host, n_real)
                    now["n_compressed"] += n_real
                now["n_saturated"] += step.n_saturated
                if step.nonfinite:
                    now["nonfinite_units"][call.unit.name] = 1

    def add_gather(
        self,
        comm: Comm,
        n_elems: int,
        n_bytes: tuple[int, int],
        seconds: tuple[float, float],
        per_host: int,
        n_bytes_within: int,
    ) -> None:
        """Counts a gather between hosts of n_elems parameters of one unit: each of the per_host ranks of a
        host gathers as many, and sends n_bytes_within to the others of its host. n_bytes: sent and received.
        seconds: of the gather, and of the agreement before it."""
        (n_bytes_sent, n_bytes_received), (gather_s, agree_s) = n_bytes, seconds
        with self._lock:
            now = self._open()
            now["_gather_share"] = (comm.world_size - 1) / comm.world_size
            now["bytes_by_leg"]["gather"] += n_bytes_sent
            now["bytes_sent"] += n_bytes_sent
            now["bytes_received"] += n_bytes_received
            now["bytes_within"] += n_bytes_within
            now["_gather_bytes"] += n_bytes_sent * per_host
            now["n_gathered"] += n_elems * per_host
            now["gather_s"] += gather_s
            self._agreed(now, comm.agreement_bytes, agree_s)

    @staticmethod
    def _agreed(now: dict[str, Any], n_bytes: int, seconds: float) -> None:
        now["bytes_by_leg"]["control"] += n_bytes
        now["bytes_sent"] += n_bytes
        now["bytes_received"] += n_bytes
        now["agree_s"] += seconds

    def add_torchs(
        self, n_bytes: int, n_elems: int, n_ranks: int, exchange_s: float, is_within: bool
    ) -> None:
        """Counts an exchange of one unit that was left to torch. n_bytes: that it sends; is_within: within
        the host."""
        with self._lock:
            now = self._open()
            now["world_size"] = n_ranks
            now["n_units"] += 1
            now["n_elems"] += n_elems
            now["exchange_s"] += exchange_s
            if is_within:
                now["ranks_per_host"] = n_ranks
                now["bytes_within"] += n_bytes
                return
            now["dense_bytes"] += n_bytes
            now["_gradient_bytes"] += n_bytes
            now["_host_bytes"] += n_bytes
            now["_share"] = (n_ranks - 1) / n_ranks
            now["bytes_by_leg"]["values"] += n_bytes
            now["bytes_sent"] += n_bytes
            now["bytes_received"] += n_bytes

    def add_control(self, n_bytes: int, is_of_gradients: bool = False) -> None:
        """Counts n_bytes by which all ranks decide together, sent and received. is_of_gradients: whether they
        count as those of an exchange."""
        with self._lock:
            now = self._open()
            self._agreed(now, n_bytes, 0.0)
            if is_of_gradients:
                now["_gradient_bytes"] += n_bytes
                now["_host_bytes"] += n_bytes

    def drop(self) -> None:
        """Drops the exchange under way, which failed."""
        with self._lock:
            self._now = None

    def so_far(self, step: int) -> dict[str, Any]:
        """Returns the statistics of the step under way; between two steps, of the last one."""
        with self._lock:
            now = copy.deepcopy(self._now)
            return copy.deepcopy(self._last) if now is None else self._closed(now, step, 1.0)[0]

    def end(self, step: int, loss_scale: float) -> dict[str, Any]:
        with self._lock:
            now, self._now = self._open(), None
            self._last, self._n_exchanges, self._sum_of_bits = self._closed(now, step, loss_scale)
            return copy.deepcopy(self._last)

    def _closed(self, now: dict[str, Any], step: int, loss_scale: float) -> tuple[dict[str, Any], int, float]:
        """Returns (what users get of a step, exchanges with it, the sum of their bits)."""
        n_exchanges, sum_of_bits = self._n_exchanges, self._sum_of_bits
        hidden = {key: now.pop(key) for key in list(now) if key.startswith("_")}
        now["step"], now["loss_scale"] = step, loss_scale
        share = hidden["_share"]
        sent, by_host = hidden["_gradient_bytes"], hidden["_host_bytes"]
        if now["n_compressed"]:
            now["sparsity"] = 1 - hidden["_sent"] / now["n_compressed"]
        if now["n_elems"] and share:
            now["bits_per_param"] = 8 * by_host / now["n_elems"] / share
            now["ratio"] = now["dense_bytes"] / sent
            n_exchanges += 1
            sum_of_bits += now["bits_per_param"]
        now["mean_bits_per_param"] = sum_of_bits / max(1, n_exchanges)
        if now["n_gathered"]:
            now["gather_bits"] = 8 * hidden["_gather_bytes"] / now["n_gathered"] / hidden["_gather_share"]
        now["n_nonfinite"] = len(now["nonfinite_units"])
        return now, n_exchanges, sum_of_bits

    def _open(self) -> dict[str, Any]:
        if self._now is None:
            self._now = {
                "step": 0, "loss_scale": 1.0, "world_size": 1, "n_units": 0, "n_elems": 0, "n_compressed": 0,
                "n_gentle": 0,
                "sparsity": 0.0, "mean_bits_per_param": 0.0,
                "bytes_sent": 0, "bytes_received": 0, "bytes_by_leg": dict.fromkeys(lib.LEGS, 0),
                "ranks_per_host": 1, "bytes_within": 0, "bits_per_param": 0.0,
                "dense_bytes": 0, "ratio": 0.0, "exchange_s": 0.0, "agree_s": 0.0, "gather_s": 0.0,
                "time_s": dict.fromkeys(lib.PHASES, 0.0), "n_gathered": 0, "gather_bits": 0.0,
                "n_nonfinite": 0, "n_saturated": 0,
                "nonfinite_units": {}, "_sent": 0, "_gradient_bytes": 0, "_host_bytes": 0, "_gather_bytes": 0,
                "_share": 0.0, "_gather_share": 1.0,
            }  # fmt: skip
        return self._now


def beside_dense(stats: Mapping[str, Any]) -> str:
    """Returns what a dense exchange sends per element of the gradients: of an all-reduce in both halves."""
    return f"dense: {stats['bits_per_param'] * stats['ratio']:.3g}"


def flat(stats: Mapping[str, Any], prefix: str = "tagc/") -> dict[str, float]:
    """Returns {prefix and name: number} of the result of Compressed.stats(), for TensorBoard, Weights &
    Biases and others. Each number of an inner dict gets a name of its own, such as tagc/time_s/encode.
    nonfinite_units, whose keys change, is left out."""
    numbers: dict[str, float] = {}
    for key, value in stats.items():
        if isinstance(value, dict):
            if key != "nonfinite_units":
                numbers |= flat(value, f"{prefix}{key}/")
        else:
            numbers[f"{prefix}{key}"] = value
    return numbers
