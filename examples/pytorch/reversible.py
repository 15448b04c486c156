"""Trains reversible blocks with experts: a backward pass by hand, for which no activations are kept.

    torchrun --standalone --nproc-per-node 2 reversible.py [--ddp] [--torch]
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        reversible.py --device cuda     # on both hosts; HOST is one of them

A block maps (x1, x2) to y1 = x1 + attention(x2) and y2 = x2 + experts(y1). Its backward pass gets x1 and x2
back from y1 and y2, computes the block again, and calls backward() inside, which adds to the gradients of its
parameters. FSDP2 and DDP exchange these as any others. With --in-turn the experts of one block at a time are
trained; the others are frozen, have no gradient, and are not exchanged. --torch leaves tagc out."""

import argparse

import torch
import torch.distributed as dist
from device import add_device, start_on
from gpt import Attention, Config
from patterns import batches
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Experts(nn.Module):
    """Each token goes to one of them."""

    def __init__(self, n_embd, n_experts=4):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(n_embd), nn.Linear(n_embd, n_experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(n_experts, n_embd, 2 * n_embd) * n_embd**-0.5)
        self.w2 = nn.Parameter(torch.randn(n_experts, 2 * n_embd, n_embd) * n_embd**-0.5)

    def forward(self, x):
        tokens = self.norm(x).flatten(0, -2)
        gates, chosen = self.router(tokens).softmax(-1).max(-1)
        y = torch.zeros_like(tokens)
        for i, (w1, w2) in enumerate(zip(self.w1, self.w2)):
            own = (chosen == i).nonzero()[:, 0]  # maybe none: then gradients are zero, and there
            y = y.index_add(0, own, gates[own, None] * (F.gelu(tokens[own] @ w1) @ w2))
        return y.view_as(x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x1, x2, block, chain):
        ctx.block, ctx.chain = block, chain
        y1 = x1 + block.attention(x2)
        y2 = x2 + block.experts(y1)
        chain[:] = y1.detach(), y2.detach()  # those of the last block are left
        return y1, y2

    @staticmethod
    def backward(ctx, d1, d2):
        block, (y1, y2) = ctx.block, ctx.chain
        with torch.enable_grad():
            y1.requires_grad_()
            made = block.experts(y1)
            made.backward(d2)
            x2 = (y2 - made).detach().requires_grad_()
            d1 = d1 + y1.grad
            made = block.attention(x2)
            made.backward(d1)
            x1 = (y1 - made).detach()
        ctx.chain[:] = x1, x2.detach()
        return d1, d2 + x2.grad, None, None


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(config.n_embd), Attention(config))
        self.experts = Experts(config.n_embd)

    def forward(self, x1, x2, chain):
        return Reversed.apply(x1, x2, self, chain)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.n_vocab, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm, self.head = nn.LayerNorm(config.n_embd), nn.Linear(config.n_embd, config.n_vocab)

    def forward(self, tokens, targets):
        x1 = x2 = self.embedding(tokens)
        chain = []  # what the next block to go backward gets its inputs from
        for block in self.blocks:
            x1, x2 = block(x1, x2, chain)
        return F.cross_entropy(self.head(self.norm(x1 + x2)).flatten(0, 1), targets.flatten())


def main(argv=None, **options):
    """Returns this rank's losses. options: of compress()."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel instead of fully_shard()")
    parser.add_argument("--torch", action="store_true", help="without tagc")
    parser.add_argument(
        "--in-turn", type=int, metavar="N", help="FSDP2: train the experts of another block every N steps"
    )
    parser.add_argument("--steps", type=int, default=20)
    add_device(parser)
    arguments = parser.parse_args(argv)
    if arguments.in_turn and arguments.ddp:
        parser.error("--in-turn is given with --ddp, which waits for the gradients that it saw at first")
    start_on(arguments.device)
    torch.manual_seed(0)
    model = Model(Config(n_vocab=64, n_embd=64, n_head=2, n_layer=3))
    if arguments.ddp:
        model = DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    if not arguments.torch:
        import tagc.torch as tagc

        tagc.compress(model, optimizer, **options)
    for step, (x, y) in enumerate(batches(arguments.steps)):
        for number, block in enumerate(model.blocks if arguments.in_turn else ()):
            block.experts.requires_grad_(number == step // arguments.in_turn % len(model.blocks))
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} steps", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
