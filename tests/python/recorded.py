"""A short run under DDP that is recorded."""

import json

import torch
from models import Even, batch_of, loss_of

N_STEPS = 6


def train(rank, world_size, folder, watches_after, n_steps=N_STEPS, resumes=False):
    """Trains under DDP and records. Returns this rank's losses and statistics."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import tagc.torch as tagc

    torch.manual_seed(0)
    wrapped = DistributedDataParallel(Even())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    losses, seen = [], []
    raw = open(folder / f"raw-{rank}.jsonl", "w")

    def on_step(stats):
        seen.append(stats)
        raw.write(json.dumps(stats) + "\n")

    handle = tagc.compress(wrapped, optimizer, verbose=False, on_step=on_step, rules={"*": "compressed"})
    handle.record(folder / "runs" / "here.jsonl")
    if resumes:
        handle.load(folder / "saved")
    for step in range(n_steps):
        optimizer.zero_grad()
        loss = loss_of(wrapped, batch_of(rank, step))
        if not watches_after:
            handle.watch(loss)
        loss.backward()
        if watches_after:
            handle.watch(loss)
        optimizer.step()
        losses.append(loss.item())
    (level,) = set(handle.state.schedule.levels().values())
    handle.save(folder / "saved")
    raw.close()
    handle.close()
    dist.barrier()
    return losses, seen, level


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
