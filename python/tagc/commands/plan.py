"""python -m tagc plan: what training on a cluster holds, sends and takes, with compression and without it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from tagc import _library as lib
from tagc.commands import codec, mesh, models, options, planner, room
from tagc.commands.models import N_VOCAB, shape_of
from tagc.commands.planner import FULL, GRAD, HYBRID, Forecast
from tagc.report.parser import Parser

N_TOKENS = 2048  # of a sequence
TOKENS = 16_384  # of a GPU and step
GPU_NOTE = "the codec has not been measured on a GPU"
_EXAMPLES = """examples:
  # Four hosts with one GPU each, for three networks between them.
  python -m tagc plan --params 1b --hosts 4 --link 1gbit,10gbit,25gbit

  # Hosts with eight GPUs each, and a codec that takes no time: the most that one on the GPU could give.
  python -m tagc plan --params 7b --hosts 4 --gpus-per-host 8 --link 10gbit --codec-ns 0

  # Tensor parallelism within hosts, a pipeline between them.
  python -m tagc plan --model llama-3-70b --hosts 16 --gpus-per-host 8 --tensor-parallel 8 \\
      --sequence-parallel --pipeline-parallel 4 --micro-batches 16 --recompute attention --link 10gbit
"""


class Way(NamedTuple):
    """A way to train: what it is called, and how the planner knows it."""

    name: str
    compresses: bool
    sharding: int
    gather: str
    values: str
    sparsity: float


_ONE_GPU = (
    Way("FSDP2 in bf16", False, FULL, "bf16", "bf16", 0.0),
    Way("FSDP2 in bf16, reshard_after_forward=False", False, GRAD, "bf16", "bf16", 0.0),
    Way('tagc, 4 bits, parameters="delta4"', True, GRAD, "delta4", "int4", 0.0),
    Way('tagc, 95 % zero, parameters="delta4"', True, GRAD, "delta4", "int2", 0.95),
)
_SEVERAL_GPUS = (
    Way("FSDP2 in bf16", False, FULL, "bf16", "bf16", 0.0),
    Way("FSDP2 in bf16, sharded within a host", False, HYBRID, "bf16", "bf16", 0.0),
    *_ONE_GPU[2:],
    Way("tagc, sharded within a host, 4 bits", True, HYBRID, "bf16", "int4", 0.0),
    Way("tagc, sharded within a host, 95 % zero", True, HYBRID, "bf16", "int2", 0.95),
)


def parser() -> Parser:
    made = Parser(
        prog="python -m tagc plan",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Memory, bytes and simulated time of a training step. Nothing is trained.",
    )
    add = made.add_argument
    add(
        "--params",
        "--model",
        metavar="N",
        type=models.size_or_name,
        default=1e9,
        help="parameters, as in 350m, 1b, 7b, or a model: " + ", ".join(models.NAMED) + ". Default: 1b",
    )
    add("--hosts", metavar="N", type=options.whole(2, 8192), default=4, help="hosts. Default: 4")
    add(
        "--gpus-per-host",
        "--ranks-per-host",
        metavar="N",
        type=options.whole(1, 64),
        default=1,
        help="ranks on each host. Default: 1",
    )
    add(
        "--link",
        metavar="RATES",
        type=options.rates,
        default=[1e9, 10e9, 25e9],
        help="rates of a host's network card. Default: 1gbit,10gbit,25gbit",
    )
    add(
        "--latency",
        metavar="TIME",
        type=options.seconds,
        default=50e-6,
        help="between hosts, one way. Default: 50us",
    )
    add(
        "--host-link",
        metavar="RATE",
        type=options.rate,
        default=800e9,
        help="between the GPUs of a host. Default: 800gbit",
    )
    add(
        "--tflops",
        metavar="X",
        type=options.real(0.001, 1e5),
        default=150.0,
        help="what a GPU reaches in training, often 40 %% of what its data sheet says. Default: 150",
    )
    add(
        "--tokens",
        metavar="N",
        type=options.whole(1, 1 << 24),
        help="of each GPU and step, in sequences of 2048. Default: 16384",
    )
    add(
        "--codec-ns",
        metavar="X",
        type=options.real(0, 1e6),
        help="nanoseconds that the codec takes per element. Default: measured here, on one thread",
    )
    add("--json", metavar="FILE", help="also write the plan there; - prints nothing else")
    mesh.add_options(made)
    return made


def _step(way: Way, arguments: argparse.Namespace, bits_per_s: float, n_levels: int = 2) -> Forecast:
    n_layer, width = shape_of(arguments.params)
    n_all = arguments.tokens or TOKENS
    n_tokens = min(N_TOKENS, n_all)
    return planner.ask(
        way.gather,
        way.values,
        sharding=way.sharding,
        sparsity=way.sparsity,
        n_layer=n_layer,
        n_embd=width,
        n_vocab=N_VOCAB,
        n_tokens=n_tokens,
        n_batch=max(1, round(n_all / n_tokens)),
        n_micro_steps=1,
        world_size=arguments.hosts * arguments.gpus_per_host,
        ranks_per_host=arguments.gpus_per_host,
        n_levels=n_levels,
        link_bytes_per_s=bits_per_s / 8 * options.PAYLOAD,
        latency_s=arguments.latency,
        host_bytes_per_s=arguments.host_link / 8,
        flops_per_s=1e12 * arguments.tflops,
        codec_s=1e-9 * arguments.codec_ns,
        optimizer_s=0.0,
    )


def _memory(way: Way, step: Forecast, gpus_per_host: int) -> int:
    """Returns bytes of a rank. What the planner counts as an fp32 copy of all parameters is torch's own, in
    bf16, or a replica of deltas: in bf16, of what one rank of each host owns."""
    n_bytes = step.state_bytes + step.residual_bytes
    if way.sharding == GRAD:
        n_bytes -= 4 * step.n_params
        n_bytes += 2 * step.n_params // (1 if way.gather == "bf16" else gpus_per_host)
    return n_bytes


def _card(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns what passes a host's network card in a step, in each direction, by ways to send it. A ring of
    all ranks enters and leaves each host once."""
    n_hosts, per_host = arguments.hosts, arguments.gpus_per_host
    n_ranks, way = n_hosts * per_host, _ONE_GPU[2]
    ring = (n_ranks - 1) / n_ranks / ((n_hosts - 1) / n_hosts)
    flat = _step(way, arguments, arguments.link[0], n_levels=1)
    dense, _, four, few = ((row["name"], row["gradient_bytes"], row["parameter_bytes"]) for row in rows[:4])
    ways = [
        (f"{dense[0]}, a ring of all ranks", ring * dense[1], ring * dense[2]),
        (f"{dense[0]}, in two levels", *dense[1:]),
        (f"{way.name}, each rank by itself", flat.gradient_bytes, flat.gather_bytes),
        (f"{four[0]}, in two levels", *four[1:]),
        (f"{few[0]}, in two levels", *few[1:]),
    ]
    return [
        {
            "name": name,
            "gradient_bytes": gradients,
            "parameter_bytes": parameters,
            "bytes_of_a_rank": (gradients + parameters) / per_host,
        }
        for name, gradients, parameters in ways
    ]


def plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the plan as a dict for JSON: "links", with the answer for each, "rows", one per way, and with
    several GPUs per host "card", what passes a host's network card."""
    ways = _ONE_GPU if arguments.gpus_per_host == 1 else _SEVERAL_GPUS
    rows: list[dict[str, Any]] = []
    for way in ways:
        steps = [_step(way, arguments, bits_per_s) for bits_per_s in arguments.link]
        rows.append(
            {
                "name": way.name,
                "compresses": way.compresses,
                "memory_bytes": _memory(way, steps[0], arguments.gpus_per_host),
                "gradient_bytes": steps[0].gradient_bytes,
                "parameter_bytes": steps[0].gather_bytes,
                "step_s": [step.step_s for step in steps],
                "exposed_s": [step.exposed_s for step in steps],
                "n_params": steps[0].n_params,
                "compute_s": steps[0].compute_s,
            }
        )
    links = [_answer(rows, i, bits_per_s) for i, bits_per_s in enumerate(arguments.link)]
    return {
        "type": "tagc plan",
        "format": 1,
        "simulated": True,
        "n_params": rows[0]["n_params"],
        "hosts": arguments.hosts,
        "gpus_per_host": arguments.gpus_per_host,
        "codec_ns": arguments.codec_ns,
        "links": links,
        "rows": rows,
        "card": _card(rows, arguments) if arguments.gpus_per_host > 1 else [],
        "memory": room.rows((*shape_of(arguments.params), N_VOCAB), arguments.hosts, arguments.gpus_per_host),
    }


def _answer(rows: Sequence[dict[str, Any]], link: int, bits_per_s: float) -> dict[str, Any]:
    """Returns whether the fastest way with compression pays beside the fastest without it. "factor": how many
    times as fast it is. "communication": the share of a step in which the fastest without it waits for the
    network."""
    plain, packed = (
        min((row for row in rows if row["compresses"] == is_packed), key=lambda row: row["step_s"][link])
        for is_packed in (False, True)
    )
    verdict = lib.verdict(plain["step_s"][link], packed["step_s"][link])
    return {
        "bits_per_s": bits_per_s,
        "choice": "compress" if verdict == "pays" else "off",
        "verdict": verdict,
        "packed": packed["name"],
        "plain": plain["name"],
        "factor": plain["step_s"][link] / packed["step_s"][link],
        "communication": plain["exposed_s"][link] / plain["step_s"][link],
    }


# ---- text ----


def rate_text(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e9:g} Gbit/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:g} Mbit/s"


def bytes_text(n_bytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.3g} {unit}"
    return f"{n_bytes:.0f} B"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _answer_text(link: dict[str, Any]) -> str:
    is_off = link["choice"] == "off"
    return (
        f"{rate_text(link['bits_per_s'])}: {'off' if is_off else 'compress'}. {link['packed']} is "
        f"{link['factor']:.2f} times as fast as {link['plain']}, which waits for the network in "
        f"{100 * link['communication']:.0f} % of a step"
    )


def text_of(made: dict[str, Any], codec_source: str) -> str:
    lines = [_answer_text(link) for link in made["links"]]
    gpus = f"{made['gpus_per_host']} GPU{'s' if made['gpus_per_host'] > 1 else ''}"
    size = f"{made['n_params'] / 1e9:.3g} B parameters"
    lines += [
        "",
        f"{size}, {made['hosts']} hosts with {gpus} each; times are simulated",
        f"codec: {made['codec_ns']:.3g} ns per element, {codec_source}; {GPU_NOTE}",
        "",
        f"{'':42} {'memory of a rank':>16} {'a host sends':>13}",
    ]
    lines[-1] += "".join(f" {'at ' + rate_text(link['bits_per_s']):>14}" for link in made["links"])
    for row in made["rows"]:
        sent = row["gradient_bytes"] + row["parameter_bytes"]
        cells = "".join(f" {_seconds_text(step):>14}" for step in row["step_s"])
        lines.append(f"{row['name']:42} {bytes_text(row['memory_bytes']):>16} {bytes_text(sent):>13}{cells}")
    lines += _card_lines(made["card"])
    lines += room.lines(made["memory"], bytes_text)
    lines += [
        "",
        "memory: parameters, gradients and Adam's moments in fp32, copies of parameters that stay, and",
        "residuals. Activations and buffers come on top. With the codec on processors, copies and residuals",
        "are in the host's memory.",
    ]
    return "\n".join(lines)


def _card_lines(card: Sequence[dict[str, Any]]) -> list[str]:
    if not card:
        return []
    wide = max(len(row["name"]) for row in card)
    lines = [
        "",
        "through the card of a host in a step, in each direction",
        f"{'':{wide}} {'gradients':>10} {'parameters':>10} {'all':>10} {'of a rank':>10}",
    ]
    for row in card:
        both = row["gradient_bytes"] + row["parameter_bytes"]
        numbers = (row["gradient_bytes"], row["parameter_bytes"], both, row["bytes_of_a_rank"])
        lines.append(f"{row['name']:{wide}} " + " ".join(f"{bytes_text(n):>10}" for n in numbers))
    return lines


def run(words: Sequence[str]) -> int:
    arguments = parser().parse_args(list(words))
    if mesh.is_asked(arguments):
        made = mesh.plan(arguments)
        text = mesh.text_of(made, bytes_text, rate_text)
    else:
        source = "as given"
        if arguments.codec_ns is None:
            arguments.codec_ns, source = codec.measure(), "measured here on one thread"
        made = plan(arguments)
        text = text_of(made, source)
    if arguments.json != "-":
        print(text)
    if arguments.json == "-":
        json.dump(made, sys.stdout, indent=1)
        print()
    elif arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(made, file, indent=1)
    return 0
