"""How what tagc costs grows with the model: 0.3, 0.9 and 2.6 M parameters at 10 tokens per parameter, from
random weights, on 2 hosts of 2 ranks; a line through the gaps over the logarithm of the size, and what it
says of 12 M, of a fork of 22.7 M and of 180 M.

    python -m pip install -r lab/parity/requirements.txt
    python lab/studies/ladder.py                 # what is missing, a row after the other, small sizes first
    python lab/studies/ladder.py --autocast      # products in bf16, where the processor has AMX
    python lab/studies/ladder.py --minutes 0     # the table, the fit and what would refute it

A row is in the JSON file as soon as its run is over, and is not run again; a run that is interrupted goes on
from its last checkpoint. lab/docs/ladder.md has the set-up, the predictions and what came out."""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import statistics
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "lab" / "studies"), str(ROOT / "lab" / "parity")]

import fork  # and with it what ranks inherit
import runner
from arms import BY_NAME, TINY_LONG

# The batch is in proportion to the critical one, which grows as tokens^0.47 (Zhang et al., 2410.21676).
_HOSTS = dataclasses.replace(TINY_LONG, n_ranks=4, n_hosts=2, seeds=(1, 2, 3), save_every=100)
SIZES = {
    "0.3 M": dataclasses.replace(
        _HOSTS, name="ladder-0.3", n_layer=3, n_embd=80, n_head=4, batch_size=12, steps=1030, warmup=100
    ),
    "0.9 M": dataclasses.replace(
        _HOSTS, name="ladder-0.9", n_layer=4, n_embd=128, n_head=4, batch_size=20, steps=1820, warmup=180
    ),
    "2.6 M": dataclasses.replace(
        _HOSTS, name="ladder-2.6", n_layer=5, n_embd=200, n_head=5, batch_size=32, steps=3200, warmup=320,
        seeds=(1,),
    ),
}  # fmt: skip
RATES = {"0.3 M": (4e-3, 8e-3), "0.9 M": (2e-3, 4e-3), "2.6 M": (2e-3, 4e-3)}  # of dense
ARMS = {
    "dense": "dense",
    "dense-b1=0.5": "dense, a beta1 of 0.5",
    "tagc": "`compress(model)`, DDP",
    "tagc-optimizer": "`compress(model, optimizer)`, DDP",
    "tagc-all-optimizer": '`compress(model, optimizer, parameters="delta4")`, FSDP2',
}
SHORT = "dense-b1=0.5"  # beside which those stand that get the optimizer and shorten its beta1
PREDICTED = {"12 M": 12.3e6, "the fork, 22.7 M": 22.7e6, "180 M": 180e6}
# Student's t, 97.5 %, by degrees of freedom
T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


# ---- what is run ----


def rows_of(rows, size):
    return [row for row in rows if row["size"] == size]


def best_rate(rows, size):
    """The rate at which dense ends lowest with the first seed; None until all have been run."""
    losses = {
        row["rate"]: row["loss"] for row in rows_of(rows, size) if (row["arm"], row["seed"]) == ("dense", 1)
    }
    return min(losses, key=losses.get) if set(losses) == set(RATES[size]) else None


def next_job(rows, sizes=tuple(SIZES)):
    """(size, arm, rate, seed) of the first row that is missing; None where there is none."""
    done, jobs = {(row["size"], row["arm"], row["rate"], row["seed"]) for row in rows}, []
    for size in sizes:
        jobs += [(size, "dense", rate, 1) for rate in RATES[size]]
        rate = best_rate(rows, size)
        jobs += [(size, arm, rate, seed) for seed in SIZES[size].seeds for arm in ARMS] if rate else []
    return next((job for job in jobs if job not in done), None)


def run_missing(args):
    import corpus
    import train

    end, folder = time.monotonic() + 60 * args.minutes, args.cache / "runs" / "ladder"
    folder.mkdir(parents=True, exist_ok=True)
    found = fork.read(args.json)
    while time.monotonic() < end and (job := next_job(found["rows"], args.sizes)):
        size, arm, rate, seed = job
        setting = dataclasses.replace(SIZES[size], autocast=args.autocast)
        text = corpus.make(args.cache, setting.n_vocabulary)
        if found["rows"] and found["text"] != text:
            raise SystemExit(f"ladder.py: {args.json} has rows of another text: give another --json")
        path = folder / f"{setting.name}-{arm}-{rate:g}-{seed}{'-bf16' * args.autocast}.json"
        print(f"{job} ...", flush=True)
        made = train.run(setting, BY_NAME[arm], rate, seed, args.cache, path, threading.Event())
        last = made["evals"][-1]
        row = {"size": size, "arm": arm, "rate": rate, "seed": seed, "autocast": args.autocast}
        row |= {name: made[name] for name in ("loss", "steps", "n_params", "cpu_seconds")}
        row |= {"bits": last["bits"] / made["steps"], "last_bits": last["step_bits"]} | runner.origin()
        found = {"text": text, "rows": [*fork.read(args.json)["rows"], row]}
        fork.write(args.json, found)
        print(f"loss {row['loss']:.4f}, {row['bits']:.2f} bits", flush=True)


# ---- what came out ----


def gaps(rows, arm, other="dense"):
    """[(parameters, per cent above the run of another arm of the same size and seed, at the best rate of
    dense)]"""
    found = []
    for size in SIZES:
        own, rate = rows_of(rows, size), best_rate(rows, size)
        of = {(row["arm"], row["seed"]): row for row in own if row["rate"] == rate}
        for seed in SIZES[size].seeds:
            if (arm, seed) in of and (other, seed) in of:
                row, base = of[arm, seed], of[other, seed]
                found.append((row["n_params"], 100 * (row["loss"] / base["loss"] - 1)))
    return found


@dataclasses.dataclass
class Line:
    """gap = middle + slope (x - centre), x the logarithm to 10 of the size; with the errors of both."""

    middle: float
    slope: float
    centre: float
    n: int
    spread: float  # standard deviation of single runs about the line
    width: float  # sum of squares of x about its centre

    def at(self, n_params):
        return self.middle + self.slope * (math.log10(n_params) - self.centre)

    def error(self, n_params, n_seeds):
        """Half of the interval, 95 %, in which the mean gap of that many seeds lies at that size, if the line
        goes on."""
        x = math.log10(n_params) - self.centre
        t = T[min(self.n - 2, len(T)) - 1]
        return t * self.spread * math.sqrt(1 / n_seeds + 1 / self.n + x * x / self.width)

    def slope_error(self):
        return T[min(self.n - 2, len(T)) - 1] * self.spread / math.sqrt(self.width)


def fitted(points):
    """Least squares over [(parameters, gap)]; None with fewer than three runs or two sizes."""
    xs, ys = [math.log10(n) for n, _ in points], [gap for _, gap in points]
    if len(points) < 3 or len(set(xs)) < 2:
        return None
    centre, middle = statistics.mean(xs), statistics.mean(ys)
    width = sum((x - centre) ** 2 for x in xs)
    slope = sum((x - centre) * (y - middle) for x, y in zip(xs, ys)) / width
    rest = sum((y - middle - slope * (x - centre)) ** 2 for x, y in zip(xs, ys))
    return Line(middle, slope, centre, len(points), math.sqrt(rest / (len(points) - 2)), width)


def table(rows):
    lines = [
        "| size | arm | rate | loss, by seed | above dense, by seed, % | above dense with a beta1 of 0.5, % "
        "| bits, all legs, mean | at the end | machine |",
        "|---|---|---:|---|---|---|---:|---:|---|",
    ]
    for size in SIZES:
        for arm in ARMS:
            of_rate = {}
            for row in rows_of(rows, size):
                if row["arm"] == arm:
                    of_rate.setdefault(row["rate"], []).append(row)
            for rate, own in sorted(of_rate.items()):
                is_best = arm != "dense" and rate == best_rate(rows, size)
                of_size = {row["n_params"] for row in own}
                found, short = (
                    [gap for n, gap in gaps(rows, arm, other) if n in of_size] if is_shown else []
                    for other, is_shown in (("dense", is_best), (SHORT, is_best and "optimizer" in arm))
                )
                cells = [
                    f"{size}{', bf16 products' if own[0]['autocast'] else ''}",
                    ARMS[arm],
                    f"{rate:g}",
                    ", ".join(f"{row['loss']:.4f}" for row in own),
                    ", ".join(f"{gap:+.2f}" for gap in found),
                    ", ".join(f"{gap:+.2f}" for gap in short),
                    f"{statistics.mean(row['bits'] for row in own):.2f}",
                    f"{statistics.mean(row['last_bits'] for row in own):.2f}",
                    ", ".join(sorted({row["cpu"] for row in own})),
                ]
                lines.append(f"| {' | '.join(cells)} |")
    missing = next_job(rows)
    return (
        "\n".join([*lines, "", f"Missing, to begin with: {missing}." if missing else "Nothing is missing."])
        + "\n"
    )


def said_of(rows):
    """The fit of each arm, what it says of larger models, and what would refute it."""
    lines = []
    lines_of = [(words, gaps(rows, arm)) for arm, words in list(ARMS.items())[1:]]
    lines_of += [
        (f"{words}, above dense with a beta1 of 0.5", gaps(rows, arm, SHORT))
        for arm, words in ARMS.items()
        if "optimizer" in arm
    ]
    for words, points in lines_of:
        line = fitted(points)
        if line is None:
            lines.append(f"- {words}: too few runs for a fit.")
            continue
        lines.append(
            f"- {words}: {line.middle:+.2f} % at {10**line.centre / 1e6:.2g} M parameters; {line.slope:+.2f} "
            f"for each factor of ten, with an error of {line.slope_error():.2f}; single runs lie "
            f"{line.spread:.2f} about the line."
        )
        for name, n_params in PREDICTED.items():
            least, most = (line.at(n_params) + sign * line.error(n_params, 3) for sign in (-1, 1))
            lines.append(
                f"  - {name}: {line.at(n_params):+.2f} %. A mean of three seeds below {least:+.2f} or above "
                f"{most:+.2f} % refutes the line."
            )
    return "\n".join([*lines, *_stored(rows)]) + "\n"


def _stored(rows):
    """Whether what has been run at other sizes lies within."""
    folder, lines = ROOT / "lab" / "results" / "parity", []
    line = fitted(gaps(rows, "tagc-all-optimizer"))
    runs = json.loads((folder / "curve.json").read_text())["runs"]
    losses = {run["arm"]: run["loss"] for run in runs if run["seed"] == 1}
    gap = 100 * (losses["tagc-all-optimizer"] / losses["dense"] - 1)
    verdict = "no fit yet"
    if line is not None:
        verdict = "within" if abs(gap - line.at(12.3e6)) <= line.error(12.3e6, 1) else "outside"
    lines.append(f"- Stored, 12 M, 750 steps, every leg, one seed: {gap:+.2f} % ({verdict}).")
    forks = fork.read(folder / "fork.json")["rows"]
    for arm, name in (
        ("tagc", "one line"),
        ("tagc-optimizer", "with the optimizer"),
        ("tagc-all-optimizer", "every leg"),
    ):
        found = [100 * gap for gap in fork.above(forks, name).values()] if fork.best_rate(forks) else []
        line = fitted(gaps(rows, arm))
        if found and line:
            is_within = abs(statistics.mean(found) - line.at(22.7e6)) <= line.error(22.7e6, len(found))
            lines.append(
                f"- Stored, the fork, {name}, {len(found)} seeds: {statistics.mean(found):+.2f} % "
                f"({'within' if is_within else 'outside'})."
            )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "lab/results/parity/ladder.json")
    parser.add_argument("--cache", type=pathlib.Path, default=cache / "tagc" / "parity")
    parser.add_argument(
        "--sizes", nargs="+", default=list(SIZES), choices=SIZES, metavar="SIZE", help="only these"
    )
    parser.add_argument(
        "--autocast", action="store_true", help="products in bf16; in a JSON file of their own"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after that; 0: run nothing")
    args = parser.parse_args()
    if any(row["autocast"] != args.autocast for row in fork.read(args.json)["rows"]) and args.minutes:
        raise SystemExit(f"ladder.py: {args.json} has rows of other products: give another --json")
    if args.minutes > 0:
        run_missing(args)
    rows = fork.read(args.json)["rows"]
    text = f"{table(rows)}\n{said_of(rows)}"
    if rows:
        args.json.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
