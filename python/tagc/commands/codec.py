"""What compressing costs on this processor: two ranks as threads exchange through libtagc."""

from __future__ import annotations

import ctypes
import math
import random
import statistics
import threading

from tagc import _library as lib

N_ELEMS = 1 << 20
N_RUNS = 5
_N_RANDOM = 1 << 14  # values that repeat: Python makes few in a second


def _gradient(seed: int) -> ctypes.Array[ctypes.c_float]:
    """Returns values with heavy tails, like gradients."""
    source = random.Random(seed)
    some = [source.gauss(0, 1) * math.exp(source.gauss(0, 1)) for _ in range(_N_RANDOM)]
    block = (ctypes.c_float * _N_RANDOM)(*some)
    values = (ctypes.c_float * N_ELEMS)()
    for at in range(0, N_ELEMS, _N_RANDOM):
        ctypes.memmove(ctypes.byref(values, 4 * at), block, 4 * _N_RANDOM)
    return values


class _Rank(threading.Thread):
    def __init__(self, group: ctypes.c_void_p, rank: int, values: str, sparsity: float) -> None:
        super().__init__(daemon=True)
        self._group, self._rank, self._values, self._sparsity = group, rank, values, sparsity
        self.samples: list[float] = []  # seconds of all phases of a step, without waiting
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self._exchange()
        except Exception as failure:
            self.failure = failure

    def _exchange(self) -> None:
        comm, reducer = ctypes.c_void_p(), ctypes.c_void_p()
        lib.call("tagc_comm_create_local", self._group, self._rank, None, ctypes.byref(comm))
        try:
            options = lib.initialised(lib.ReducerOptions, "tagc_reducer_options_init")
            options.n_elems, options.exchange = N_ELEMS, lib.EXCHANGES["direct"]
            options.format, options.sparsity = lib.FORMATS[self._values], self._sparsity
            gradient, output = _gradient(self._rank), (ctypes.c_float * (N_ELEMS // 2))()
            lib.call("tagc_reducer_create", comm, ctypes.byref(options), ctypes.byref(reducer))
            for _ in range(1 + N_RUNS):
                stats = lib.initialised(lib.ReducerStats, "tagc_reducer_stats_init")
                lib.call("tagc_reducer_begin", reducer, gradient, output)
                lib.call("tagc_reducer_end", reducer, ctypes.byref(stats))
                self.samples.append(
                    sum(stats.time_s[i] for i, name in enumerate(lib.PHASES) if name != "wait")
                )
        finally:
            if reducer:
                lib.load().tagc_reducer_destroy(reducer)
            lib.load().tagc_comm_destroy(comm)


def measure(values: str = "int2", sparsity: float = 0.95) -> float:
    """Returns nanoseconds per element of selecting, encoding and decoding on one thread, of the slower rank.
    Takes about a second."""
    group = ctypes.c_void_p()
    lib.call("tagc_local_group_create", 2, ctypes.byref(group))
    ranks = [_Rank(group, rank, values, sparsity) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    lib.load().tagc_local_group_destroy(group)
    for rank in ranks:
        if rank.failure is not None:
            raise rank.failure
    return 1e9 * max(statistics.median(rank.samples[1:]) for rank in ranks) / N_ELEMS
