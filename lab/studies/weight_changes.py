"""How many bits the changes of weights take, and the exponents of bf16 weights: the tables of
lab/docs/weight-changes.md.

    OMP_NUM_THREADS=1 python lab/studies/weight_changes.py

Sizes and speeds of zstd, at level 1, are those of the command `zstd`; without it they are left out. Speeds
are of one thread, and depend on what else the machine does. The model learns from this repository's text, so
its figures move with it."""

import argparse
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "pytorch"), str(ROOT / "python")]

import train_gpt
from gpt import GPT, Config

from tagc.weights import frame

LINK_MB_S = 125.0  # of 1 Gbit/s
N_SEGMENT = 1 << 20  # elements
ZSTD = shutil.which("zstd")


def entropy(values):
    """Returns the bits per value of a code that knows how often each occurs."""
    counts = torch.unique(values, return_counts=True)[1].double()
    share = counts / counts.sum()
    return float(-(share * share.log2()).sum())


def entropy_of_places(p):
    """Returns the bits per change, of places where each element changes with probability p."""
    return -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p if 0 < p < 1 else 0.0


def zstd_bytes(values):
    """Returns what `zstd -1` makes of a tensor of uint8, or None."""
    if ZSTD is None:
        return None
    command = [ZSTD, "-1", "-c", "--no-check", "--single-thread"]
    return len(
        subprocess.run(command, input=values.numpy().tobytes(), capture_output=True, check=True).stdout
    )


def zstd_speeds(values):
    """Returns MB/s of its encoder and decoder by its own benchmark, the best of five, or None."""
    if ZSTD is None:
        return None
    best = (0.0, 0.0)
    with tempfile.NamedTemporaryFile() as file:
        file.write(values.numpy().tobytes())
        file.flush()
        command = [ZSTD, "-b1", "-i1", file.name]
        for _ in range(5):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = re.findall(r"([\d.]+) MB/s", done.stdout + done.stderr)
            if len(found) < 2:
                raise RuntimeError(f"{' '.join(command)} prints no speeds: {done.stdout + done.stderr!r}")
            best = tuple(max(a, float(b)) for a, b in zip(best, found[-2:]))
    return best


def column(n_bytes, n):
    return "-" if n_bytes is None else f"{8 * n_bytes / n:.1f}"


def words(values):
    """Returns elements as integers of the same bits."""
    return values.view({2: torch.int16, 4: torch.int32}[values.dtype.itemsize])


def planes(values):
    """Returns the low bytes of integers, then the next ones, as zstd compresses them best."""
    return values.contiguous().view(torch.uint8).view(len(values), -1).t().reshape(-1).contiguous()


def differences(before, after):
    """Returns by how many units in the last place the elements differ that do, in the order of numbers."""

    def number(values):
        x = words(values).long()
        return torch.where(x < 0, -(1 << 8 * values.dtype.itemsize - 1) - 1 - x, x)

    found = number(after) - number(before)
    return found[found != 0]


# ---- arrays ----


def of_arrays(n, shares):
    """Prints what changes by one unit at random places take."""
    random = torch.Generator().manual_seed(1)
    print(f"\n{n} bf16, changes by one unit up or down")
    print("| share that changes | bits per change | entropy of the places |\n|---:|---:|---:|")
    for share in shares:
        before = (0.02 * torch.randn(n, generator=random)).bfloat16()
        moves = (torch.rand(n, generator=random) < share) * (
            2 * torch.randint(2, (n,), generator=random, dtype=torch.int16) - 1
        )
        after = (words(before) + moves).view(torch.bfloat16)
        message, k = frame.encode(before, after, by_magnitude=True)
        places = entropy_of_places(k / n)
        print(f"| {share:.1%} | {8 * len(message) / k:.1f} | {places:.1f} |")


# ---- a model ----


def flat(model, dtype):
    return torch.cat([p.detach().to(dtype).reshape(-1) for p in model.parameters()])


def trained(args):
    """Yields a model after args.steps, and then for each rate: (rate, weights before a step, after it)."""
    torch.manual_seed(1)
    model = GPT(Config(n_embd=96, n_positions=64))
    text, random = train_gpt.read_bytes(args.data)[0], torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(n, rate):
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(n):
            starts = torch.randint(len(text) - 65, (8,), generator=random)
            batch = torch.stack([text[start : start + 65] for start in starts]).long()
            optimizer.zero_grad()
            model(batch[:, :-1], batch[:, 1:]).backward()
            optimizer.step()

    train(args.steps, 1e-3)
    yield None, flat(model, torch.float32), None
    for rate in args.rates:
        before = flat(model, torch.float32)
        train(1, rate)
        yield rate, before, flat(model, torch.float32)


def of_a_model(rows):
    """Prints what one step changes, and what its values take."""
    print(
        "\n| dtype | rate | weights that change | entropy of places | entropy of differences | "
        "zstd of differences | zstd of new values | all, by place | all, by magnitude |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    for dtype in (torch.bfloat16, torch.float32):
        for rate, *both in rows:
            before, after = (values.to(dtype) for values in both)
            message, k = frame.encode(before, after, by_magnitude=True)
            by_place = frame.encode(before, after)[0]
            found, n = differences(before, after), len(before)
            assert len(found) == k and n <= N_SEGMENT, (len(found), k, n)
            integers = torch.where(found > 0, 2 * found - 1, -2 * found - 2).to(words(before).dtype)
            new = words(after)[words(after) != words(before)]
            cells = [
                str(dtype).removeprefix("torch."), f"{rate:.0e}", f"{k / n:.1%}",
                f"{entropy_of_places(k / n):.1f}", f"{entropy(found):.1f}",
                column(zstd_bytes(planes(integers)), k), column(zstd_bytes(planes(new)), k),
                column(len(by_place), k), column(len(message), k),
            ]  # fmt: skip
            print("| " + " | ".join(cells) + " |")


# ---- gathers without loss ----


def seconds(call):
    """Returns the processor time of the fastest of ten calls, and what it returns."""
    best = math.inf
    for _ in range(10):
        begun = time.process_time()
        result = call()
        best = min(best, time.process_time() - begun)
    return best, result


def split(values):
    """Returns the exponents of bf16, and of each the sign and the mantissa in a byte."""
    x = words(values).int()
    return (x >> 7 & 0xFF).to(torch.uint8), (x >> 8 & 0x80 | x & 0x7F).to(torch.uint8)


def join(exponents, rest):
    x = rest.int()
    return ((x & 0x80) << 8 | exponents.int() << 7 | x & 0x7F).to(torch.int16).view(torch.bfloat16)


def of_gathers(values):
    """Prints what gathers of bf16 take with coded exponents."""
    exponents, rest = split(values)
    assert torch.equal(words(join(exponents, rest)), words(values))
    n, n_bytes = len(values), zstd_bytes(exponents)
    bits = entropy(exponents.int())
    print(f"\nbf16, {n} weights: exponents have an entropy of {bits:.2f} bits, so {8 + bits:.1f} bits of 16")
    speeds = zstd_speeds(exponents)
    if n_bytes is None or speeds is None:
        print("zstd: left out, there is no command zstd here")
        return
    share = (n + n_bytes) / (2 * n)
    (splits, _), (joins, _) = seconds(lambda: split(values)), seconds(lambda: join(exponents, rest))
    mega = 2 * n / 1e6  # of bf16
    # zstd counts bytes of exponents, of which a weight has one
    encode, decode = mega / (mega / 2 / speeds[0] + splits), mega / (mega / 2 / speeds[1] + joins)
    print(f"zstd: {8 * n_bytes / n:.2f} bits of an exponent, so {16 * share:.1f} of 16")
    print(f"MB/s of bf16, zstd alone: encode {2 * speeds[0]:.0f}, decode {2 * speeds[1]:.0f}")
    print(f"MB/s of bf16, with torch's splits and joins: encode {encode:.0f}, decode {decode:.0f}")
    for n_ranks in (2, 8):
        # a rank encodes its shard, and decodes those of the others
        codec = 1 / n_ranks / encode + (1 - 1 / n_ranks) / decode
        link = (1 - 1 / n_ranks) / LINK_MB_S
        print(
            f"{n_ranks} ranks, 1 Gbit/s: as long as bf16 {max(share * link, codec) / link:.2f} overlapped, "
            f"{(share * link + codec) / link:.2f} one after the other"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=pathlib.Path, nargs="+", default=train_gpt.TEXT, help="text (this repository's)")
    add("--steps", type=int, default=150, help="at a rate of 1e-3, before (150)")
    add("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4], help="(1e-6 1e-5 1e-4)")
    add("--elements", type=int, default=1 << 18, help="of the array, up to 2^20 (2^18)")
    args = parser.parse_args()
    if not 1000 <= args.elements <= N_SEGMENT:
        parser.error(f"--elements {args.elements}: must be from 1000 to {N_SEGMENT}")
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be 1 or more")
    of_arrays(args.elements, (0.003, 0.01, 0.03, 0.1, 0.3))
    (_, start, _), *rows = trained(args)
    print(f"\na GPT of {len(start)} parameters after {args.steps} steps, one step at each rate")
    of_a_model(rows)
    of_gathers(start.bfloat16())


if __name__ == "__main__":
    main()
