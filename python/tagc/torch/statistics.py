"""What one exchange of the whole model sent, took and kept, as a dict."""

from tagc import _library as lib


class Recorder:
    def __init__(self):
        self.last = {}
        self._now = None

    def add(self, unit, stats, n_elems, world_size):
        """stats: [(part, tagc_reducer_stats)] of one unit with n_elems values."""
        if self._now is None:
            self._now = _empty()
        now = self._now
        now["n_units"] += 1
        now["n_elems"] += n_elems
        for part, step in stats:
            for leg, sent in zip(lib.LEGS, step.n_bytes_sent):
                now["bytes_by_leg"][leg] += sent
            now["bytes_sent"] += sum(step.n_bytes_sent)
            now["bytes_received"] += sum(step.n_bytes_received)
            for phase, seconds in zip(lib.PHASES, step.time_s):
                now["time_s"][phase] += seconds
            now["exchange_s"] += step.total_s
            if part.kind == "compressed":
                now["_kept"] += step.n_kept
                now["n_compressed"] += part.n_real
            if step.nonfinite and unit not in now["nonfinite_units"]:
                now["nonfinite_units"].append(unit)
        now["world_size"] = world_size

    def add_gather(self, unit, n_bytes_sent, n_elems):
        """Parameters of one unit went to all ranks."""
        if self._now is None:
            self._now = _empty()
        self._now["bytes_by_leg"]["gather"] += n_bytes_sent
        self._now["bytes_sent"] += n_bytes_sent

    def drop(self):
        """The exchange under way failed."""
        self._now = None

    def end(self, step):
        now, self._now = self._now or _empty(), None
        kept = now.pop("_kept")
        now["step"] = step
        now["sparsity"] = 1 - kept / now["n_compressed"] if now["n_compressed"] else 0.0
        share = (now["world_size"] - 1) / now["world_size"]
        now["bits_per_param"] = 8 * now["bytes_sent"] / now["n_elems"] / share if now["n_elems"] and share else 0.0
        self.last = now
        return now


def _empty():
    return {"step": 0, "world_size": 1, "n_units": 0, "n_elems": 0, "n_compressed": 0, "bytes_sent": 0, "bytes_received": 0,
            "bytes_by_leg": dict.fromkeys(lib.LEGS, 0), "bits_per_param": 0.0, "exchange_s": 0.0,
            "time_s": dict.fromkeys(lib.PHASES, 0.0), "sparsity": 0.0, "nonfinite_units": [], "_kept": 0}
