"""PyTorch on two GPUs with NCCL, or on one that two processes share over gloo: losses under FSDP2, with
gradients in fp32 and in bf16, and under DDP against those of the same runs on the processor, the time and the
memory of a step with and without tagc, and torch.topk of the arrays of bench_cuda.cu.
With two GPUs rank 0 is on the second one.

    python lab/studies/torch_gpu.py --json torch_gpu.json
    python lab/studies/torch_gpu.py --only losses   # whether training works at all
    python lab/studies/torch_gpu.py --device cpu    # the same on a machine without a GPU, small

On a CPU the weights of the second run of each pair differ by one part in 10^6, to imitate a device that
rounds otherwise."""

import argparse
import copy
import datetime
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "pytorch"), str(ROOT / "python")]
from gpt import GPT, Config

import tagc
import tagc.torch

N_RANKS = 2
TINY = Config(n_vocab=256, n_positions=64, n_embd=64, n_head=4, n_layer=2)
MODELS = {
    "tiny": TINY,
    "small": Config(n_vocab=8192, n_positions=256, n_embd=384, n_head=6, n_layer=6, tied=False),
    # 162 M parameters
    "gpt2": Config(n_vocab=50304, n_positions=1024, n_embd=768, n_head=12, n_layer=12, tied=False),
}
WRAPPERS = ("fsdp2", "fsdp2-bf16", "ddp")  # -bf16: gradients are
PERTURBED = 1e-6
# of the loss, at every step; a change of all weights by 5 % differs by 2.5e-3, no exchange by 2.7e-2
TOLERANCE = 5e-4


def name_of(wrapper, codec):
    """codec: where tagc's is; None without tagc."""
    return wrapper if codec is None else f"{wrapper}-tagc" + ("" if codec == "host" else f"-{codec}")


def codecs_on(device):
    """Of tagc: always the processor's, and the kernels where they were built."""
    if device == "cpu":
        return ["host"]
    named = os.environ.get("TAGC_CUDA_LIBRARY")
    beside = tagc._library.library_path().parent / "libtagc-cuda.so"
    return ["host", "device"] if named or beside.exists() else ["host"]


def say(args, rank, what):
    """For who stops what hangs: what began last, and when."""
    if rank == 0:
        print(f"at {time.time() - args.began:.0f} s: {what}", flush=True)


class Run:
    """A model, wrapped, on a device, and its optimizer."""

    def __init__(self, model, wrapper, codec, threads):
        device = next(model.parameters()).device
        self.handle = None
        if wrapper in ("fsdp2", "fsdp2-bf16"):
            mesh = init_device_mesh(device.type, (N_RANKS,))
            policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if wrapper != "fsdp2" else None)
            for module in (*model.transformer.h, model):
                fully_shard(module, mesh=mesh, mp_policy=policy)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no average
        elif wrapper == "ddp":
            model = DistributedDataParallel(model)
        self.model = model
        if codec is not None:
            self.handle = tagc.torch.compress(
                model, sparsity=0.95, verbose=False, options=tagc.torch.Options(threads=threads, codec=codec)
            )
        groups = self.handle.param_groups() if self.handle else model.parameters()
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3)

    def step(self, tokens):
        loss = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def close(self):
        if self.handle:
            self.handle.close()


# ---- losses ----


def batches(config, n_steps, batch_size, rank):
    """Each token follows from the one before it, by a rule that rank and step do not change; one in eight is
    noise."""
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(n_steps):
        tokens = torch.randint(config.n_vocab, (batch_size, config.n_positions + 1), generator=generator)
        is_noise = torch.rand(tokens.shape, generator=generator) < 0.125
        for i in range(1, tokens.shape[1]):
            tokens[:, i] = torch.where(
                is_noise[:, i], tokens[:, i], (5 * tokens[:, i - 1] + 17) % config.n_vocab
            )
        yield tokens


def losses_of(args, rank, wrapper, codec, device, perturbed=0.0):
    """Of each step, the mean over ranks."""
    say(args, rank, f"{'alone' if wrapper is None else name_of(wrapper, codec)} on {device}")
    torch.manual_seed(1)
    model = GPT(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + perturbed * torch.randn_like(parameter))
    run = Run(model.to(device), wrapper, codec, args.threads)
    mine = torch.stack(
        [run.step(tokens.to(device)).cpu() for tokens in batches(TINY, args.loss_steps, 8, rank)]
    )
    run.close()
    dist.all_reduce(mine)
    return (mine / N_RANKS).tolist()


def difference(a, b):
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def compare_losses(args, rank, device, wrapper):
    """The control has no exchange at all: its losses must differ by more than the tolerance, or the
    comparison shows nothing."""
    found, references = [], {}
    for codec in (None, *args.codecs):
        if (codec is None) not in references:
            references[codec is None] = losses_of(args, rank, wrapper, codec and "host", "cpu")
        reference = references[codec is None]
        other = losses_of(args, rank, wrapper, codec, device, PERTURBED if device == "cpu" else 0.0)
        found.append(
            {
                "name": name_of(wrapper, codec),
                "cpu": reference,
                "device": other,
                "max_rel_difference": difference(other, reference),
            }
        )
    alone = losses_of(args, rank, None, None, device)
    control = min(difference(alone, row["cpu"]) for row in found)
    return {
        "tolerance": TOLERANCE,
        "perturbed": PERTURBED if device == "cpu" else 0.0,
        "arms": found,
        "without_exchange": control,
    }


# ---- time of a step ----


def wait_for(device):
    if device != "cpu":
        torch.cuda.synchronize()


def largest_unit_bytes(model):
    """Returns the bytes of the largest group of parameters that is exchanged together: a block, or what no
    block has."""
    blocks = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in model.transformer.h]
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return max(*blocks, whole - sum(blocks))


def is_counted(device):
    """Whether torch knows how much memory of the device is allocated."""
    return device != "cpu" and os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") == "0"


def peak_of(device, go):
    """Returns how many bytes go() has allocated at once, beyond what was allocated before. None: nobody
    counts."""
    if not is_counted(device):
        go()
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    go()
    return torch.cuda.max_memory_allocated() - before


def time_steps(args, rank, device, wrapper):
    """Arms take turns; of each step the slowest rank's seconds."""
    config = MODELS[args.model]
    torch.manual_seed(1)
    model = GPT(config)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(config.n_vocab, (args.batch_size, args.seq_len + 1), generator=generator).to(
        device
    )
    runs = {"alone": Run(copy.deepcopy(model).to(device), None, None, args.threads)}
    for codec in (None, *args.codecs):
        runs[name_of(wrapper, codec)] = Run(copy.deepcopy(model).to(device), wrapper, codec, args.threads)
    seconds, peaks = {name: [] for name in runs}, {name: [] for name in runs}
    for number in range(-1, args.rounds):
        for name, run in runs.items():
            say(args, rank, f"round {number + 1} of {name} on {device}")
            for _ in range(3 if number < 0 else args.steps):
                dist.barrier()
                wait_for(device)
                begin = time.perf_counter()
                peak = peak_of(device, lambda run=run: run.step(tokens))
                wait_for(device)
                if number >= 0:
                    seconds[name].append(time.perf_counter() - begin)
                    peaks[name].append(peak)
    rows = []
    for name, run in runs.items():
        slowest = torch.tensor(seconds[name])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        peak = None if None in peaks[name] else max(peaks[name])
        row = {
            "name": name,
            "median_s": statistics.median(slowest.tolist()),
            "min_s": slowest.min().item(),
            "max_s": slowest.max().item(),
            "n": len(slowest),
            "peak_bytes": peak,
        }
        if run.handle:
            row |= {
                "bytes_sent": run.handle.stats()["bytes_sent"],
                "codec": run.handle.codec,
                "device_bytes": run.handle.memory().device.total,
            }
        rows.append(row)
        run.close()
    return {
        "model": args.model,
        "n_params": sum(p.numel() for p in model.parameters()),
        "batch_size": args.batch_size,
        "seq_len": args.seq_len,
        "largest_unit_bytes": largest_unit_bytes(model),
        "arms": rows,
    }


# ---- torch.topk ----


def bench_values(n, seed, device):
    """What fill() in cuda_measure.cuh makes, to the bit."""
    parts = []
    for begin in range(0, n, 1 << 24):
        z = torch.arange(begin + 1, min(n, begin + (1 << 24)) + 1, device=device)
        z = z * (0x9E3779B97F4A7C15 - 2**64) + seed
        z = (z ^ (z >> 30 & (1 << 34) - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
        z = (z ^ (z >> 27 & (1 << 37) - 1)) * (0x94D049BB133111EB - 2**64)
        a = (z & 0xFFFF).float() + (z >> 16 & 0xFFFF).float() - 65535.0
        b = (z >> 32 & 0xFFFF).float() + (z >> 48 & 0xFFFF).float() - 65535.0
        parts.append(a * b * torch.tensor(1e-12, dtype=torch.float32, device=device))
    return torch.cat(parts)


def median_seconds(device, go, n_runs=7):
    samples = []
    for number in range(-2, n_runs):
        wait_for(device)
        begin = time.perf_counter()
        go()
        wait_for(device)
        if number >= 0:
            samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def time_topk(n, device):
    gradient, residual = bench_values(n, 1, device), bench_values(n, 2, device)
    room = torch.empty_like(gradient)
    sweep = 1.5 * median_seconds(device, lambda: room.copy_(gradient))
    magnitudes = gradient.abs()
    rows = []
    for percent in (95, 99):
        k = int((1 - percent / 100) * n)

        def select(k=k):  # with error feedback, as our encode does
            torch.add(gradient, residual, out=room)
            places = room.abs().topk(k, sorted=False).indices
            values = room[places]
            room[places] = 0
            return values

        rows.append(
            {
                "percent_zeros": percent,
                "k": k,
                "topk_sweeps": median_seconds(device, lambda k=k: magnitudes.topk(k, sorted=False)) / sweep,
                "select_sweeps": median_seconds(device, select) / sweep,
            }
        )
    return {"n": n, "sweep_s": sweep, "rows": rows}


# ---- all of it ----


def has_gpu_each(args):
    """Whether each rank has a GPU of its own."""
    return args.device != "cpu" and torch.cuda.device_count() >= N_RANKS


def start(args, rank=0):
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    if args.device != "cpu":
        # ordinal 0 is what everything falls back to, and so hides who forgets the ordinal
        torch.cuda.set_device((rank + 1) % torch.cuda.device_count() if has_gpu_each(args) else 0)
        torch.cuda.init()


def backend_of(args):
    """NCCL refuses two ranks on one GPU."""
    if args.device == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if has_gpu_each(args) else "cpu:gloo,cuda:gloo"


def train(rank, args, store, out, wrapper):
    start(args, rank)
    say(args, rank, f"{wrapper}: processes meet")
    dist.init_process_group(
        backend_of(args),
        init_method=f"file://{store}",
        rank=rank,
        world_size=N_RANKS,
        timeout=datetime.timedelta(seconds=120),
    )
    found = {"losses": compare_losses(args, rank, args.device, wrapper)}
    if args.only != "losses":
        found["steps"] = time_steps(args, rank, args.device, wrapper)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        pathlib.Path(out).write_text(json.dumps(found))


def select(rank, args, out):
    start(args)
    say(args, rank, "torch.topk")
    pathlib.Path(out).write_text(json.dumps(time_topk(args.topk_elems, args.device)))


def all_parts(args):
    """Each in processes of its own, so that one that ends badly leaves the others. What is found so far is
    written as it comes."""
    found, failed = {}, {}
    for part in WRAPPERS if args.only == "losses" else (*WRAPPERS, "topk"):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "found.json")
            try:
                if part == "topk":
                    torch.multiprocessing.spawn(select, (args, out), nprocs=1)
                else:
                    torch.multiprocessing.spawn(
                        train, (args, os.path.join(folder, "store"), out, part), nprocs=N_RANKS
                    )
                found[part] = json.loads(pathlib.Path(out).read_text())
                write(args, found, failed)
            except (
                torch.multiprocessing.ProcessRaisedException,
                torch.multiprocessing.ProcessExitedException,
            ) as failure:
                print(failure, file=sys.stderr)
                failed[part] = str(failure).strip().splitlines()[-1]
                write(args, found, failed)
    return result_of(args, found, failed)


def result_of(args, found, failed):
    device = "cpu" if args.device == "cpu" else torch.cuda.get_device_name(0)
    return {
        "type": "torch-gpu",
        "format": 1,
        "torch": torch.__version__,
        "tagc": tagc.version(),
        "device": device,
        "n_ranks": N_RANKS,
        "backend": backend_of(args),
        "threads": args.threads,
        "codecs": args.codecs,
        **found,
        "failed": failed,
    }


def write(args, found, failed):
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result_of(args, found, failed), indent=1) + "\n")


def table(result):
    lines = [f"{result['device']}, torch {result['torch']}, {N_RANKS} processes over {result['backend']}"]
    for wrapper in (name for name in WRAPPERS if name in result):
        losses, steps = result[wrapper]["losses"], result[wrapper].get("steps")
        other = "weights changed by 1e-6" if losses["perturbed"] else "on the GPU"
        lines.append(
            f"{wrapper}: losses of {len(losses['arms'][0]['cpu'])} steps, {other} against on the processor "
            f"(allowed: {losses['tolerance']:g})"
        )
        for row in losses["arms"]:
            lines.append(
                f"  {row['name']:17} {row['cpu'][0]:.4f} to {row['cpu'][-1]:.4f}, "
                f"differs by at most {row['max_rel_difference']:.1e}"
            )
        lines.append(f"  without any exchange it differs by {losses['without_exchange']:.1e}")
        if steps is None:
            continue
        lines.append(
            f"{wrapper}: a step of {steps['model']}, {steps['n_params'] / 1e6:.1f} M parameters, "
            f"{steps['batch_size']} x {steps['seq_len']} tokens a rank"
        )
        torchs = {row["name"]: row["median_s"] for row in steps["arms"]}
        for row in steps["arms"]:
            base = row["name"].split("-tagc")[0]
            text = (
                f"  {torchs[base] / row['median_s']:.2f} times as fast as {base}"
                if base != row["name"]
                else ""
            )
            lines.append(
                f"  {row['name']:17} {1e3 * row['median_s']:9.1f} ms "
                f"({1e3 * row['min_s']:.1f} to {1e3 * row['max_s']:.1f})"
                + ("" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**20:.0f} MiB at most")
                + text
            )
    if "topk" in result:
        topk = result["topk"]
        lines.append(f"torch.topk of {topk['n']} values, in sweeps of {1e3 * topk['sweep_s']:.3f} ms")
        for row in topk["rows"]:
            lines.append(
                f"  {row['percent_zeros']} % zeros: topk {row['topk_sweeps']:.1f}, "
                f"with error feedback and values {row['select_sweeps']:.1f}"
            )
    return "\n".join(lines)


def too_much_memory(steps):
    """What is wrong with the memory of a step, one line each: beyond the step without tagc, two of the
    largest unit may be under way."""
    peaks, largest = {row["name"]: row["peak_bytes"] for row in steps["arms"]}, steps["largest_unit_bytes"]
    wrong = []
    for name, peak in peaks.items():
        base = peaks[name.split("-tagc")[0]]
        if "-tagc" in name and peak is not None and peak > base + 2 * largest:
            wrong.append(
                f"{name}: a step allocates {peak / 2**20:.0f} MiB, allowed are {base / 2**20:.0f} "
                f"without tagc and twice the largest unit of {largest / 2**20:.0f}"
            )
    return wrong


def verdict(result):
    """What is wrong, one line each."""
    wrong = [f"{part} failed: {why}" for part, why in result["failed"].items()]
    for wrapper in (name for name in WRAPPERS if name in result):
        losses = result[wrapper]["losses"]
        limit = losses["tolerance"]
        wrong += [
            (
                f"{row['name']}: losses differ by {row['max_rel_difference']:.2e} of the loss, allowed is "
                f"{limit:g}"
            )
            for row in losses["arms"]
            if not row["max_rel_difference"] <= limit
        ]
        wrong += [
            f"{row['name']}: the loss does not fall: {row['cpu'][0]:.4f} to {row['cpu'][-1]:.4f}"
            for row in losses["arms"]
            if not row["cpu"][-1] < 0.97 * row["cpu"][0]
        ]
        if "steps" in result[wrapper]:
            wrong += too_much_memory(result[wrapper]["steps"])
        if not losses["without_exchange"] > 2 * limit:
            wrong.append(
                f"a run without exchanges differs by {losses['without_exchange']:.2e} only: "
                "the comparison shows nothing"
            )
    return wrong


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="(cuda)")
    add("--only", choices=("losses",), help="leave out times and torch.topk")
    add("--model", choices=MODELS, help="of the time of a step (gpt2; on a CPU small)")
    for name, text in (
        ("loss-steps", "of each run of which losses are compared (20)"),
        ("rounds", "in which each arm has its turn (3)"),
        ("steps", "of an arm in a round (3)"),
        ("batch-size", "rows of a rank (4; on a CPU 1)"),
        ("seq-len", "tokens of a row (256; on a CPU 64)"),
        ("topk-elems", "values for torch.topk (169869312; on a CPU 1048576)"),
        ("threads", "of tagc's codec (half of the cores)"),
    ):
        add(f"--{name}", type=int, help=text)
    add("--json", metavar="FILE", help="everything, for machines")
    args = parser.parse_args()
    args.began = time.time()
    args.codecs = codecs_on(args.device)
    is_cpu = args.device == "cpu"
    if not is_cpu and not torch.cuda.is_available():
        parser.error(
            f"--device is cuda, and torch {torch.__version__} finds no CUDA device; --device cpu runs without"
        )
    defaults = {
        "model": ("gpt2", "small"),
        "loss_steps": (20, 20),
        "rounds": (3, 2),
        "steps": (3, 2),
        "batch_size": (4, 1),
        "seq_len": (256, 64),
        "topk_elems": (162 << 20, 1 << 20),
        "threads": (max(1, (os.cpu_count() or 2) // 2), 1),
    }
    for name, pair in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, pair[is_cpu])
        elif name != "model" and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be 1 or more")
    n_positions = MODELS[args.model].n_positions
    if args.seq_len > n_positions:
        parser.error(
            f"--seq-len is {args.seq_len}, must be at most {n_positions} with the model {args.model}"
        )
    if args.topk_elems < 100:
        parser.error(f"--topk-elems is {args.topk_elems}, must be 100 or more")
    return args


def main():
    args = parse()
    result = all_parts(args)
    print(table(result), flush=True)
    wrong = verdict(result)
    for line in wrong:
        print(f"torch_gpu: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
