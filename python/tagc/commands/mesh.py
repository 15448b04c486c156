"""python -m tagc plan on a mesh: tensor, sequence, context, expert and pipeline parallelism, and offload."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from tagc.commands import models, options, planner
from tagc.commands.models import NAMED, Model
from tagc.commands.room import SIZES_GB
from tagc.report.parser import UsageError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
SEQUENCES = ("no", "torch", "megatron")
RECOMPUTED = ("none", "attention", "full")
OFFLOADED = {"parameters": 1, "optimizer": 2, "activations": 4}
FORMATS = ("bf16", "int8", "int4")
N_TOKENS = 2048  # of a sequence, where nothing says so
OWN = (
    "tensor_parallel sequence_parallel context_parallel pipeline_parallel pipeline_schedule stages_per_rank "
    "micro_batches micro_batch_size sequence_length expert_parallel experts experts_per_token offload "
    "recompute pipeline_values"
).split()  # options that make a plan one on a mesh; None where they are not given


class Way(NamedTuple):
    """A way of data parallelism. placement: of tagc_placement."""

    name: str
    compresses: bool
    placement: int
    gather: str
    values: str
    sparsity: float


NONE, _, ZERO2, ZERO3, HYBRID = range(5)
WAYS = (
    Way("FSDP2 in bf16", False, ZERO3, "bf16", "bf16", 0.0),
    Way("FSDP2 in bf16, reshard_after_forward=False", False, ZERO2, "bf16", "bf16", 0.0),
    Way("FSDP2 in bf16, sharded within a host", False, HYBRID, "bf16", "bf16", 0.0),
    Way("DDP in bf16", False, NONE, "bf16", "bf16", 0.0),
    Way('tagc, 4 bits, parameters="delta4"', True, ZERO3, "delta4", "int4", 0.0),
    Way('tagc, 95 % zero, parameters="delta4"', True, ZERO3, "delta4", "int2", 0.95),
    Way("tagc, sharded within a host, 4 bits", True, HYBRID, "bf16", "int4", 0.0),
    Way("tagc, DDP, 4 bits", True, NONE, "bf16", "int4", 0.0),
)


def offloaded(text: str) -> int:
    words = text.split(",")
    if not set(words) <= set(OFFLOADED):
        raise argparse.ArgumentTypeError(
            f'"{text[:60]}", allowed: parameters, optimizer, activations, with commas between'
        )
    return sum(OFFLOADED[word] for word in set(words))


def boundary(text: str) -> tuple[str, str]:
    words = tuple(text.split(","))
    if len(words) != 2 or not set(words) <= set(FORMATS):
        raise argparse.ArgumentTypeError(
            f'"{text[:40]}", allowed: two of bf16, int8 and int4, forward and backward, as in int8,int4'
        )
    return words[0], words[1]


def add_options(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group(
        "a mesh", "With one of these, or a named model, the plan is one of memory and bytes on a mesh."
    )
    add, whole = group.add_argument, options.whole
    add("--tensor-parallel", metavar="N", type=whole(1, 1024), help="ranks that split each layer. Default: 1")
    add(
        "--sequence-parallel",
        metavar="HOW",
        nargs="?",
        const="torch",
        choices=SEQUENCES,
        help="norms split along the sequence: torch (it keeps what it gathers for the backward pass) or "
        "megatron (it gathers again). Without a word: torch",
    )
    add(
        "--context-parallel", metavar="N", type=whole(1, 1024), help="ranks that split a sequence. Default: 1"
    )
    add(
        "--pipeline-parallel",
        metavar="N",
        type=whole(1, 1024),
        help="ranks that split the layers. Default: 1",
    )
    add(
        "--pipeline-schedule",
        metavar="NAME",
        choices=SCHEDULES,
        help=", ".join(SCHEDULES) + ". Default: 1f1b",
    )
    add(
        "--stages-per-rank",
        metavar="N",
        type=whole(1, 1024),
        help="for interleaved and zero-bubble. Default: 2 with interleaved, else 1",
    )
    add("--micro-batches", metavar="N", type=whole(1, 65536), help="of a step. Default: 1")
    add("--micro-batch-size", metavar="N", type=whole(1, 1 << 20), help="sequences of one. Default: 1")
    add("--sequence-length", metavar="N", type=whole(1, 1 << 26), help=f"tokens. Default: {N_TOKENS}")
    add("--expert-parallel", metavar="N", type=whole(1, 65536), help="ranks that split experts. Default: 1")
    add(
        "--experts",
        metavar="N",
        type=whole(1, 65536),
        help="experts in place of each feed-forward, each of its size. Default: the model's",
    )
    add("--experts-per-token", metavar="N", type=whole(1, 65536), help="default: the model's, or 2")
    add(
        "--offload",
        metavar="LIST",
        type=offloaded,
        help="to the host's memory: parameters (with gradients and optimizer, as FSDP2 does), optimizer "
        "(with gradients), activations",
    )
    add("--recompute", metavar="WHAT", choices=RECOMPUTED, help=", ".join(RECOMPUTED) + ". Default: none")
    add(
        "--pipeline-values",
        metavar="F,B",
        type=boundary,
        help="of compress(stage): activations and gradients between hosts. Default: int8,int4",
    )


def is_asked(arguments: argparse.Namespace) -> bool:
    """Returns whether the options ask for a plan on a mesh."""
    return isinstance(arguments.params, str) or any(getattr(arguments, name) is not None for name in OWN)


def _model_of(arguments: argparse.Namespace, n_tokens: int) -> Model:
    if isinstance(arguments.params, str):
        model = NAMED[arguments.params]
    else:
        model = models.gpt_of(arguments.params, n_tokens)
    if arguments.experts is not None:
        n_active = model.n_active if model.n_experts > 1 else 2
        model = model._replace(n_experts=arguments.experts, n_active=min(n_active, arguments.experts))
    if arguments.experts_per_token is not None:
        if model.n_experts == 1:
            raise UsageError(
                "--experts-per-token is given, but the model has no experts: give --experts, too"
            )
        model = model._replace(n_active=arguments.experts_per_token)
    return model


def _question(arguments: argparse.Namespace) -> tuple[Model, dict[str, Any]]:
    """Returns the model, and the fields of tagc_mesh_question that do not depend on the way."""
    if arguments.tokens is not None:
        raise UsageError(
            "--tokens is not for a mesh, where a step has --micro-batches of --micro-batch-size sequences of "
            "--sequence-length"
        )
    n_pipeline = arguments.pipeline_parallel or 1
    given = [
        name
        for name in ("pipeline_schedule", "stages_per_rank", "pipeline_values")
        if getattr(arguments, name)
    ]
    if n_pipeline == 1 and given:
        raise UsageError(f"--{given[0].replace('_', '-')} is given, but --pipeline-parallel is 1")
    schedule = arguments.pipeline_schedule or "1f1b"
    n_tokens = arguments.sequence_length or N_TOKENS
    model = _model_of(arguments, n_tokens)
    return model, {
        **model._asdict(),
        "world_size": arguments.hosts * arguments.gpus_per_host,
        "ranks_per_host": arguments.gpus_per_host,
        "n_tensor": arguments.tensor_parallel or 1,
        "n_context": arguments.context_parallel or 1,
        "n_pipeline": n_pipeline,
        "n_expert": arguments.expert_parallel or 1,
        "sequence": SEQUENCES.index(arguments.sequence_parallel or "no"),
        "n_sequences": arguments.micro_batch_size or 1,
        "n_tokens": n_tokens,
        "n_micro_batches": arguments.micro_batches or 1,
        "schedule": SCHEDULES.index(schedule),
        "n_stages_per_rank": arguments.stages_per_rank or (2 if schedule == "interleaved" else 1),
        "recompute": RECOMPUTED.index(arguments.recompute or "none"),
        "offload": arguments.offload or 0,
    }


def _ask(numbers: dict[str, Any], way: Way, forward: str, backward: str) -> dict[str, Any]:
    return planner.ask_mesh(
        way.gather, way.values, forward, backward, placement=way.placement, sparsity=way.sparsity, **numbers
    )


def _ways(numbers: dict[str, Any], found: dict[str, Any]) -> list[Way]:
    """Returns the ways that differ here. In a pipeline FSDP2 gathers once in a step. found: of any way."""
    n_data = found["n_data"] * numbers["n_context"]
    near = max(1, min(numbers["ranks_per_host"] // numbers["n_tensor"], n_data))
    ways = list(WAYS if numbers["n_pipeline"] == 1 else WAYS[1:])
    if near == n_data:  # within a host, or alone
        ways = [way for way in ways if not way.compresses]
    if near == 1 or near == n_data:
        ways = [way for way in ways if way.placement != HYBRID]
    if numbers["offload"] & OFFLOADED["parameters"]:
        ways = [way for way in ways if way.placement != NONE]
    return ways


def plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the plan as a dict for JSON: "mesh", "rows" with the memory of each way of data parallelism,
    and "legs" with what each leg sends in a step."""
    model, numbers = _question(arguments)
    forward, backward = arguments.pipeline_values or ("int8", "int4")
    first = _ask(numbers, WAYS[1], "bf16", "bf16")
    ways = _ways(numbers, first)
    rows, legs = [], []
    for leg in ("tensor", "context", "expert", "pipeline"):
        if first["legs"][leg]["all"]:
            legs.append({"name": f"{leg} parallel", "compresses": False} | first["legs"][leg])
    for way in ways:
        made = _ask(numbers, way, "bf16", "bf16")
        device, host = made["device"], made["host"]
        total = sum(device.values())
        rows.append(
            {
                "name": way.name,
                "compresses": way.compresses,
                "device": device,
                "device_all": total,
                "host": host,
                "host_all": sum(host.values()),
                "stage": made["fullest"],
                "fits": [size for size in SIZES_GB if total <= size * 1e9],
            }
        )
        for leg in ("gradients", "parameters"):
            if made["legs"][leg]["all"]:
                legs.append({"name": f"{leg}: {way.name}", "compresses": way.compresses} | made["legs"][leg])
    if numbers["n_pipeline"] > 1 and first["legs"]["pipeline"]["between"]:
        packed = _ask(numbers, WAYS[1], forward, backward)["legs"]["pipeline"]
        at = 1 + next(i for i, leg in enumerate(legs) if leg["name"] == "pipeline parallel")
        name = f"pipeline parallel, compress(stage), {forward} and {backward}"
        legs.insert(at, {"name": name, "compresses": True} | packed)
    if first["legs"]["offload"]["all"]:
        legs.append({"name": "offload, to and from the host", "compresses": False} | first["legs"]["offload"])
    n_tokens = numbers["n_tokens"] * numbers["n_sequences"] * numbers["n_micro_batches"] * first["n_data"]
    compute_s = 6 * first["n_active_params"] * n_tokens / numbers["world_size"] / (1e12 * arguments.tflops)
    return {
        "type": "tagc plan",
        "format": 1,
        "simulated": False,
        "model": arguments.params if isinstance(arguments.params, str) else None,
        "n_params": first["n_params"],
        "n_active_params": first["n_active_params"],
        "hosts": arguments.hosts,
        "gpus_per_host": arguments.gpus_per_host,
        "mesh": {
            "tensor": numbers["n_tensor"],
            "sequence": SEQUENCES[numbers["sequence"]],
            "context": numbers["n_context"],
            "data": first["n_data"],
            "pipeline": numbers["n_pipeline"],
            "expert": numbers["n_expert"],
            "experts": model.n_experts,
            "schedule": SCHEDULES[numbers["schedule"]],
            "stages_per_rank": numbers["n_stages_per_rank"],
            "micro_batches": numbers["n_micro_batches"],
            "micro_batch_size": numbers["n_sequences"],
            "sequence_length": numbers["n_tokens"],
            "recompute": RECOMPUTED[numbers["recompute"]],
            "offload": [word for word, bit in OFFLOADED.items() if numbers["offload"] & bit],
        },
        "tokens": n_tokens,
        "compute_s": compute_s,
        "bubble": first["bubble"],
        "in_flight": first["in_flight"],
        "links": arguments.link,
        "rows": rows,
        "legs": legs,
    }


# ---- text ----


def _many(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def _head(made: dict[str, Any]) -> list[str]:
    mesh = made["mesh"]
    dims = [f"{name} {mesh[name]}" for name in ("tensor", "context", "data", "pipeline")]
    if mesh["sequence"] != "no":
        dims[0] += " with the sequence"
    if mesh["experts"] > 1:
        dims.append(f"{mesh['experts']} experts over {_many(mesh['expert'], 'rank')}")
    active = f", {made['n_active_params'] / 1e9:.3g} B of a token" if mesh["experts"] > 1 else ""
    lines = [
        f"{made['n_params'] / 1e9:.3g} B parameters{active}; {_many(made['hosts'], 'host')} with "
        f"{_many(made['gpus_per_host'], 'GPU')} each: {', '.join(dims)}",
        f"a step: {_many(mesh['micro_batches'], 'micro-batch', 'micro-batches')} of "
        f"{mesh['micro_batch_size']} x {mesh['sequence_length']} tokens for each of "
        f"{_many(mesh['data'], 'data rank')}, {made['tokens']:,} tokens in all",
    ]
    if mesh["pipeline"] > 1:
        share = 100 * made["bubble"] / (1 + made["bubble"])
        lines.append(
            f"{mesh['schedule']}, {_many(mesh['stages_per_rank'], 'stage')} per rank: bubbles take "
            f"{share:.1f} % of a step ({made['bubble']:.3g} of the computing time); the fullest rank holds "
            f"{made['in_flight']:.3g} micro-batches"
        )
    lines.append(f"computing takes {made['compute_s']:.3g} s of each GPU, without what is recomputed")
    return lines


def _memory(rows: Sequence[dict[str, Any]], where: str, title: str, bytes_text: Any) -> list[str]:
    wide = max(len(row["name"]) for row in rows)
    columns = [kind for kind in rows[0][where] if any(row[where][kind] for row in rows)]
    lines = ["", title, f"{'':{wide}} " + " ".join(f"{column:>11}" for column in [*columns, "all"])]
    if where == "device":
        lines[-1] += "  fits in"
    for row in rows:
        cells = [row[where][column] for column in columns] + [row[f"{where}_all"]]
        line = f"{row['name']:{wide}} " + " ".join(f"{bytes_text(n):>11}" for n in cells)
        if where == "device":
            line += "  " + (", ".join(f"{size} GB" for size in row["fits"]) or "none of these")
        lines.append(line)
    return lines


def text_of(made: dict[str, Any], bytes_text: Any, rate_text: Any) -> str:
    wide = max(len(leg["name"]) for leg in made["legs"]) if made["legs"] else 0
    sizes = ", ".join(f"{size} GB" for size in SIZES_GB)
    stage = f"of the rank of the pipeline that holds most (of {sizes})"
    lines = _head(made) + _memory(made["rows"], "device", f"memory of a GPU, {stage}", bytes_text)
    if any(row["host_all"] for row in made["rows"]):
        lines += _memory(made["rows"], "host", "memory of the host, for the same rank", bytes_text)
    lines += [
        "",
        "sent in a step, by the rank and by the host that send most; seconds are those of a host's card",
    ]
    lines.append(f"{'':{wide}} {'a rank':>9} {'in hosts':>9} {'a card':>9}")
    lines[-1] += "".join(f" {'at ' + rate_text(rate):>12}" for rate in made["links"])
    for leg in made["legs"]:
        inside = 100 * (1 - leg["between"] / leg["all"])
        line = (
            f"{leg['name']:{wide}} {bytes_text(leg['rank']):>9} {inside:>7.0f} % {bytes_text(leg['host']):>9}"
        )
        for rate in made["links"]:
            seconds = leg["host"] / (rate / 8 * options.PAYLOAD)
            line += f" {f'{seconds:.3g} s' if leg['host'] else '-':>12}"
        lines.append(line)
    lines += ["", "counted by formulas, not simulated: no leg is overlapped with computing or another one"]
    return "\n".join(lines)
