"""Rank 0 trains a small GPT on bytes; all other ranks write text with its bf16 weights, which they get after
every step, exactly.

    torchrun --standalone --nproc-per-node 3 weight_sync.py
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        weight_sync.py --device cuda     # on both hosts; HOST is one of them

As in reinforcement learning, the rate is small, so that a step leaves most bf16 weights as they were. Before,
rank 0 trains for some steps at a usual rate. What is written does not become part of the training here."""

import argparse
import pathlib

import torch
import torch.distributed as dist
from device import add_device, start_on
from gpt import GPT, Config

from tagc.weights import WeightSync

TEXT = pathlib.Path(__file__).resolve().parents[2] / "docs"


def train(model, optimizer, text, n_steps, random):
    for _ in range(n_steps):
        starts = torch.randint(len(text) - 65, (8,), generator=random, device="cpu")
        batch = torch.stack([text[start : start + 65] for start in starts])
        optimizer.zero_grad()
        model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()


@torch.no_grad()
def write(model, prompt, n_bytes, random):
    """Returns the prompt, and bytes drawn from the model's probabilities."""
    tokens = torch.tensor(list(prompt.encode()))
    for _ in range(n_bytes):
        seen = tokens[-model.config.n_positions :]
        x = model.transformer.wte(seen) + model.transformer.wpe(torch.arange(len(seen), device=seen.device))
        for block in model.transformer.h:
            x = block(x[None] if x.ndim == 2 else x)
        logits = model.lm_head(model.transformer.ln_f(x))[0, -1].float().cpu()
        drawn = logits.softmax(0).multinomial(1, generator=random)
        tokens = torch.cat([tokens, drawn.to(tokens.device)])
    return bytes(tokens.tolist()).decode(errors="replace")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add_device(parser)
    add("--steps", type=int, default=10, help="that are sent (10)")
    add("--before", type=int, default=200, help="steps before the first version, at a rate of 2e-3 (200)")
    add("--lr", type=float, default=1e-5, help="of the steps that are sent (1e-5)")
    options = parser.parse_args(argv)
    start_on(options.device)
    rank, random = dist.get_rank(), torch.Generator().manual_seed(dist.get_rank())
    model = GPT(Config(n_layer=3, n_positions=64))
    if rank == 0:
        text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted(TEXT.rglob("*.md")))))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        train(model, optimizer, text, options.before, random)
        optimizer.param_groups[0]["lr"] = options.lr
    else:
        model = model.bfloat16()
    sync = WeightSync(model, dist.group.WORLD, source=0, dtype=torch.bfloat16)
    for _ in range(options.steps + 1):
        if rank == 0:
            sync.send()
            last = sync.last
            print(
                f"version {last.version:3}  {last.n_bytes:8} bytes  {last.n_changes / last.n_elems:6.1%} of "
                f"the weights, {last.bits_per_change:.3g} bits each{' (all)' if last.is_whole else ''}",
                flush=True,
            )
            train(model, optimizer, text, sync.version <= options.steps, random)
        else:
            sync.receive()
            written = write(model, "A rank ", 24, random)
            if sync.version > options.steps:
                print(f"rank {rank} writes with version {sync.version}: {written!r}", flush=True)
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
