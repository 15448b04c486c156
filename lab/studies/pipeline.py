"""What it costs in loss to round what the stages of a pipeline send each other: a small GPT over bytes, in
one process, whose activations and gradients pass libtagc's codec where stages would meet.

    python lab/studies/pipeline.py --data FOLDER --stages 2 4 --seeds 1 2 --steps 300

All arms of a seed have the same weights and batches. A batch is rounded as by
`tagc.pipeline.compress_stage()`. Rows of it do not meet in a block, so that it does not matter how many
micro-batches there are. "dense, rows reversed" differs from "dense" in nothing but how sums round: so far
apart do equal runs end. In arms of bf16, tensors between stages are bf16 and all else is fp32. With
--results, a run that the file has is not made again."""

import argparse
import json
import math
import pathlib
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "pytorch")]

import train_gpt
from gpt import GPT, Config
from torch.nn import functional as F

DEFAULT = {"forward": "int8", "backward": "int4", "block": 64, "stochastic": True}
DENSE = {"forward": None, "backward": None}
ARMS = {
    "dense": DENSE,
    "dense, rows reversed": DENSE | {"reversed": True},
    "dense bf16": DENSE | {"bf16": True},
    "8/4": {},
    "8/8": {"backward": "int8"},
    "4/4": {"forward": "int4"},
    "8/4, nearest": {"stochastic": False},
    "8/4, blocks of 32": {"block": 32},
    "8/4 of bf16": {"bf16": True},
}


class Boundary(torch.autograd.Function):
    """What the next stage gets of x, and this one of its gradient."""

    @staticmethod
    def forward(ctx, x, ways, seed):
        ctx.ways, ctx.seed = ways, seed
        return through(ways["forward"], x, 0)

    @staticmethod
    def backward(ctx, gradient):
        return through(ctx.ways["backward"], gradient, ctx.seed), None, None


def through(codec, x, seed):
    message, back = torch.empty(codec.n_bytes(x.numel()), dtype=torch.uint8), torch.empty_like(x)
    codec.encode(x, message, seed)
    codec.decode(message, back)
    return back


def codecs_of(arm):
    from tagc.pipeline.blocks import Codec

    o = DEFAULT | ARMS[arm]
    if o["forward"] is None:
        return None
    return {
        "forward": Codec(o["forward"], o["block"], False),
        "backward": Codec(o["backward"], o["block"], o["stochastic"]),
    }


def is_cut(arm):
    """Returns whether it matters to this arm where stages meet."""
    return ARMS[arm].get("bf16", False) or "forward" not in ARMS[arm] or ARMS[arm]["forward"] is not None


def loss_of(model, args, arm, n_stages, ways, tokens, targets, step):
    parts, positions = model.transformer, torch.arange(tokens.shape[1])
    x = parts.wte(tokens) + parts.wpe(positions)
    per_stage = args.n_layer // n_stages
    for i, block in enumerate(parts.h, 1):
        x = block(x)
        if i % per_stage == 0 and i < args.n_layer:
            x = x.bfloat16() if ARMS[arm].get("bf16") else x
            x = Boundary.apply(x, ways, step << 8 | i) if ways is not None else x
            x = x.float()
    return F.cross_entropy(model.lm_head(parts.ln_f(x)).flatten(0, 1), targets.flatten())


def train(args, arm, n_stages, seed, texts):
    """Returns the validation loss of one run. Evaluation passes the same boundaries."""
    torch.manual_seed(seed)
    args.seed, ways = seed, codecs_of(arm)
    shape = {name: getattr(args, name) for name in ("n_layer", "n_embd", "n_head", "n_positions")}
    model = GPT(Config(tied=False, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(args.steps):
        falls = 0.1 + 0.45 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / args.warmup) * falls
        rows = train_gpt.batch(texts[0], args, step)
        rows = [part.flip(0) for part in rows] if ARMS[arm].get("reversed") else rows
        loss_of(model, args, arm, n_stages, ways, *rows, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        batches = (train_gpt.batch(texts[1], args, "evaluation", i) for i in range(args.eval_batches))
        losses = [loss_of(model, args, arm, n_stages, ways, *batch, 0).item() for batch in batches]
    return sum(losses) / len(losses)


def key_of(run):
    return tuple(sorted((name, value) for name, value in run.items() if name != "loss"))


def read_runs(path):
    """Returns the loss of each run that the file has."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return {key_of(run): run["loss"] for run in map(json.loads, lines)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--data", type=pathlib.Path, nargs="+", default=train_gpt.TEXT, help="folders of text"
    )
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS)
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    for name, default in dict(
        steps=300, n_layer=4, n_embd=64, n_head=4, n_positions=64, batch_size=16, eval_batches=40, warmup=40
    ).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"({default})")
    parser.add_argument("--lr", type=float, default=3e-3, help="(3e-3)")
    parser.add_argument("--results", type=pathlib.Path, help="file with a line per run, read and added to")
    args = parser.parse_args()
    for n in args.stages:
        if n < 1 or args.n_layer % n:
            parser.error(f"--stages {n}: must divide the {args.n_layer} layers")
    texts = train_gpt.read_bytes(args.data)
    shape = {name: value for name, value in vars(args).items() if isinstance(value, (int, float))}
    known = read_runs(args.results)
    for seed in args.seeds:
        for arm in args.arms:
            for n_stages in args.stages if is_cut(arm) else [1]:
                run = shape | {"arm": arm, "stages": n_stages, "seed": seed}
                begin, found = time.monotonic(), known.get(key_of(run))
                if found is None:
                    found = known[key_of(run)] = train(args, arm, n_stages, seed, texts)
                    if args.results:
                        with args.results.open("a") as file:
                            print(json.dumps(run | {"loss": found}), file=file)
                dense = known.get(key_of(run | {"arm": "dense", "stages": 1}))
                against = f" {100 * (found / dense - 1):+.2f} %" if dense else ""
                where = f", {n_stages} stages" if is_cut(arm) else ""
                seconds = time.monotonic() - begin
                print(f"seed {seed}, {arm}{where}: {found:.4f}{against} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
