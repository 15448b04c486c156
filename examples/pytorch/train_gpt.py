"""Trains a small GPT on bytes, under FSDP2, DDP or FSDP1, with gradients compressed by tagc or not.

    torchrun --standalone --nproc-per-node 2 train_gpt.py
    torchrun --standalone --nproc-per-node 2 train_gpt.py --wrap ddp --no-compress
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        train_gpt.py --device cuda     # on both hosts; HOST is one of them

With --resume newest it goes on from the last checkpoint in --save, with as many ranks as there are then
(docs/guide/elastic.md). What tagc needs is in compress(), and the word "tagc" in state_of() and
resume()."""

import argparse
import contextlib
import math
import os
import pathlib
import time
import zlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from device import add_device, start_on
from gpt import GPT, Block, Config
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

# tagc's own, 2 MB
TEXT = [
    pathlib.Path(__file__).resolve().parents[2] / folder
    for folder in ("lib", "engine", "planning", "command", "tests", "docs")
]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add(
        "--data",
        type=pathlib.Path,
        nargs="+",
        default=TEXT,
        help="files, and folders of text (tagc's sources)",
    )
    add_device(parser)
    add("--wrap", choices=["fsdp2", "ddp", "fsdp1", "none"], default="fsdp2")
    add("--compress", action=switch, default=True, help="send gradients through tagc")
    add(
        "--sparsity",
        type=float,
        help="share of a gradient that stays behind, from the first step (0.95, begun gently)",
    )
    add(
        "--parameters",
        choices=["bf16", "lossless", "int8", "delta8", "delta4", "delta2"],
        help="fsdp2: how parameters travel",
    )
    add("--record", help="file for statistics of each step, which tagc-report draws")
    add("--bf16", action=switch, default=False, help="compute in bf16, gradients and optimizer in fp32")
    add("--checkpoint-activations", action=switch, default=False)
    add("--tied", action=switch, default=False, help="one matrix for token embedding and head")
    for name, default in dict(
        n_layer=4,
        n_head=4,
        n_embd=128,
        n_positions=128,
        batch_size=8,
        accumulate=1,
        steps=200,
        warmup=50,
        eval_every=50,
        eval_batches=10,
        save_every=100,
        seed=1,
    ).items():
        add(f"--{name.replace('_', '-')}", type=int, default=default, help=f"({default})")
    for name, default in dict(lr=2e-3, min_lr=2e-4, weight_decay=0.1, clip=1.0).items():
        add(f"--{name.replace('_', '-')}", type=float, default=default, help=f"({default})")
    add("--save", type=pathlib.Path, help="folder for checkpoints")
    add(
        "--resume",
        help=(
            "a checkpoint: one folder that was written into --save's folder; newest: the last one there, "
            "if there is one"
        ),
    )
    args = parser.parse_args()
    if args.resume == "newest" and not args.save:
        parser.error("--resume newest looks for checkpoints in --save's folder: --save is missing")
    if args.wrap == "none":  # one process, nothing to send
        args.compress = False
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            parser.error("--wrap none trains in one process: start it without torchrun")
    return args


def read_bytes(paths):
    """All text below `paths` in a fixed order, its last tenth for evaluation."""
    kinds = {".c", ".h", ".py", ".md", ".txt", ".pod", ".sh"}
    files = []
    for path in paths:
        files += sorted(p for p in path.rglob("*") if p.suffix in kinds) if path.is_dir() else [path]
    data = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8)
    return data[: -len(data) // 10], data[-len(data) // 10 :]


def batch(data, args, *key):
    """A batch that depends on nothing but `key`, so a resumed run sees what it would have seen."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((args.seed, *key)).encode()))
    starts = torch.randint(
        len(data) - args.n_positions - 1, (args.batch_size,), generator=generator, device="cpu"
    )
    rows = torch.stack([data[i : i + args.n_positions + 1] for i in starts.tolist()]).long()
    rows = rows.to(torch.get_default_device())
    return rows[:, :-1], rows[:, 1:]


def wrap(model, args):
    if args.wrap == "fsdp2":
        precision = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if args.bf16
            else None
        )
        options = {"mp_policy": precision} if precision else {}
        for block in model.transformer.h:
            fully_shard(block, **options)
        return fully_shard(model, **options)
    if args.wrap == "ddp":
        return DistributedDataParallel(model)
    if args.wrap == "fsdp1":
        precision = (
            MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if args.bf16 else None
        )
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}),
                                        mixed_precision=precision,
                                        use_orig_params=True,
                                        device_id=torch.get_default_device())  # fmt: skip
    return model


def compress(model, optimizer, args):
    import tagc.torch as tagc

    handle = tagc.compress(model, optimizer, sparsity=args.sparsity, parameters=args.parameters)
    if args.record:
        handle.record(args.record)
    return handle


def dense_bits(args, n_ranks):
    """Bits per parameter that torch alone sends for gradients, counted as tagc counts: before the factor
    (W-1)/W. DDP's all-reduce sends everything twice."""
    return 0 if n_ranks == 1 else 64 if args.wrap == "ddp" else 32


def learning_rate(step, args):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.min_lr + 0.5 * (args.lr - args.min_lr) * (1 + math.cos(math.pi * min(1, done)))


@contextlib.contextmanager
def syncing(model, is_last):
    """Gradients are exchanged at the last micro-step only."""
    if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
        with contextlib.nullcontext() if is_last else model.no_sync():
            yield
    else:
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(is_last)
        yield


def clip(model, norm):
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(norm)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)


def mean_over_ranks(value):
    value = torch.as_tensor(value, dtype=torch.float32).clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def state_of(model, optimizer, handle, step):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "step": torch.tensor(step)}
    return state | {"tagc": handle} if handle else state


def newest(folder):
    """The last checkpoint that is whole: DCP writes .metadata when everything else is there."""
    return max((path for path in folder.glob("step-*") if (path / ".metadata").exists()), default=None)


def resume(path, model, optimizer, handle):
    state = state_of(model, optimizer, handle, 0)
    if handle:  # residuals of as many ranks, or of others
        state["tagc"] = handle.at(path)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return int(state["step"])


def main():
    args = arguments()
    start_on(args.device, has_peers=args.wrap != "none")
    rank, n_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def say(text):
        if rank == 0:
            print(text, flush=True)

    train, evaluation = read_bytes(args.data)
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = GPT(Config(n_positions=args.n_positions, n_embd=args.n_embd, n_head=args.n_head,
                       n_layer=args.n_layer,
                       tied=args.tied, checkpoint_activations=args.checkpoint_activations))  # fmt: skip
    say(
        f"{len(train):,} bytes, {sum(p.numel() for p in model.parameters()):,} parameters, {n_ranks} ranks, "
        f"{args.wrap}"
    )
    model = wrap(model, args)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay
    )
    handle = compress(model, optimizer, args) if args.compress else None
    path = newest(args.save) if args.resume == "newest" else args.resume
    first = resume(path, model, optimizer, handle) if path else 0
    if path:
        say(f"goes on at step {first} from {path}")
    # FSDP casts by itself.
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.bf16 and args.wrap in ("ddp", "none"))

    for step in range(first, args.steps):
        begin, loss = time.perf_counter(), 0.0
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        for micro in range(args.accumulate):
            with syncing(model, micro == args.accumulate - 1):
                with autocast:
                    micro_loss = model(*batch(train, args, step, micro, rank)) / args.accumulate
                micro_loss.backward()
            loss += micro_loss.item()
        if handle and args.record:
            handle.watch(loss)
        clip(model, args.clip)
        optimizer.step()
        optimizer.zero_grad()
        ms = 1e3 * (time.perf_counter() - begin)
        is_last = step + 1 == args.steps
        if step % 10 == 0 or is_last:
            bits = (
                f"{handle.stats().get('bits_per_param', 0):.2f} bits per parameter"
                if handle
                else f"{dense_bits(args, n_ranks)} bits per parameter"
            )
            say(f"step {step:5d}  loss {mean_over_ranks(loss):.4f}  {ms:7.1f} ms  {bits}")
        if (step + 1) % args.eval_every == 0 or is_last:
            with torch.no_grad(), autocast:
                losses = [model(*batch(evaluation, args, "eval", i, rank)) for i in range(args.eval_batches)]
            say(f"step {step:5d}  evaluation loss {mean_over_ranks(sum(losses) / len(losses)):.4f}")
        if args.save and ((step + 1) % args.save_every == 0 or is_last):
            path = args.save / f"step-{step + 1:06d}"
            dcp.save(state_of(model, optimizer, handle, step + 1), checkpoint_id=path)
            say(f"step {step:5d}  saved {path}")
    if dist.is_initialized():
        dist.barrier()  # let torch's own threads finish: they may still need Python
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
