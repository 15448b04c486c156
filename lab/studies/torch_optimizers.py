"""What each optimizer makes of compressed gradients: the small GPT of torch_first_try.py from random weights,
per optimizer dense, with every value in 4 bits, and going on to selection with its first moment kept and
taken off.

    torchrun --standalone --nproc-per-node 2 lab/studies/torch_optimizers.py --json optimizers.json

Rows that the JSON file has are kept and not run again. lion and schedule-free want the packages lion-pytorch
and schedulefree."""

import argparse
import json
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import torch_first_try as first_try  # puts the package's folder on the path, too

ARMS = ("dense", "4 bits", "goes on, moment kept", "goes on, moment off")


def adamw_groups(model, keep=lambda p: True):
    parameters = [p for p in model.parameters() if keep(p)]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def lion(groups):
    from lion_pytorch import Lion

    return Lion(groups, lr=3e-4, betas=(0.9, 0.99))


def schedule_free(groups):
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(groups, lr=5e-3, betas=(0.9, 0.99), warmup_steps=20)


def muon(model):
    """The matrices of the blocks by Muon, the rest by AdamW, as its authors advise."""
    inner = {id(p) for name, p in model.named_parameters() if p.dim() == 2 and ".h." in name}
    return [
        torch.optim.Muon([p for p in model.parameters() if id(p) in inner], lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(adamw_groups(model, lambda p: id(p) not in inner), lr=2e-3, betas=(0.9, 0.99)),
    ]


MAKES = {
    "adamw": lambda m: [torch.optim.AdamW(adamw_groups(m), lr=2e-3, betas=(0.9, 0.99))],
    "nadam": lambda m: [
        torch.optim.NAdam(adamw_groups(m), lr=2e-3, betas=(0.9, 0.99), decoupled_weight_decay=True)
    ],
    "radam": lambda m: [
        torch.optim.RAdam(adamw_groups(m), lr=2e-3, betas=(0.9, 0.99), decoupled_weight_decay=True)
    ],
    "lion": lambda m: [lion(adamw_groups(m))],
    "sgd": lambda m: [
        torch.optim.SGD(
            [{**g, "weight_decay": 0.0} for g in adamw_groups(m)], lr=0.3, momentum=0.9, nesterov=True
        )
    ],
    "muon": muon,
    "adafactor": lambda m: [torch.optim.Adafactor(adamw_groups(m), lr=2e-2)],
    "schedule-free": lambda m: [schedule_free(adamw_groups(m))],
}


def moment_off(optimizer, group):
    """The group's options without a first moment, {} where it has none."""
    if type(optimizer).__name__ in ("SGD", "Muon"):
        return {"momentum": 0.0, "nesterov": False}
    return {"betas": (0.0, group["betas"][1])} if "betas" in group else {}


def hold_off(optimizer, handle):
    """Whatever is compressed and noise is stepped without a first moment."""

    def before(optimizer, args, kwargs):
        names = {name for name, memory in handle.state.schedule.memories().items() if memory.moment == 0}
        keys = {id(p) for name, p in handle.model.named_parameters() if name.removeprefix("module.") in names}
        optimizer.whole = [dict(group) for group in optimizer.param_groups]
        for group in list(optimizer.param_groups):
            own = [p for p in group["params"] if id(p) in keys]
            group["params"] = [p for p in group["params"] if id(p) not in keys]
            optimizer.param_groups.append({**group, "params": own} | moment_off(optimizer, group))

    def after(optimizer, args, kwargs):
        del optimizer.param_groups[len(optimizer.whole) :]
        for group, whole in zip(optimizer.param_groups, optimizer.whole):
            group["params"] = whole["params"]

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def run(name, arm, setup, seed, tokens, n_vocab):
    import tagc.torch as tagc

    model = first_try.made({}, setup, n_vocab, seed)
    optimizers, handle = MAKES[name](model), None
    if arm != "dense":
        handle = tagc.compress(model, verbose=False)
        if arm.endswith("off"):
            handle.state.schedule.set_moments(
                {parameter.name for parameter in handle.wrapper.parameters()}, ()
            )
        if arm.startswith("goes on"):
            handle.state.schedule.none_is_long()
        if arm.endswith("off"):
            for optimizer in optimizers:
                hold_off(optimizer, handle)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    train, held_out = tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    bits, begin = [], time.perf_counter()
    for step in range(setup["steps"]):
        for optimizer, base in zip(optimizers, rates):
            for group, rate in zip(optimizer.param_groups, base):
                if name != "schedule-free":
                    group["lr"] = rate * first_try.learning_rate(step, setup) / setup["lr"]
        model(*first_try.batch(train, setup, generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), setup["clip"])
        for optimizer in optimizers:
            getattr(optimizer, "train", lambda: None)()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            bits.append(handle.stats().get("bits_per_param", 0.0))
    for optimizer in optimizers:
        getattr(optimizer, "eval", lambda: None)()
    loss = first_try.evaluate(model, held_out, setup)
    if handle is not None:
        handle.close()
    return {
        "loss": loss,
        "bits": sum(bits) / len(bits) if bits else 64.0,
        "last_bits": bits[-1] if bits else 64.0,
        "seconds": time.perf_counter() - begin,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("optimizers.json"))
    parser.add_argument("--optimizers", nargs="+", default=list(MAKES), choices=MAKES)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rows = json.loads(args.json.read_text()) if args.json.exists() else []
    dist.barrier()
    setup = first_try.COMMON | first_try.SETUPS["tiny"] | {"steps": args.steps}
    tokens, n_vocab = first_try.read_tokens("bytes")
    for seed in args.seeds:
        for name in args.optimizers:
            for arm in args.arms:
                key = {"optimizer": name, "seed": seed, "arm": arm, "steps": args.steps}
                if any(all(row[k] == v for k, v in key.items()) for row in rows):
                    continue
                rows.append(key | run(name, arm, setup, seed, tokens, n_vocab))
                if dist.get_rank() == 0:
                    part = args.json.with_suffix(".part")
                    part.write_text(json.dumps(rows, indent=1) + "\n")
                    part.replace(args.json)
                    dense = next(
                        (
                            r["loss"]
                            for r in rows
                            if (r["optimizer"], r["seed"], r["steps"], r["arm"])
                            == (name, seed, args.steps, "dense")
                        ),
                        float("nan"),
                    )
                    print(
                        f"{name:14} {seed} {arm:22} {rows[-1]['loss']:.4f} "
                        f"{100 * (rows[-1]['loss'] / dense - 1):+7.2f} % of dense, "
                        f"{rows[-1]['bits']:.2f} bits, at the end {rows[-1]['last_bits']:.2f}  "
                        f"{rows[-1]['seconds']:.0f} s",
                        flush=True,
                    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
