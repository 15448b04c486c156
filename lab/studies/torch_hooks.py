"""What PyTorch's hooks add to exchanges of many small units: the processor's time that Python takes for their
begins and ends. build/bench/bench_latency has the rest, what as many units take in C over ranks with latency.
At worst nothing of the two overlaps, and a step takes their sum.

    torchrun --nproc-per-node 8 lab/studies/torch_hooks.py --units 16

It is the time of threads, so that waiting for peers does not count, of the rank that takes longest."""

import argparse
import functools
import os
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
os.environ.setdefault("TAGC_LIBRARY", str(ROOT / "build" / "libtagc.so"))

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tagc.torch
from tagc.torch.exchange.runner import Host
from tagc.torch.passes import Passes

WIDTH = 256  # of a unit's matrix
spent_s, running = {}, []  # by what; what this thread is in, so that nothing counts twice


def timed(what, call):
    @functools.wraps(call)
    def run(*given, **named):
        if running:
            return call(*given, **named)
        running.append(what)
        start_s = time.thread_time()
        try:
            return call(*given, **named)
        finally:
            running.pop()
            spent_s[what] = spent_s.get(what, 0.0) + time.thread_time() - start_s

    return run


def timed_end(await_end):
    """Times what the handle's thread does: DDP's ends."""

    def run(self, work):
        def end():
            start_s = time.thread_time()
            try:
                return work()
            finally:
                spent_s["thread"] = spent_s.get("thread", 0.0) + time.thread_time() - start_s

        return await_end(self, end)

    return run


def wrapped(kind, n_units):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n_units)))
    if kind == "DDP":
        return DistributedDataParallel(model, bucket_cap_mb=4 * WIDTH * WIDTH / 2**20)
    for unit in model:
        fully_shard(unit)
    return fully_shard(model)


def measure(kind, args):
    """Returns milliseconds of a step by what takes them, and the number of units that were exchanged."""
    model = wrapped(kind, args.units)
    rows, x = [], torch.randn(1, WIDTH)
    with tagc.torch.compress(
        model, layers="all", hosts=dist.get_world_size(), verbose=False, rules={"*": "compressed"}
    ) as handle:
        for number in range(-3, args.steps):  # DDP makes its buckets anew
            loss = model(x).square().mean()
            dist.barrier()
            spent_s.clear()
            loss.backward()
            model.zero_grad()
            rows += [dict(spent_s)] if number >= 0 else []
        n_units = handle.stats()["n_units"]
    return {what: 1e3 * statistics.median(row.get(what, 0.0) for row in rows) for what in rows[0]}, n_units


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--units", type=int, default=16)
    parser.add_argument("--steps", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Passes.begin = timed("begins", Passes.begin)
    Passes.exchange = timed("begins", Passes.exchange)
    Passes.end_backward = timed("end of the pass", Passes.end_backward)
    Host.await_end = timed_end(Host.await_end)
    for kind in ("FSDP2", "DDP"):
        own, n_units = measure(kind, args)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        most = max(everyone, key=lambda row: sum(row.values()))
        if dist.get_rank() == 0:
            parts = ", ".join(f"{what} {spent:.2f}" for what, spent in most.items())
            print(
                f"{kind}, {n_units} units, {dist.get_world_size()} ranks: {sum(most.values()):.2f} ms of a "
                f"processor in a step ({parts})",
                flush=True,
            )
    dist.barrier()
    os._exit(0)  # gloo's threads, of torch 2.13, end some exits by an abort


if __name__ == "__main__":
    main()
