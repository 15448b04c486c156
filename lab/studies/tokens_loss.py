"""What it costs in loss to round the tokens of experts between two hosts: a small GPT over bytes whose
feed-forwards are experts, half of them on each host.

    python lab/studies/tokens_loss.py --results rows.jsonl         # resumes where it stopped
    python lab/studies/tokens_loss.py --results rows.jsonl --table

Both hosts, with one rank each, are simulated in one process, where what crosses passes libtagc's codec. It
gets the bits that `Collectives.tokens()` gives two processes; lab/tests/test_studies.py compares them. Tokens
are bf16 in every arm, and all else is fp32. Batches and first weights of a seed are the same in all arms.
"bf16, nudged" differs from "bf16" by weights nudged by 1e-6 of their size: so far apart do equal runs end.
"fp8" has blocks of a row, 128 values at most, with a scale in fp32, and e4m3 both ways."""

import argparse
import json
import math
import os
import pathlib
import statistics
import struct
import sys
import time
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "examples" / "pytorch"), str(ROOT / "lab" / "studies")]
os.environ.setdefault("TAGC_LIBRARY", str(ROOT / "build" / "libtagc.so"))

import torch
from gpt import GPT, Config
from tokens_bench import fp8_rounded
from torch import nn
from torch.nn import functional as F

# what travels forward and backward
ARMS = {
    "bf16": ("whole", "whole"),
    "8/8": ("int8", "int8"),
    "8/4": ("int8", "int4"),
    "fp8": ("fp8", "fp8"),
    "bf16, nudged": ("whole", "whole"),
}
HOSTS, TOP = 2, 2
WHOLE = 4096  # elements: what is shorter is not rounded


# of XXH3's secret
SECRET = bytes.fromhex("b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f")
ONES = 2**64 - 1


def message_seed(*words):
    """As lib/exchange/all_to_all.c has it: XXH3 (64 bits, seed 0) of three uint64."""

    def mixed(data, secret):
        low, high = (a ^ b for a, b in zip(struct.unpack("<2Q", data), struct.unpack("<2Q", secret)))
        return low * high & ONES ^ low * high >> 64

    data = struct.pack("<3Q", *words)
    sum_ = len(data) * 0x9E3779B185EBCA87 + mixed(data[:16], SECRET[:16]) + mixed(data[8:], SECRET[16:])
    sum_ = sum_ & ONES
    sum_ = (sum_ ^ sum_ >> 37) * 0x165667919E3779F9 & ONES
    return sum_ ^ sum_ >> 32


class Wire:
    """What crosses between the simulated hosts."""

    def __init__(self, forward, backward):
        from tagc.pipeline.blocks import Codec

        self.formats, self.n_backward = (forward, backward), {}
        self._codecs = [
            Codec(values, 64, is_back) if values.startswith("int") else None
            for is_back, values in enumerate(self.formats)
        ]

    def move(self, rows, counts, key, is_backward):
        """rows (R, C): those of host 0 for each host, then those of host 1. counts (HOSTS, HOSTS): rows from
        one to another. Returns (R, C): those for host 0 from each, then those for host 1."""
        from tagc.collectives.keys import token_seed

        seed = 0
        if is_backward:
            self.n_backward[key] = n = self.n_backward.get(key, 0) + 1
            seed = token_seed(key, n, 0)
        parts = list(rows.contiguous().split(counts.flatten().tolist()))  # (from, to)
        for k, part in enumerate(parts):
            from_, to = divmod(k, HOSTS)
            if from_ == to or not len(part):
                continue
            codec = self._codecs[is_backward]
            if self.formats[is_backward] == "fp8":
                parts[k] = fp8_rounded(part)
            elif codec is not None and part.numel() >= WHOLE:
                message = torch.empty(codec.n_bytes(part.numel()), dtype=torch.uint8)
                codec.encode(part, message, message_seed(seed, from_, to) if is_backward else 0)
                codec.decode(message, part := torch.empty_like(part))
                parts[k] = part
        return torch.cat([parts[i * HOSTS + host] for host in range(HOSTS) for i in range(HOSTS)])


class Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, wire, counts, key):
        ctx.call = wire, counts, key
        return wire.move(rows, counts, key, False)

    @staticmethod
    def backward(ctx, gradient):
        wire, counts, key = ctx.call
        return wire.move(gradient, counts.T.contiguous(), key, True), None, None, None


class Experts(nn.Module):
    """In place of a block's feed-forward. A batch has the rows of host 0, then those of host 1."""

    def __init__(self, width, n_experts, hidden, key):
        super().__init__()
        self.router = nn.Linear(width, n_experts, bias=False)
        self.up = nn.Parameter(torch.randn(n_experts, width, hidden) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(n_experts, hidden, width) * 0.02 / math.sqrt(hidden / width))
        self.key, self.wire = key, None

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, 1)
        shares = self.router(x).softmax(-1)
        weights, chosen = shares.topk(TOP)
        weights = weights / weights.sum(-1, keepdim=True)
        n_experts = len(self.up)
        source = torch.arange(HOSTS).repeat_interleave(len(x) // HOSTS)
        slots = (source[:, None] * n_experts + chosen).flatten()
        order = slots.argsort(stable=True)  # by host, then by expert
        counts = slots.bincount(minlength=HOSTS * n_experts).view(HOSTS, n_experts)
        between = counts.view(HOSTS, HOSTS, -1).sum(-1)  # (from, to)
        came = Moved.apply(x[order // TOP].bfloat16(), self.wire, between, f"{self.key} dispatch").float()
        # (to, from, expert of the host): how tokens lie there
        pieces = came.split(counts.view(HOSTS, HOSTS, -1).transpose(0, 1).flatten().tolist())
        each = n_experts // HOSTS
        out = [None] * len(pieces)
        for e in range(n_experts):
            at = [(e // each * HOSTS + host) * each + e % each for host in range(HOSTS)]
            own = torch.cat([pieces[i] for i in at])
            own = F.gelu(own @ self.up[e]) @ self.down[e]
            for i, piece in zip(at, own.split([len(pieces[i]) for i in at])):
                out[i] = piece
        out = torch.cat(out).bfloat16()
        back = Moved.apply(out, self.wire, between.T.contiguous(), f"{self.key} combine").float()
        y = torch.zeros_like(x).index_add(0, order // TOP, back * weights.flatten()[order, None])
        # so that all experts are used: Switch Transformer's loss
        self.uneven = n_experts * (counts.sum(0) / counts.sum() * shares.mean(0)).sum()
        return y.view(shape)


def batch(text, rows, n, *key):
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    starts = torch.randint(len(text) - n - 1, (rows,), generator=generator)
    found = torch.stack([text[i : i + n + 1] for i in starts.tolist()]).long()
    return found[:, :-1], found[:, 1:]


def evaluate(model, text, args):
    """Forward tokens are rounded, as in training."""
    with torch.no_grad():
        losses = [model(*batch(text, 16, args.positions, "held out", i)) for i in range(args.eval_batches)]
    return (sum(losses) / len(losses)).item()


def train(args, arm, seed, texts):
    """Returns the held-out loss at each third of the run."""
    torch.manual_seed(seed)
    shape = {"n_layer": args.layers, "n_embd": args.width, "n_positions": args.positions}
    model = GPT(Config(tied=False, **shape))
    wire = Wire(*ARMS[arm])
    layers = []
    for i, block in enumerate(model.transformer.h):
        block.mlp = Experts(args.width, args.experts, 2 * args.width, f"layer {i}")
        block.mlp.wire = wire
        layers.append(block.mlp)
    if arm.endswith("nudged"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + 1e-6 * torch.randn(parameter.shape)
    options = {"lr": args.lr, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    losses = {}
    for step in range(args.steps):
        for group in optimizer.param_groups:
            falls = 0.05 + 0.475 * (1 + math.cos(math.pi * step / args.steps))
            group["lr"] = args.lr * min(1, (step + 1) / 100) * falls
        loss = model(*batch(texts[0], args.rows, args.positions, seed, step))
        (loss + 0.01 * sum(layer.uneven for layer in layers)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, args.steps // 3) == 0:
            losses[step + 1] = evaluate(model, texts[1], args)
    return losses


SIZES = {"steps": 3000, "layers": 2, "width": 64, "positions": 64, "rows": 8, "experts": 4,
         "eval_batches": 60}  # fmt: skip


def done(args):
    """Returns the rows of --results with these sizes, by arm and seed."""
    rows = map(json.loads, args.results.read_text().splitlines() if args.results.exists() else [])
    return {
        (row["arm"], row["seed"]): row
        for row in rows
        if all(row[name] == getattr(args, name) for name in SIZES)
    }


def table(rows):
    steps = sorted({int(n) for row in rows.values() for n in row["losses"]})
    print("| arm | seeds | " + " | ".join(f"after {n} steps" for n in steps) + " |")
    print("|---|---|" + "---:|" * len(steps))
    for arm in ARMS:
        seeds = sorted(seed for name, seed in rows if name == arm)
        cells = []
        for n in map(str, steps):
            own = [rows[arm, seed]["losses"][n] for seed in seeds]
            base = [rows["bf16", seed]["losses"][n] for seed in seeds if ("bf16", seed) in rows]
            if arm == "bf16":
                cells.append(", ".join(f"{loss:.4f}" for loss in own))
            elif len(base) == len(own) and own:
                gaps = [100 * (a / b - 1) for a, b in zip(own, base)]
                cells.append(
                    ", ".join(f"{gap:+.2f}" for gap in gaps) + f" %; mean {statistics.mean(gaps):+.2f} %"
                )
        if cells:
            print(f"| {arm} | {', '.join(map(str, seeds))} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    for name, default in SIZES.items():
        add(f"--{name.replace('_', '-')}", type=int, default=default, help=f"({default})")
    add("--lr", type=float, default=2e-3, help="(2e-3)")
    add("--results", type=pathlib.Path, required=True, help="file with a line per run, read and added to")
    add("--table", action="store_true", help="train nothing, print the table of --results")
    args = parser.parse_args()
    if not args.table:
        from torch_first_try import read_bytes

        torch.set_num_threads(1)
        text = torch.frombuffer(bytearray(read_bytes()), dtype=torch.uint8)
        texts = text[: -len(text) // 10], text[-len(text) // 10 :]
        for seed in args.seeds:
            for arm in args.arms:
                if (arm, seed) in done(args):
                    continue
                begin = time.monotonic()
                losses = train(args, arm, seed, texts)
                row = {name: getattr(args, name) for name in SIZES} | {"arm": arm, "seed": seed}
                row |= {"losses": losses, "seconds": time.monotonic() - begin, "torch": torch.__version__}
                with args.results.open("a") as file:
                    print(json.dumps(row), file=file, flush=True)
                print(f"seed {seed}, {arm}: {losses} ({row['seconds']:.0f} s)", flush=True)
    table(done(args))


if __name__ == "__main__":
    main()
