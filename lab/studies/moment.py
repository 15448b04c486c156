"""Which selection keeps Adam's first moment: losses of a small GPT whose gradients are sent in part, by rules
that the library has and by candidates. One process; ranks are simulated.

    python lab/studies/moment.py --out moment.json --seeds 1 2 --begins 60 300
    python lab/studies/moment.py --out moment.json --begins 250 --steps 500 --model first-try

Until step --begins every value is sent. From then on a rank sends 5 % of each matrix (8 % of the embedding)
unless an arm names another share, its values in 2 bits. A gap is the loss at the end relative to "dense" of
the same seed. Rows that --out has are not run again."""

import argparse
import json
import math
import pathlib
import sys
import sysconfig
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "pytorch")]

from gpt import GPT, Config

SEQUENCES, RATE, WARMUP, BETAS = 16, 2e-3, 20, (0.9, 0.99)
MODELS = {  # "first-try": `untied` of torch_first_try.py
    "small": dict(n_positions=32, n_embd=64, n_layer=2),
    "first-try": dict(n_positions=64, n_embd=96, n_head=4, n_layer=3, tied=False),
}


def two_bits(values):
    """values as two magnitudes with signs: the means of the smaller and of the larger half."""
    if values.numel() < 2:
        return values.clone()
    size = values.abs()
    is_large = size > size.median()
    sizes = torch.where(is_large, size[is_large].mean() if is_large.any() else 0, size[~is_large].mean())
    return sizes * values.sign()


def largest(values, n):
    return values.abs().topk(n).indices


class Dense:
    """Every value. The others exchange so before they begin."""

    def __init__(self, n_ranks, share, generator, shape):
        self.n_ranks, self.share, self.generator, self.shape = n_ranks, share, generator, shape
        self.bits = 0.0

    def __call__(self, gradients, moment):
        """gradients: a flat one per rank; moment: what the owner's optimizer holds. Returns their mean."""
        return sum(gradients) / self.n_ranks

    def n(self, gradient):
        return max(1, int(self.share * gradient.numel()))


def bits_of_positions(n, of):
    p = n / of
    return of * (-p * math.log2(p) - (1 - p) * math.log2(1 - p))


class Largest(Dense):
    """Each rank's largest values; the rest waits, times decay at each step, for the next (error feedback).

    before: the gradient first passes a moment of the rank with that beta."""

    def __init__(self, *args, decay=1.0, before=None, forgets=False):
        super().__init__(*args)
        self.decay, self.before, self.forgets = decay, before, forgets
        self.residuals, self.moments = None, None

    def __call__(self, gradients, moment):
        if self.residuals is None:
            self.residuals = [torch.zeros_like(g) for g in gradients]
            self.moments = [torch.zeros_like(g) for g in gradients]
        total = torch.zeros_like(gradients[0])
        for g, r, m in zip(gradients, self.residuals, self.moments, strict=True):
            if self.before is not None:
                g = m.lerp_(g, 1 - self.before)
            r.mul_(self.decay).add_(g)
            chosen = largest(r, self.n(g))
            sent = two_bits(r[chosen])
            r[chosen] -= sent
            if self.forgets:
                m[chosen] = 0
            total[chosen] += sent
        n = self.n(gradients[0])
        self.bits = (bits_of_positions(n, total.numel()) + 2 * n) / total.numel()
        return total / self.n_ranks


class FourBits(Dense):
    """Every value in 4 bits, 32 to a scale, with error feedback. rank: before that, a product of two matrices
    with so many columns, in bf16, by a power iteration that begins where the last one ended."""

    def __init__(self, *args, rank=0):
        super().__init__(*args)
        self.rank, self.residuals, self.right = rank, None, None

    def __call__(self, gradients, moment):
        size, n_low = moment.numel(), 0
        if self.residuals is None:
            self.residuals = [torch.zeros_like(g) for g in gradients]
            self.right = torch.randn(self.shape[1], self.rank, generator=self.generator)
        total = torch.zeros_like(moment)
        for g, r in zip(gradients, self.residuals, strict=True):
            r += g
        if self.rank:
            matrices = [r.view(self.shape) for r in self.residuals]
            left = torch.linalg.qr(sum(m @ self.right for m in matrices))[0].bfloat16().float()
            rights = [(m.mT @ left).bfloat16().float() for m in matrices]
            for r, right in zip(self.residuals, rights, strict=True):
                r -= (left @ right.mT).flatten()
            self.right = sum(rights)
            total += (left @ self.right.mT).flatten()
            n_low = 2 * self.rank * sum(self.shape)  # left's sums travel, too
        for r in self.residuals:
            blocks = torch.nn.functional.pad(r, (0, -size % 32)).view(-1, 32)
            scales = blocks.abs().amax(1, keepdim=True) / 7 + 1e-30
            sent = ((blocks / scales).round() * scales).flatten()[:size]
            r -= sent
            total += sent
        self.bits = 4 + 16 / 32 + 16 * n_low / size
        return total / self.n_ranks


class Following(Dense):
    """EF21: a rank's moment is followed by a copy that the owner has, too; a rank sends the largest values of
    the difference. Returns the gradient that leads from the owner's last copy to its next."""

    def __init__(self, *args, beta):
        super().__init__(*args)
        self.beta, self.moments, self.copies = beta, None, None

    def __call__(self, gradients, moment):
        if self.moments is None:
            self.moments = [moment.clone() for _ in gradients]
            self.copies = [moment.clone() for _ in gradients]
            self.mean = moment.clone()
        before = self.mean.clone()
        for g, m, c in zip(gradients, self.moments, self.copies, strict=True):
            m.lerp_(g, 1 - self.beta)
            difference = m - c
            chosen = largest(difference, self.n(g))
            sent = two_bits(difference[chosen])
            c[chosen] += sent
            self.mean[chosen] += sent / self.n_ranks
        n = self.n(before)
        self.bits = (bits_of_positions(n, before.numel()) + 2 * n) / before.numel()
        return (self.mean - self.beta * before) / (1 - self.beta)


class Mask(Dense):
    """All ranks send the same positions for a window of steps: the owner's choice, by its moment, with a part
    that is new: of the largest sums of residuals, which ranks send as they send values above, or random."""

    def __init__(self, *args, window=20, new=0.2, by="residual", decay=1.0):
        super().__init__(*args)
        self.window, self.new, self.by, self.decay, self.step = window, new, by, decay, 0
        self.residuals = None

    def __call__(self, gradients, moment):
        size = gradients[0].numel()
        if self.residuals is None:
            self.residuals = [torch.zeros_like(g) for g in gradients]
            self.mask = largest(moment, self.n(moment))
        elif self.step % self.window == 0:
            self.mask = self.chosen(moment)
        self.step += 1
        total = torch.zeros_like(gradients[0])
        for g, r in zip(gradients, self.residuals, strict=True):
            r.mul_(self.decay).add_(g)
            sent = two_bits(r[self.mask])
            r[self.mask] -= sent
            total[self.mask] += sent
        n_new = self.new * len(self.mask) if self.by == "residual" else 0
        once = bits_of_positions(len(self.mask), size) + bits_of_positions(max(1, n_new), size)
        self.bits = (2 * len(self.mask) + once / self.window) / size
        return total / self.n_ranks

    def chosen(self, moment):
        n_new = int(self.new * self.n(moment))
        if self.by == "random":
            new = torch.randperm(moment.numel(), generator=self.generator)[:n_new]
        else:
            votes = torch.zeros_like(moment)
            for r in self.residuals:
                at = largest(r, n_new)
                votes[at] += r[at]
            new = largest(votes, n_new)
        rest = moment.clone()
        rest[new] = 0
        return torch.cat([new, largest(rest, self.n(moment) - n_new)])


def arm(kind, beta1=0.9, share=0.05, falls="after", **options):
    """share: of a matrix's values; of the embedding's 1.6 times as many. falls: whether beta1 goes to its
    last value "before" the exchange begins, as in the library, or in the 100 steps "after"."""
    return {"kind": kind, "beta1": beta1, "share": share, "falls": falls, "options": options}


def beta1_of(spec, step, begin):
    """Before: in ten windows of 20 steps, which lower (1 + beta1) / (1 - beta1) by equal ratios."""
    if spec["falls"] == "after":
        return BETAS[0] + min(1.0, max(0, step - begin) / 100) * (spec["beta1"] - BETAS[0])
    at = min(10, max(0, (step - begin) // 20 + 11)) / 10
    first, last = ((1 + beta) / (1 - beta) for beta in (BETAS[0], spec["beta1"]))
    factor = first ** (1 - at) * last**at
    return (factor - 1) / (factor + 1)


ARMS = {
    "dense": arm(Dense),
    "dense, beta1 0.5": arm(Dense, 0.5),
    "dense, beta1 0": arm(Dense, 0.0),
    "largest": arm(Largest),
    "largest, beta1 0.5": arm(Largest, 0.5),
    "library": arm(Largest, 0.5, falls="before"),
    "largest, beta1 0": arm(Largest, 0.0),
    "largest, residual times 0.98": arm(Largest, decay=0.98),
    "largest, residual times 0.9": arm(Largest, decay=0.9),
    "moment of the rank, beta1 0": arm(Largest, 0.0, before=0.9),
    "moment of the rank that forgets, beta1 0": arm(Largest, 0.0, before=0.9, forgets=True),
    "following": arm(Following, beta=0.9),
    "4 bits": arm(FourBits),
    "rank 4, the rest in 4 bits": arm(FourBits, rank=4),
    "largest 15 %": arm(Largest, share=0.15),
    "following, 15 %": arm(Following, beta=0.9, share=0.15),
    "mask 15 %, 20 steps, 20 % by residuals": arm(Mask, share=0.15),
    "mask 40 %, 20 steps, 20 % by residuals": arm(Mask, share=0.4),
    "mask 40 %, 5 steps, 20 % by residuals": arm(Mask, share=0.4, window=5),
    "mask 40 %, 20 steps, 50 % by residuals": arm(Mask, share=0.4, new=0.5),
    "mask, 20 steps, 20 % by residuals": arm(Mask),
    "mask, 5 steps, 20 % by residuals": arm(Mask, window=5),
    "mask, 20 steps, 50 % by residuals": arm(Mask, new=0.5),
    "mask, 20 steps, 20 % random": arm(Mask, by="random"),
    "mask, 20 steps, no error feedback": arm(Mask, decay=0.0, by="random"),
}


def text():
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(folder.rglob("*.py")) if not {"test", "tests", "site-packages"} & set(p.parts)]
    whole = b"".join(p.read_bytes() for p in files)[:6_000_000]
    tokens = torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()
    return tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]


def batch(tokens, n, length, generator):
    starts = torch.randint(len(tokens) - length - 1, (n,), generator=generator)
    rows = tokens[starts[:, None] + torch.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def orthogonal(x):
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if is_tall else x


def update(parameter, gradient, state, lr, beta1, muon):
    first = state["first"].lerp_(gradient, 1 - beta1)
    if muon:
        shape = parameter.shape
        rate = 8 * lr * max(1.0, shape[0] / shape[1]) ** 0.5
        parameter -= rate * orthogonal(gradient.lerp(first, beta1).view_as(parameter))
        return
    second = state["second"].lerp_(gradient.square(), 1 - BETAS[1])
    state["c1"] = beta1 * state["c1"] + 1 - beta1
    state["c2"] = BETAS[1] * state["c2"] + 1 - BETAS[1]
    step = (first / state["c1"]) / ((second / state["c2"]).sqrt() + 1e-8)
    parameter.mul_(1 - 0.1 * lr if parameter.dim() > 1 else 1).sub_(lr * step.view_as(parameter))


def train(args, spec, begin, seed, texts):
    torch.manual_seed(seed)
    shape = MODELS[args.model]
    model, length = GPT(Config(**shape)), shape["n_positions"]
    generator, own = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1000)
    names, parameters = zip(*model.named_parameters(), strict=True)
    muon = [args.muon and p.dim() == 2 and ".h." in n for n, p in zip(names, parameters, strict=True)]
    state = [
        {"first": torch.zeros(p.numel()), "second": torch.zeros(p.numel()), "c1": 0.0, "c2": 0.0}
        for p in parameters
    ]
    exchanges = None
    for step in range(args.steps):
        if step == begin:
            exchanges = [
                spec["kind"](
                    args.ranks, spec["share"] * (1 if ".h." in n else 1.6), own, p.shape, **spec["options"]
                )
                if p.dim() == 2
                else Dense(args.ranks, 1.0, own, p.shape)
                for n, p in zip(names, parameters, strict=True)
            ]
        gradients = []
        tokens, targets = batch(texts[0], SEQUENCES, length, generator)
        for part in zip(tokens.chunk(args.ranks), targets.chunk(args.ranks), strict=True):
            model.zero_grad()
            model(*part).backward()
            gradients.append([p.grad.flatten().clone() for p in parameters])
        falls = 0.1 + 0.45 * (1 + math.cos(math.pi * step / args.steps))
        lr = RATE * min(1, (step + 1) / WARMUP) * falls
        beta1 = beta1_of(spec, step, begin)
        with torch.no_grad():
            for i, (p, s) in enumerate(zip(parameters, state, strict=True)):
                own_gradients = [g[i] for g in gradients]
                mean = (
                    exchanges[i](own_gradients, s["first"]) if exchanges else sum(own_gradients) / args.ranks
                )
                update(p, mean, s, lr, (0.95 if muon[i] and beta1 == BETAS[0] else beta1), muon[i])
    fixed = torch.Generator().manual_seed(10_000)
    with torch.no_grad():
        losses = [model(*batch(texts[1], 64, length, fixed)).item() for _ in range(30)]
    bits = [e.bits * p.numel() for e, p in zip(exchanges, parameters, strict=True) if p.dim() == 2]
    n = sum(p.numel() for p in parameters if p.dim() == 2)
    return sum(losses) / len(losses), sum(bits) / n


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("moment.json"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--begins", type=int, nargs="+", default=[300])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--muon", action="store_true", help="Muon for the matrices of blocks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    texts = text()
    for begin in args.begins:
        for seed in args.seeds:
            for name in args.arms:
                key = {"arm": name, "begin": begin, "seed": seed, "ranks": args.ranks}
                key |= {"steps": args.steps, "muon": args.muon, "model": args.model}
                row = next((r for r in rows if key.items() <= r.items()), None)
                if row is None:
                    start = time.monotonic()
                    loss, bits = train(args, ARMS[name], begin, seed, texts)
                    row = key | {"loss": loss, "bits": bits, "seconds": time.monotonic() - start}
                    rows.append(row)
                    args.out.write_text(json.dumps(rows, indent=1) + "\n")
                dense = next((r for r in rows if key | {"arm": "dense"} == {k: r[k] for k in key}), None)
                gap = f"{100 * (row['loss'] / dense['loss'] - 1):+.2f} %" if dense else ""
                what = f"begin {begin}, seed {seed}, {name}"
                print(f"{what:60} {row['loss']:.4f} {gap:>8} {row['bits']:.2f} bits", flush=True)


if __name__ == "__main__":
    main()
