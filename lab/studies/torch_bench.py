"""Time per iteration and bytes of a GPT under PyTorch, torch's own ways to communicate against tagc's. Arms
take turns in one run, so that ratios are between neighbours in time.

    torchrun --standalone --nproc-per-node 2 lab/studies/torch_bench.py --model small \\
        --arms fsdp2,fsdp2-tagc
    sudo lab/lab run torch        # over links as slow as asked for

lab/docs/formats.md describes the output of --json."""

import argparse
import ctypes
import datetime
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import time
import warnings

import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).resolve().parents[2]
STUDIES = ROOT / "lab" / "studies"
sys.path[:0] = [str(ROOT / "examples" / "pytorch"), str(ROOT / "python"), str(STUDIES)]
from gpt import GPT, Config
from torch_arms import DEFAULT_ARMS, Arm, arms_of

import tagc
import tagc.local
import tagc.torch
from tagc import _library as lib
from tagc.commands.info import torch_blas
from tagc.torch.advise import survey

MODELS = {
    "tiny": Config(n_vocab=256, n_positions=64, n_embd=64, n_head=4, n_layer=2),
    "small": Config(n_vocab=8192, n_positions=256, n_embd=384, n_head=6, n_layer=6),
    "medium": Config(n_vocab=8192, n_positions=256, n_embd=512, n_head=8, n_layer=8),
    "gpt2": Config(n_vocab=50304, n_positions=1024, n_embd=768, n_head=12, n_layer=12),
}


# ---- measuring ----


def all_to_all(found, n):
    """Each rank sends its n / W fp32 values to all others."""
    mine, everyone = (torch.zeros(n // size) for size in (found.world_size, 1))
    call = found.comm.handle, mine.data_ptr(), mine.nbytes, everyone.data_ptr(), everyone.nbytes
    return found.time("all-to-all", n, lambda: lib.call("tagc_comm_all_gather", *call))


def whole_values(found, n):
    """A reduce-scatter of fp32 values as they are."""
    options = lib.initialised(lib.ReducerOptions, "tagc_reducer_options_init")
    options.n_elems, options.n_threads = n, found.threads
    options.exchange, options.format, options.sparsity = lib.EXCHANGES["direct"], lib.FORMATS["fp32"], 0
    gradient, sums, reducer = torch.ones(n), torch.zeros(n // found.world_size), ctypes.c_void_p()
    lib.call("tagc_reducer_create", found.comm.handle, ctypes.byref(options), ctypes.byref(reducer))

    def run():
        lib.call("tagc_reducer_begin", reducer, gradient.data_ptr(), n, sums.data_ptr(), sums.numel())
        lib.call("tagc_reducer_end", reducer, None)

    try:
        return found.time("whole values", n, run)
    finally:
        lib.load().tagc_reducer_destroy(reducer)


def bytes_sent(interface):
    """By all of this host, since it was made."""
    for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise SystemExit(f"torch_bench: there is no interface {interface!r} in /proc/net/dev")


def resident_bytes():
    """Of this process, without what its allocator keeps free."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tagc_memory_bytes(handle):
    """What tagc holds, as it counts that itself."""
    return handle.memory().total if hasattr(handle, "memory") else 0


def spread(samples):
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "n": len(samples)}


def origin(program, hosts):
    """Returns where a result comes from. hosts: the name of each rank's."""

    def git(*words):
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", "-C", str(ROOT), *words], capture_output=True, text=True
        )
        return done.stdout.strip()

    head = git("rev-parse", "--short", "HEAD")
    is_changed = git("status", "--porcelain", "--untracked-files=no")
    cpu = next(
        (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    return {
        "version": tagc.version(),
        "commit": (head + ("-dirty" if is_changed else "")) if head else None,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": [program, *sys.argv[1:]],
        "machine": {
            "cpu": cpu,
            "n_cpus": os.cpu_count(),
            "os": platform.platform(),
            "hosts": sorted(set(hosts)),
            "blas": torch_blas(),
        },
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("OMP_", "GLOO_", "MKL_"))
        },
    }


class Bench:
    def __init__(self, args):
        self.args = args
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.hosts = self._everyone(socket.gethostname())
        self.ranks_per_host = self.hosts.count(self.hosts[self.rank])
        # whose bytes are counted together
        self.n_counted = self.ranks_per_host if args.interface else 1
        self.config = MODELS[args.model]
        known = arms_of(args.sparsity, args.threads)
        self.arms = [known[name] for name in args.arms]
        generator = torch.Generator().manual_seed(self.rank)
        self.tokens = torch.randint(
            self.config.n_vocab, (args.batch_size, args.seq_len + 1), generator=generator
        )
        self.exchanges, self.advice, self.compute_s = [], None, None
        self.again = []  # iterations of the first arm's second turns
        self.n_params = self.n_root = None

    def check(self):
        if self.ranks_per_host in (1, self.world_size):
            for arm in self.arms:
                if arm.needs_hosts:
                    sys.exit(
                        f"torch_bench: --arms has {arm.name!r}, which needs several hosts of several ranks"
                    )

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def model(self):
        torch.manual_seed(1)
        return GPT(self.config)

    def make(self, arm):
        model = self.model()
        self.n_params = sum(parameter.numel() for parameter in model.parameters())
        self.n_root = self.n_params - sum(p.numel() for p in model.transformer.h.parameters())
        arm.wrapped, arm.handle = arm.wrap(model, self.ranks_per_host) if arm.wrap else (model, None)
        groups = arm.handle.param_groups() if arm.handle else arm.wrapped.parameters()
        arm.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        if arm.local:
            arm.handle = tagc.local.LocalSteps(
                model, arm.optimizer, every=1, layers="all", verbose=False, **arm.local
            )

    def step(self, arm):
        arm.wrapped(self.tokens[:, :-1], self.tokens[:, 1:]).backward()
        arm.optimizer.step()
        arm.optimizer.zero_grad()

    def run(self):
        args = self.args
        if args.skip_exchanges == "false":
            self.measure_exchanges()
        self.compute_s = self.measure_computing()
        self.say(f"computing alone: {1e3 * self.compute_s:.0f} ms")
        for arm in self.arms:
            before = resident_bytes()
            self.make(arm)
            for _ in range(args.warmup):  # DDP makes its buckets anew, PowerSGD begins in the third step
                self.step(arm)
            arm.rank_memory_bytes = resident_bytes() - before
        for number in range(args.rounds):
            for arm in self.arms:
                self.round(number, arm)
            self.round(number, self.arms[0], self.again)  # between its two turns is chance alone
        if args.advise:
            self.advice = tagc.torch.advise(self.arms[0].wrapped, step_s=self.compute_s, seconds=args.advise)

    def round(self, number, arm, iterations=None):
        iterations = arm.iterations if iterations is None else iterations
        for _ in range(self.args.steps):
            dist.barrier()
            before, start = self._sent(arm), time.perf_counter()
            self.step(arm)
            seconds = time.perf_counter() - start
            iterations.append({"round": number, "total_s": seconds} | self._sent_since(arm, before))

    def _sent(self, arm):
        return bytes_sent(self.args.interface) if self.args.interface else None

    def _sent_since(self, arm, before):
        """What this host's interface sent, of what tagc counted the sum of this step."""
        found = {}
        if before is not None:
            dist.barrier()
            found["interface_bytes"] = (bytes_sent(self.args.interface) - before) / self.n_counted
        if arm.handle:
            stats = arm.handle.stats()
            found |= {
                "tagc_bytes": stats["bytes_sent"],
                "tagc_s": stats["exchange_s"],
                "codec_s": sum(seconds for phase, seconds in stats["time_s"].items() if phase != "wait"),
            }
        return found

    def measure_computing(self):
        """Seconds of a step on one rank while all others do the same, without communication."""
        model = self.model()
        arm = Arm("compute", "", None)
        arm.wrapped, arm.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        samples = []
        for _ in range(4):
            dist.barrier()
            start = time.perf_counter()
            self.step(arm)
            samples.append(time.perf_counter() - start)
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, statistics.median(samples[1:]))
        return max(everyone)

    def measure_exchanges(self):
        """Each collective alone, of a unit's size: what it sends in a second."""
        n = sum(p.numel() for p in self.model().transformer.h[0].parameters())
        n -= n % (16 * self.world_size)
        shape = survey.Shape("fsdp2", self.world_size, [{"compressed": n}], [2])
        share = (self.world_size - 1) / self.world_size
        with survey.Survey(dist.group.WORLD, shape, self.args.threads) as found:
            jobs = (
                ("torch reduce_scatter fp32", lambda: found.torch_reduce(n, "fp32", False), 4 * share),
                ("torch all_gather fp32", lambda: found.torch_gather(n, "fp32"), 4 * share),
                ("torch all_reduce fp32", lambda: found.torch_reduce(n, "fp32", True), 8 * share),
                ("torch reduce_scatter bf16", lambda: found.torch_reduce(n, "bf16", False), 2 * share),
                ("tagc reduce-scatter fp32", lambda: whole_values(found, n), 4 * share),
                ("tagc all-to-all", lambda: all_to_all(found, n), 4 * share),
            )
            for name, job, must in jobs:
                dist.barrier()
                before = self._sent(None)
                samples = job()
                sent = None
                if before is not None:
                    dist.barrier()
                    n_calls = len(samples) + 1  # which warmed up, and the agreements before them
                    sent = (bytes_sent(self.args.interface) - before) / self.n_counted / n_calls
                seconds = [max(row) for row in zip(*self._everyone(samples))]
                rate = (sent or must * n) / statistics.median(seconds)
                self.exchanges.append(
                    {
                        "name": name,
                        "n_elems": n,
                        "n_bytes_needed": must * n,
                        "n_bytes_sent": sent,
                        "total_s": spread(seconds),
                        "bytes_per_s": rate,
                    }
                )
                self.say(
                    f"{name:28} {1e3 * statistics.median(seconds):8.1f} ms, "
                    f"{8e-6 * rate:8.0f} Mbit/s sent per rank"
                )

    def _everyone(self, mine):
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, mine)
        return everyone

    # ---- results ----

    def result(self):
        """Collective: times are the slowest rank's, bytes the mean over ranks."""
        arms, first = [], None
        for arm in self.arms:
            steps = self._of_all_ranks(arm.iterations)
            medians = round_medians(steps)
            first = first or medians
            needed = arm.must_send(self.n_params, self.n_root, self.world_size, self.n_counted)
            needed = None if needed is None else needed / self.n_counted
            sent, source = None, "formula"
            if "interface_bytes" in steps[0]:
                sent, source = statistics.fmean(step["interface_bytes"] for step in steps), "interface"
            arms.append(
                {
                    "name": arm.name,
                    "about": arm.about,
                    "is_tagc": arm.handle is not None,
                    "n_params": self.n_params,
                    "n_bytes_needed": needed,
                    "n_bytes_sent": needed if sent is None else sent,
                    "bytes_from": source,
                    "rank_memory_bytes": max(self._everyone(arm.rank_memory_bytes)),
                    "tagc_memory_bytes": max(self._everyone(tagc_memory_bytes(arm.handle))),
                    "iterations": steps,
                    "total_s": spread([s["total_s"] for s in steps]),
                    "speedup": spread([first[number] / medians[number] for number in medians]),
                }
            )
            if arm.handle and sent is None:  # parameters that torch gathers are not counted there
                arms[-1] |= {
                    "n_bytes_sent": steps[-1]["tagc_bytes"],
                    "bytes_from": "tagc, what torch gathers left out",
                }
        config, again = self.config, round_medians(self._of_all_ranks(self.again))
        return {
            "type": "torch",
            "format": 1,
            "origin": origin("lab/studies/torch_bench.py", self.hosts),
            "torch": torch.__version__,
            "world_size": self.world_size,
            "n_hosts": len(set(self.hosts)),
            "ranks_per_host": self.ranks_per_host,
            "n_threads": self.args.threads,
            "model": {
                "name": self.args.model,
                "n_layer": config.n_layer,
                "n_head": config.n_head,
                "n_embd": config.n_embd,
                "vocab_size": config.n_vocab,
                "n_params": self.n_params,
            },
            "batch_size": self.args.batch_size,
            "seq_len": self.args.seq_len,
            "sparsity": self.args.sparsity,
            "compute_s": self.compute_s,
            "exchanges": self.exchanges,
            "arms": arms,
            "again": spread([again[number] / first[number] for number in again]),
            "advice": self.advice,
        }

    def _of_all_ranks(self, iterations):
        steps = []
        for row in zip(*self._everyone(iterations)):
            step = {"round": row[0]["round"], "total_s": max(item["total_s"] for item in row)}
            for key in row[0].keys() - step.keys():
                step[key] = statistics.fmean(item[key] for item in row)
            steps.append(step)
        return steps

    def finish(self):
        result = self.result()
        if self.rank == 0:
            print(table(result), flush=True)
            if self.args.json:
                part = f"{self.args.json}.part"
                pathlib.Path(part).write_text(json.dumps(result, indent=1) + "\n")
                os.replace(part, self.args.json)
        for arm in self.arms:
            if arm.handle:
                arm.handle.close()


def round_medians(steps):
    rounds = {}
    for step in steps:
        rounds.setdefault(step["round"], []).append(step["total_s"])
    return {number: statistics.median(samples) for number, samples in rounds.items()}


def table(result):
    lines = [f"{'arm':26} {'iteration':>26} {'MB sent per rank':>18}   times as fast as the first, per round"]
    for arm in result["arms"]:
        time_, speed = arm["total_s"], arm["speedup"]
        sent = f"{arm['n_bytes_sent'] / 1e6:.2f}" if arm["n_bytes_sent"] else "-"
        lines.append(
            f"{arm['name']:26} {1e3 * time_['median']:8.0f} ms ({1e3 * time_['min']:5.0f} to "
            f"{1e3 * time_['max']:5.0f})"
            f" {sent:>18}   {speed['median']:.2f} ({speed['min']:.2f} to {speed['max']:.2f})"
        )
    sources = {arm["bytes_from"] for arm in result["arms"]}
    return "\n".join([*lines, f"bytes: from {'; '.join(sorted(sources))}"])


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", choices=MODELS, default="small", help="(small)")
    add("--arms", default=DEFAULT_ARMS, help=f"of {', '.join(arms_of(0.95, 1))} ({DEFAULT_ARMS})")
    for name, default, text in (
        ("batch-size", 1, "rows of a rank"),
        ("seq-len", 128, "tokens of a row"),
        ("rounds", 5, "in which each arm has its turn"),
        ("steps", 2, "of an arm in a round"),
        ("warmup", 3, "steps of each arm before that"),
        ("threads", 1, "of torch and of tagc"),
    ):
        add(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    add("--sparsity", type=float, default=0.95, help="of tagc's arms (0.95)")
    add(
        "--interface",
        help="network interface whose bytes are counted, and shared out over the ranks of its host; without "
        "one, bytes are by formula",
    )
    add(
        "--skip-exchanges",
        nargs="?",
        const="true",
        default="false",
        choices=("true", "false"),
        help="do not measure each collective alone",
    )
    add(
        "--advise",
        type=float,
        metavar="SECONDS",
        default=0,
        help="end with tagc.torch.advise() for the first arm",
    )
    add("--json", metavar="FILE", help="everything, for machines")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "the ranks are missing: start it as torchrun --standalone --nproc-per-node 2 "
            "lab/studies/torch_bench.py ..."
        )
    args.arms = args.arms.split(",")
    known = arms_of(0.95, 1)
    for name in args.arms:
        if name not in known:
            parser.error(f"--arms has {name!r}, known: {', '.join(known)}")
    least = {"warmup": 3 if "ddp-powersgd" in args.arms else 1}
    for name in ("batch_size", "seq_len", "rounds", "steps", "warmup", "threads"):
        if getattr(args, name) < least.get(name, 1):
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(args, name)}, must be {least.get(name, 1)} or more"
            )
    if args.seq_len > MODELS[args.model].n_positions:
        parser.error(
            f"--seq-len is {args.seq_len}, must be at most {MODELS[args.model].n_positions} with that model"
        )
    return args


def main():
    args = parse()
    warnings.simplefilter("ignore", FutureWarning)  # torch's, of its own functions
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    bench = Bench(args)
    bench.check()
    bench.run()
    bench.finish()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
