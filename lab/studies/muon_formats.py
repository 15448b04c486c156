"""What of Muon's loss at few bits is the format, what the residual, what the other parameters, what the first
steps: losses of a small GPT on bytes, whose gradients travel in formats that the library has, and in others.
One process; ranks are simulated.

    python lab/studies/muon_formats.py --out muon-formats.json --seeds 1 2 3
    python lab/studies/muon_formats.py --out muon-formats.json --steps 2000 --arms dense "blocks, 4 bits"
    python lab/studies/muon_formats.py --out muon-formats.json --table

A gap is the loss at the end relative to "dense" of the same seed. Rows that --out has are not run again."""

import argparse
import dataclasses
import json
import math
import pathlib
import statistics
import sys
import time

import torch
from torch.func import functional_call, grad, vmap

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "pytorch"), str(ROOT / "lab" / "studies")]

from gpt import GPT, Config
from moment import batch, text

WARMUP = 20
WINDOW = 20  # steps before the first basis, and those of whose sums one is made
RATE_MUON, RATE_ADAMW, DECAY, MOMENTUM = 0.02, 2e-3, 0.1, 0.95
SHAPE = Config(n_positions=64, n_embd=96, n_head=4, n_layer=3, tied=False)
BLOCK, RESIDUAL_BLOCK = 32, 128  # as in the library: values of a scale, and of a residual's exponent


@dataclasses.dataclass(frozen=True)
class Format:
    bits: int = 32  # 32: whole
    # "lines": one of a row times one of a column; "both": blocks of what lines have scaled; "directions":
    # blocks of what is transposed when it was turned, so that each has values of one direction
    scales: str = "blocks"
    rounding: str = "nearest"
    basis: str = ""  # what the columns are turned by; "" nothing
    every: int = 20  # steps between two bases; the first is made after 20. 0: it stays
    doubles: bool = False  # as many steps as there were, up to `every`
    side: str = "right"  # "short": a wide matrix is turned from the left
    residual: str = "fp32"
    kept: str = "turned"  # the residual where the basis changes; or "dropped"
    n_whole: int = 0  # first steps that are sent whole
    n_eight: int = 0  # those that are sent in 8 bits
    reach: float = 3.0  # the largest integer of "lines", in units of the scales
    pieces: int = 1  # owners of a matrix, each with some rows, scales and a basis of its own
    block: int = BLOCK  # values of one scale
    basis_bits: int = 16  # in which a basis travels: bf16, or a scale per BLOCK
    is_change: bool = False  # what travels is how a new basis is turned against the one before
    n_qr: int = 0  # a basis by that many steps of QR, from the one before; 0: eigenvectors
    first: float = 1.0  # the share of the directions that are sent, the largest; the rest is any that fit
    diagonal: int = 0  # columns of each block of a block-diagonal basis; 0: it is whole


WHOLE, FOUR = Format(), Format(4)


@dataclasses.dataclass(frozen=True)
class Arm:
    matrices: Format = WHOLE  # which Muon updates
    others: Format = WHOLE  # the embedding and the head, which AdamW updates; vectors and positions go whole
    nudge: float = 0.0


def lines(bits=4, basis="", **options):
    return Arm(Format(bits, "lines", basis=basis, **options))


def turned(bits=4, others=WHOLE, **options):
    options = {"basis": "sums", "every": 100, "side": "short", "kept": "dropped"} | options
    return Arm(Format(bits, "directions", **options), others)


ARMS = {
    "dense": Arm(),
    "nudged": Arm(nudge=1e-6),
    "blocks, 4 bits": Arm(FOUR),
    "lines, 4 bits": lines(),
    "V each 20, 4 bits": lines(basis="momentum"),
    "V each 100, 4 bits": lines(basis="momentum", every=100),
    # one factor each beside "blocks, 4 bits"
    "blocks at random, 4 bits": Arm(Format(4, rounding="random")),
    "blocks, 4 bits, residual int8": Arm(Format(4, residual="int8")),
    "blocks, 4 bits, 60 whole": Arm(Format(4, n_whole=60)),
    "others alone, 4 bits": Arm(others=FOUR),
    "all as the library": Arm(Format(4, residual="int8"), Format(4, residual="int8")),
    "all as the library, 60 in 8 bits": Arm(
        Format(4, residual="int8", n_eight=60), Format(4, residual="int8", n_eight=60)
    ),
    "blocks, 8 bits": Arm(Format(8)),
    # more bits where the format is plain
    "blocks, 5 bits": Arm(Format(5)),
    "lines, 5 bits": lines(5),
    "lines, 6 bits": lines(6),
    "blocks, 6 bits": Arm(Format(6)),
    # the format
    "both, 4 bits": Arm(Format(4, "both")),
    "lines, 4 bits, reach 4": lines(reach=4.0),
    "lines, 4 bits, 60 whole": lines(n_whole=60),
    "V each 20, both, 4 bits": Arm(Format(4, "both", basis="momentum")),
    "V each 100, 4 bits, residual int8": lines(basis="momentum", every=100, residual="int8"),
    # what Turned does but for "doubling", which it does, too: a basis of the last sums, on the shorter side;
    # what waits is dropped with the old one
    "turned, 4 bits": turned(),
    "turned, doubling, 4 bits": turned(doubles=True),
    "turned, doubling, all as the library": turned(
        doubles=True, residual="int8", others=Format(4, residual="int8")
    ),
    "turned, 4 bits, residual int8": turned(residual="int8"),
    "turned, all as the library": turned(residual="int8", others=Format(4, residual="int8")),
    "turned, all as the library, 60 in 8 bits": turned(
        residual="int8", n_eight=60, others=Format(4, residual="int8", n_eight=60)
    ),
    "turned, residual kept, 4 bits": turned(kept="turned"),
    "turned, each 20, 4 bits": turned(every=20),
    # a better basis sooner
    "turned, each 20, residual kept, 4 bits": turned(every=20, kept="turned"),
    "turned, each 50, residual kept, 4 bits": turned(every=50, kept="turned"),
    "turned, doubling, residual kept, 4 bits": turned(doubles=True, kept="turned"),
    **{
        f"V in {bits} bits, each {every}, 4 bits": turned(every=every, kept="turned", basis_bits=bits)
        for bits, every in ((8, 20), (8, 50), (4, 20), (4, 10), (4, 50), (3, 20))
    },
    "V by one QR, each 20, 4 bits": turned(every=20, kept="turned", n_qr=1),
    "V by two QR, each 20, 4 bits": turned(every=20, kept="turned", n_qr=2),
    "V in 4 bits by one QR, each 20, 4 bits": turned(every=20, kept="turned", basis_bits=4, n_qr=1),
    "V's change in 4 bits by one QR, each 20, 4 bits": turned(
        every=20, kept="turned", basis_bits=4, n_qr=1, is_change=True
    ),
    **{
        f"{words}, each 20, 4 bits": turned(every=20, kept="turned", **options)
        for words, options in (
            ("V of the first half", {"first": 0.5}),
            ("V of the first quarter", {"first": 0.25}),
            ("V in blocks of 48", {"diagonal": 48}),
            ("V in blocks of 24", {"diagonal": 24}),
            ("Hadamard", {"basis": "hadamard"}),
        )
    },
    "V in 4 bits, four owners, each 20, 4 bits": turned(every=20, kept="turned", basis_bits=4, pieces=4),
    "V in 4 bits, each 20, blocks of 96, 4 bits": turned(every=20, kept="turned", basis_bits=4, block=96),
    "V in 4 bits, each 20, 5 bits": turned(5, every=20, kept="turned", basis_bits=4),
    "V in 4 bits, each 20, 3 bits": turned(3, every=20, kept="turned", basis_bits=4),
    "turned, residual kept, 5 bits": turned(5, kept="turned"),
    "V in 4 bits, each 20, residual int8, 4 bits": turned(
        every=20, kept="turned", basis_bits=4, residual="int8"
    ),
    "turned, once, 4 bits": turned(every=0),
    "turned, four owners, 4 bits": turned(pieces=4),
    "turned, 3 bits": turned(bits=3),
    "turned by the momentum, 4 bits": turned(basis="momentum"),
    "turned by one sum, 4 bits": turned(basis="sum"),
    "turned by one QR of the momentum, 4 bits": turned(basis="qr"),
    "turned by the change of weights, 4 bits": turned(basis="weights"),
    "turned at random, 4 bits": turned(basis="random"),
    "turned by Hadamard, 4 bits": turned(basis="hadamard"),
    "V each 500, 4 bits": lines(basis="momentum", every=0),
    "V each 100, 4 bits, reach 4": lines(basis="momentum", every=100, reach=4.0),
    "V each 20, 3 bits": lines(3, basis="momentum"),
    "lines, 3 bits": lines(3),
    "V at random, 4 bits": lines(basis="random"),
}


# ---- formats ----


def integers(x, bits, rounding, generator):
    """x in units of a scale, rounded and cut to what `bits` hold."""
    most = 2 ** (bits - 1) - 1
    x = x.round() if rounding == "nearest" else (x + torch.rand(x.shape, generator=generator)).floor()
    return x.clamp_(-most, most)


def in_blocks(x, format, generator):
    """A scale of neighbours, from the largest of them."""
    parts = x.reshape(-1, format.block)
    scales = (parts.abs().amax(1, keepdim=True) / (2 ** (format.bits - 1) - 1)).bfloat16().float() + 1e-30
    return integers(parts / scales, format.bits, format.rounding, generator).mul_(scales).view_as(x)


def line_scales(x):
    """A scale of each row times one of each column, by the mean square, as bf16. x (..., rows, columns)."""
    rows = (x.square().mean(-1, keepdim=True).sqrt() + 1e-30).bfloat16().float()
    columns = ((x / rows).square().mean(-2, keepdim=True).sqrt() + 1e-30).bfloat16().float()
    return rows * columns


def rounded(x, format, generator):
    if format.scales in ("blocks", "directions"):
        return in_blocks(x, format, generator)
    scales = line_scales(x)
    if format.scales == "both":
        return in_blocks(x / scales, format, generator) * scales
    step = format.reach / (2 ** (format.bits - 1) - 1)
    return integers(x / scales / step, format.bits, format.rounding, generator) * step * scales


def stored(x, generator):
    """A residual as the library keeps it: 8 bits, an exponent of RESIDUAL_BLOCK values, rounded at random."""
    parts = x.reshape(-1, RESIDUAL_BLOCK)
    steps = torch.exp2((parts.abs().amax(1, keepdim=True) / 127 + 1e-38).log2().ceil())
    return (integers(parts / steps, 8, "random", generator) * steps).view_as(x)


# ---- bases ----


def eigenvectors(gram):
    """Of symmetric matrices (..., n, n), the largest first."""
    return torch.linalg.eigh(gram.double())[1].flip(-1).float()


def by_qr(gram, basis, n_steps):
    """Eigenvectors of symmetric matrices, nearly, by steps from a basis. Signs stay as they were."""
    first = basis
    for _ in range(n_steps):
        basis = torch.linalg.qr(gram @ basis)[0]
    signs = (first * basis).sum(-2, keepdim=True).sign()
    return basis * (signs + (signs == 0))


def orthogonal_again(basis):
    for _ in range(5):
        basis = 1.5 * basis - 0.5 * basis @ (basis.mT @ basis)
    return basis


def as_sent(basis, bits=16):
    """As it came, and made orthogonal again."""
    sent = basis.bfloat16().float() if bits == 16 else in_blocks(basis, Format(bits), None)
    return orthogonal_again(sent)


def hadamard(n, generator):
    """Orthogonal, of blocks as large as a power of two divides n, with random signs of its rows."""
    size = n & -n
    block = torch.ones(1, 1)
    while len(block) < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    signs = 2.0 * torch.randint(2, (n, 1), generator=generator) - 1
    return signs * torch.block_diag(*[block / size**0.5] * (n // size))


class Exchange:
    """The mean of all ranks' gradients of matrices of one shape. What is not sent is kept as it was turned.

    Shapes: gradients (matrices, owners, ranks, rows, columns), the mean (matrices, owners, rows, columns)."""

    def __init__(self, format, generator):
        self.format, self.generator = format, generator
        self.residual = self.basis = self.gram = self.weights = None
        self.step, self.renews_at = 0, WINDOW

    def turned(self, x):
        if self.basis is not None:
            x = x @ self.basis[:, :, None]  # of all ranks
        return x.mT.contiguous() if self.format.scales == "directions" else x

    def turned_back(self, x):
        x = x.mT if self.format.scales == "directions" else x
        return x if self.basis is None else x @ self.basis[:, :, None].mT

    def __call__(self, gradients):
        self.step += 1
        if self.format.bits == 32 or self.step <= self.format.n_whole:
            return gradients.mean(2)
        x = self.turned(gradients)
        x = x if self.residual is None else x + self.residual
        is_early = self.step <= self.format.n_eight
        format = dataclasses.replace(self.format, bits=8) if is_early else self.format
        sent = rounded(x, format, self.generator)
        error = x - sent
        self.residual = error if self.format.residual == "fp32" else stored(error, self.generator)
        return self.turned_back(sent.mean(2, keepdim=True))[:, :, 0]

    def turn(self, sums, momentum, weights):
        """What follows an update: a new basis where it is time. All (matrices, owners, rows, columns)."""
        kind = self.format.basis
        if kind == "sums" and 0 <= self.renews_at - self.step < WINDOW:
            square = sums.mT @ sums
            self.gram = square if self.gram is None else self.gram + square
        if not kind or self.step != self.renews_at:
            return
        every = self.format.every
        self.renews_at += min(every, self.step) if self.format.doubles else every
        n = sums.shape[-1]
        is_kept = self.residual is not None and self.format.kept == "turned"
        residual = self.turned_back(self.residual) if is_kept else None
        last = torch.eye(n).expand(*sums.shape[:2], n, n) if self.basis is None else self.basis
        if kind in ("random", "hadamard"):
            whole = torch.randn(n, n, generator=self.generator)
            one = torch.linalg.qr(whole)[0] if kind == "random" else hadamard(n, self.generator)
            new = one.expand(*sums.shape[:2], n, n)
        elif kind == "qr":
            new = by_qr(momentum.mT @ momentum, last, 1)
        elif kind == "weights":
            change = weights - self.weights if self.weights is not None else momentum
            new, self.weights = eigenvectors(change.mT @ change), weights.clone()
        else:
            if kind != "sums":
                of = sums if kind == "sum" else momentum
                self.gram = of.mT @ of
            if self.format.diagonal:
                blocks = torch.ones(n // self.format.diagonal, self.format.diagonal, self.format.diagonal)
                self.gram = self.gram * torch.block_diag(*blocks)
            has_last = self.basis is not None and self.format.n_qr
            new = by_qr(self.gram, last, self.format.n_qr) if has_last else eigenvectors(self.gram)
            self.gram = None
        if self.format.first < 1:
            new = torch.linalg.qr(new[..., : int(n * self.format.first)], mode="complete")[0]
        bits = self.format.basis_bits
        if self.format.is_change and self.basis is not None:
            one = torch.eye(n)
            change = in_blocks(last.mT @ new - one, Format(bits), None)
            self.basis = last @ orthogonal_again(one + change)
        else:  # the first one is exact enough for changes to it
            self.basis = as_sent(new, 16 if self.format.is_change else bits)
        self.residual = None if residual is None else self.turned(residual)


def bits_per_value(format, shape, steps):
    """Of one rank to the owner, and the basis from the owner, in bf16."""
    if format.bits == 32:
        return 32.0
    rows, columns = shape[0] // format.pieces, shape[1]
    if format.side == "short":
        rows, columns = max(rows, columns), min(rows, columns)
    scales = 16 / format.block if format.scales != "lines" else 0
    scales += 16 * (rows + columns) / (rows * columns) if format.scales in ("lines", "both") else 0
    is_sent = format.basis in ("momentum", "sums", "sum", "qr")
    if not is_sent:
        return format.bits + scales
    n_bases, at = 0, WINDOW
    while at < steps:
        n_bases, at = n_bases + 1, at + ((min(format.every, at) if format.doubles else format.every) or steps)
    of_basis = format.basis_bits + (16 / BLOCK if format.basis_bits < 16 else 0)
    of_basis *= format.first * (format.diagonal / columns if format.diagonal else 1)
    return format.bits + scales + of_basis * columns / rows * n_bases / steps


# ---- training ----


def orthogonal(x):
    """Five steps of Newton and Schulz, of each matrix."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if is_tall else x


class Stack:
    """Matrices of one shape that Muon updates."""

    def __init__(self, parameters, format, generator):
        self.parameters, self.pieces = parameters, format.pieces
        rows, columns = parameters[0].shape
        self.is_left = format.side == "short" and rows // format.pieces < columns
        self.exchange = Exchange(format, generator)
        self.momentum = torch.zeros(len(parameters), *parameters[0].shape)

    def of_owners(self, x):
        """(..., owners, rows, columns); transposed if it is turned from the left."""
        x = x.unflatten(-2, (self.pieces, -1))
        return x.mT if self.is_left else x

    def exchanged(self, gradients):
        """gradients: one (ranks, rows, columns) for each matrix. Returns what Muon makes orthogonal."""
        sent = self.exchange(self.of_owners(torch.stack(gradients)).movedim(2, 1).contiguous())
        mean = (sent.mT if self.is_left else sent).flatten(1, 2)
        self.momentum.lerp_(mean, 1 - MOMENTUM)
        if self.exchange.format.basis:
            weights = self.of_owners(torch.stack(self.parameters))
            self.exchange.turn(sent, self.of_owners(self.momentum), weights)
        return mean.lerp(self.momentum, MOMENTUM)

    def update(self, gradients, factor):
        steps = orthogonal(self.exchanged(gradients))
        rows, columns = steps.shape[1:]
        rate = RATE_MUON * factor
        for parameter, step in zip(self.parameters, steps, strict=True):
            parameter.mul_(1 - rate * DECAY).sub_(rate * max(1.0, rows / columns) ** 0.5 * step)


class Shadows:
    """What other arms would make of the gradients of a run: how far their updates are from those of whole
    gradients, as a share of the update, squared."""

    def __init__(self, names, parameters, seed):
        self.whole = Stack(parameters, WHOLE, None)
        self.stacks = {
            name: Stack(parameters, ARMS[name].matrices, torch.Generator().manual_seed(seed))
            for name in names
        }
        self.errors = {name: [] for name in names}

    def see(self, gradients, is_measured):
        wanted = self.whole.exchanged(gradients)
        wanted = orthogonal(wanted) if is_measured else None
        for name, stack in self.stacks.items():
            found = stack.exchanged(gradients)
            if is_measured:
                errors = (orthogonal(found) - wanted).square().sum((1, 2)) / wanted.square().sum((1, 2))
                self.errors[name] += errors.tolist()


def train(arm, seed, n_steps, n_ranks, n_sequences, texts, shadows=()):
    """Returns the loss at the end, and by how much updates of other arms, `shadows`, would have differed from
    step 40 on."""
    torch.manual_seed(seed)
    model = GPT(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters() if arm.nudge else ():
            parameter.mul_(1 + arm.nudge * torch.randn_like(parameter))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    shapes = {}
    for name, p in parameters.items():
        if p.dim() == 2 and ".h." in name:
            shapes.setdefault(p.shape, []).append(name)
    rounding = torch.Generator().manual_seed(seed + 1000)
    stacks = [
        (names, Stack([parameters[n] for n in names], arm.matrices, rounding)) for names in shapes.values()
    ]
    others = [Shadows(shadows, stack.parameters, seed) for _, stack in stacks if shadows]
    rest = [name for name in parameters if not any(name in names for names, _ in stacks)]
    exchanges = {
        name: Exchange(arm.others if name.endswith(("wte.weight", "lm_head.weight")) else WHOLE, rounding)
        for name in rest
    }
    optimizer = torch.optim.AdamW(
        [parameters[n] for n in rest], lr=RATE_ADAMW, betas=(0.9, 0.99), weight_decay=DECAY
    )
    of_ranks = vmap(grad(lambda p, x, y: functional_call(model, p, (x, y))), in_dims=(None, 0, 0))
    draws = torch.Generator().manual_seed(seed)
    for step in range(n_steps):
        tokens = batch(texts[0], n_sequences, SHAPE.n_positions, draws)
        gradients = of_ranks(parameters, *(t.view(n_ranks, -1, SHAPE.n_positions) for t in tokens))
        falls = 0.03 + 0.97 * (1 + math.cos(math.pi * step / n_steps)) / 2
        factor = min(1, (step + 1) / WARMUP) * falls
        for i, (names, stack) in enumerate(stacks):
            of_stack = [gradients[n] for n in names]
            for other in others[i : i + 1]:
                other.see(of_stack, step >= 40 and step % 10 == 9)
            stack.update(of_stack, factor)
        for name in rest:  # (1, 1, ranks, rows, columns), where there are columns
            parameters[name].grad = exchanges[name](gradients[name][None, None])[0, 0]
        for group in optimizer.param_groups:
            group["lr"] = RATE_ADAMW * factor
        optimizer.step()
    fixed = torch.Generator().manual_seed(10_000)
    with torch.no_grad():
        losses = [
            functional_call(model, parameters, batch(texts[1], 64, SHAPE.n_positions, fixed)).item()
            for _ in range(20)
        ]
    errors = {name: statistics.mean(sum((o.errors[name] for o in others), [])) for name in shadows}
    return statistics.mean(losses), errors


def bits_of_matrices(format, n_steps):
    width = SHAPE.n_embd
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    sizes = [rows * columns for rows, columns in shapes]
    bits = [bits_per_value(format, shape, n_steps) for shape in shapes]
    return sum(b * n for b, n in zip(bits, sizes, strict=True)) / sum(sizes)


# ---- rows ----


def gaps(rows, arm):
    """{seed: how much the arm's loss is above dense's}, in percent."""
    losses = {(r["arm"], r["seed"]): r["loss"] for r in rows}
    return {
        seed: 100 * (loss / losses["dense", seed] - 1)
        for (name, seed), loss in losses.items()
        if name == arm and ("dense", seed) in losses
    }


def table(rows):
    """rows: of one number of steps and ranks."""
    lines = ["| what is sent of Muon's matrices | bits | gap by seed | mean |", "|---|---:|---|---:|"]
    for name in (name for name in ARMS if name != "dense" and gaps(rows, name)):
        found = gaps(rows, name)
        each = ", ".join(f"{gap:+.2f}" for _, gap in sorted(found.items()))
        seeds = "" if sorted(found) == [1, 2, 3] else f" (seeds {', '.join(map(str, sorted(found)))})"
        bits = bits_of_matrices(ARMS[name].matrices, rows[0]["steps"])
        mean = statistics.mean(found.values())
        lines.append(f"| {name} | {bits:.2f} | {each} %{seeds} | {mean:+.2f} % |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=pathlib.Path("muon-formats.json"))
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    add("--seeds", type=int, nargs="+", default=[1])
    add("--steps", type=int, default=500)
    add("--ranks", type=int, default=4)
    add("--sequences", type=int, default=16, help="of all ranks, in a step")
    add("--updates", action="store_true", help="what --arms make of the gradients of one dense run")
    add("--table", action="store_true", help="print what --out has, and run nothing")
    args = parser.parse_args()
    of_all = {"steps": args.steps, "ranks": args.ranks, "sequences": args.sequences}
    rows = json.loads(args.out.read_text()) if args.out.exists() else []

    def alike():
        return [row for row in rows if "arm" in row and of_all.items() <= row.items()]

    torch.set_num_threads(1)
    texts = None if args.table else text()
    if args.updates:
        row = {"updates": args.seeds[0], **of_all}
        _, errors = train(Arm(), args.seeds[0], *of_all.values(), texts, args.arms)
        for name, error in errors.items():
            bits = bits_of_matrices(ARMS[name].matrices, args.steps)
            print(f"| {name} | {bits:.2f} | {100 * error:.2f} % |")
        args.out.write_text(json.dumps([*rows, row | {"errors": errors}], indent=1) + "\n")
        return
    for seed in [] if args.table else args.seeds:
        for name in args.arms:
            if any((row["arm"], row["seed"]) == (name, seed) for row in alike()):
                continue
            begin = time.monotonic()
            loss, _ = train(ARMS[name], seed, *of_all.values(), texts)
            row = {"arm": name, "seed": seed, **of_all, "loss": loss, "seconds": time.monotonic() - begin}
            rows.append(row)
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
            gap = gaps(alike(), name).get(seed, math.nan)
            print(f"seed {seed}, {name:36} {loss:.4f} {gap:+.2f} %  {row['seconds']:.0f} s", flush=True)
    print(table(alike()))


if __name__ == "__main__":
    main()
