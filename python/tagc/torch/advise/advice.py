"""advise(): measures the link, the codec and torch's own collectives, and says what to choose, "off"
included.

survey.py measures, and the planner says what a step takes with that; forecast() and choose() are pure, the
same on every rank."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tagc import _library as lib
from tagc import _planner as planner
from tagc._library import Error
from tagc.torch.advise.choice import (
    bytes_text,
    call_of,
    check_seconds,
    choose,
    choose_local,
    factor_of,
    mildest,
    off,
    seconds_text,
)
from tagc.torch.advise.first_words import about_host
from tagc.torch.advise.shape import OTHER, Shape, advised, is_one, look
from tagc.torch.advise.survey import (
    AGAIN,
    DTYPES,
    GRADIENTS,
    LOCAL,
    LOCAL_OPTIONS,
    N_RUNS,
    WIRES,
    Survey,
    codec_of,
    own_work_of,
    parts_of,
)  # fmt: skip
from tagc.torch.exchange import cores, internals, streams
from tagc.torch.exchange.agreement import agree_all, all_ranks, versions
from tagc.torch.exchange.comm import share
from tagc.torch.exchange.hosts import Cluster
from tagc.torch.exchange.identity import identity
from tagc.torch.exchange.said import say
from tagc.torch.exchange.waits import timeout_of
from tagc.torch.hooks.kinds import kind_of
from tagc.torch.schedule.options import Settings, check_known

BUSY = 1.5  # times that runs of the same measurement may differ by


def advise(
    model: torch.nn.Module,
    *,
    hosts: int | None = None,
    between: dist.ProcessGroup | None = None,
    step_s: float | None = None,
    step: Callable[[], object] | None = None,
    accumulate: int = 1,
    seconds: float = 20,
    threads: int | None = None,
    timeout_s: float | None = None,
    every: int | str | None = None,
    verbose: bool = True,
    **unknown: NoReturn,
) -> dict[str, Any]:
    """Measures this model's communication and says what to choose. Collective over the ranks that train it,
    before or after compress(); leaves model, gradients, residuals and random numbers as they are.

    step_s: seconds of a step's computing, without communication. step: instead of it, a function that
        computes one forward and backward pass without exchanging gradients, as on a copy that is not wrapped;
        it is timed. With neither of them only communication is compared, not whether it matters.
    accumulate: forward and backward passes of a step, of which the last one exchanges gradients. step_s is
        that of all of them, step of one.
    every: also compare with local steps, whose exchange is measured, too: steps between two exchanges, or
        "auto".
    seconds: that it may take, about. hosts, between, threads, timeout_s: as for compress(). verbose: rank
        0 prints the advice.

    Returns a dict for JSON, the same on every rank: "choice" ("off" or "compress"), "verdict" (compression
    "pays", "makes no difference" or "costs", by tagc_verdict_of, as tagc bench and tagc plan have it),
    "baseline" (name of the fastest row without tagc, with which all is compared), "gain" (how many times as
    fast as the baseline the choice is), "name" (of its row), "options" (for compress(), which takes
    them as tagc.grouped(options); among them may be exchange="dense", which loses nothing), "torch" (for
    torch's own mixed precision, where that is enough),
    "bucket" (where units are too small for this link: how many elements they should have, and what to write),
    "reason", "text", "where" (of the hosts, in words), "ranks_per_host" (whose gradients are added up within
    the host), "rows" (each way to communicate: seconds of gradients, parameters, "own_s" (FSDP2's own work),
    and a step, "card_bytes", which a host sends to others in a step, and "n_units"), "link",
    "codec", "measured", "spread" (the slowest run of a measurement over its fastest: much above 1, something
    else was running), and "local" (with `every`: "choice", "verdict", "every", "bits" per parameter and
    step, "exchange_s", "step_s", "reason"; else None)."""
    check_known(advise, unknown)
    model = internals.unwrapped(model)
    group: dist.ProcessGroup | None = None
    failure: Exception | None = None
    about: dict[str, Any] = {}
    on, cluster = None, None
    try:
        group = all_ranks()
        lib.load()
        shape, group = look(model, kind_of(model, between, call="advise()").name, between)
        _check_options(step_s, step, accumulate, seconds, every)
        shape.accumulate = accumulate
        on = streams.of(streams.device_of(model))
        timeout_s = timeout_of(group) if timeout_s is None else timeout_s
        Settings(threads=threads, timeout_s=timeout_s, hosts=hosts)  # which checks them
        cluster = _cluster(group, hosts, between, timeout_s)
        if not shape.n_elems:
            raise Error("argument", "this model has no trained parameters: there is nothing to exchange")
        about = {
            "versions": versions(),
            "options": {
                "seconds": seconds,
                "threads": threads,
                "step": step is not None,
                "step_s": step_s is None,
                "accumulate": accumulate,
                "every": every,
                "hosts": hosts,
            },
            "host": identity(),
            "about host": about_host(),
            "rows": [(f"unit {i}", unit) for i, unit in enumerate(shape.units)],
        }
    except Exception as problem:
        failure = problem
    everyone = agree_all(group, about, failure, timeout_s, "advise()")
    assert group is not None  # or that has raised
    if group.size() == 1 or hosts == 1:
        return _said(_alone(shape, step_s, group.size()), verbose)
    if cluster is not None:
        ranks = dist.get_process_group_ranks(group)
        cluster.split([group], {rank: theirs["host"] for rank, theirs in zip(ranks, everyone)})
    if step is not None:
        try:
            step_s = accumulate * _seconds_of(model, step)
        except Exception as problem:
            failure = problem
        agree_all(group, {}, failure)
    if threads is None:
        threads = cores.threads(about["about host"], [theirs["about host"] for theirs in everyone])
    n_reducers = 1 + sum(parameter.requires_grad and parameter.ndim > 1 for parameter in model.parameters())
    return advise_shape(
        group,
        shape,
        Survey(group, shape, threads, timeout_s, on, None if cluster is None else cluster.of(group)),
        step_s=step_s,
        seconds=seconds,
        every=every,
        n_reducers=n_reducers,
        where=where_of([theirs["host"] for theirs in everyone], cluster, group, on),
        verbose=verbose,
    )


def _check_options(step_s: Any, step: Any, accumulate: Any, seconds: Any, every: Any) -> None:
    """Raises Error for a wrong option of advise(), of those that are its own. Local."""
    check_seconds(step_s, seconds)
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or not 1 <= accumulate <= 65536:
        raise Error("argument", f"accumulate is {accumulate!r}, must be an integer of 1 to 65536")
    if step is not None and (not callable(step) or step_s is not None):
        raise Error("argument", "step must be a function, and there is no use for it where step_s is given")
    if (
        every is not None
        and every != "auto"
        and (isinstance(every, bool) or not isinstance(every, int) or not 2 <= every <= 10**6)
    ):
        raise Error("argument", f'every is {every!r}, must be "auto", or an integer of 2 to 1000000')


def _cluster(group: dist.ProcessGroup, hosts: int | None, between: Any, timeout_s: float) -> Cluster | None:
    """Returns the hosts to look for, where compress() adds gradients up within them. Local."""
    adds_up = between is None
    if hosts is not None and not adds_up:
        raise Error("unsupported", f"hosts is {hosts}, and between is given, too: leave hosts out")
    return Cluster(dist.get_process_group_ranks(group), hosts, timeout_s) if adds_up else None


def where_of(
    identities: Sequence[str], cluster: Cluster | None, group: dist.ProcessGroup, on: streams.Cuda | None
) -> str:
    """Returns a line on the hosts of the ranks, "" where there is nothing to say. identities: of each."""
    device = torch.device("cpu") if on is None else on.device
    split = "" if cluster is None else cluster.words([group], device)
    if len(set(identities)) > 1:
        return split
    one = f"all {len(identities)} ranks are on one host: its memory takes the place of a network"
    return f"{split}; {one}" if split else one


def advise_shape(
    group: dist.ProcessGroup,
    shape: Shape,
    survey: Survey,
    *,
    step_s: float | None,
    seconds: float,
    every: int | str | None,
    n_reducers: int,
    verbose: bool,
    where: str = "",
) -> dict[str, Any]:
    """Returns what advise() returns, of a model of that shape that need not be there. Collective over the
    group. n_reducers: exchanges of local steps, one after the other. where: of where_of()."""
    with survey:
        survey.run(seconds, every is not None)
        measured = survey.results()
    if step_s is not None:
        step_s = max(share(group, step_s))
    rows = forecast(shape, measured, step_s, survey.hosts.per_host)
    advice = choose(rows, spread=measured["spread"]) | {
        **_about(shape, step_s, shape.world_size, survey.hosts.per_host, where),
        "rows": rows,
        "link": link_of(shape, measured),
        "codec": measured["codec"],
        "measured": measured["seconds"],
        "spread": measured["spread"],
    }
    advice["bucket"] = bucket_of(shape, measured, step_s, advice["name"], survey.hosts.per_host)
    advice["local"] = None if every is None else local_of(shape, measured, advice, every, n_reducers)
    advice["text"] = text_of(advice)
    return _said(advice, verbose)


def _said(advice: dict[str, Any], verbose: bool) -> dict[str, Any]:
    if verbose and dist.get_rank() == 0:
        say(advice["text"])
    return advice


def _about(shape: Shape, step_s: float | None, n_ranks: int, per_host: int, where: str) -> dict[str, Any]:
    """Returns what an advice has of the model and its ranks."""
    return {
        "wrap": shape.wrap,
        "world_size": n_ranks,
        "ranks_per_host": per_host,
        "where": where,
        "n_params": shape.n_params,
        "n_elems": shape.n_elems,
        "n_units": len(shape.units),
        "compute_s": step_s,
        "accumulate": shape.accumulate,
    }


def _alone(shape: Shape, step_s: float | None, n_ranks: int) -> dict[str, Any]:
    """Returns the advice for one rank, or for ranks of one host by the user's word."""
    name = torch_name(shape) + ", as it is"
    reason = "leave it off: gradients are exchanged over one rank here, which sends nothing"
    if n_ranks > 1:
        reason = f"leave it off: all {n_ranks} ranks are on one host, and nothing passes its network card"
    return off(name, reason) | {
        **_about(shape, step_s, n_ranks, n_ranks, ""),
        "link": {},
        "codec": {},
        "measured": {},
        "spread": 1.0,
        "bucket": None,
        "local": None,
    }


def _seconds_of(model: torch.nn.Module, step: Callable[[], object]) -> float:
    """Returns the seconds of one pass. Gradients are as before afterwards."""
    parameters = list(model.parameters())
    before = [parameter.grad for parameter in parameters]
    samples = []
    try:
        for _ in range(1 + N_RUNS):
            for parameter in parameters:
                parameter.grad = None
            start = time.perf_counter()
            step()
            samples.append(time.perf_counter() - start)
    finally:
        for parameter, gradient in zip(parameters, before):
            parameter.grad = gradient
    return statistics.median(samples[1:])


# ---- from measurements to a choice: pure ----

_TIMES = {"sum within": "sum_within", "share within": "share_within", "copy out": "copy_out",
          "copy back": "copy_back"}  # fmt: skip


def _timed(by_size: Mapping[int, float]) -> planner.Timed:
    """Returns the smallest and the largest size that were measured."""
    points = sorted((int(n), seconds) for n, seconds in by_size.items())
    (n_small, small_s), (n_large, large_s) = points[0], points[-1]
    return planner.Timed((n_small, n_large), (small_s, large_s))


class Asked:
    """The questions to the planner about a model (planning/sizes/units.h). measured: Survey.results().
    per_host: the ranks of a host, each of which has as much of the gradient to exchange."""

    def __init__(
        self, shape: Shape, measured: Mapping[str, Any], step_s: float | None = None, per_host: int = 1
    ) -> None:
        self._shape, self._codec = shape, measured["codec"]
        units = [
            planner.UnitsUnit(
                tuple(unit.get(kind, 0) for kind in lib.CLASSES),
                *(held.get(dtype, 0) for dtype in ("fp32", "bf16", OTHER)),
                n_gathers,
            )
            for unit, held, n_gathers in zip(shape.units, shape.held, shape.n_gathers)
        ]
        self._question = question = planner.UnitsQuestion(
            units=(planner.UnitsUnit * len(units))(*units),
            n_units=len(units),
            world_size=shape.world_size,
            ranks_per_host=per_host,
            is_ddp=shape.wrap == "ddp",
            is_all_reduce=shape.all_reduce,
            reduces_frozen=advised(shape.wrap).reduces_frozen,
            n_passes=shape.accumulate,
            compute_s=step_s or 0,
        )
        times, seconds = question.times, measured["seconds"]
        times.latency_s, times.bytes_per_s = measured["link"]
        for what, name in _TIMES.items():
            if what in seconds:
                setattr(times, name, _timed(seconds[what]))
        for i, dtype in enumerate(DTYPES):
            for what, lines in (("reduce", times.reduce), ("gather", times.gather)):
                if (by_size := seconds.get(f"torch {what} {dtype}")) is not None:
                    lines[i] = _timed(by_size)
            if (by_size := seconds.get(own_work_of(i + 1))) is not None:
                times.own[i] = _timed(by_size)

    def __call__(
        self,
        *,
        reduce: str | None = None,
        narrows: bool = False,
        options: Mapping[str, Any] | None = None,
        parameters: str | None = None,
        on_device: bool = False,
        joined: int = 0,
    ) -> Any:
        """Returns the planner's answer. reduce, narrows: of torch's own. options: of compress(), by which
        tagc exchanges gradients. parameters: by which it gathers."""
        q = self._question
        q.reduce = lib.FORMATS[reduce or self._shape.reduce]
        q.narrows, q.codec_on_host, q.joined = narrows, not on_device, joined
        q.parameters = -1 if parameters is None else planner.GATHER_KINDS[parameters]
        q.gradients = None
        if options is not None:
            parts = parts_of(options, self._shape.reduce)
            q.gradients = planner.options_of(parts)
            q.codec_s = tuple(
                self._codec.get(codec_of(part, on_device), self._codec[codec_of(part)]) for part in parts
            )
        if parameters is not None:
            q.gather_s, q.again_s = self._codec[f"gather {parameters}"], self._codec[AGAIN]
        return planner.units(q)


def forecast(
    shape: Shape, measured: Mapping[str, Any], step_s: float | None = None, per_host: int = 1, joined: int = 0
) -> list[dict[str, Any]]:
    """Returns a row for each way to communicate, from the mildest to the strongest: seconds in a step, and
    bytes through the card of a host in each direction, of torch's own as NCCL's ring sends them. joined:
    neighbouring units have so many elements at least."""
    asked = Asked(shape, measured, step_s, per_host)
    rows: list[dict[str, Any]] = []

    def add(name: str, chosen: Mapping[str, Any] | None, torch: Mapping[str, str], **way: Any) -> None:
        reply = asked(joined=joined, **way)
        rows.append(
            {
                "name": name,
                "choice": "off" if chosen is None else "compress",
                "options": chosen or {},
                "torch": torch,
                "gradients_s": reply.gradients_s,
                "parameters_s": reply.parameters_s,
                "comm_s": reply.gradients_s + reply.parameters_s,
                "exposed_s": reply.exposed_s,
                "own_s": reply.own_s,
                "step_s": None if step_s is None else reply.step_s,
                "card_bytes": reply.host_bytes,
                "n_units": reply.n_units,
            }
        )

    gathered = [held for held, times in zip(shape.held, shape.n_gathers) if times]
    add(torch_name(shape) + ", as it is", None, {})
    if shape.reduce != "bf16":
        add(torch_name(shape, "bf16"), None, {"reduce": "bf16"}, reduce="bf16")
    if any("fp32" in held for held in gathered):
        halved = {"reduce": "bf16", "param": "bf16"}
        add(torch_name(shape, "bf16", "bf16"), None, halved, reduce="bf16", narrows=True)
    for options in GRADIENTS:
        wires: tuple[str, ...] = WIRES
        if options.get("exchange") == "dense":  # nothing is lost, in parameters neither
            wires = ("bf16", "lossless") if shape.gather == "bf16" else (shape.gather,)
        if shape.wrap != "fsdp2" or not any(map(is_one, gathered)):
            wires = ()
        has_kernels = codec_of(parts_of(options, shape.reduce)[0], True) in measured["codec"]
        for codec in ("host", "device") if has_kernels else (None,):
            for parameters in (None, *wires):
                chosen = options | ({"parameters": parameters} if parameters else {})
                chosen |= {"codec": codec} if codec else {}  # the default is the device's
                way = {"options": options, "parameters": parameters, "on_device": codec == "device"}
                add(name_of(chosen), chosen, {}, **way)
    return rows


def name_of(options: Mapping[str, Any]) -> str:
    """Returns options of compress() as text."""
    if options.get("exchange") == "dense":
        what = "uncompressed"
    else:
        what = "every value as int8" if options["sparsity"] == 0 else f"{100 * options['sparsity']:g} % zero"
    parameters = f", parameters {options['parameters']}" if options.get("parameters") else ""
    on_device = ", codec on the device" if options.get("codec") == "device" else ""
    return f"tagc, {what}{on_device}{parameters}"


def torch_name(shape: Shape, reduce: str | None = None, gather: str | None = None) -> str:
    """Returns what torch sends without tagc, in words: now, or with gradients and parameters in other
    dtypes."""
    main = gather or (shape.gather if any(shape.n_gathers) else shape.reduce)
    differ = f" with gradients in {reduce or shape.reduce}" if (reduce or shape.reduce) != main else ""
    return f"{shape.wrap.upper()} in {main}{differ}"


def bucket_of(
    shape: Shape, measured: Mapping[str, Any], step_s: float | None, name: str, per_host: int = 1
) -> dict[str, Any] | None:
    """Returns how many elements units should have at least, for the row of that name: the smallest power of
    two beside which no other makes a difference; None where larger units do not pay. {"elems", "n_units",
    "comm_s" (with them), "how" (what to write)}."""

    def row_of(elems: int) -> dict[str, Any]:
        rows = forecast(shape, measured, step_s, per_host, elems)
        return next(row for row in rows if row["name"] == name) | {"elems": elems}

    column, now = ("comm_s" if step_s is None else "step_s"), row_of(0)
    tried = [now]
    for exponent in range(1, max(1, shape.n_elems).bit_length() + 1):
        row = row_of(2**exponent)
        if row["n_units"] < tried[-1]["n_units"]:
            tried.append(row)
    best = mildest(tried[1:], column) if tried[1:] else now
    if lib.verdict(now[column], best[column]) != "pays":
        return None
    how = advised(shape.wrap).units_of(best["elems"])
    return {key: best[key] for key in ("elems", "n_units", "comm_s")} | {"now_s": now["comm_s"], "how": how}


def local_of(
    shape: Shape, measured: Mapping[str, Any], advice: Mapping[str, Any], every: int | str, n_reducers: int
) -> dict[str, Any]:
    """Returns what local steps would take, beside the row that was chosen. n_reducers: exchanges one after
    the other, one for each parameter."""
    n_mean = shape.n_elems / n_reducers
    unit: dict[str, Any] = {kind: part * n_mean for kind, part in shape.mix.items()}
    whole = dataclasses.replace(
        shape, units=[unit] * n_reducers, n_gathers=[0] * n_reducers, held=[{}] * n_reducers, all_reduce=True
    )
    reply = Asked(whole, measured)(options=LOCAL_OPTIONS)
    exchange_s, bits = reply.gradients_s, 8 * reply.host_bytes / shape.n_elems
    chosen = next(row for row in advice["rows"] if row["name"] == advice["name"])
    compute_s = advice["compute_s"]
    if compute_s is None:
        steps = planner.every_of(0, exchange_s) if every == "auto" else int(every)
        return {
            "every": steps,
            "bits": bits / steps,
            "exchange_s": exchange_s,
            "step_s": None,
            "choice": None,
            "verdict": "unknown",
            "reason": (
                f"local steps would exchange for {seconds_text(exchange_s)} every {steps} steps; say "
                "step_s= or step=, and this says whether that pays"
            ),
        }
    steps = planner.every_of(compute_s, exchange_s) if every == "auto" else int(every)
    row = {"name": LOCAL, "every": steps, "step_s": planner.local_s(compute_s, exchange_s, steps)}
    verdict, reason = choose_local(chosen, row, compute_s, measured["spread"])
    return row | {
        "bits": bits / steps,
        "exchange_s": exchange_s,
        "verdict": verdict,
        "reason": reason,
        "choice": "local steps" if verdict == "pays" else "every step",
    }


def link_of(shape: Shape, measured: Mapping[str, Any]) -> dict[str, float]:
    """Returns what each rank sent in a second: through tagc's connection, and what torch's own reduction came
    to if it had sent no more than it must. From and to a device, where tensors are on one: copy_out and
    copy_back."""
    seconds, (latency_s, bytes_per_s) = measured["seconds"], measured["link"]
    n, reduce_s = max(seconds["torch reduce fp32"].items())
    must = 4 * n * (shape.world_size - 1) / shape.world_size * (2 if shape.all_reduce else 1)
    link = {
        what.replace(" ", "_") + "_bytes_per_s": 4 * max(by_size) / by_size[max(by_size)]
        for what, by_size in seconds.items()
        if what.startswith("copy ")
    }
    return link | {"agree_s": latency_s, "bytes_per_s": bytes_per_s, "torch_bytes_per_s": must / reduce_s}


def text_of(advice: Mapping[str, Any]) -> str:
    link, rows = advice["link"], advice["rows"]
    baseline = next(row for row in rows if row["name"] == advice["baseline"])
    of = "comm_s" if baseline["step_s"] is None else "step_s"
    n_frozen = advice["n_params"] - advice["n_elems"]
    has_cards = advice["ranks_per_host"] > 1
    lines = [
        f"{advice['wrap'].upper()}, {advice['world_size']} ranks, {advice['n_params'] / 1e6:.1f} M parameters"
        + (f", {advice['n_elems'] / 1e6:.3g} M of them trained" if n_frozen else "")
        + f", {advice['n_units']} {advised(advice['wrap']).units}",
        *([advice["where"]] if advice["where"] else []),
        *(_passes_text(advice) if advice["accumulate"] > 1 else []),
        f"each rank sends {8 * link['bytes_per_s'] / 1e6:.0f} Mbit/s through tagc and "
        f"{8 * link['torch_bytes_per_s'] / 1e6:.0f} in torch's own reduction; an empty message takes "
        f"{seconds_text(link['agree_s'])}" + _copies_text(link),
        f"runs of the same measurement differ by {advice['spread']:.1f} times"
        + (": the machine or the link is busy, measure again" if advice["spread"] > BUSY else ""),
        f"{'seconds in a step':48} {'gradients':>10} {'parameters':>10} {'together':>10} {'step':>10} "
        f"{'factor':>7}" + (f" {'a host sends':>13}" if has_cards else ""),
    ]
    for row in rows:
        cells = [row["gradients_s"], row["parameters_s"], row["comm_s"], row["step_s"]]
        lines.append(
            f"{row['name']:48} "
            + " ".join(f"{'-' if s is None else seconds_text(s):>10}" for s in cells)
            + f" {factor_of(baseline, row, of):7.2f}"
            + (f" {bytes_text(row['card_bytes']):>13}" if has_cards else "")
        )
    lines.append(f"factor: times as fast as {baseline['name']}, the fastest without tagc")
    if baseline["own_s"] and baseline["step_s"] is not None:
        own = seconds_text(baseline["own_s"])
        lines.append(
            f"{own} of each step are FSDP2's own: it copies parameters and gradients for its exchanges"
        )
    if has_cards:
        lines.append("a host sends: to other hosts in a step; of torch's own, as much as a ring of all ranks")
    lines.append(advice["reason"])
    if advice["choice"] == "compress":
        lines.append(f"    {call_of(advice['options'])}")
    if advice["bucket"]:
        bucket = advice["bucket"]
        lines.append(
            f"units are small for this link: communication would take {seconds_text(bucket['comm_s'])} "
            f"instead of {seconds_text(bucket['now_s'])} with {bucket['n_units']} units of "
            f"{bucket['elems']} parameters or more: {bucket['how']}; the parameters of a unit are in memory "
            "together"
        )
    if advice["local"]:
        local = advice["local"]
        lines.append(f"{local['reason']}; {local['bits']:.3g} bits per parameter and step")
    return "\n".join(lines)


def _passes_text(advice: Mapping[str, Any]) -> list[str]:
    gathers = "" if advice["wrap"] == "ddp" else "; each of them gathers parameters"
    return [f"{advice['accumulate']} passes in a step, the last one exchanges gradients{gathers}"]


def _copies_text(link: Mapping[str, float]) -> str:
    if "copy_out_bytes_per_s" not in link:
        return ""
    return (
        f"; copies to the host {link['copy_out_bytes_per_s'] / 1e9:.1f} GB/s, back "
        f"{link['copy_back_bytes_per_s'] / 1e9:.1f}"
    )
