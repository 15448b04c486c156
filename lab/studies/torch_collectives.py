"""What Collectives cost in loss where a loop communicates by itself, on the model, text and rate of
torch_first_try.py. Three loops: Muon and AdamW of examples/pytorch/own_collectives.py, which reduce-scatter
gradients and gather parameters; AdamW behind an all-reduce of each gradient; and torch.optim.Muon and AdamW
behind one.

    torchrun --standalone --nproc-per-node 2 lab/studies/torch_collectives.py --seeds 1 2

Rows that the JSON file has are kept and not run again, so a broken run goes on where it stopped."""

import argparse
import math
import pathlib
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import torch_first_try as first_try  # puts the examples on the path, too
import torch_optimizers

import gpt  # isort: skip
import own_collectives  # isort: skip

MUONS = ("muon", "torch-muon")
# What Collectives gets; None: torch's calls. "nudge": as in torch_first_try.py. "key": False: calls have
# none. "first": that many steps are in 8 bits. "muon": whether only Muon's matrices go through Collectives,
# or all but these. "turned": Muon's matrices go through Turned, with new bases each so many steps. "loops":
# those in which the arm means something.
ARMS = {
    "torch's": {"options": None},
    "torch's, nudged": {"options": None, "nudge": 1e-6},
    "every value in 4 bits": {"options": {}},
    "Muon's matrices in 4 bits": {"options": {}, "muon": True, "loops": MUONS},
    "all but Muon's matrices in 4 bits": {"options": {}, "muon": False, "loops": MUONS},
    "every value in 4 bits, matrices turned": {"options": {}, "turned": 20, "loops": MUONS},
    "Muon's matrices in 4 bits, turned": {"options": {}, "muon": True, "turned": 20, "loops": MUONS},
    "the same, parameters as 4-bit changes": {"options": {"parameters": "delta4"}, "loops": ["muon"]},
    "a tenth of the values in 4 bits": {"options": {"sparsity": 0.9}},
    "by the schedule": {"options": {"gentle": True}, "loops": ["adamw"]},
    "every value in 8 bits": {"options": {"values": "int8"}},
    "the first 60 steps in 8 bits, then 4": {"options": {}, "first": 60},
    "every value in 4 bits, without keys": {"options": {}, "key": False},
    "every value in 8 bits, without keys": {"options": {"values": "int8"}, "key": False},
}
LOOPS = (*MUONS, "adamw")
SETUP = first_try.COMMON | {"lr": 3e-3, "accumulate": 1}


class Keyless:
    """Collectives whose calls have no key."""

    def __init__(self, comm):
        self.comm = comm

    def reduce_scatter(self, output, input, key, op, async_op):
        return self.comm.reduce_scatter(output, input, op=op, async_op=async_op)

    def all_gather(self, output, input, key, async_op):
        return self.comm.all_gather(output, input, async_op=async_op)

    def all_reduce(self, tensor, key, op, async_op):
        return self.comm.all_reduce(tensor, op=op, async_op=async_op)


def is_muons(key):
    """Whether that is the key of Muon's matrices: of a stack in one loop, a parameter's in the other."""
    return key.startswith("stack") or ".h." in key and key.endswith("weight") and ".ln_" not in key


class Torch(own_collectives.TorchCollectives):
    def all_reduce(self, tensor, key, op, async_op):
        return own_collectives.Mean(tensor, dist.all_reduce(tensor, async_op=async_op))


class Parted:
    """Some keys by Collectives, the others by torch's calls."""

    def __init__(self, comm, is_muon):
        self.comm, self.is_muon, self.torch = comm, is_muon, Torch()

    def calls(self, key):
        return self.comm if is_muons(key) == self.is_muon else self.torch

    def reduce_scatter(self, output, input, key, op, async_op):
        return self.calls(key).reduce_scatter(output, input, key=key, op=op, async_op=async_op)

    def all_gather(self, output, input, key, async_op):
        return self.calls(key).all_gather(output, input, key=key, async_op=async_op)

    def all_reduce(self, tensor, key, op, async_op):
        return self.calls(key).all_reduce(tensor, key=key, op=op, async_op=async_op)


class Matrices:
    """Muon's matrices by Turned, the rest as `calls` does it."""

    def __init__(self, comm, calls, every):
        from tagc.collectives import Turned

        self.turned, self.calls, self.all_gather = Turned(comm, every), calls, calls.all_gather

    def reduce_scatter(self, output, input, key, op, async_op):
        calls = self.turned if is_muons(key) else self.calls
        return calls.reduce_scatter(output, input, key=key, op=op, async_op=async_op)

    def all_reduce(self, tensor, key, op, async_op):
        calls = self.turned if is_muons(key) else self.calls
        return calls.all_reduce(tensor, key=key, op=op, async_op=async_op)


class Averaged:
    """Optimizers of torch behind an all-reduce of each gradient."""

    def __init__(self, model, comm, optimizers):
        self.parameters, self.comm, self.optimizers = dict(model.named_parameters()), comm, optimizers
        self.rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]

    def step(self, lr):
        works = [
            self.comm.all_reduce(p.grad, key=name, op=dist.ReduceOp.AVG, async_op=True)
            for name, p in self.parameters.items()
        ]
        for work in works:
            work.wait()
        for optimizer, rates in zip(self.optimizers, self.rates):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * lr / SETUP["lr"]
            optimizer.step()


def made(loop, arm, model):
    """Returns (Collectives or None, what has step(lr))."""
    from tagc.collectives import Collectives

    options, comm, optimizer = arm["options"], None, None
    if loop == "adamw":
        optimizer = [torch.optim.AdamW(model.parameters(), SETUP["lr"], betas=SETUP["betas"])]
    if loop == "torch-muon":
        optimizer = torch_optimizers.muon(model)
    if options is not None:
        if options.get("gentle"):
            options = options | {"names": model, "optimizer": optimizer}
        comm = Collectives(**options)
    calls = Torch() if comm is None else comm if arm.get("key", True) else Keyless(comm)
    if "muon" in arm:
        calls = Parted(comm, arm["muon"])
    if "turned" in arm:
        calls = Matrices(comm, calls, arm["turned"])
    if optimizer is not None:
        return comm, Averaged(model, calls, optimizer)
    return comm, own_collectives.Optimizer(model, calls)


def go_on(arm, comm, optimizer):
    """Ends the first steps, which were in 8 bits. What they rounded off is lost."""
    from tagc.collectives import Collectives

    comm.close()
    comm = Collectives(**arm["options"])
    for one in getattr(optimizer, "shared", [optimizer]):
        one.comm = comm
    return comm


def run(loop, arm, seed, steps, tokens, n_vocab):
    setup = SETUP | {"steps": steps}
    torch.manual_seed(seed)
    model = gpt.GPT(gpt.Config(n_vocab, setup["block"], setup["width"], 4, setup["layers"]))
    with torch.no_grad():
        for parameter in model.parameters() if arm.get("nudge") else ():
            parameter.mul_(1 + arm["nudge"] * torch.randn_like(parameter))
    n_first = arm.get("first", 0)
    comm, optimizer = made(loop, arm | {"options": {"values": "int8"}} if n_first else arm, model)
    train, held_out = tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    bits, losses, begin = [], {}, time.perf_counter()
    for step in range(steps):
        if n_first and step == n_first:
            comm = go_on(arm, comm, optimizer)
        model.zero_grad()
        model(*first_try.batch(train, setup, generator)).backward()
        optimizer.step(first_try.learning_rate(step, setup))
        if comm is not None and arm.get("key", True):  # which end its steps
            bits.append(comm.stats()["bits_per_param"])
        if (step + 1) % 100 == 0 or step + 1 == steps:
            losses[step + 1] = first_try.evaluate(model, held_out, setup)
    if comm is not None:
        if not bits:  # one step of all
            bits.append(comm.stats()["bits_per_param"])
        comm.close()
    bits = bits or [32.0 * (1 + (loop != "muon"))]
    return {
        "losses": losses,
        "loss": losses[steps],
        "bits": sum(bits) / len(bits),
        "last_bits": bits[-1],
        "seconds": time.perf_counter() - begin,
    }


def table(rows):
    lines = []
    for loop, seed, steps in sorted({(row["loop"], row["seed"], row["steps"]) for row in rows}):
        own = [row for row in rows if (row["loop"], row["seed"], row["steps"]) == (loop, seed, steps)]
        dense = next((row["loss"] for row in own if row["arm"] == "torch's"), math.nan)
        lines += [
            f"{loop:10} {seed}  {row['arm']:38} {row['loss']:.4f} {100 * (row['loss'] / dense - 1):+7.2f} %  "
            f"{row['bits']:6.2f} bits, at the end {row['last_bits']:.2f}  {row['seconds']:.0f} s"
            for row in own
        ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("collectives.json"))
    parser.add_argument("--loops", nargs="+", default=LOOPS, choices=LOOPS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    tokens, n_vocab = first_try.read_tokens("bytes")
    rows = first_try.read_rows(args.json)
    wanted = [(seed, loop, name) for seed in args.seeds for loop in args.loops for name in args.arms]
    for seed, loop, name in wanted:
        key = {"loop": loop, "arm": name, "seed": seed, "steps": args.steps}
        if loop not in ARMS[name].get("loops", LOOPS) or any(key.items() <= row.items() for row in rows):
            continue
        rows.append(key | run(loop, ARMS[name], seed, args.steps, tokens, n_vocab))
        if dist.get_rank() == 0:
            first_try.write_rows(args.json, rows)
            last = [
                row for row in rows if (row["loop"], row["seed"], row["steps"]) == (loop, seed, args.steps)
            ]
            print(table(last).splitlines()[-1], flush=True)
    if dist.get_rank() == 0:
        print(table(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
