"""Validation loss of a small GPT under FSDP2, dense against tagc: all arms go on from one trained state, and
see the data in the same orders. Runs from random weights differ by more between seeds than most arms do from
each other.

    scripts/corpus.sh data/corpus
    torchrun --standalone --nproc-per-node 2 lab/studies/torch_quality.py --data data/corpus \\
        --json lab/results/torch-quality.json"""

import argparse
import copy
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "pytorch"), str(ROOT / "lab" / "hosts")]

import results
import torchquality
import train_gpt
from gpt import GPT, Config

# What compress() gets; "adam": Adam keeps its first moment everywhere, as in a loop that changes nothing
# else.
ARMS = {
    "dense": None,
    "0.9": {"sparsity": 0.9},
    "0.95, the default": {"sparsity": 0.95},  # from the first step
    "0.95, Adam unchanged": {"sparsity": 0.95, "adam": True},
    "0.9875": {"sparsity": 0.9875},
    "0.9875, Adam unchanged": {"sparsity": 0.9875, "adam": True},
    "0.95 and delta4 parameters": {"sparsity": 0.95, "parameters": "delta4"},
    "gently": {},
    "the paper's sketch": {"exchange": "sketch", "sparsity": 0.9875, "adam": True},
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=pathlib.Path, nargs="+", default=train_gpt.TEXT, help="folders of text"
    )
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS)
    )
    parser.add_argument("--orders", type=int, default=3, help="of the data (3)")
    parser.add_argument("--json", type=pathlib.Path)
    for name, default in dict(
        trunk=300, steps=150, n_layer=3, n_embd=96, n_positions=96, batch_size=8, eval_batches=40
    ).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"({default})")
    args = parser.parse_args()
    args.n_head, args.warmup, args.lr, args.weight_decay, args.clip = 4, 20, 2e-3, 0.1, 1.0
    args.seed, args.wrap, args.bf16 = 1, "fsdp2", False
    return args


def wrapped(args):
    torch.manual_seed(1)
    model = GPT(
        Config(
            n_positions=args.n_positions,
            n_embd=args.n_embd,
            n_head=args.n_head,
            n_layer=args.n_layer,
            tied=False,
        )
    )
    return train_gpt.wrap(model, args)


def steps(args, model, optimizer, text, order, n, falls):
    """falls: the learning rate does; in the trunk it rises and stays."""
    for step in range(n):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - 0.95 * step / n if falls else min(1, (step + 1) / args.warmup))
        model(*train_gpt.batch(text, args, order, step, dist.get_rank())).backward()
        train_gpt.clip(model, args.clip)
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(model, handle, args):
    """handle: whose groups have a short first moment from the first step on; None: a plain AdamW."""
    options = dict(lr=args.lr, weight_decay=args.weight_decay)
    groups = model.parameters() if handle is None else handle.param_groups(betas=(0.9, 0.95), **options)
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), **options)


def trunk_of(args, text):
    """Weights, and Adam's moments by parameter, that all arms go on from."""
    model = wrapped(args)
    optimizer = optimizer_of(model, None, args)
    steps(args, model, optimizer, text, 0, args.trunk, False)
    return copy.deepcopy(model.state_dict()), {
        name: optimizer.state[p] for name, p in model.named_parameters()
    }


def fork(args, arm, order, trunk, texts):
    """Validation loss after args.steps, mean bits per element of gradients and parameters, seconds."""
    import tagc.torch as tagc

    weights, moments = trunk
    model = wrapped(args)
    model.load_state_dict(weights)
    options = dict(ARMS[arm] or {})
    keeps_adam = options.pop("adam", False)
    bits, handle = [], None
    if ARMS[arm] is not None:
        handle = tagc.compress(
            model,
            verbose=False,
            on_step=lambda stats: bits.append((stats["bits_per_param"], stats["gather_bits"])),
            **tagc.grouped(options),
        )
    optimizer = optimizer_of(model, None if keeps_adam else handle, args)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = copy.deepcopy(moments[name])
    begin = time.perf_counter()
    steps(args, model, optimizer, texts[0], order, args.steps, True)
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        losses = [
            model(*train_gpt.batch(texts[1], args, "eval", i, dist.get_rank()))
            for i in range(args.eval_batches)
        ]
    if handle:
        handle.close()
    gradients, gathers = (statistics.mean(column) for column in zip(*bits)) if bits else (32.0, 0.0)
    return {
        "loss": train_gpt.mean_over_ranks(sum(losses) / len(losses)),
        "bits": gradients,
        "gather_bits": gathers or None,
        "seconds": seconds,
    }


def main():
    args = arguments()
    dist.init_process_group("gloo")
    texts = train_gpt.read_bytes(args.data)
    runs = []
    n_params = sum(parameter.numel() for parameter in wrapped(args).parameters())
    trunk = trunk_of(args, texts[0])
    for order in range(1, args.orders + 1):
        for arm in args.arms:
            run = {"arm": arm, "order": order} | fork(args, arm, order, trunk, texts)
            runs.append(run)
            if dist.get_rank() == 0:
                print(
                    (
                        f"order {order}  {arm:28} loss {run['loss']:.4f}  {run['bits']:6.2f} bits  "
                        f"{run['seconds']:.0f} s"
                    ),
                    flush=True,
                )
    if dist.get_rank() == 0:
        commit = subprocess.run(
            ["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True
        )
        result = {
            "type": "torch-quality",
            "format": 1,
            "command": sys.argv,
            "commit": commit.stdout.strip(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "world_size": dist.get_world_size(),
            "n_params": n_params,
            "trunk": args.trunk,
            "steps": args.steps,
            "runs": runs,
        }
        print(torchquality.markdown(result))
        if args.json:
            results.write(args.json, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
