"""Trains a small GPT on bytes with an optimizer that communicates by itself: no wrapper is around the model.

    torchrun --standalone --nproc-per-node 2 own_collectives.py
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        own_collectives.py --device cuda     # on both hosts; HOST is one of them
    torchrun --standalone --nproc-per-node 2 own_collectives.py --torch

Each rank updates a share of the parameters: Muon takes whole matrices, AdamW rows of the rest. step()
reduce-scatters all gradients, updates this rank's share of each as soon as its mean is there, and gathers the
new values. --torch uses torch's collectives. For tagc's only the object that makes the calls is another."""

import argparse
import functools
import pathlib

import torch
import torch.distributed as dist
from device import add_device, start_on
from gpt import GPT, Config

TEXT = pathlib.Path(__file__).resolve().parents[2] / "docs"


class TorchCollectives:
    """torch's calls as Collectives has them, with the mean of the ranks."""

    def reduce_scatter(self, output, input, key, op, async_op):
        return Mean(output, dist.reduce_scatter_tensor(output, input, async_op=async_op))

    def all_gather(self, output, input, key, async_op):
        return dist.all_gather_into_tensor(output, input, async_op=async_op)


class Mean:
    """gloo has sums only."""

    def __init__(self, tensor, work):
        self.tensor, self.work = tensor, work

    def wait(self):
        self.work.wait()
        self.tensor /= dist.get_world_size()


def orthogonal(x):
    """x (..., rows, columns), made orthogonal by steps of Newton and Schulz."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if is_tall else x


def muon(own, gradient, state, lr, beta=0.95):
    """own: (matrices, rows, columns)."""
    momentum = state.setdefault("momentum", torch.zeros_like(own)).lerp_(gradient, 1 - beta)
    step = orthogonal(gradient.lerp(momentum, beta))
    own -= 8 * lr * max(1.0, own.shape[-2] / own.shape[-1]) ** 0.5 * step


def adamw(own, gradient, state, lr, betas=(0.9, 0.95)):
    state["step"] = step = state.get("step", 0) + 1
    first = state.setdefault("first", torch.zeros_like(own)).lerp_(gradient, 1 - betas[0])
    second = state.setdefault("second", torch.zeros_like(own)).lerp_(gradient.square(), 1 - betas[1])
    own -= lr * (first / (1 - betas[0] ** step)) / ((second / (1 - betas[1] ** step)).sqrt() + 1e-8)


class Shared:
    """Parameters that the ranks share out among them: of a stack of matrices each updates some, of a single
    parameter some rows. A rank keeps its share in fp32, whatever the others get to know of it."""

    def __init__(self, comm, key, parameters, update):
        self.comm, self.key, self.parameters, self.update_by, self.state = comm, key, parameters, update, {}
        self.own = (
            self.whole([p.data for p in parameters]).chunk(dist.get_world_size())[dist.get_rank()].clone()
        )

    def whole(self, tensors):
        """One tensor whose first dimension the ranks divide, with zeros at its end if need be."""
        whole = torch.stack(tensors) if self.update_by is muon else tensors[0]
        return torch.cat([whole, whole.new_zeros(-len(whole) % dist.get_world_size(), *whole.shape[1:])])

    def reduce(self):
        self.input, self.gradient = self.whole([p.grad for p in self.parameters]), torch.empty_like(self.own)
        self.work = self.comm.reduce_scatter(
            self.gradient, self.input, key=self.key, op=dist.ReduceOp.AVG, async_op=True
        )

    def update(self, lr):
        self.work.wait()
        self.update_by(self.own, self.gradient, self.state, lr)
        self.full = torch.empty_like(self.input)
        self.work = self.comm.all_gather(self.full, self.own, key=self.key, async_op=True)

    def spread(self):
        self.work.wait()
        values = self.full if self.update_by is muon else [self.full[: len(self.parameters[0])]]
        for parameter, value in zip(self.parameters, values):
            parameter.data.copy_(value)
        self.input = self.gradient = self.full = None


class Optimizer:
    def __init__(self, model, comm):
        stacks, self.shared = {}, []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and ".h." in name:
                stacks.setdefault(tuple(parameter.shape), []).append(parameter)
            else:
                self.shared.append(Shared(comm, name, [parameter], adamw))
        self.shared += [Shared(comm, f"stack {shape}", stack, muon) for shape, stack in stacks.items()]

    @torch.no_grad()
    def step(self, lr):
        for phase in (Shared.reduce, functools.partial(Shared.update, lr=lr), Shared.spread):
            for shared in self.shared:
                phase(shared)


def batch_of(text, seed):
    """Returns sequences of 65 bytes, (8, 65)."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - 65, (8,), generator=generator, device="cpu")
    return torch.stack([text[start : start + 65] for start in starts])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add_device(parser)
    add("--torch", action="store_true", help="torch's collectives")
    add("--values", default="int4", help="format of gradients (int4)")
    add("--sparsity", type=float, default=0.0, help="share of a gradient that is sent later (0)")
    add("--parameters", help="format of parameters: bf16, lossless, int8, delta8, delta4 (whole values)")
    add("--steps", type=int, default=100, help="(100)")
    add("--n-embd", type=int, default=128, help="(128)")
    options = parser.parse_args(argv)
    start_on(options.device)
    rank, world_size, comm = dist.get_rank(), dist.get_world_size(), TorchCollectives()
    if not options.torch:
        from tagc.collectives import Collectives

        comm = Collectives(**{n: getattr(options, n) for n in ("values", "sparsity", "parameters")})
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted(TEXT.rglob("*.md")))))
    torch.manual_seed(1)
    model = GPT(Config(n_layer=3, n_embd=options.n_embd, n_positions=64))
    optimizer, losses = Optimizer(model, comm), []
    for step in range(options.steps):
        batch = batch_of(text, step * world_size + rank)
        model.zero_grad()
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step(3e-3 * min(1, (step + 1) / 20) * (1 - 0.9 * step / options.steps))
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(mean.item() / world_size)
        if rank == 0 and (step + 1) % 10 == 0:
            sent = "" if options.torch else f"  {comm.stats()['bits_per_param']:.3g} bits per gradient"
            print(f"step {step + 1:4}  loss {losses[-1]:.4f}{sent}", flush=True)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
