"""Seconds and bytes of the all-to-alls of a layer of experts: tokens there and back, and the gradients of
both. Torch's own in bf16 against tagc's, in one run, in turn, over hosts with slow links (root; lab/hosts).

    sudo $(scripts/python.sh find) lab/studies/tokens_bench.py --rates 100mbit 1gbit
    ... --ranks-per-host 2            # two levels

"fp8" rounds whole blocks of 128 to e4m3 by torch, on the processor, and sends bytes by torch's own.

Routing is uneven: shares of experts fall like 1 / rank, other ones each step. Nothing is computed, so the
ratio of seconds is the most that a model can gain. bytes: through rank 0's host's card, of all its ranks."""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "lab" / "studies"), str(ROOT / "lab" / "hosts")]
sys.path.append(str(ROOT / "tests" / "python"))  # for its questions to the planner
os.environ.setdefault("TAGC_LIBRARY", str(ROOT / "build" / "libtagc.so"))

import torch
import torch.distributed as dist
from torch_bench import bytes_sent

ARMS = {
    "bf16": None,  # torch's own
    "fp8": None,  # torch's own, of blocks in fp8
    "whole": {"forward": "whole", "backward": "whole"},  # tagc's connections alone
    "8/8": {},
    "8/4": {"backward": "int4"},
    "4/4": {"forward": "int4", "backward": "int4"},
}


def counts_of(step, args, world_size):
    """Rows that each rank has for each other one, (W, W)."""
    made = torch.Generator().manual_seed(step)
    shares = 1 / torch.arange(1, args.experts + 1).float()
    counts = torch.zeros(world_size, world_size, dtype=torch.long)
    for rank in range(world_size):
        of_expert = shares[torch.randperm(args.experts, generator=made)]
        chosen = torch.multinomial(of_expert, args.tokens * args.top_k, replacement=True, generator=made)
        counts[rank] = chosen.bincount(minlength=args.experts).view(world_size, -1).sum(1)
    return counts


FP8_BLOCK, FP8_MOST = 128, 448.0  # values of a scale; the largest of e4m3


def fp8_encoded(x):
    """(n, C) -> (n, C + C / 32) bytes: values, then a scale in fp32 for each block of a row, whose length is
    that of a narrow row at most."""
    blocks = x.float().unflatten(1, (-1, min(FP8_BLOCK, x.shape[1])))
    scales = blocks.abs().amax(2, keepdim=True).clamp(min=1e-30) / FP8_MOST
    values = (blocks / scales).to(torch.float8_e4m3fn)
    return torch.cat([values.flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8)], 1)


def fp8_decoded(message, width, dtype):
    values, scales = message.split([width, message.shape[1] - width], 1)
    values = values.contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (-1, min(FP8_BLOCK, width)))
    return (values * scales.contiguous().view(torch.float32)[:, :, None]).flatten(1).to(dtype)


def fp8_rounded(x):
    return fp8_decoded(fp8_encoded(x), x.shape[1], x.dtype)


class Torch(torch.autograd.Function):
    """Torch's own; it has none in bf16 by gloo, so bytes travel."""

    @staticmethod
    def forward(ctx, x, received, sent, is_fp8):
        ctx.call = received, sent, is_fp8
        return _move(x, received, sent, is_fp8)

    @staticmethod
    def backward(ctx, gradient):
        received, sent, is_fp8 = ctx.call
        return _move(gradient, sent, received, is_fp8), None, None, None


def _move(x, received, sent, is_fp8):
    rows = fp8_encoded(x) if is_fp8 else x.contiguous().view(torch.uint8)
    output = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(output, rows, received, sent)
    return fp8_decoded(output, x.shape[1], x.dtype) if is_fp8 else output.view(x.dtype)


def torchs(is_fp8):
    return lambda x, received, sent: Torch.apply(x, received, sent, is_fp8)


def planned_s(args, world_size, name):
    """Returns the seconds that `tagc plan` forecasts for an arm, with the codec of this processor."""
    import plan_parts

    from tagc import _planner as planner

    options = {"forward": "int8", "backward": "int8"} | (ARMS[name] or {})
    formats = ["bf16" if values == "whole" else values for values in options.values()]
    codec_s = [0.0 if values == "bf16" else 1e-9 * planner.blocks_ns(values) for values in formats]
    bits_per_s = float(args.rate.removesuffix("mbit").removesuffix("gbit")) * (
        1e9 if "gbit" in args.rate else 1e6
    )
    reply = plan_parts.ask_tokens(
        *formats,
        world_size=world_size,
        ranks_per_host=args.ranks_per_host,
        n_experts=args.experts,
        n_active=args.top_k,
        n_tokens=args.tokens,
        width=args.width,
        element_bytes=2,
        n_forward=2,
        n_backward=2,
        codec_s=tuple(codec_s),
        latency_s=1e-4,
        bytes_per_s=bits_per_s / 8 * 1448 / 1538 / args.ranks_per_host,
    )
    return reply.comm_s[ARMS[name] is not None]


def run(args):
    from tagc.collectives import Collectives

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    n_hosts = world_size // args.ranks_per_host
    exchanges, comms = {}, []
    for name, options in ARMS.items():
        if options is None:
            exchanges[name] = [torchs(name == "fp8")] * 2
            continue
        comm = Collectives(hosts=n_hosts if args.ranks_per_host > 1 else None, **options)
        comms.append(comm)
        exchanges[name] = [comm.tokens("there"), comm.tokens("back")]
    rows = {name: [] for name in ARMS}
    for step in range(-1, args.rounds):
        counts = counts_of(step + 1, args, world_size)
        sent, received = counts[rank].tolist(), counts[:, rank].tolist()
        tokens = torch.randn(sum(sent), args.width, generator=torch.Generator().manual_seed(rank)).bfloat16()
        for name, (there, back) in exchanges.items():
            x = tokens.clone().requires_grad_()
            dist.barrier()
            before, begin = bytes_sent(args.interface), time.perf_counter()
            back(there(x, received, sent), sent, received).backward(x.detach())
            seconds = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            n_bytes = bytes_sent(args.interface) - before
            if step >= 0:
                rows[name].append((seconds.item(), n_bytes))
    if rank == 0:
        print(
            f"{world_size} ranks on {n_hosts} hosts, {args.rate}; {args.tokens} tokens of width "
            f"{args.width} a rank, top {args.top_k} of {args.experts} experts; torch {torch.__version__}"
        )
        for name in ARMS:
            seconds = [s for s, _ in rows[name]]
            faster = [a / b for (a, _), (b, _) in zip(rows["bf16"], rows[name])]
            fewer = [a / b for (_, a), (_, b) in zip(rows["bf16"], rows[name])]
            print(
                f"{name:5} {1e3 * statistics.median(seconds):8.1f} ms ({1e3 * min(seconds):.1f} to "
                f"{1e3 * max(seconds):.1f})   {statistics.median(faster):.2f} times as fast "
                f"({min(faster):.2f} to {max(faster):.2f}), {statistics.median(fewer):.2f} times fewer bytes"
                + ("" if name == "fp8" else f"; planned {1e3 * planned_s(args, world_size, name):.1f} ms")
            )
    for comm in comms:
        comm.close()
    dist.barrier()
    dist.destroy_process_group()


def launch(args):
    """Makes the hosts, and runs this program as each rank."""
    import experiment
    import hosts

    hosts.check_allowed()
    for rate in args.rates:
        place = {"hosts": 2, "ranks_per_host": args.ranks_per_host, "arms": [], "rate": rate}
        case = experiment.Case(**experiment.DEFAULTS | place)
        with hosts.Network(case, ROOT / "build" / "tagc") as network:
            processes = []
            for rank in range(case.world_size):
                own = {
                    "RANK": rank,
                    "WORLD_SIZE": case.world_size,
                    "MASTER_ADDR": hosts.address(1),
                    "MASTER_PORT": 29500,
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "OMP_NUM_THREADS": 1,
                    "TAGC_LAB": network.prefix,
                }
                words = [sys.executable, __file__, *sys.argv[1:], "--rate", rate, "--interface", "eth0"]
                words = ["env", *(f"{name}={value}" for name, value in own.items()), *words]
                processes.append(subprocess.Popen(network.inside(1 + rank // args.ranks_per_host, *words)))
            codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"tokens_bench: ranks ended with {codes}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--rates", nargs="+", default=["100mbit", "1gbit"], help="of links between the two hosts")
    for name, default, text in (
        ("ranks-per-host", 1, "ranks of each host"),
        ("tokens", 2048, "of a rank"),
        ("width", 1024, "values of a token"),
        ("top-k", 2, "experts of a token"),
        ("experts", 8, "of all ranks"),
        ("rounds", 7, "in which each arm has its turn"),
    ):
        add(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    add("--rate", help=argparse.SUPPRESS)
    add("--interface", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    parsed = parse()
    run(parsed) if "RANK" in os.environ else launch(parsed)
