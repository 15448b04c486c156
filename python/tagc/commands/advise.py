"""python -m tagc advise: measures the link between the ranks and the codec, and asks the planner about a
model of a given size that need not be there."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from tagc import _planner as planner
from tagc._library import Error
from tagc.commands import options
from tagc.commands.parser import Parser, UsageError
from tagc.commands.plan import made_of

_EXAMPLES = """examples:
  # On each of two hosts, with the address of one of them; the network between them is measured.
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m tagc advise

  # Here, to see what it prints.
  torchrun --standalone --nproc-per-node 2 -m tagc advise --params 10m
"""
PAYLOAD = 1448 / 1538  # of a link's rate: a frame of 1538 bytes has 1448 bytes of TCP's data


class Link(NamedTuple):
    """What measure_link() returns."""

    latency_s: float
    bytes_per_s: float
    spread: float


def parser() -> Parser:
    made = Parser(
        prog="python -m tagc advise",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measures the link between the ranks and the codec of their processors, and asks the "
        "planner (python -m tagc plan) what to choose on such a link.",
    )
    add = made.add_argument
    add("--params", metavar="N", default="100m", help="parameters, as in 10m, 1b. Default: 100m")
    add(
        "--hosts",
        metavar="N",
        type=options.whole(2, 10**6),
        help="on how many hosts the ranks are, in their order. Default: as found; ranks of one host count as "
        "one host each",
    )
    add(
        "--step-s",
        metavar="X",
        type=options.real(1e-9, 1e6),
        help="seconds that a step computes. Default: what the planner takes a GPU to need",
    )
    add(
        "--accumulate",
        metavar="N",
        type=options.whole(1, 65536),
        default=1,
        help="micro-steps of a step, of which the last one exchanges gradients. Default: 1",
    )
    add(
        "--experts",
        metavar="N",
        type=options.whole(2, 65536),
        help="of each layer, spread over all ranks: also says what their tokens take. Default: no experts",
    )
    add(
        "--experts-per-token",
        metavar="N",
        type=options.whole(1, 65536),
        default=2,
        help="that each token goes to. Default: 2",
    )
    add(
        "--tokens",
        metavar="N",
        type=options.whole(1, 1 << 26),
        default=2048,
        help="of each rank and micro-step, for --experts. Default: 2048",
    )
    return made


def run(words: Sequence[str]) -> int:
    arguments = parser().parse_args(list(words))
    n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.experts is not None and arguments.experts % n_ranks:
        raise UsageError(f"--experts is {arguments.experts}, allowed: multiples of the {n_ranks} ranks")
    if n_ranks < 2:
        raise UsageError(
            "advise measures the link between ranks, and there is one rank: start it by torchrun on the "
            "hosts that will train, or here by torchrun --standalone --nproc-per-node 2 -m tagc advise"
        )
    try:
        import torch
        import torch.distributed as dist

        from tagc.torch.advise import first_words
        from tagc.torch.advise.survey import measure_link
        from tagc.torch.exchange import cores
        from tagc.torch.exchange.comm import Comm, share
        from tagc.torch.exchange.hosts import Cluster
        from tagc.torch.exchange.waits import timeout_of
    except ModuleNotFoundError as missing:
        raise Error("unsupported", f'{missing}: pip install "tagc-train[torch]"') from None

    dist.init_process_group("gloo")
    try:
        world = dist.group.WORLD
        assert world is not None
        timeout_s = timeout_of(world)
        cluster = Cluster(range(world.size()), arguments.hosts, timeout_s)
        abouts = share(world, first_words.about_host())
        cluster.split([world], {rank: theirs["host"] for rank, theirs in enumerate(abouts)})
        hosts = cluster.of(world)
        comm = Comm(hosts.between, timeout_s)
        try:
            link = Link(*measure_link(comm, world, hosts.n_hosts - 1))
        finally:
            comm.close()
        threads = cores.threads(abouts[world.rank()], abouts)
        codec_ns = max(share(world, planner.codec_ns("int2", 0.95, threads)))
        blocks_ns = max(share(world, planner.blocks_ns("int8"))) if arguments.experts else 0.0
        if dist.get_rank() == 0:
            said = cluster.words([world], torch.device("cpu"))
            print(_advice(arguments, hosts.n_hosts, hosts.per_host, link, codec_ns, said))
            if arguments.experts:
                print(_of_tokens(arguments, hosts.n_hosts, hosts.per_host, link, blocks_ns))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def _advice(
    arguments: argparse.Namespace, n_hosts: int, per_host: int, link: Link, codec_ns: float, where: str
) -> str:
    """Returns what was measured, and the plan. link: of each of per_host ranks."""
    payload = 8 * per_host * link.bytes_per_s  # of a host's card
    asked = _asked(arguments, n_hosts, per_host, link, codec_ns) | {"accumulate": arguments.accumulate}
    made = made_of([f"--{name}={value}" for name, value in asked.items()])
    head = (
        f"{n_hosts * per_host} ranks; a host sends {payload / 1e6:.0f} Mbit/s, an empty message takes "
        f"{1e6 * link.latency_s:.0f} us, the codec {codec_ns:.3g} ns per element"
    )
    (answer,) = json.loads(made.json or "")["links"]
    doubt = _doubt(link.spread, answer["verdict"], answer["factor"])
    return "\n".join(line for line in (head, where, doubt, made.text) if line)


def _asked(
    arguments: argparse.Namespace, n_hosts: int, per_host: int, link: Link, codec_ns: float
) -> dict[str, Any]:
    """Returns options of a plan on this link."""
    return {
        "params": arguments.params,
        "hosts": n_hosts,
        "gpus-per-host": per_host,
        "link": f"{8 * per_host * link.bytes_per_s / PAYLOAD / 1e6:.6f}mbit",
        "latency": f"{1e6 * link.latency_s:.6f}us",
        "codec-ns": f"{codec_ns:.6f}",
    } | ({} if arguments.step_s is None else {"compute-s": arguments.step_s})


def _of_tokens(
    arguments: argparse.Namespace, n_hosts: int, per_host: int, link: Link, codec_ns: float
) -> str:
    """Returns what the planner says of experts that are spread over all ranks."""
    shape = {"experts": arguments.experts, "expert-parallel": n_hosts * per_host}
    shape |= {"experts-per-token": arguments.experts_per_token, "sequence-length": arguments.tokens}
    shape |= {"micro-batches": arguments.accumulate}
    asked = _asked(arguments, n_hosts, per_host, link, codec_ns) | shape
    made = made_of([f"--{name}={value}" for name, value in asked.items()])
    (answer,) = json.loads(made.json or "")["token_links"]
    lines = made.text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("tokens of experts"))
    doubt = _doubt(link.spread, answer["verdict"], answer["plain_s"] / answer["packed_s"])
    return "\n".join(["", *([doubt] if doubt else []), *lines[begin : begin + 2]])


def _doubt(spread: float, verdict: str, factor: float) -> str:
    """Returns a line where messages differ by more than compression gains or costs; else ""."""
    if verdict == "makes no difference" or spread < max(factor, 1 / factor):
        return ""
    return (
        f"no verdict: runs of the same message differ by {spread:.2f} times, more than compression gains or "
        "costs below; measure again"
    )
