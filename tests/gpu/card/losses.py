"""GPT-2 of 124 M parameters on one GPU as several ranks: the loss of each step without compression, with one
line, and with the optimizer. Writes each as it comes, so that a file that ends early has what there was.

    python tests/gpu/card/losses.py --json losses.jsonl
    python tests/gpu/card/losses.py --device cpu     # tiny

Without compression one process computes the gradients of all ranks, whose mean is what DDP's would be. Else
each rank is a process under DDP; all share the card. Text: this repository, as bytes."""

import argparse
import json
import os
import pathlib
import sys
import time

import forks
import torch
from torch.nn.parallel import DistributedDataParallel

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "examples" / "pytorch"))
from gpt import GPT, Config
from train_gpt import TEXT, read_bytes

import tagc.torch

GPT2 = Config(n_vocab=50304, n_positions=1024, n_embd=768, n_head=12, n_layer=12)
TINY = Config(n_vocab=256, n_positions=32, n_embd=32, n_head=2, n_layer=1)
ARMS = ("dense", "one line", "optimizer")
WARM_UP = 20


def batch_of(text, args, rank, step):
    generator = torch.Generator().manual_seed(100003 * rank + step)
    starts = torch.randint(len(text) - args.length - 1, (args.batch_size,), generator=generator).tolist()
    rows = torch.stack([text[i : i + args.length + 1] for i in starts]).long().to(args.device)
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, args, batch):
    with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
        return model(*batch)


def say(args, arm, step, loss):
    line = {"arm": arm, "step": step, "loss": loss, "seconds": round(time.time() - args.began, 2)}
    with open(args.json, "a") as file:
        file.write(json.dumps(line) + "\n")
    if step % 10 == 0:
        print(f"{arm}: step {step}, loss {loss:.4f}, after {line['seconds']} s", flush=True)


def train(rank, args, arm):
    if args.device == "cuda":
        torch.cuda.set_device(0)
    torch.manual_seed(1)
    model = GPT(GPT2 if args.device == "cuda" else TINY).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.1)
    handle, text = None, read_bytes(TEXT)[0]
    if arm != "dense":
        model = DistributedDataParallel(model)
        handle = tagc.torch.compress(
            model, *([optimizer] if arm == "optimizer" else []), hosts=args.ranks, verbose=rank == 0
        )
    own = range(args.ranks) if handle is None else [rank]  # ranks whose gradients this process computes
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1, (step + 1) / WARM_UP)
        total = torch.zeros(1)
        for one in own:
            loss = loss_of(model, args, batch_of(text, args, one, step))
            (loss / len(own)).backward()
            total += loss.detach().float().cpu()
        if handle is not None:
            torch.distributed.all_reduce(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            say(args, arm, step, total.item() / args.ranks)
    if handle is not None:
        if rank == 0:
            print(f"{arm}: {handle.stats()['bytes_sent']} bytes sent in the last step")
        handle.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--ranks", type=int, default=4)
    add("--steps", type=int, help="of each arm (120; on a CPU 3)")
    add("--batch-size", type=int, default=8, help="rows of a rank")
    add("--rate", type=float, default=6e-4, help="learning rate")
    add("--json", default="losses.jsonl", metavar="FILE")
    add("--seconds", type=float, default=160, help="for all arms")
    args = parser.parse_args()
    args.began = time.time()
    args.steps = args.steps or (120 if args.device == "cuda" else 3)
    args.length = 1024 if args.device == "cuda" else 32
    pathlib.Path(args.json).unlink(missing_ok=True)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    wrong = []
    for arm in ARMS:
        left_s = args.seconds - (time.time() - args.began)
        problem = forks.run(train, 1 if arm == "dense" else args.ranks, max(left_s, 1), (), (args, arm))
        if problem:
            wrong.append(f"{arm}: {problem}")
    found = {}
    with open(args.json) as file:
        for line in map(json.loads, file):
            found.setdefault(line["arm"], []).append(line["loss"])
    for arm, losses in found.items():
        last = losses[-10:]
        mean = sum(last) / len(last)
        print(
            f"{arm}: {losses[0]:.4f} to {mean:.4f}, the mean of the last {len(last)} of {len(losses)} steps"
        )
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
