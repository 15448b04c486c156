"""What a first try of tagc costs: a small GPT from random weights, trained by the loop that most people start
from, dense and with one line added. Several models, texts and loops; the same data in the same order for all
arms of a set-up.

    torchrun --standalone --nproc-per-node 2 lab/studies/torch_first_try.py --json first-try.json

Rows that the JSON file has are kept and not run again, so a broken run goes on where it stopped."""

import argparse
import json
import math
import pathlib
import sys
import sysconfig
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "pytorch"), str(ROOT / "python"), str(ROOT / "lab" / "studies")]

import gpt
from torch_arms import bf16_hook

# "compress": what compress() gets, None: dense. "optimizer": "plain" (the loop's own), "groups"
# (handle.param_groups), "given" (compress(model, optimizer)). "nudge": initial weights differ by that share
# of their size. "powersgd": rank of torch's hook, for set-ups under DDP. "wire": "bf16", of dense gradients.
ARMS = {
    "dense": {"compress": None},
    "dense, nudged": {"compress": None, "nudge": 1e-6},  # how far runs scatter that compute the same
    "dense, beta1 0.5": {"compress": None, "beta1": 0.5},  # from the first step on
    # what compress(model, optimizer) comes to where values are selected, from the first step on
    "dense, tagc's betas": {"compress": None, "beta1": 0.5, "beta2": 0.999},
    "dense, bf16": {"compress": None, "wire": "bf16"},
    "dense, no first moment": {
        "compress": {"sparsity": 0, "values": "fp32", "mild": "fp32", "mild_sparsity": 0},
        "optimizer": "groups",
    },
    "one line": {"compress": {}},
    "two lines": {"compress": {}, "optimizer": "groups"},  # param_groups
    "with the optimizer": {"compress": {}, "optimizer": "given"},
    # torch's hook, after as many dense steps as its documentation advises: a tenth of the run
    "PowerSGD, rank 1": {"compress": None, "powersgd": 1},
    "one line, from the first step": {"compress": {"gentle": False}},
    "two lines, from the first step": {"compress": {"gentle": False}, "optimizer": "groups"},
}

# Differences from COMMON. "quick" and "tiny" are for finding causes.
SETUPS = {
    "nanogpt": {},
    "untied": {"tied": False, "accumulate": 1, "clip": 0.0, "before": True},
    "llama bpe": {"style": "llama", "tied": False, "text": "bpe", "accumulate": 1},
    "llama tied": {"style": "llama", "clip": 0.0, "wrap": "fsdp2"},
    "gpt2 bpe 4": {"text": "bpe", "accumulate": 4, "batch": 4},
    "quick": {"accumulate": 1},
    "tiny": {"accumulate": 1, "layers": 2, "width": 64, "block": 32},
}
COMMON = {
    "style": "gpt2",
    "tied": True,
    "text": "bytes",
    "accumulate": 2,
    "clip": 1.0,
    "before": False,
    "wrap": "ddp",
    "batch": 8,
    "block": 64,
    "layers": 3,
    "width": 96,
    "lr": 2e-3,
    "warmup": 20,
    "steps": 500,
    "betas": (0.9, 0.99),
}


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


class LlamaBlock(nn.Module):
    """Names of modules are those of Hugging Face's Llama."""

    def __init__(self, width, n_head):
        super().__init__()
        self.n_head, hidden = n_head, 8 * width // 3 // 8 * 8
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width), RMSNorm(width)
        self.self_attn = nn.ModuleDict({f"{x}_proj": nn.Linear(width, width, bias=False) for x in "qkvo"})
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(width, hidden, bias=False),
                "up_proj": nn.Linear(width, hidden, bias=False),
                "down_proj": nn.Linear(hidden, width, bias=False),
            }
        )

    def forward(self, x, cos, sin):
        def rotated(y):
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        y, attn, mlp = self.input_layernorm(x), self.self_attn, self.mlp
        q, k, v = (attn[f"{p}_proj"](y).unflatten(-1, (self.n_head, -1)).transpose(1, 2) for p in "qkv")
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + attn["o_proj"](y.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))


class Llama(nn.Module):
    def __init__(self, n_vocab, n_positions, width, n_head, n_layer, tied):
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(n_vocab, width),
                "layers": nn.ModuleList(LlamaBlock(width, n_head) for _ in range(n_layer)),
                "norm": RMSNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, n_vocab, bias=False)
        if tied:
            self.lm_head.weight = self.model["embed_tokens"].weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        half = width // n_head // 2
        angles = torch.outer(torch.arange(n_positions), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens, targets):
        n = tokens.shape[1]
        x = self.model["embed_tokens"](tokens)
        for block in self.model["layers"]:
            x = block(x, self.cos[:n], self.sin[:n])
        return F.cross_entropy(self.lm_head(self.model["norm"](x)).flatten(0, 1), targets.flatten())


def read_bytes(limit=12_000_000):
    """Python's standard library, without its tests."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(folder.rglob("*.py")) if not {"test", "tests", "site-packages"} & set(p.parts)]
    return b"".join(p.read_bytes() for p in files)[:limit]


def read_tokens(kind):
    """(tokens (n,), vocabulary)"""
    text = read_bytes()
    if kind == "bytes":
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), 256
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    cache = pathlib.Path(tempfile.gettempdir()) / f"tagc-first-try-{len(text)}-{dist.get_rank()}.pt"
    if not cache.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=2048, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
        words = text.decode(errors="replace")
        tokenizer.train_from_iterator([words[i : i + 100_000] for i in range(0, 3_000_000, 100_000)], trainer)
        tokens = tokenizer.encode_batch([words[i : i + 100_000] for i in range(0, 6_000_000, 100_000)])
        torch.save(torch.tensor([i for piece in tokens for i in piece.ids]), cache)
    return torch.load(cache), 2048


def made(arm, setup, n_vocab, seed):
    nudge, powersgd, is_bf16 = arm.get("nudge", 0.0), arm.get("powersgd"), arm.get("wire") == "bf16"
    torch.manual_seed(seed)
    if setup["style"] == "llama":
        model = Llama(n_vocab, setup["block"], setup["width"], 4, setup["layers"], setup["tied"])
        blocks = model.model["layers"]
    else:
        model = gpt.GPT(
            gpt.Config(
                n_vocab=n_vocab,
                n_positions=setup["block"],
                n_embd=setup["width"],
                n_head=4,
                n_layer=setup["layers"],
                tied=setup["tied"],
            )
        )
        blocks = model.transformer["h"]
    with torch.no_grad():
        for parameter in model.parameters() if nudge else ():
            parameter.mul_(1 + nudge * torch.randn_like(parameter))
    if setup["wrap"] == "ddp":
        if not powersgd:
            model = DistributedDataParallel(model)
            if is_bf16:
                model.register_comm_hook(dist.group.WORLD, bf16_hook)
            return model
        # in one bucket: over gloo the exchanges of several run in another order on each rank, and fail
        model = DistributedDataParallel(model, bucket_cap_mb=100_000)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=powersgd, start_powerSGD_iter=max(2, setup["steps"] // 10)
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        model.powersgd = state
        return model
    if powersgd:
        raise ValueError("PowerSGD is a hook of DDP: this set-up has FSDP2")
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if is_bf16 else None)
    for block in blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def own_groups(model):
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def batch(tokens, setup, generator):
    n_draws = setup["batch"] * setup.get("shared_by", 1)
    starts = torch.randint(len(tokens) - setup["block"] - 1, (n_draws,), generator=generator)
    if "shared_by" in setup:
        starts = starts.chunk(setup["shared_by"])[dist.get_rank()]
    rows = torch.stack([tokens[i : i + setup["block"] + 1] for i in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def evaluate(model, tokens, setup):
    """Returns the mean loss over 40 batches of 16 sequences that the ranks share out, or over 20 for each."""
    n_ranks = dist.get_world_size()
    is_shared = "shared_by" in setup
    generator = torch.Generator().manual_seed(10_000 + (0 if is_shared else dist.get_rank()))
    size, n_batches = (16 // n_ranks, 40) if is_shared else (16, 20)
    with torch.no_grad():
        losses = (model(*batch(tokens, setup | {"batch": size}, generator)) for _ in range(n_batches))
        loss = sum(losses) / n_batches
    dist.all_reduce(loss)
    return loss.item() / n_ranks


def prepared(arm, setup, n_vocab, seed):
    """(model, optimizer, handle)"""
    import tagc.torch as tagc

    model = made(arm, setup, n_vocab, seed)
    beta1, beta2 = setup["betas"]
    options = dict(lr=setup["lr"], betas=(arm.get("beta1", beta1), arm.get("beta2", beta2)))
    how, handle, optimizer = arm.get("optimizer", "plain"), None, None
    if how == "given" or (setup["before"] and how == "plain"):
        optimizer = torch.optim.AdamW(own_groups(model), **options)
    if arm["compress"] is not None:
        given = (optimizer,) if how == "given" else ()
        hosts = {"hosts": setup["hosts"]} if "hosts" in setup else {}
        handle = tagc.compress(
            model, *given, verbose=arm.get("verbose", False), **tagc.grouped(hosts | arm["compress"])
        )
    if how == "groups":
        optimizer = torch.optim.AdamW(
            handle.param_groups(groups=own_groups(model), **options), lr=setup["lr"]
        )
    elif optimizer is None:
        optimizer = torch.optim.AdamW(own_groups(model), **options)
    return model, optimizer, handle


def learning_rate(step, setup):
    if step < setup["warmup"]:
        return setup["lr"] * (step + 1) / setup["warmup"]
    done = (step - setup["warmup"]) / max(1, setup["steps"] - setup["warmup"])
    return setup["lr"] * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def run(arm, setup, seed, tokens, n_vocab):
    model, optimizer, handle = prepared(arm, setup, n_vocab, seed)
    train, held_out = tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]
    own = 0 if "shared_by" in setup else dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * seed + own)
    bits, losses, begin = [], {}, time.perf_counter()
    for step in range(setup["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, setup)
        for micro in range(setup["accumulate"]):
            is_last = micro == setup["accumulate"] - 1
            if setup["wrap"] == "ddp":
                model.require_backward_grad_sync = is_last
            else:
                model.set_requires_gradient_sync(is_last)
            (model(*batch(train, setup, generator)) / setup["accumulate"]).backward()
        if setup["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), setup["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if handle is not None:
            bits.append(handle.stats().get("bits_per_param", 0.0))
        if step + 1 in (100, 200, 350) or (step + 1) % 500 == 0 or step + 1 == setup["steps"]:
            losses[step + 1] = evaluate(model, held_out, setup)
    seconds = time.perf_counter() - begin
    legs = {}
    if handle is not None:
        if setup.get("hosts"):
            stats = handle.stats()
            legs = {"within_bits": 8 * stats["bytes_within"] / stats["n_elems"]}
        handle.close()
    dense_bits = 64.0 if setup["wrap"] == "ddp" else 32.0
    if arm.get("wire") == "bf16":
        dense_bits /= 2
    if arm.get("powersgd"):
        n_dense = model.powersgd.start_powerSGD_iter
        of_dense = 1 / model.powersgd.compression_stats()[0]
        bits = [dense_bits] * n_dense + [dense_bits * of_dense] * (setup["steps"] - n_dense)
    return {
        "losses": losses,
        "loss": losses[setup["steps"]],
        "bits": sum(bits) / len(bits) if bits else dense_bits,
        "last_bits": bits[-1] if bits else dense_bits,
        "seconds": seconds,
    } | legs


def table(rows):
    lines = []
    for setup in dict.fromkeys(row["setup"] for row in rows):
        for seed in sorted({row["seed"] for row in rows if row["setup"] == setup}):
            own = [row for row in rows if row["setup"] == setup and row["seed"] == seed]
            losses = {row["arm"]: row["loss"] for row in own if row["arm"].startswith("dense")}
            dense, best = losses.get("dense", math.nan), min(losses.values(), default=math.nan)
            lines += [
                f"{setup:12} {seed}  {row['arm']:44} {row['loss']:.4f} "
                f"{100 * (row['loss'] / dense - 1):+7.2f} % of dense, "
                f"{100 * (row['loss'] / best - 1):+7.2f} % of the best dense, {row['bits']:6.2f} bits, at "
                "the end "
                f"{row['last_bits']:.2f}  {row['seconds']:4.0f} s"
                for row in own
            ]
    return "\n".join(lines)


def read_rows(path):
    """Collective."""
    rows = json.loads(path.read_text()) if path.exists() else []
    dist.barrier()
    return rows


def write_rows(path, rows):
    part = path.with_suffix(".part")
    part.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    part.replace(path)


def words_of(args, n_ranks):
    """What makes the set-ups of a call other ones."""
    words = [] if args.steps == 500 else [f"{args.steps} steps"]
    if args.shared:
        words.append(f"{args.sequences} sequences over {n_ranks} ranks")
    elif args.sequences is not None:
        words.append(f"{n_ranks} ranks of {args.sequences // n_ranks} sequences")
    on = "" if args.hosts is None else f" on {args.hosts} hosts"
    return "".join(f", {word}" for word in words) + on


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("first-try.json"))
    parser.add_argument("--setups", nargs="+", default=list(SETUPS)[:5], choices=SETUPS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="names, or name=JSON")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--sequences",
        type=int,
        help="of a micro-step, over all ranks; default: as many per rank as the set-up has",
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="with --sequences: the same ones for any number of ranks; default: each rank draws its own",
    )
    parser.add_argument(
        "--hosts", type=int, help="ranks of how many hosts, for tagc; default: each is a host"
    )
    args = parser.parse_args()
    arms = dict(ARMS)
    for text in args.arms:
        if "=" in text:
            name, _, spec = text.partition("=")
            arms[name] = json.loads(spec)
    names = [text.partition("=")[0] for text in args.arms]
    dist.init_process_group("gloo")
    n_ranks = dist.get_world_size()
    if args.sequences is not None and args.sequences % n_ranks:
        parser.error(f"--sequences is {args.sequences}, must be a multiple of the {n_ranks} ranks")
    if args.shared and args.sequences is None:
        parser.error("--shared is given, and no --sequences to share out")
    if args.shared and 16 % n_ranks:
        parser.error(f"--shared is given with {n_ranks} ranks, allowed: 1, 2, 4, 8 or 16")
    if args.hosts is not None and n_ranks % args.hosts:
        parser.error(f"--hosts is {args.hosts}, must divide the {n_ranks} ranks")
    rows = read_rows(args.json)
    suffix = words_of(args, n_ranks)
    for setup in args.setups:
        for seed in args.seeds:
            for name in names:
                key = {"setup": setup + suffix, "seed": seed, "arm": name}
                if any(all(row[k] == v for k, v in key.items()) for row in rows):
                    continue
                what = COMMON | SETUPS[setup] | {"steps": args.steps}
                if args.sequences is not None:
                    what["batch"] = args.sequences // n_ranks
                if args.shared:
                    what["shared_by"] = n_ranks
                if args.hosts is not None:
                    what["hosts"] = args.hosts
                tokens, n_vocab = read_tokens(what["text"])
                rows.append(key | run(arms[name], what, seed, tokens, n_vocab))
                if dist.get_rank() == 0:
                    write_rows(args.json, rows)
                    alike = [row for row in rows if (row["setup"], row["seed"]) == (key["setup"], seed)]
                    print(table(alike).splitlines()[-1], rows[-1]["losses"], flush=True)
    if dist.get_rank() == 0:
        print(table(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
