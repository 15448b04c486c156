"""What does LocalSteps(gate="bf16"), PULSELoCo's rule, save and cost over a thousand exchanges? Two sites
fine-tune a GPT so small that a step takes about two milliseconds.

    python lab/studies/local_gate.py --out rows.jsonl                # resumes where it stopped
    python lab/studies/local_gate.py --out rows.jsonl --table

The sites are processes, with LocalSteps as it is. All arms begin with one model that learnt Python's standard
library, and learn the C sources of tagc with a constant learning rate. Steps are --exchanges times the local
steps between two. Bits are those that a site sends for each parameter and exchange."""

import argparse
import json
import multiprocessing
import os
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "examples" / "pytorch"), str(ROOT / "lab" / "studies")]
os.environ.setdefault("TAGC_LIBRARY", str(ROOT / "build" / "libtagc.so"))

import torch
import torch.distributed as dist
from gpt import GPT, Config
from torch_first_try import read_bytes
from torch_local import batch
from train_gpt import read_bytes as read_folders

SITES, POSITIONS, ROWS = 2, 32, 4
# None: torch's all-reduce in every step
ARMS = {
    "averaging, fp32": {"values": "fp32"},
    "gate, fp32 (PULSELoCo)": {"values": "fp32", "gate": "bf16"},
    "averaging, 4 bits": {"values": "int4"},
    "gate, 4 bits": {"values": "int4", "gate": "bf16"},
}


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="; ".join(ARMS))
    add("--every", type=int, nargs="+", default=[30, 100], help="local steps between exchanges (30 100)")
    add("--lr", type=float, nargs="+", default=[1e-5, 1e-4], help="of AdamW, constant (1e-5 1e-4)")
    add("--seeds", type=int, nargs="+", default=[1], help="of the data (1)")
    add("--exchanges", type=int, default=1000, help="(1000)")
    add("--first", type=int, default=6000, help="steps in which one process makes the first model (6000)")
    add("--out", type=pathlib.Path, required=True, help="rows, a line of JSON for each")
    add("--table", action="store_true", help="train nothing, print the table of --out")
    return parser.parse_args()


def made():
    torch.manual_seed(1)
    return GPT(Config(n_positions=POSITIONS, n_embd=32, n_head=2, n_layer=1))


def step(model, optimizer, text, rows, *key):
    optimizer.zero_grad()
    tokens, targets = batch(text, rows, *key)
    model(tokens[:, :POSITIONS], targets[:, :POSITIONS]).backward()
    optimizer.step()


def evaluate(model, text):
    with torch.no_grad():
        losses = []
        for i in range(100):
            tokens, targets = batch(text, 32, "held out", i)
            losses.append(model(tokens[:, :POSITIONS], targets[:, :POSITIONS]))
        return (sum(losses) / len(losses)).item()


def first_model(args):
    """Returns parameters that one process has trained on other text."""
    text = torch.frombuffer(bytearray(read_bytes()), dtype=torch.uint8)
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    for i in range(args.first):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (i + 1) / 100) * (1 - i / args.first)
        step(model, optimizer, text, 8, "first", i)
    return model.state_dict()


def site(rank, port, args, row, weights, texts):
    from tagc.local import LocalSteps

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, SITES, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SITES)
    model, n_bytes, begin = made(), [], time.monotonic()
    model.load_state_dict(weights)
    n_params = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=row["lr"], betas=(0.9, 0.95))
    options = {"every": row["every"], "layers": "all", "verbose": False} | ARMS[row["arm"]]
    handle = LocalSteps(
        model, optimizer, on_exchange=lambda stats: n_bytes.append(stats["bytes_sent"]), **options
    )
    losses = {0: evaluate(model, texts[1])}
    for i in range(row["every"] * args.exchanges):
        step(model, optimizer, texts[0], ROWS, row["seed"], rank, i)
        if (i + 1) % (row["every"] * args.exchanges // 4) == 0:
            losses[i + 1] = evaluate(model, texts[1])
    if rank == 0:
        row |= {"losses": losses, "bits": 8 * sum(n_bytes) / len(n_bytes) / n_params, "n_params": n_params}
        row |= {"seconds": time.monotonic() - begin}
        with args.out.open("a") as file:
            print(json.dumps(row), file=file, flush=True)
        print(json.dumps(row), flush=True)
    handle.close()
    dist.barrier()
    os._exit(0)  # gloo's threads


KEY = ("every", "lr", "seed", "arm", "exchanges", "first")


def done(args):
    rows = map(json.loads, args.out.read_text().splitlines() if args.out.exists() else [])
    found = {tuple(row[name] for name in KEY): row for row in rows}
    return {key: row for key, row in found.items() if key[4:] == (args.exchanges, args.first)}


def table(rows):
    print("| H | learning rate | arm | seed | bits per exchange | loss | beside fp32 |")
    print("|---:|---:|---|---:|---:|---:|---:|")
    for key in sorted(rows, key=lambda key: (key[:3], list(ARMS).index(key[3]))):
        every, lr, seed, arm, *rest = key
        base = rows.get((every, lr, seed, "averaging, fp32", *rest))
        loss = list(rows[key]["losses"].values())[-1]
        above = f"{100 * (loss / list(base['losses'].values())[-1] - 1):+.2f} %" if base else "-"
        print(f"| {every} | {lr:g} | {arm} | {seed} | {rows[key]['bits']:.2f} | {loss:.4f} | {above} |")


def main():
    args = arguments()
    if not args.table:
        torch.set_num_threads(1)
        texts, weights = read_folders([ROOT / "lib", ROOT / "engine"]), None
        context = multiprocessing.get_context("fork")
        for every in args.every:
            for lr in args.lr:
                for seed in args.seeds:
                    for arm in args.arms:
                        values = (every, lr, seed, arm, args.exchanges, args.first)
                        if values in done(args):
                            continue
                        weights = first_model(args) if weights is None else weights
                        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
                        row = dict(zip(KEY, values))
                        processes = [
                            context.Process(target=site, args=(rank, store.port, args, row, weights, texts))
                            for rank in range(SITES)
                        ]
                        for process in processes:
                            process.start()
                        for process in processes:
                            process.join()
                        if any(process.exitcode for process in processes):
                            raise SystemExit("a site failed")
    table(done(args))


if __name__ == "__main__":
    main()
