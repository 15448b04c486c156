"""Trains a small GPT on bytes as SimpleFSDP does: compiled whole, with its collectives in the graph.

    torchrun --standalone --nproc-per-node 2 compiled.py
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        compiled.py --device cuda     # on both hosts; HOST is one of them
    torchrun --standalone --nproc-per-node 2 compiled.py --torch --backend eager

Blocks are checkpointed selectively: products of matrices and of attention are kept, all else is computed
again."""

import argparse
import functools
import pathlib

import torch
import torch.distributed as dist
from device import add_device, start_on
from gpt import GPT, Config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tagc.torch as tagc
from tagc.compiled import data_parallel

TEXT = pathlib.Path(__file__).resolve().parents[2] / "docs"
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def policy(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(block):
    """The block, whose forward pass is checkpointed."""
    forward = block.forward
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False, context_fn=contexts)
    return block


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add_device(parser)
    add("--torch", action="store_true", help="torch's collectives")
    add("--backend", default="inductor", help="of torch.compile (inductor)")
    add("--values", help="format of gradients (as compress() has it)")
    add("--sparsity", type=float, help="share of a gradient that is sent later (as compress() has it)")
    add("--parameters", help="format of parameters: bf16, lossless, int8, delta8, delta4 (whole values)")
    add("--steps", type=int, default=100, help="(100)")
    add("--n-embd", type=int, default=128, help="(128)")
    options = parser.parse_args(argv)
    start_on(options.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted(TEXT.rglob("*.md")))))
    torch.manual_seed(1)
    model = data_parallel(GPT(Config(n_layer=3, n_embd=options.n_embd, n_positions=64, tied=False)))
    for block in model.transformer["h"]:
        checkpointed(block)
    optimizer, handle, losses = torch.optim.AdamW(model.parameters(), 1e-3), None, []
    if not options.torch:
        given = {name: getattr(options, name) for name in ("values", "sparsity", "parameters")}
        handle = tagc.compress(model, optimizer, **given)
    compiled = torch.compile(model, fullgraph=True, backend=options.backend)
    for step in range(options.steps):
        generator = torch.Generator().manual_seed(step * world_size + rank)
        starts = torch.randint(len(text) - 65, (8,), generator=generator, device="cpu")
        batch = torch.stack([text[start : start + 65] for start in starts])
        optimizer.zero_grad()
        loss = compiled(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(mean.item() / world_size)
        if rank == 0 and (step + 1) % 10 == 0:
            sent = "" if handle is None else f"  {handle.stats()['bits_per_param']:.3g} bits per gradient"
            print(f"step {step + 1:4}  loss {losses[-1]:.4f}{sent}", flush=True)
    if handle is not None:
        handle.close()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
