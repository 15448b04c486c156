"""Seconds of a step of a pipeline whose stages are on different hosts, with torch's own messages in bf16
against tagc's. Arms take turns in one run, so that ratios are between neighbours in time.

    torchrun --standalone --nproc-per-node 2 lab/studies/pipeline_bench.py --hosts 2
    sudo lab/lab run pipeline     # over links as slow as asked for

Tensors between stages have the size of a large model's, and messages are real. Computing is simulated, since
a processor takes a thousand times as long for it as a GPU: a stage multiplies activations by a vector and
sleeps as long as its layers would take at --tflops. --tflops 0 runs blocks of a GPT on the processor.
lab/docs/formats.md describes the output of --json."""

import argparse
import functools
import json
import os
import pathlib
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "pytorch"), str(ROOT / "python"), str(ROOT / "lab" / "studies")]
from gpt import Block, Config
from torch_bench import bytes_sent, origin, round_medians, spread

import tagc.pipeline

SCHEDULES = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}
MESSAGES = {
    "fp32": ("torch's own messages, fp32", torch.float32, None),
    "bf16": ("torch's own messages, bf16", torch.bfloat16, None),
    "tagc": ("8 bits forward and 4 back, of bf16", torch.bfloat16, {}),
    "tagc-8-8": ("8 bits both ways, of bf16", torch.bfloat16, {"backward": "int8"}),
    "tagc-4-4": ("4 bits both ways, of bf16", torch.bfloat16, {"forward": "int4"}),
}
ARMS = [f"{schedule}-{messages}" for schedule in SCHEDULES for messages in MESSAGES]
DEFAULT_ARMS = "1f1b-bf16,1f1b-tagc,gpipe-bf16,gpipe-tagc"


class Sleep(torch.autograd.Function):
    """Takes the time of a stage's layers, twice as long on the way back."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Simulated(nn.Module):
    def __init__(self, width, seconds):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(width)), seconds

    def forward(self, x):
        return Sleep.apply(x, self.seconds) * self.weight.to(x.dtype)


class Blocks(nn.Module):
    """Layers that compute in fp32, and get and send another dtype."""

    def __init__(self, config, dtype):
        super().__init__()
        self.blocks, self.dtype = nn.Sequential(*(Block(config) for _ in range(config.n_layer))), dtype

    def forward(self, x):
        return self.blocks(x.float()).to(self.dtype)


def layer_flops(width, seq_len):
    """Of a token on its way forward: matrices of 12 width^2 values, and attention to half of the others."""
    return 24 * width**2 + 2 * width * seq_len


class Bench:
    def __init__(self, args):
        self.args = args
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.hosts = self._everyone(socket.gethostname())
        flops = args.batch_size * args.seq_len * args.layers * layer_flops(args.width, args.seq_len)
        self.simulated_s = flops / (args.tflops * 1e12) if args.tflops else None
        self.arms = [{"name": name, "iterations": []} for name in args.arms]

    def _everyone(self, mine):
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, mine)
        return everyone

    def module(self, dtype):
        args = self.args
        if self.simulated_s is not None:
            return Simulated(args.width, self.simulated_s)
        torch.manual_seed(1)
        heads = max(1, args.width // 64)
        return Blocks(Config(n_embd=args.width, n_head=heads, n_layer=args.layers), dtype)

    def make(self, arm):
        schedule, messages = arm["name"].split("-", 1)
        about, dtype, options = MESSAGES[messages]
        args = self.args
        module = self.module(dtype)
        stage = pipelining.PipelineStage(module, self.rank, self.world_size, torch.device("cpu"))
        handle = None
        if options is not None:
            handle = tagc.pipeline.compress_stage(stage, hosts=args.hosts, verbose=False, **options)
        made = SCHEDULES[schedule](stage, n_microbatches=args.micro_batches, loss_fn=_loss)
        shape = args.micro_batches * args.batch_size, args.seq_len, args.width
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        step = functools.partial(made.step, *([x] if stage.is_first else []))
        if stage.is_last:
            step = functools.partial(step, target=torch.zeros_like(x))
        arm |= {
            "about": f"{schedule}, {about}",
            "dtype": dtype,
            "handle": handle,
            "step": step,
            "module": module,
        }

    def step(self, arm):
        arm["step"]()
        for parameter in arm["module"].parameters():
            parameter.grad = None

    def run(self):
        for arm in self.arms:
            self.make(arm)
            for _ in range(self.args.warmup):
                self.step(arm)
        for number in range(self.args.rounds):
            for arm in self.arms:
                for _ in range(self.args.steps):
                    arm["iterations"].append({"round": number} | self.measure(arm))

    def measure(self, arm):
        sent = functools.partial(bytes_sent, self.args.interface) if self.args.interface else None
        codec_s = -_codec_s(arm["handle"])
        dist.barrier()
        before, start = sent and sent(), time.perf_counter()
        self.step(arm)
        found = {"total_s": time.perf_counter() - start, "codec_s": codec_s + _codec_s(arm["handle"])}
        if sent:
            dist.barrier()
            found["interface_bytes"] = sent() - before
        return found

    # ---- results ----

    def compute_s(self):
        """Seconds of a step in which a stage computes, for all its micro-batches."""
        if self.simulated_s is not None:
            return 3 * self.simulated_s * self.args.micro_batches
        module, samples = self.module(torch.float32), []
        x = torch.randn(self.args.batch_size, self.args.seq_len, self.args.width, requires_grad=True)
        for _ in range(4):
            dist.barrier()
            start = time.perf_counter()
            module(x).sum().backward()
            samples.append(time.perf_counter() - start)
        return max(self._everyone(statistics.median(samples[1:]))) * self.args.micro_batches

    def result(self):
        """Collective. Times are the slowest rank's. Bytes are those that passed between two neighbours, both
        ways together, in the mean over such pairs."""
        arms, first = [], None
        args, n_between = self.args, self.world_size - 1
        n_elems = args.micro_batches * args.batch_size * args.seq_len * args.width
        for arm in self.arms:
            steps = []
            for row in zip(*self._everyone(arm["iterations"])):
                step = {"round": row[0]["round"]}
                step |= {key: max(item[key] for item in row) for key in ("total_s", "codec_s")}
                if "interface_bytes" in row[0]:
                    step["interface_bytes"] = sum(item["interface_bytes"] for item in row) / n_between
                steps.append(step)
            medians = round_medians(steps)
            first = first or medians
            is_tagc = arm["handle"] is not None
            needed = None if is_tagc else 2 * n_elems * arm["dtype"].itemsize
            if args.interface:
                sent, source = statistics.fmean(step["interface_bytes"] for step in steps), "interface"
            elif is_tagc:
                counted = sum(n for n in self._everyone(arm["handle"].stats()["bytes_sent"]))
                n_steps = args.warmup + args.rounds * args.steps
                sent, source = counted / n_between / n_steps, "tagc"
            else:
                sent, source = needed, "formula"
            arms.append(
                {
                    "name": arm["name"],
                    "about": arm["about"],
                    "is_tagc": is_tagc,
                    "n_bytes_needed": needed,
                    "n_bytes_sent": sent,
                    "bytes_from": source,
                    "iterations": steps,
                    "total_s": spread([step["total_s"] for step in steps]),
                    "speedup": spread([first[number] / medians[number] for number in medians]),
                }
            )
        return {
            "type": "torch",
            "format": 1,
            "origin": origin("lab/studies/pipeline_bench.py", self.hosts),
            "torch": torch.__version__,
            "world_size": self.world_size,
            "n_hosts": len(set(self.hosts)),
            "width": args.width,
            "layers_per_stage": args.layers,
            "micro_batches": args.micro_batches,
            "batch_size": args.batch_size,
            "seq_len": args.seq_len,
            "tflops": args.tflops or None,
            "compute_s": self.compute_s(),
            "exchanges": [],
            "arms": arms,
            "advice": None,
        }

    def finish(self):
        result = self.result()
        if self.rank == 0:
            print(table(result), flush=True)
            if self.args.json:
                part = f"{self.args.json}.part"
                pathlib.Path(part).write_text(json.dumps(result, indent=1) + "\n")
                os.replace(part, self.args.json)


def _loss(output, target):
    """Whose gradient costs nothing that a link could hide."""
    return (output - target).mean()


def _codec_s(handle):
    stats = handle.stats() if handle else {}
    return sum(stats[way]["codec_s"] for way in ("forward", "backward")) if handle else 0.0


def table(result):
    lines = [f"{'arm':16} {'step':>26} {'MB between stages':>18}   times as fast as the first, per round"]
    for arm in result["arms"]:
        step, speed = arm["total_s"], arm["speedup"]
        times = f"({1e3 * step['min']:5.0f} to {1e3 * step['max']:5.0f})"
        factors = f"{speed['median']:.2f} ({speed['min']:.2f} to {speed['max']:.2f})"
        sent = arm["n_bytes_sent"] / 1e6
        lines.append(f"{arm['name']:16} {1e3 * step['median']:8.0f} ms {times} {sent:18.2f}   {factors}")
    computing = "computing, simulated" if result["tflops"] else "computing"
    return "\n".join([*lines, f"{computing}: {1e3 * result['compute_s']:.0f} ms of a step"])


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--arms", default=DEFAULT_ARMS, help=f"of {', '.join(ARMS)} ({DEFAULT_ARMS})")
    for name, default, text in (
        ("width", 4096, "values of a token's activation"),
        ("layers", 8, "of a stage"),
        ("micro-batches", 8, "of a step"),
        ("batch-size", 1, "rows of a micro-batch"),
        ("seq-len", 512, "tokens of a row"),
        ("rounds", 3, "in which each arm has its turn"),
        ("steps", 1, "of an arm in a round"),
        ("warmup", 1, "steps of each arm before that"),
        ("threads", 1, "of torch"),
    ):
        add(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    add("--tflops", type=float, default=150, help="of the simulated GPU; 0: compute on the processor (150)")
    add("--hosts", type=int, help="for compress(): as many as there are ranks, on one machine")
    add(
        "--interface",
        help="network interface whose bytes are counted; without one, bytes are tagc's, or by formula",
    )
    add("--json", metavar="FILE", help="everything, for machines")
    args = parser.parse_args()
    args.arms = args.arms.split(",")
    for name in args.arms:
        if name not in ARMS:
            parser.error(f"--arms has {name!r}, known: {', '.join(ARMS)}")
    for name in (
        "width",
        "layers",
        "micro_batches",
        "batch_size",
        "seq_len",
        "rounds",
        "steps",
        "warmup",
        "threads",
    ):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be 1 or more")
    if not 0 <= args.tflops <= 1e6:
        parser.error(f"--tflops is {args.tflops:g}, must be from 0 to 1e6")
    n_ranks = int(os.environ.get("WORLD_SIZE", 0))
    if n_ranks < 2:
        parser.error(
            "a pipeline needs two ranks or more: start it as torchrun --standalone --nproc-per-node 2 "
            "lab/studies/pipeline_bench.py ..."
        )
    if args.micro_batches < n_ranks and any(name.startswith("1f1b") for name in args.arms):
        parser.error(
            f"--micro-batches is {args.micro_batches}, must be at least the {n_ranks} stages for 1f1b"
        )
    return args


def main():
    args = parse()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    bench = Bench(args)
    bench.run()
    bench.finish()
    for arm in bench.arms:
        if arm["handle"]:
            arm["handle"].close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
