"""python -m tagc advise: tagc.advise() for a model of a given size that need not be there."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from tagc._library import Error
from tagc.commands import models, options
from tagc.report.parser import Parser, UsageError

_EXAMPLES = """examples:
  # On each of two hosts, with the address of one of them; the network between them is measured.
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m tagc advise

  # Here, to see what it prints.
  torchrun --standalone --nproc-per-node 2 -m tagc advise --params 10m
"""


def parser() -> Parser:
    made = Parser(
        prog="python -m tagc advise",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measures the link between the ranks, and the codec, in CPU memory; says what to choose.",
    )
    add = made.add_argument
    add(
        "--params",
        metavar="N",
        type=options.size,
        default=1e8,
        help="parameters, as in 10m, 1b. Default: 100m",
    )
    add("--wrap", choices=("fsdp2", "ddp"), default="fsdp2", help="how the model is wrapped. Default: fsdp2")
    add(
        "--hosts",
        metavar="N",
        type=options.whole(2, 10**6),
        help="on how many hosts the ranks are, in their order. Default: as found",
    )
    add(
        "--step-s",
        metavar="X",
        type=options.real(1e-9, 1e6),
        help="seconds that a step computes; without it only communication is compared",
    )
    add(
        "--seconds",
        metavar="X",
        type=options.real(0.1, 3600),
        default=20.0,
        help="that it may take, about. Default: 20",
    )
    return made


def run(words: Sequence[str]) -> int:
    arguments = parser().parse_args(list(words))
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise UsageError(
            "advise measures the link between ranks, and there is one rank: start it by torchrun on the "
            "hosts that will train, or here by torchrun --standalone --nproc-per-node 2 -m tagc advise"
        )
    try:
        import torch.distributed as dist

        from tagc.torch.advise.advice import advise_shape, where_of
        from tagc.torch.advise.shape import Shape
        from tagc.torch.advise.survey import Survey
        from tagc.torch.exchange.comm import share
        from tagc.torch.exchange.hosts import Cluster
        from tagc.torch.exchange.identity import identity
        from tagc.torch.exchange.waits import timeout_of
    except ModuleNotFoundError as missing:
        raise Error("unsupported", f'{missing}: pip install "tagc-train[torch]"') from None

    n_layer, width = models.shape_of(arguments.params)
    root = {"compressed": 2 * models.N_VOCAB * width, "dense": 2 * width}
    layer = {"compressed": 9 * width**2, "mild": 3 * width**2, "dense": 13 * width}
    is_sharded = arguments.wrap == "fsdp2"
    dist.init_process_group("gloo")
    try:
        group = dist.group.WORLD
        assert group is not None
        shape = Shape(
            arguments.wrap,
            group.size(),
            [root] + [layer] * n_layer,
            [1] + [2] * n_layer if is_sharded else [0] * (1 + n_layer),
            all_reduce=not is_sharded,
        )
        identities = share(group, identity())
        cluster = Cluster(range(group.size()), arguments.hosts, timeout_of(group))
        cluster.split([group], dict(enumerate(identities)))
        advise_shape(
            group,
            shape,
            Survey(group, shape, hosts=cluster.of(group)),
            step_s=arguments.step_s,
            seconds=arguments.seconds,
            every=None,
            n_reducers=1 + n_layer,
            where=where_of(identities, cluster, group, None),
            verbose=True,
        )
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0
