"""Which share and format of sums an all-reduce may send back: losses of forks, and bits at 2 to 64 ranks.

    build/tagc data --out data/text FOLDER
    python lab/studies/way_back.py --data data/text --out runs/way-back --seeds 1 2 --ranks 2 8 16
    python lab/studies/way_back.py --data data/text --out runs/way-back --ranks 2 8 16 --schedule
    python lab/studies/way_back.py --data data/text --out runs/way-back --bits

Ranks are threads of `tagc train --sharding none`. A seed trains a small GPT-2 without compression for 300
steps. Its forks go on with the same data: without compression, and with 5 % of the gradient on the way there,
each choice for the way back, and a short first moment or none. --schedule: from random weights, and in forks,
with the schedule that tagc has by default. A run that is in --out is not repeated."""

import argparse
import json
import pathlib
import subprocess

ORIGIN_STEPS, SEQUENCES = 300, 16
# (result-sparsity, result-values); the first is what the others are compared with
CHOICES = [("0", "fp32"), ("auto", "auto"), ("0.92", "int4"), ("0.84", "int4")]


def train(args, name, *words):
    """Returns the lines of metrics.jsonl of a run, which is made unless it is there."""
    folder = args.out / name
    done = args.out / f"{name}.done"
    if not done.exists():
        shape = "--model tiny --n-layer 2 --n-head 4 --block-size 64 --sharding none --blas-threads 1"
        words = [*shape.split(), "--data", str(args.data), "--out", str(folder), *map(str, words)]
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        subprocess.run([args.tagc, "train", *words, "--quiet"], check=True)
        done.touch()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def loss(args, name, ranks, steps, *words):
    """Returns the last validation loss of a run with 16 sequences per step on that many ranks."""
    rate = "--n-embd 64 --lr 2e-3 --warmup 20 --eval-every 100 --eval-batches 40".split()
    run = [*rate, "--ranks", ranks, "--batch-size", SEQUENCES // ranks, "--steps", steps, *words]
    return [line["val_loss"] for line in train(args, name, *run) if line["type"] == "eval"][-1]


def losses(args, seed):
    """Prints the loss of each choice after a fork."""
    origin, last = f"origin-{seed}", ORIGIN_STEPS + args.steps
    rate = ["--seed", seed, "--min-lr", "2e-3" if args.steps <= 200 else "2e-4"]
    dense = ["--compress", "none"]
    loss(args, origin, 2, ORIGIN_STEPS, *rate[:2], "--min-lr", "2e-3", *dense, "--save-every", ORIGIN_STEPS)
    fork = [*rate, "--fork", args.out / origin, "--schedule-from", "fork"]
    direct = "--compress non-attention-linear --exchange direct --gentle no --sparsity 0.95".split()
    end = f"{args.steps}-{seed}"
    found = {
        f"none, beta1 {beta1}": loss(args, f"none-{beta1}-{end}", 2, last, *fork, *dense, "--beta1", beta1)
        for beta1 in (0.9, 0.5)
    }
    for ranks in args.ranks:
        for share, values in CHOICES:
            for beta1 in (0.5, 0):
                back = ["--result-sparsity", share, "--result-values", values, "--compressed-beta1", beta1]
                name = f"{ranks}-{share}-{values}-{beta1}-{end}"
                what = f"{ranks} ranks, {share} {values}, beta1 {beta1}"
                found[what] = loss(args, name, ranks, last, *fork, *direct, *back)
    for what, value in found.items():
        print(f"seed {seed}, {what}: {value:.4f}", flush=True)


def scheduled(args, seed):
    """Prints losses of 1,500 steps and of a fork of 600, in which the schedule decides when to select."""
    rate, dense = ["--seed", seed, "--min-lr", "2e-4"], ["--compress", "none"]
    gentle = "--compress non-attention-linear --exchange direct --gentle yes --sparsity 0.95".split()
    starts = [("random weights", 1500, rate)]
    if not args.no_forks:
        origin = args.out / f"origin-{seed}"
        last = ["--min-lr", "2e-3", *dense, "--save-every", ORIGIN_STEPS]
        loss(args, origin.name, 2, ORIGIN_STEPS, *rate[:2], *last)
        fork = [*rate, "--fork", origin, "--schedule-from", "fork"]
        starts.append(("fork", ORIGIN_STEPS + 600, fork))
    for start, steps, words in starts:
        none = loss(args, f"schedule-none-{start[0]}-{seed}", 2, steps, *words, *dense)
        print(f"seed {seed}, {start}, no compression: {none:.4f}", flush=True)
        for ranks in args.ranks:
            for beta1 in args.beta1:
                name = f"schedule-{ranks}-{beta1}-{start[0]}-{seed}"
                found = loss(args, name, ranks, steps, *words, *gentle, "--compressed-beta1", beta1)
                what = f"{ranks} ranks, beta1 {beta1}: {found:.4f}, {100 * (found / none - 1):+.2f} %"
                print(f"seed {seed}, {start}, {what}", flush=True)


def bits(args):
    """Prints the bits per parameter that a rank sends, before the factor (W - 1) / W."""
    for ranks in (2, 8, 16, 64):
        words = "--n-embd 128 --compress all --exchange direct --gentle no --sparsity 0.95".split()
        words += "--batch-size 1 --steps 8 --eval-every never --ranks".split()
        run = train(args, f"bits-{ranks}", *words, ranks)
        sent = [line for line in run if line["type"] == "step"][-1]["bits_sent_per_param"]
        there, back = (
            part * ranks / (ranks - 1) for part in (sent["index"] + sent["values"], sent["result"])
        )
        print(f"{ranks} ranks: there {there:.2f}, back {back:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="what `tagc data` made")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the runs")
    parser.add_argument("--tagc", default="build/tagc", help="the command")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8], choices=[1, 2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=200, help="of a fork; above 200 the rate falls")
    parser.add_argument("--schedule", action="store_true", help="with the schedule, and no --steps")
    parser.add_argument(
        "--beta1", nargs="+", default=["auto", "0"], help="short first moments, with --schedule"
    )
    parser.add_argument("--no-forks", action="store_true", help="with --schedule: random weights alone")
    parser.add_argument("--bits", action="store_true", help="count bits instead")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.bits:
        bits(args)
        return
    for seed in args.seeds:
        (scheduled if args.schedule else losses)(args, seed)


if __name__ == "__main__":
    main()
