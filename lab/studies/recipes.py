"""Recipes of docs/guide/trainers.md, dense beside compressed: reversible blocks with experts, all trained or
in turn, and preferences with a term of supervised tuning, full and LoRA. Small models from random weights, on
2 hosts of 2 ranks: whether a recipe trains as it does without tagc, not what it costs at size.

    torchrun --standalone --nproc-per-node 4 lab/studies/recipes.py --json recipes.json

A row that the JSON file has is not run again. Prints the table."""

import argparse
import functools
import json
import pathlib
import statistics
import sys
from unittest import mock

import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("examples/pytorch", "python", "lab/parity")]

import preference
import reversible
import runner

import tagc.torch

RECIPES = {
    "reversible blocks, FSDP2": (reversible, []),
    "reversible blocks, experts in turn, FSDP2": (reversible, ["--in-turn", "10"]),
    "preferences and supervised tuning, FSDP2": (preference, []),
    "preferences and supervised tuning, LoRA, DDP": (preference, ["--lora", "--ddp"]),
}
# what torch's AdamW gets, and whether compress() gets that optimizer; None: without tagc
ARMS = {
    "dense": ({}, None),
    "dense, a beta1 of 0.5": ({"betas": (0.5, 0.999)}, None),  # to which the last arm lowers it
    "compress(model)": ({}, False),
    "compress(model, optimizer)": ({}, True),
}
LAST = 20  # steps over which the loss at the end is the mean


def run(recipe, arm, steps):
    """Returns the row. Collective."""
    job, flags = RECIPES[recipe]
    options, gets_optimizer = ARMS[arm]
    whole, adamw = tagc.torch.compress, functools.partial(torch.optim.AdamW, **options)
    sent = {"bytes_sent": 0, "dense_bytes": 0}

    def count(stats):
        for name in sent:
            sent[name] += stats[name] - (stats["bytes_by_leg"]["gather"] if name == "bytes_sent" else 0)

    def compress(model, optimizer, **options):
        return whole(model, *[optimizer] * gets_optimizer, **options)

    words = [*flags, "--steps", str(steps)]
    with mock.patch.object(torch.optim, "AdamW", adamw), mock.patch.object(tagc.torch, "compress", compress):
        if gets_optimizer is None:
            losses = job.main([*words, "--torch"])
        else:
            losses = job.main(words, hosts=2, verbose=False, on_step=count)
    found = torch.tensor([statistics.mean(losses[:LAST]), statistics.mean(losses[-LAST:]), *sent.values()])
    dist.all_reduce(found)
    first, last, n_bytes, n_dense = found.tolist()
    ranks = dist.get_world_size()
    row = {"recipe": recipe, "arm": arm, "steps": steps, "first": first / ranks, "last": last / ranks}
    if n_dense:  # of a host's two ranks
        row |= {"bytes_of_host": n_bytes / 2 / steps, "dense_bytes_of_host": n_dense / 2 / steps}
    return row | runner.origin()


def table(rows):
    lines = [
        f"| recipe | arm | loss of the first and the last {LAST} steps | above dense "
        "| bytes of gradients that a host sends in a step | dense, of the same gradients | machine |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    of = {(row["recipe"], row["arm"]): row for row in rows}
    for (recipe, arm), row in of.items():
        dense = of.get((recipe, "dense"))
        cells = [
            recipe,
            arm,
            f"{row['first']:.3f}, {row['last']:.4f}",
            f"{100 * (row['last'] / dense['last'] - 1):+.2f} %" if dense and row is not dense else "",
            *(
                f"{row[name]:,.0f}" if name in row else ""
                for name in ("bytes_of_host", "dense_bytes_of_host")
            ),
            row["cpu"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def run_missing(args, rows):
    """Adds rows. Collective."""
    done = {(row["recipe"], row["arm"], row["steps"]) for row in rows}
    for recipe in args.recipes:
        for arm in [arm for arm in ARMS if (recipe, arm, args.steps) not in done]:
            rows.append(run(recipe, arm, args.steps))
            if dist.get_rank() == 0:
                args.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "lab/results/parity/recipes.json")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES, metavar="RECIPE")
    args = parser.parse_args()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = json.loads(args.json.read_text()) if args.json.exists() else []
    dist.barrier()
    # Examples make and end a group of their own; here one serves all runs.
    nothing = dict.fromkeys(("init_process_group", "destroy_process_group"), lambda *_, **__: None)
    with mock.patch.multiple(dist, **nothing):
        run_missing(args, rows)
    if dist.get_rank() == 0:
        args.json.with_suffix(".md").write_text(table(rows))
        print(table(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
