"""Trains a small GPT on bytes with Muon and AdamW in the ways in which loops with Muon communicate. Gradients
travel in 4 bits, those of Muon's matrices in the basis of their directions.

    torchrun --standalone --nproc-per-node 2 muon_loops.py --loop torch
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        muon_loops.py --device cuda --loop torch    # on both hosts; HOST is one of them
    torchrun --standalone --nproc-per-node 2 muon_loops.py --loop torch --torch     # by torch's calls

--loop torch     torch.optim.Muon. All ranks get the means of all gradients, and make the same update. Each
                 gradient is on its way as soon as backward has it, as under DDP.
       jordan    as Keller Jordan's Muon: the same means, but of W matrices each rank updates one, and gives
                 the new weights to the others.
       dion      as microsoft/dion's Muon with a process group as distributed_mesh: the same means; ranks
                 share out the matrices of a shape, make them orthogonal, and give each other the updates.
       nanochat  as nanochat's Muon: by reduce_scatter_tensor(grad_chunk, stacked_grads) each rank has
                 the means of its own matrices alone, and gives the new weights to the others. It is the
                 optimizer of own_collectives.py.
"""

import argparse
import pathlib

import own_collectives
import torch
import torch.distributed as dist
from device import add_device, start_on
from gpt import GPT, Config

TEXT = pathlib.Path(__file__).resolve().parents[2] / "docs"
LR, LR_ADAMW, DECAY, BETA = 0.02, 2e-3, 0.1, 0.95


class TorchCalls(own_collectives.TorchCollectives):
    def all_reduce(self, tensor, key, op, async_op):
        return own_collectives.Mean(tensor, dist.all_reduce(tensor, async_op=async_op))


class TagcCalls:
    """Matrices by Turned, all else by Collectives."""

    def __init__(self, model, is_muons, **options):
        from tagc.collectives import Collectives, Turned

        self.comm, self.is_muons = Collectives(names=model, **options), is_muons
        self.turned, self.all_gather = Turned(self.comm), self.comm.all_gather

    def calls(self, key):
        return self.turned if self.is_muons(key) else self.comm

    def all_reduce(self, tensor, key, op, async_op):
        return self.calls(key).all_reduce(tensor, key=key, op=op, async_op=async_op)

    def reduce_scatter(self, output, input, key, op, async_op):
        return self.calls(key).reduce_scatter(output, input, key=key, op=op, async_op=async_op)


class Means:
    """Gives all ranks the means of gradients while backward goes on. Backward has gradients in the same order
    on all ranks."""

    def __init__(self, parameters, calls):
        self.calls, self.works = calls, []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.begin)

    def begin(self, p):
        self.works.append(self.calls.all_reduce(p.grad, key=p, op=dist.ReduceOp.AVG, async_op=True))

    def wait(self):
        for work in self.works:
            work.wait()
        self.works.clear()


class TorchLoop:
    def __init__(self, matrices, others, calls):
        self.matrices, self.means, self.rank = matrices, Means([*matrices, *others], calls), dist.get_rank()
        self.states = {p: {} for p in matrices}
        self.adamw = torch.optim.AdamW(others, lr=LR_ADAMW, betas=(0.9, 0.99), weight_decay=DECAY)
        self.optimizers = [self.adamw, *self.others()]
        self.rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]

    def others(self):
        return [torch.optim.Muon(self.matrices, lr=LR, weight_decay=DECAY)]

    def step(self, factor):
        self.means.wait()
        for optimizer, rate in zip(self.optimizers, self.rates):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
        with torch.no_grad():
            for alike in self.stacks():
                self.update(alike, LR * factor)

    # ---- of the loops that share out Muon's work ----

    def stacks(self):
        return []

    def by_shape(self):
        shapes = {}
        for p in self.matrices:
            shapes.setdefault(p.shape, []).append(p)
        return list(shapes.values())

    def direction(self, p):
        """Momentum with Nesterov's step."""
        momentum = self.states[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 1 - BETA)
        return p.grad.lerp(momentum, BETA)

    def move(self, p, orthogonal, rate):
        p.mul_(1 - rate * DECAY).sub_(rate * max(1.0, p.shape[0] / p.shape[1]) ** 0.5 * orthogonal)


class JordansLoop(TorchLoop):
    def others(self):
        return []

    def stacks(self):
        n_ranks = dist.get_world_size()
        return [alike[i : i + n_ranks] for alike in self.by_shape() for i in range(0, len(alike), n_ranks)]

    def update(self, alike, rate):
        """alike: as many matrices as there are ranks, or fewer."""
        padded = [*alike, *[torch.empty_like(alike[0])] * (dist.get_world_size() - len(alike))]
        if self.rank < len(alike):
            own = alike[self.rank]
            self.move(own, own_collectives.orthogonal(self.direction(own)), rate)
        new = [torch.empty_like(p) for p in padded]
        dist.all_gather(new, padded[self.rank].detach())
        for p, value in zip(alike, new):
            p.copy_(value)


class DionsLoop(TorchLoop):
    def others(self):
        return []

    def stacks(self):
        return self.by_shape()

    def update(self, alike, rate):
        stack, n_ranks = torch.stack([self.direction(p) for p in alike]), dist.get_world_size()
        stack = torch.cat([stack, stack.new_zeros(-len(stack) % n_ranks, *stack.shape[1:])])
        own = own_collectives.orthogonal(stack.chunk(n_ranks)[self.rank]).contiguous()
        dist.all_gather_into_tensor(stack, own)
        for p, orthogonal in zip(alike, stack):
            self.move(p, orthogonal, rate)


LOOPS = {"torch": TorchLoop, "jordan": JordansLoop, "dion": DionsLoop}


def made(loop, model, is_torch, options):
    """Returns (the optimizer, what makes its calls)."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name]
    numbers = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in numbers]

    def is_muons(key):
        return key.startswith("stack") if isinstance(key, str) else id(key) in numbers

    calls = TorchCalls() if is_torch else TagcCalls(model, is_muons, **options)
    if loop == "nanochat":
        return own_collectives.Optimizer(model, calls), calls
    return LOOPS[loop](matrices, others, calls), calls


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_device(parser)
    add("--loop", choices=[*LOOPS, "nanochat"], default="torch", help="(torch)")
    add("--torch", action="store_true", help="torch's collectives")
    add("--values", default="int4", help="format of gradients (int4)")
    add("--steps", type=int, default=100, help="(100)")
    add("--n-embd", type=int, default=128, help="(128)")
    args = parser.parse_args(argv)
    start_on(args.device)
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted(TEXT.rglob("*.md")))))
    torch.manual_seed(1)
    model = GPT(Config(n_layer=3, n_embd=args.n_embd, n_positions=64))
    optimizer, calls = made(args.loop, model, args.torch, {"values": args.values})
    rank, world_size, losses = dist.get_rank(), dist.get_world_size(), []
    for step in range(args.steps):
        batch = own_collectives.batch_of(text, step * world_size + rank)
        model.zero_grad()
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        factor = min(1, (step + 1) / 20) * (1 - 0.9 * step / args.steps)
        optimizer.step(3e-3 * factor if args.loop == "nanochat" else factor)
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(mean.item() / world_size)
        if rank == 0 and (step + 1) % 10 == 0:
            bits = "" if args.torch else f"  {calls.comm.stats()['bits_per_param']:.3g} bits per gradient"
            print(f"step {step + 1:4}  loss {losses[-1]:.4f}{bits}", flush=True)
    if not args.torch:
        calls.comm.close()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
