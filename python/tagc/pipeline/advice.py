"""advise_stage(): measures a message between neighbours, whole and encoded, and says whether compress_stage()
pays.

forecast() is a pure function of what was measured, the same on every rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from tagc import _planner as planner
from tagc._library import Error
from tagc.pipeline import internals
from tagc.pipeline.blocks import Codec, Device, codec_of, opened
from tagc.pipeline.stage import check_hosts, hosts_of
from tagc.torch.extension import (
    agree_all,
    all_ranks,
    bytes_text,
    check_seconds,
    choose,
    factor_of,
    identity,
    number,
    off,
    say,
    seconds_text,
    share,
    streams,
    versions,
)

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

SCHEDULES = ("1F1B", "GPipe")
BLOCK = 64
# name, forward, backward: the mildest first. What is milder than them sends torch's own messages.
WAYS = (("tagc, 8 bits both ways", "int8", "int8"), ("tagc, 8 bits forward and 4 back", "int8", "int4"))
Tensors = Sequence[tuple[tuple[int, ...], torch.dtype]]


def forecast(
    measured: Sequence[Mapping[str, Any]],
    schedule: str,
    n_stages: int,
    micro_batches: int,
    step_s: float | None,
) -> list[dict[str, Any]]:
    """Returns a row for each of `found`, which has "forward_s" and "backward_s" of a message, codec included:
    with the seconds of a step, "comm_s" if stages took no time to compute. step_s: a stage's computing in a
    step; None: not known."""
    rows = []

    def takes_s(compute_s: float, forward_s: float, backward_s: float) -> float:
        return planner.pipeline_s(schedule, n_stages, micro_batches, compute_s, forward_s, backward_s)

    for row in measured:
        messages = (row["forward_s"], row["backward_s"])
        compute_s = None if step_s is None else step_s / micro_batches
        alone = None if compute_s is None else takes_s(compute_s, 0, 0)
        takes = None if compute_s is None else takes_s(compute_s, *messages)
        rows.append(
            {
                **row,
                "torch": {},
                "comm_s": takes_s(0, *messages),
                "exposed_s": None if takes is None or alone is None else takes - alone,
                "step_s": takes,
                "card_bytes": micro_batches * max(row["forward_bytes"], row["backward_bytes"]),
            }
        )
    return rows


class _Asked(NamedTuple):
    """The options of advise_stage(), and the ranks that advise together."""

    stage: Any
    group: dist.ProcessGroup
    micro_batches: int
    schedule: str
    hosts: int | None
    step_s: float | None
    seconds: float


class _Survey:
    """Measures messages between the ranks of a group that are neighbours and on different hosts: all of them
    at once, as in a pipeline at work. Collective."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        on: streams.Cuda | Device | None,
        hosts: Sequence[Any],
        seconds: float,
    ) -> None:
        """on: of codec_of(), for tensors on `device`."""
        self.group, self.device, self.on, self.until = group, device, on, time.monotonic() + seconds
        self.streams = on.streams if isinstance(on, Device) else on
        self.ranks, self.at = dist.get_process_group_ranks(group), dist.get_rank(group)
        self.crosses = [one != other for one, other in zip(hosts, hosts[1:])]  # rank i to i + 1 of the group

    def codec(self, values: str, is_stochastic: bool) -> Codec:
        return codec_of(values, BLOCK, is_stochastic, self.on)

    def slowest(self, run: Callable[[], None]) -> float:
        """Returns the median seconds of a few calls, each that of the slowest rank. The first one does not
        count."""
        samples: list[float] = []
        while True:
            dist.barrier(self.group)
            begin = time.perf_counter()
            run()
            took = time.perf_counter() - begin
            samples.append(max(share(self.group, took)))
            is_late = any(share(self.group, time.monotonic() > self.until))
            if len(samples) == 4 or (is_late and len(samples) > 1):
                return statistics.median(samples[1:])

    def message_s(self, n_bytes: int, is_forward: bool) -> float:
        sent = torch.zeros(n_bytes, dtype=torch.uint8, device=self.device)
        received = torch.empty_like(sent)
        # whether this rank sends to the next one or receives from it, and the same of the one before
        after = self.at < len(self.crosses) and self.crosses[self.at]
        before = self.at > 0 and self.crosses[self.at - 1]

        def run() -> None:
            ops = []
            for is_there, peer, sends in ((after, 1, is_forward), (before, -1, not is_forward)):
                if is_there:
                    operation, tensor = (dist.isend, sent) if sends else (dist.irecv, received)
                    ops.append(dist.P2POp(operation, tensor, self.ranks[self.at + peer], self.group))
            for work in dist.batch_isend_irecv(ops) if ops else []:
                work.wait()
            self._settle()

        return self.slowest(run)

    def _settle(self) -> None:
        if self.streams is not None:
            self.streams.settle()

    def codec_s(self, codec: Codec, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Returns seconds to encode and to decode a tensor of the stage's device."""
        tensor = torch.empty(tuple(shape), dtype=dtype).uniform_(-1, 1, generator=torch.Generator())
        tensor = tensor.to(self.device)
        message = torch.empty(codec.n_bytes(tensor.numel()), dtype=torch.uint8, device=self.device)

        def run() -> None:
            codec.encode(tensor, message, 1)
            codec.decode(message, tensor)
            self._settle()

        return self.slowest(run)


def _measure(survey: _Survey, tensors: Tensors) -> list[dict[str, Any]]:
    """Returns the ways to send the tensors, from the mildest to the strongest. Integers have no gradient."""
    floats = [(shape, dtype) for shape, dtype in tensors if Codec.takes(dtype)]

    def nbytes(some: Tensors, itemsize: int | None = None) -> int:
        return sum(torch.Size(shape).numel() * (itemsize or dtype.itemsize) for shape, dtype in some)

    rest = nbytes(tensors) - nbytes(floats)
    ways: list[dict[str, Any]] = [_way("torch's own messages", "off", {}, nbytes(tensors), nbytes(floats))]
    if any(dtype == torch.float32 for _, dtype in floats):
        ways.append(_way("torch's own, bf16", "off", {}, rest + nbytes(floats, 2), nbytes(floats, 2)))
    for name, forward, backward in WAYS:
        codecs = survey.codec(forward, False), survey.codec(backward, True)
        sent = [sum(codec.n_bytes(torch.Size(shape).numel()) for shape, _ in floats) for codec in codecs]
        options = {"forward": forward, "backward": backward}
        way = _way(name, "compress", options, rest + sent[0], sent[1])
        way["codec_s"] = [sum(survey.codec_s(codec, *one) for one in floats) for codec in codecs]
        ways.append(way)
    for way in ways:
        for i, name in enumerate(("forward", "backward")):
            way[f"{name}_s"] = survey.message_s(way[f"{name}_bytes"], i == 0) + way["codec_s"][i]
    return ways


def _way(name: str, choice: str, options: Mapping[str, str], forward: int, backward: int) -> dict[str, Any]:
    made = {"name": name, "choice": choice, "options": options}
    return made | {"forward_bytes": forward, "backward_bytes": backward, "codec_s": [0.0, 0.0]}


def _activations(stage: Any, given: Any) -> Tensors:
    """Returns shape and dtype of each tensor that this stage sends to the next one."""
    if given is None:
        metas = internals.stage_sends(stage, True)
        if metas is None:
            raise Error(
                "state",
                "what the stage sends is not known before its first step: run one, or pass activations=, a "
                "tensor like what it returns for a micro-batch",
            )
        return [(tuple(meta.shape), meta.dtype) for meta in metas]
    tensors: list[Any] = list(given) if isinstance(given, (tuple, list)) else [given]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise Error("argument", f"activations has {tensor!r}, must be a tensor or a list of tensors")
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def advise_stage(
    stage: PipelineStage,
    *,
    micro_batches: int,
    schedule: str = "1F1B",
    activations: Any = None,
    hosts: int | None = None,
    step_s: float | None = None,
    seconds: float = 20,
    timeout_s: float | None = None,
    verbose: bool = True,
) -> dict[str, Any]:
    """Measures messages between the stages, and says whether compress_stage() pays. Collective over the
    stage's group, one stage on each rank, before or after compress_stage(); changes nothing.

    micro_batches: of a step. schedule: "1F1B" or "GPipe".
    activations: a tensor, or a list of them, as the stage returns for a micro-batch; needed before its first
        step.
    hosts: as for compress_stage(); not given: those that it was called with.
    step_s: how long the stage computes in a step; without it only communication is compared.
    seconds: that it may take, about. timeout_s: as for compress_stage(). verbose: rank 0 prints the advice.

    Returns a dict for JSON, the same on every rank, with what tagc.torch.advise() has of it: "choice",
    "verdict", "baseline", "gain", "name", "options" (of compress_stage()), "reason", "text", "rows"."""
    if not internals.is_pipeline_stage(stage):
        raise Error("argument", f"stage is a {type(stage).__name__}, must be a PipelineStage")
    world = all_ranks()
    group = world if stage.group is None else stage.group
    hosts = hosts_of(stage) if hosts is None else hosts
    asked = _Asked(stage, group, micro_batches, schedule, hosts, step_s, seconds)
    failure: Exception | None = None
    about: dict[str, Any] = {}
    on: streams.Cuda | Device | None = None
    try:
        tensors = _check(asked, activations)
        on, why_host = opened(torch.device(stage.device))
        is_last = stage.stage_index == stage.num_stages - 1
        about = {
            "versions": versions(),
            "options": {
                "micro_batches": micro_batches,
                "schedule": schedule,
                "hosts": hosts,
                "seconds": seconds,
                "step_s": step_s is None,
            },
            "rows": [],
            "host": identity(),
            "sends": [] if is_last else tensors,
            "compute_s": step_s,
            "why_host": why_host,
        }
    except Exception as problem:
        failure = problem
    try:
        everyone = agree_all(group, about, failure, timeout_s, "advise_stage()")
        has_kernels = not any(theirs["why_host"] for theirs in everyone)
        codec_on = (
            on.streams if isinstance(on, Device) and not has_kernels else on
        )  # as compress_stage() does
        advice = _advise(everyone, asked, codec_on)
    finally:
        if isinstance(on, Device):
            on.close()
    if verbose and dist.get_rank() == 0:
        say(advice["text"])
    return advice


def _advise(
    everyone: list[dict[str, Any]], asked: _Asked, on: streams.Cuda | Device | None
) -> dict[str, Any]:
    """Returns the advice, now that all ranks know the same. Collective."""
    n, hosts, (micro_batches, schedule) = len(everyone), asked.hosts, asked[2:4]
    of_hosts = [i * hosts // n if hosts else theirs["host"] for i, theirs in enumerate(everyone)]
    # the largest of all boundaries, which the others wait for; the slowest stage
    sends = max((theirs["sends"] for theirs in everyone), key=_size)
    step_s = None if asked.step_s is None else max(theirs["compute_s"] for theirs in everyone)
    about = {
        "wrap": "pipeline",
        "world_size": n,
        "micro_batches": micro_batches,
        "schedule": schedule,
        "compute_s": step_s,
    }
    if len(set(of_hosts)) == 1 or not any(Codec.takes(dtype) for _, dtype in sends):
        why = f"all {n} stages are on one host" if len(set(of_hosts)) == 1 else "stages send no floats"
        reason = f"leave it off: {why}, so compress_stage() would send everything whole"
        return off("torch's own messages", reason) | about
    survey = _Survey(asked.group, torch.device(asked.stage.device), on, of_hosts, asked.seconds)
    rows = forecast(_measure(survey, sends), schedule, n, micro_batches, step_s)
    advice = choose(rows, "step_s= shows") | about | {"rows": rows}
    return advice | {"text": _text(advice)}


def _size(tensors: Tensors) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in tensors)


def _check(asked: _Asked, activations: Any) -> Tensors:
    """Returns what the stage sends, or raises an Error that names the option. Local."""
    stage, group, micro_batches, schedule, hosts = asked[:5]
    number("micro_batches", micro_batches, 1, 10**6, int)
    if schedule not in SCHEDULES:
        raise Error("argument", f"schedule is {schedule!r}, must be one of {', '.join(map(repr, SCHEDULES))}")
    n_ranks = dist.get_world_size(group)
    check_hosts(hosts, n_ranks)
    check_seconds(asked.step_s, asked.seconds)
    if stage.num_stages != n_ranks:
        raise Error(
            "unsupported",
            "advise_stage() forecasts schedules with one stage per rank; this pipeline has "
            f"{stage.num_stages} stages on {n_ranks} ranks",
        )
    if stage.stage_index == stage.num_stages - 1 and activations is None:
        return []  # nobody gets what the last one returns
    return _activations(stage, activations)


def _text(advice: Mapping[str, Any]) -> str:
    rows = advice["rows"]
    column = "comm_s" if advice["compute_s"] is None else "step_s"
    baseline = next(row for row in rows if row["name"] == advice["baseline"])
    lines = [
        f"a pipeline of {advice['world_size']} stages, {advice['micro_batches']} micro-batches, forecast for "
        f"{advice['schedule']}",
        f"{'of a message':36} "
        + " ".join(f"{head:>10}" for head in ("forward", "back", "takes", "back", "a step", "factor")),
    ]
    for row in rows:
        sizes = (bytes_text(row[f"{direction}_bytes"]) for direction in ("forward", "backward"))
        times = (seconds_text(row[name]) for name in ("forward_s", "backward_s", column))
        cells = " ".join(f"{cell:>10}" for cell in (*sizes, *times))
        lines.append(f"{row['name']:36} {cells} {factor_of(baseline, row, column):10.2f}")
    if column == "comm_s":
        lines.append("a step: if stages took no time to compute")
    return "\n".join([*lines, f"factor: times as fast as {baseline['name']}", advice["reason"]])
