"""Inputs of a report, small enough to work out by hand, and real ones that are kept as files."""

import json
import pathlib

LEGS = ("index", "values", "leftover", "result", "gather", "control")
SEEDS = pathlib.Path(__file__).parent / "report_files"
SEED_FILES = [str(SEEDS / name) for name in ("metrics.jsonl", "bench.json", "lab.json", "trace.json")]


def legs(**given):
    return {leg: given.get(leg, 0) for leg in LEGS}


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def head(exchange="dense", seed=1, **more):
    return {"type": "run", "tagc": "0.1.0", "options": {"exchange": exchange, "seed": str(seed),
                                                        "out": f"x{seed}"}, "world_size": 2,
            "n_params": 1000, "n_compressed": 500} | more  # fmt: skip


def step(number, wall_s=1.0, loss=4, **more):
    return {"type": "step", "step": number, "loss": loss, "wall_s": wall_s, "compute_s": 0.5,
            "wait_gather_s": 0.1, "wait_reduce_s": 0.2,
            "optimizer_s": 0.05, "bits_sent_per_param": legs(index=1, values=2, gather=8)} | more  # fmt: skip


def statistics(number, **more):
    """What PyTorch's on_step gets, in short."""
    return {"step": number, "world_size": 2, "n_elems": 8, "bytes_by_leg": {"values": 4}} | more


def log(path, *lines):
    """Writes a file of PyTorch's. lines: objects, or text as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))


def evaluation(number, loss):
    return {"type": "eval", "step": number, "val_loss": loss}


def run(folder, lines):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def a_run(folder, exchange, seed, wall_s, loss):
    """Twelve steps, the first two slow."""
    steps = [step(i, 9 if i <= 2 else wall_s + 0.001 * i) for i in range(1, 13)]
    return run(folder, [head(exchange, seed), *steps, evaluation(6, 7), evaluation(12, loss)])


def spread(middle, least=None, most=None, n=3):
    return {
        "median": middle,
        "min": middle if least is None else least,
        "max": middle if most is None else most,
        "n": n,
    }


def bench(arms, **more):
    return {
        "type": "bench",
        "format": 1,
        "world_size": 2,
        "n_hosts": 1,
        "model": {"name": "tiny"},
        "link": None,
        "arms": arms,
    } | more


# name, exchange, losses of two seeds, bits of gradients, of gathers. Gaps in percent: paper +3, cheap +1,
# dear +2 (cheap beats it in both), fine 0 at more bits, free -1 and +1: 0.
QUALITY = (("dense", "dense", (2, 4), 32, 64), ("paper", "sketch", (2.06, 4.12), 5, 64), ("cheap", "direct",
    (2.02, 4.04), 0.5, 4),
           ("dear", "direct", (2.04, 4.08), 0.6, 4), ("fine", "direct", (2, 4), 2, 4), ("free", "direct",
               (1.98, 4.04), 1, 64))  # fmt: skip


def quality():
    """A result of the lab with forks of a trained state."""
    runs = [{"label": name, "seed": seed, "world_size": 2, "n_params": 1000, "n_compressed": 500,
             "options": {"exchange": exchange},
             "bits_per_param": legs(values=bits, gather=gather), "evals": [{"step": 100, "val_loss": 5},
                 {"step": 110, "val_loss": losses[seed]}]}
            for name, exchange, losses, bits, gather in QUALITY for seed in (0, 1)]  # fmt: skip
    return {"type": "lab", "format": 1, "experiment": "quality-x", "title": "t", "origin": {},
            "settings": {"table": "quality"}, "cases": [
        {"hosts": 1, "ranks_per_host": 2, "link": None, "interface": None, "runs": runs}]}  # fmt: skip


THREADS = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
           for tid, name in enumerate(("compute", "codec", "comm", "comm 2"))]  # fmt: skip


def event(name, tid, start_us, end_us, unit):
    return {"ph": "X", "name": f"{name} {unit}".strip(), "pid": 0, "tid": tid, "ts": start_us,
            "dur": end_us - start_us,
            "args": {"n_bytes": 1, "unit": unit}}  # fmt: skip


def trace(events):
    return {"traceEvents": THREADS + events}
