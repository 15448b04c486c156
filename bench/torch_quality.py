"""Validation loss of a small GPT under FSDP2, dense against tagc: every arm over the same seeds of weights and data.

    scripts/corpus.sh data/corpus
    torchrun --standalone --nproc-per-node 2 bench/torch_quality.py --data data/corpus --json results/torch-quality.json"""

import argparse
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "pytorch"))

import train_gpt
from gpt import GPT, Config

# What compress() gets; "one_lr" says that Adam keeps its first moment everywhere, as a loop has it that changes nothing else.
ARMS = {
    "dense": None,
    "0.9": {"sparsity": 0.9},
    "0.95, the default": {},
    "0.95, Adam unchanged": {"adam": True},
    "0.9875": {"sparsity": 0.9875},
    "0.9875, Adam unchanged": {"sparsity": 0.9875, "adam": True},
    "0.95 and delta4 parameters": {"parameters": "delta4"},
    "the paper's sketch": {"exchange": "sketch", "sparsity": 0.9875, "adam": True},
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, nargs="+", default=train_gpt.TEXT, help="folders of text")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sparsity-warmup", type=int, default=100)
    parser.add_argument("--json", type=pathlib.Path)
    for name, default in dict(steps=400, n_layer=4, n_embd=128, n_positions=128, batch_size=8, eval_batches=40).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"({default})")
    args = parser.parse_args()
    args.n_head, args.warmup, args.lr, args.min_lr, args.weight_decay, args.clip = 4, 20, 2e-3, 2e-4, 0.1, 1.0
    return args


def train(args, arm, seed, texts):
    """Validation loss after args.steps, mean bits per parameter and exchange, seconds."""
    import tagc.torch as tagc

    args.seed, args.wrap, args.bf16 = seed, "fsdp2", False
    torch.manual_seed(seed)
    model = GPT(Config(n_positions=args.n_positions, n_embd=args.n_embd, n_head=args.n_head, n_layer=args.n_layer))
    model = train_gpt.wrap(model, args)
    options = dict(ARMS[arm] or {})
    keeps_adam = options.pop("adam", False)
    bits, handle = [], None
    if ARMS[arm] is not None:
        handle = tagc.compress(model, verbose=False, sparsity_warmup=args.sparsity_warmup,
                               on_step=lambda stats: bits.append(stats["bits_per_param"]), **options)
    optimizer = train_gpt.optimizer_of(model, None if keeps_adam else handle, args)
    begin = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = train_gpt.learning_rate(step, args)
        model(*train_gpt.batch(texts[0], args, step, dist.get_rank())).backward()
        train_gpt.clip(model, args.clip)
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        losses = [model(*train_gpt.batch(texts[1], args, "eval", i, dist.get_rank())) for i in range(args.eval_batches)]
    if handle:
        handle.close()
    return train_gpt.mean_over_ranks(sum(losses) / len(losses)), statistics.mean(bits) if bits else 32.0, seconds


def table(runs):
    """Markdown: mean over seeds, gaps to dense seed by seed."""
    lines = ["| arm | validation loss | above dense, mean (each seed) | bits per parameter and exchange |", "|---|---|---|---|"]
    dense = {run["seed"]: run["loss"] for run in runs if run["arm"] == "dense"}
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = [run for run in runs if run["arm"] == arm]
        gaps = [100 * (run["loss"] / dense[run["seed"]] - 1) for run in own if run["seed"] in dense]
        each = ", ".join(f"{gap:+.2f}" for gap in gaps)
        gap = "" if arm == "dense" or not gaps else f"{statistics.mean(gaps):+.2f} % ({each})"
        if arm == "dense" and len(own) > 1:
            losses = [run["loss"] for run in own]
            gap = f"spread of seeds {100 * (max(losses) - min(losses)) / statistics.mean(losses):.2f} %"
        lines.append(f"| {arm} | {statistics.mean(run['loss'] for run in own):.4f} | {gap} | "
                     f"{statistics.mean(run['bits'] for run in own):.2f} |")
    return "\n".join(lines)


def main():
    args = arguments()
    dist.init_process_group("gloo")
    texts = train_gpt.read_bytes(args.data)
    runs = []
    for seed in range(1, args.seeds + 1):
        for arm in args.arms:
            loss, bits, seconds = train(args, arm, seed, texts)
            runs.append({"arm": arm, "seed": seed, "loss": loss, "bits": bits, "seconds": seconds})
            if dist.get_rank() == 0:
                print(f"seed {seed}  {arm:28} loss {loss:.4f}  {bits:6.2f} bits  {seconds:.0f} s", flush=True)
    if dist.get_rank() == 0:
        print(table(runs))
        if args.json:
            commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
            result = {"kind": "torch-quality", "command": " ".join(["torchrun", "--nproc-per-node", str(dist.get_world_size()),
                                                                    *sys.argv]),
                      "commit": commit.stdout.strip(), "torch": torch.__version__, "machine": platform.machine(),
                      "world_size": dist.get_world_size(), "steps": args.steps, "runs": runs}
            part = args.json.with_suffix(".part")
            part.write_text(json.dumps(result, indent=1) + "\n")
            part.replace(args.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
