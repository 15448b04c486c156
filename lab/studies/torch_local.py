"""What local steps cost in loss: LocalSteps beside an exchange in every step, on a small GPT from random
weights.

    python lab/studies/torch_local.py --sites 2 4 8 --out local.jsonl  # goes on where it broke off
    python lab/studies/torch_local.py --out local.jsonl --table          # the table of what is there

Needs libtagc (make build). Sites are processes on this machine, joined by gloo, and use LocalSteps and
compress() as they are. All arms begin with the same weights. A step has the same --rows sequences whatever
the number of sites, each of which has its part of them. The loss is that of the common model on held-out text
of Python's standard library, at the end and at every hundredth step; where sites keep what they do not send,
before the end the mean loss of their own models. tagc counts the bits. Seconds come from
them, by the formulas of docs/guide/sites.md, for a model of --params parameters whose step computes for
--step-s seconds."""

import argparse
import json
import math
import multiprocessing
import os
import pathlib
import statistics
import sys
import time
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "examples" / "pytorch")]
os.environ.setdefault("TAGC_LIBRARY", str(ROOT / "build" / "libtagc.so"))

ALL = {"sparsity": 0, "layers": "all"}
DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}
LARGEST = {"sparsity": 0.95, "values": "int2"}
# name -> options of LocalSteps; None: an exchange in every step
ARMS = {
    "every step, fp32": None,
    "every step, direct": None,
    "averaging, fp32": ALL | {"values": "fp32"},
    "DiLoCo, fp32": ALL | DILOCO | {"values": "fp32"},
    "DiLoCo, bf16": ALL | DILOCO | {"values": "bf16"},
    "averaging, every value in 4 bits": {"sparsity": 0, "values": "int4"},
    "DiLoCo, every value in 4 bits": DILOCO | {"sparsity": 0, "values": "int4"},
    "averaging, direct 95 %": LARGEST,
    "averaging, direct 99 %": LARGEST | {"sparsity": 0.99},
    "DiLoCo, direct 95 %": LARGEST | DILOCO,
    "SparseLoCo's setting": {"sparsity": 0.984, "values": "int2", "residual_decay": 0.95, "layers": "all"},
    "Muon, every step, fp32": None,
    "Muon, averaging, direct 95 %": LARGEST,
}
PAYLOAD = 1448 / 1538  # of a link's rate: a frame of 1538 bytes has 1448 bytes of TCP's data
MESSAGES = 5  # of an all-reduce, one after the other: the agreement, bodies and their rests, sums and theirs
LINKS = [(rate, latency) for rate in (20, 100, 1000) for latency in (0.001, 0.03, 0.1)]  # Mbit/s, seconds


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sites", type=int, nargs="+", default=[2, 4, 8])
    add("--every", type=int, nargs="+", default=[10, 30, 100])
    add("--seeds", type=int, nargs="+", default=[1], help="of the data")
    add(
        "--arms",
        nargs="+",
        choices=[*ARMS],
        default=[*ARMS],
        metavar="NAME",
        help="of: " + "; ".join(ARMS).replace("%", "%%"),
    )
    add("--steps", type=int, default=300, help="a multiple of each of --every (300)")
    add("--rows", type=int, default=16, help="sequences of 64 bytes in a step, over all sites (16)")
    add("--params", type=float, default=124e6, help="of the model that seconds are for (124e6)")
    add("--step-s", type=float, default=1.0, help="that its step computes (1)")
    add("--out", type=pathlib.Path, required=True, help="rows, a line of JSON for each")
    add("--table", action="store_true", help="print the table of what --out has")
    return parser.parse_args()


def rows_of(args):
    """(sites, arm, every, seed) of each row; every is 1 where it has no meaning."""
    return [
        (sites, arm, every, seed)
        for sites in args.sites
        for seed in args.seeds
        for arm in args.arms
        for every in ([1] if ARMS[arm] is None else args.every)
    ]


def key_of(row):
    return row["sites"], row["arm"], row["every"], row["seed"]


def done(args):
    if not args.out.exists():
        return []
    whole, end, torn = args.out.read_text().rpartition("\n")
    if torn:
        args.out.write_text(whole + end)
    found = [json.loads(line) for line in whole.splitlines()]
    return [row for row in found if (row["steps"], row["rows"]) == (args.steps, args.rows)]


# ---- a site ----


def site(rank, sites, port, jobs, args):
    import torch
    import torch.distributed as dist
    from torch_first_try import read_bytes

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, sites, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=sites)
    text = torch.frombuffer(bytearray(read_bytes()), dtype=torch.uint8)
    train, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    for _, arm, every, seed in jobs:
        row = one_run(args, arm, every, seed, train, held_out)
        if rank == 0:
            with args.out.open("a") as file:
                print(json.dumps(row), file=file, flush=True)
            print(
                (
                    f"{sites} sites, {arm}, every {every}, seed {seed}: {row['loss']:.4f}, {row['bits']:.4g} "
                    f"bits a step, {row['wall_s']:.0f} s"
                ),
                flush=True,
            )
    dist.barrier()
    os._exit(0)  # gloo's threads


def batch(data, rows, *key):
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    starts = torch.randint(len(data) - 65, (rows,), generator=generator)
    found = torch.stack([data[i : i + 65] for i in starts.tolist()]).long()
    return found[:, :-1], found[:, 1:]


def optimizers_of(model, arm):
    import torch

    if not arm.startswith("Muon"):
        return [torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)]
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name]
    inside = {id(p) for p in matrices}
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(
            [p for p in model.parameters() if id(p) not in inside],
            lr=2e-3,
            betas=(0.9, 0.95),
            weight_decay=0.1,
        ),
    ]


def one_run(args, arm, every, seed, train, held_out):
    import torch
    import torch.distributed as dist
    from gpt import GPT, Config
    from torch.nn.parallel import DistributedDataParallel

    import tagc.torch as tagc
    from tagc.local import LocalSteps

    rank, sites, begin = dist.get_rank(), dist.get_world_size(), time.monotonic()
    torch.manual_seed(1)
    model = GPT(Config(n_positions=64, n_embd=64, n_head=4, n_layer=2))
    optimizers, n_params, bits = optimizers_of(model, arm), sum(p.numel() for p in model.parameters()), []
    own = ARMS[arm]
    wrapped = DistributedDataParallel(model) if own is None else model
    handle = None
    if own is not None:
        handle = LocalSteps(model, optimizers, every=every, verbose=False, **own)
    elif "direct" in arm:
        handle = tagc.compress(
            wrapped, optimizers, verbose=False, on_step=lambda stats: bits.append(stats["bits_per_param"])
        )
    losses = {}
    for step in range(args.steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = (
                    (0.02 if isinstance(optimizer, torch.optim.Muon) else 2e-3)
                    * min(1, (step + 1) / 30)
                    * (1 - 0.9 * step / args.steps)
                )
            optimizer.zero_grad()
        loss = wrapped(*(rows[rank::sites] for rows in batch(train, args.rows, seed, step)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step + 1 == args.steps and own is not None and own["sparsity"]:
            handle.synchronize()  # every value, which counts in the bits
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            losses[step + 1] = evaluate(model, held_out)
    assert not math.isnan(losses[args.steps])
    if own is not None:
        per_step = handle.stats()["bits_per_param_and_step"]
    elif handle is not None:
        per_step = sum(bits) / len(bits)
    else:
        per_step = 64.0  # torch's all-reduce: there and back
    if handle is not None:
        handle.close()
    del wrapped
    return {
        "sites": sites,
        "arm": arm,
        "every": every,
        "seed": seed,
        "steps": args.steps,
        "rows": args.rows,
        "loss": losses[args.steps],
        "losses": losses,
        "bits": per_step,
        "n_params": n_params,
        "wall_s": time.monotonic() - begin,
    }


def evaluate(model, held_out):
    """The same on all sites, where they have the same parameters: else the mean of their losses."""
    import torch
    import torch.distributed as dist

    with torch.no_grad():
        total = sum(model(*batch(held_out, 32, "held out", i)) for i in range(10)) / 10
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# ---- all of them ----


def run(args):
    import torch.distributed as dist

    have = {key_of(row) for row in done(args)}
    if wrong := [every for every in args.every if args.steps % every]:
        raise SystemExit(
            f"--steps is {args.steps}, must be a multiple of {wrong[0]}, so that all sites end with the "
            "same model"
        )
    if wrong := [sites for sites in args.sites if args.rows % sites]:
        raise SystemExit(f"--rows is {args.rows}, must be a multiple of {wrong[0]} sites")
    context = multiprocessing.get_context("fork")
    for sites in args.sites:
        jobs = [row for row in rows_of(args) if row[0] == sites and row not in have]
        if not jobs:
            continue
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        processes = [
            context.Process(target=site, args=(rank, sites, store.port, jobs, args)) for rank in range(sites)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a site failed")


def table(args):
    from tagc._planner import local_s

    found = {key_of(row): row for row in done(args)}
    heads = [
        "sites",
        "arm",
        "H",
        "seeds",
        "loss",
        "above fp32 at every step",
        "bits a step",
        *(f"{rate} Mbit/s, {1e3 * latency:g} ms" for rate, latency in LINKS),
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for sites, arm, every in sorted(
        {key[:3] for key in found}, key=lambda one: (one[0], [*ARMS].index(one[1]), one[2])
    ):
        seeds = {key[3]: row for key, row in sorted(found.items()) if key[:3] == (sites, arm, every)}
        loss, bits = (statistics.mean(row[name] for row in seeds.values()) for name in ("loss", "bits"))
        bases = {seed: found.get((sites, "every step, fp32", 1, seed)) for seed in seeds}
        gaps = [100 * (row["loss"] / bases[seed]["loss"] - 1) for seed, row in seeds.items() if bases[seed]]
        above = f"{statistics.mean(gaps):+.1f} %" if gaps else "-"
        spread = (
            f" ({min(gaps):+.1f} to {max(gaps):+.1f})" if len(gaps) > 1 and arm != "every step, fp32" else ""
        )
        cells = []
        for rate, latency in LINKS:
            n_bytes_s = bits * every * (sites - 1) / sites * args.params / (PAYLOAD * rate * 1e6)
            exchange_s = MESSAGES * latency + n_bytes_s
            cells.append(f"{local_s(args.step_s, exchange_s, every):.3g} s")
        words = [
            str(sites),
            arm,
            "-" if every == 1 else str(every),
            str(len(seeds)),
            f"{loss:.3f}",
            above + spread,
            f"{bits:.3g}",
        ]
        lines.append("| " + " | ".join(words + cells) + " |")
    print("\n".join(lines))


def main():
    args = arguments()
    args.out = args.out.resolve()
    if not args.table:
        run(args)
    table(args)


if __name__ == "__main__":
    main()
