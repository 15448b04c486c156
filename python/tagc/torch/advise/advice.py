"""advise(): measures the link, the codec and torch's own collectives, and says what to choose, "off"
included.

survey.py measures; forecast() and choose() are pure functions of what it found, the same on every rank."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.advise.choice import (
    EVERY,
    bytes_text,
    choose,
    choose_every,
    choose_local,
    factor_of,
    local_step_s,
    mildest,
    seconds_text,
)
from tagc.torch.advise.first_words import about_host
from tagc.torch.advise.shape import Held, Shape, advised, held_bytes, is_one, look
from tagc.torch.advise.survey import GRADIENTS, LOCAL, N_RUNS, WIRES, Survey, by_codec, name_of, own_work_of
from tagc.torch.exchange import cores, internals, streams
from tagc.torch.exchange.agreement import agree_all
from tagc.torch.exchange.comm import share
from tagc.torch.exchange.hosts import Cluster
from tagc.torch.exchange.identity import identity
from tagc.torch.exchange.said import say
from tagc.torch.exchange.waits import timeout_of
from tagc.torch.hooks.kinds import kind_of
from tagc.torch.schedule.options import Settings, check_known

BACKWARD = 2 / 3  # of a pass's computing, which DDP's exchange overlaps
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
    and a step, and "card_bytes", which a host sends to others in a step), "link",
    "codec", "measured", "spread" (the slowest run of a measurement over its fastest: much above 1, something
    else was running), and "local" (with `every`: "choice", "verdict", "every", "bits" per parameter and
    step, "exchange_s", "step_s", "reason"; else None)."""
    check_known(advise, unknown)
    model = internals.unwrapped(model)
    group: dist.ProcessGroup | None = dist.group.WORLD if dist.is_initialized() else None
    failure: Exception | None = None
    mine: dict[str, Any] = {}
    on, cluster = None, None
    try:
        if group is None:
            raise Error("state", "torch.distributed is not initialised: call init_process_group() first")
        lib.load()
        shape, group = look(model, kind_of(model, between, call="advise()").name, between)
        for name, value, most in (("step_s", step_s, 1e6), ("seconds", seconds, 3600)):
            if value is not None and not (isinstance(value, (int, float)) and 0 < value <= most):
                raise Error("argument", f"{name} is {value!r}, must be a number above 0, at most {most:g}")
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or not 1 <= accumulate <= 65536:
            raise Error("argument", f"accumulate is {accumulate!r}, must be an integer of 1 to 65536")
        shape.accumulate = accumulate
        if step is not None and (not callable(step) or step_s is not None):
            raise Error(
                "argument", "step must be a function, and there is no use for it where step_s is given"
            )
        if (
            every is not None
            and every != "auto"
            and (isinstance(every, bool) or not isinstance(every, int) or not 2 <= every <= 10**6)
        ):
            raise Error("argument", f'every is {every!r}, must be "auto", or an integer of 2 to 1000000')
        on = streams.of(streams.device_of(model))
        timeout_s = timeout_of(group) if timeout_s is None else timeout_s
        Settings(threads=threads, timeout_s=timeout_s, hosts=hosts)  # which checks them
        cluster = _cluster(group, shape, hosts, between, timeout_s)
        if not shape.n_elems:
            raise Error("argument", "this model has no trained parameters: there is nothing to exchange")
        mine = {
            "versions": {"libtagc": lib.version(), "torch": torch.__version__},
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
    everyone = agree_all(group, mine, failure, timeout_s, "advise()")
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
        agree_all(group, {"versions": {}, "options": {}, "rows": []}, failure)
    if threads is None:
        threads = cores.threads(mine["about host"], [theirs["about host"] for theirs in everyone])
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


def _cluster(
    group: dist.ProcessGroup, shape: Shape, hosts: int | None, between: Any, timeout_s: float
) -> Cluster | None:
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
        found = survey.found()
    if step_s is not None:
        step_s = max(share(group, step_s))
    rows = forecast(shape, found, step_s, survey.hosts.per_host)
    advice = choose(rows) | {
        "wrap": shape.wrap,
        "world_size": shape.world_size,
        "n_params": shape.n_params,
        "n_elems": shape.n_elems,
        "n_units": len(shape.units),
        "compute_s": step_s,
        "accumulate": shape.accumulate,
        "ranks_per_host": survey.hosts.per_host,
        "where": where,
        "rows": rows,
        "link": link_of(shape, found),
        "codec": found["codec"],
        "measured": found["seconds"],
        "spread": found["spread"],
    }
    advice["bucket"] = bucket_of(shape, found, step_s, advice["name"])
    advice["local"] = None if every is None else local_of(shape, found, advice, every, n_reducers)
    advice["text"] = text_of(advice)
    return _said(advice, verbose)


def _said(advice: dict[str, Any], verbose: bool) -> dict[str, Any]:
    if verbose and dist.get_rank() == 0:
        say(advice["text"])
    return advice


def _alone(shape: Shape, step_s: float | None, n_ranks: int) -> dict[str, Any]:
    """Returns the advice for one rank, or for ranks of one host by the user's word."""
    name = torch_name(shape) + ", as it is"
    reason = "leave it off: gradients are exchanged over one rank here, which sends nothing"
    if n_ranks > 1:
        reason = f"leave it off: all {n_ranks} ranks are on one host, and nothing passes its network card"
    return {
        "choice": "off",
        "options": {},
        "torch": {},
        "name": name,
        "verdict": "makes no difference",
        "baseline": name,
        "gain": 1.0,
        "reason": reason,
        "wrap": shape.wrap,
        "world_size": n_ranks,
        "ranks_per_host": n_ranks,
        "where": "",
        "n_params": shape.n_params,
        "n_elems": shape.n_elems,
        "n_units": len(shape.units),
        "compute_s": step_s,
        "accumulate": shape.accumulate,
        "rows": [],
        "link": {},
        "codec": {},
        "measured": {},
        "spread": 1.0,
        "bucket": None,
        "local": None,
        "text": reason,
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


def cost(found: Mapping[str, Any], what: str, n: float) -> float:
    """Returns seconds for n elements, from the line through the two sizes that were measured."""
    points = sorted((int(size), seconds) for size, seconds in found["seconds"][what].items())
    (small, fixed), (large, full) = points[0], points[-1]
    if large == small:
        return full
    slope = max(0.0, (full - fixed) / (large - small))
    return max(0.0, min(fixed, full) - slope * small) + slope * n


def forecast(
    shape: Shape, found: Mapping[str, Any], step_s: float | None = None, per_host: int = 1
) -> list[dict[str, Any]]:
    """Returns a row for each way to communicate, from the mildest to the strongest: seconds in a step, and
    bytes through the card of a host in each direction, of torch's own as NCCL's ring sends them.
    per_host: the ranks of a host, each of which has as much of the gradient to exchange."""
    sizes = [sum(unit.values()) for unit in shape.units]
    agree_s = cost(found, "agree", 0)
    gathers = Gathers(shape, found, agree_s, per_host)
    around = (shape.world_size - 1) / shape.world_size  # of a ring's bytes, which pass each card
    rows: list[dict[str, Any]] = []

    def total(what: str, extra_s: float = 0.0, of: Sequence[int] = sizes) -> float:
        return sum(cost(found, what, n) + extra_s for n in of if n)

    def add(
        name: str,
        choice: str,
        gradients_s: float,
        parameters_s: float,
        card_bytes: float | None,
        options: Mapping[str, Any] | None = None,
        torch: Mapping[str, str] | None = None,
    ) -> None:
        comm_s = gradients_s + parameters_s
        row: dict[str, Any] = {
            "name": name,
            "choice": choice,
            "options": options or {},
            "torch": torch or {},
            "gradients_s": gradients_s,
            "parameters_s": parameters_s,
            "comm_s": comm_s,
            "exposed_s": comm_s,
            "own_s": gathers.own_s,
            "step_s": None,
            "card_bytes": card_bytes,
        }
        if step_s is not None:
            if shape.wrap == "ddp":
                row["exposed_s"] = max(0.0, comm_s - BACKWARD * step_s / shape.accumulate)
            row["step_s"] = step_s + row["exposed_s"] + gathers.own_s
        rows.append(row)

    def torch_reduces(dtype: str) -> float:
        return total(f"torch reduce {dtype}", of=shape.reduced)

    def ring_bytes(reduce: str, in_bf16: bool = False) -> float:
        reduced = sum(shape.reduced) * (2 if reduce == "bf16" else 4) * (1 + shape.all_reduce)
        return around * (reduced + gathers.torchs_bytes(in_bf16))

    def tagcs_bytes(what: str, gathered: float | None) -> float | None:
        bits = found["bits"].get(what)
        return None if bits is None or gathered is None else bits / 8 * sum(sizes) + gathered

    copies_s = sum(
        copies(found, shape.reduce, n // per_host, n // (per_host if shape.all_reduce else shape.world_size))
        for n in sizes
    )
    add(
        torch_name(shape) + ", as it is",
        "off",
        torch_reduces(shape.reduce),
        gathers.by_torch(),
        ring_bytes(shape.reduce),
    )
    if shape.reduce != "bf16":
        add(
            torch_name(shape, reduce="bf16"),
            "off",
            torch_reduces("bf16"),
            gathers.by_torch(),
            ring_bytes("bf16"),
            torch={"reduce": "bf16"},
        )
    if gathers.has_fp32:
        add(
            torch_name(shape, reduce="bf16", gather="bf16"),
            "off",
            torch_reduces("bf16"),
            gathers.by_torch(in_bf16=True),
            ring_bytes("bf16", in_bf16=True),
            torch={"reduce": "bf16", "param": "bf16"},
        )
    for options in itertools.chain(*map(by_codec, GRADIENTS)):
        if name_of(options) not in found["seconds"]:
            continue
        is_on_device = "codec" in options
        gradients_s = total(name_of(options), agree_s) + (0.0 if is_on_device else copies_s)
        others: tuple[str, ...] = WIRES
        if options.get("exchange") == "dense":  # nothing is lost, in parameters neither
            others = ("bf16", "lossless") if shape.gather == "bf16" else (shape.gather,)
        if not gathers.some_by_tagc:
            others = ()
        for parameters in (None, *others):
            parameters_s = gathers.by_torch() if parameters is None else gathers.by_tagc(parameters)
            gathered = around * gathers.torchs_bytes() if parameters is None else gathers.bytes_of(parameters)
            chosen = options | ({"parameters": parameters} if parameters else {})
            if not is_on_device and name_of({**options, "codec": "device"}) in found["seconds"]:
                chosen["codec"] = "host"  # which is not the default where there are kernels
            card_bytes = tagcs_bytes(name_of(options), gathered)
            add(name_of(chosen), "compress", gradients_s, parameters_s, card_bytes, chosen)
    return rows


def torch_name(shape: Shape, reduce: str | None = None, gather: str | None = None) -> str:
    """Returns what torch sends without tagc, in words: now, or with gradients and parameters in other
    dtypes."""
    own = gather or (shape.gather if any(shape.n_gathers) else shape.reduce)
    differ = f" with gradients in {reduce or shape.reduce}" if (reduce or shape.reduce) != own else ""
    return f"{shape.wrap.upper()} in {own}{differ}"


def copies(found: Mapping[str, Any], dtype: str, n_out: int, n_back: int) -> float:
    """Returns seconds from a device to the host and back; 0 where tensors are in CPU memory."""
    if "copy out" not in found["seconds"]:
        return 0.0
    size = 0.5 if dtype == "bf16" else 1.0  # of an fp32 value, which is what was copied
    return cost(found, "copy out", size * n_out) + cost(found, "copy back", size * n_back)


class Gathers:
    """Seconds and bytes of a step's gathers of parameters, those that are not trained included. own_s: what
    FSDP2 itself takes around gathers and reductions."""

    def __init__(self, shape: Shape, found: Mapping[str, Any], agree_s: float, per_host: int = 1) -> None:
        self._shape, self._found, self._agree_s, self._per_host = shape, found, agree_s, per_host
        self._units = [
            (held, times * shape.accumulate, any(unit.values()))
            for held, times, unit in zip(shape.held, shape.n_gathers, shape.units)
            if times
        ]
        self.has_fp32 = any("fp32" in held for held, _, _ in self._units)
        self.some_by_tagc = shape.wrap == "fsdp2" and any(is_one(held) for held, _, _ in self._units)
        # of FSDP2, whoever communicates: its copies into and out of units
        self.own_s = sum(
            shape.accumulate * cost(found, own_work_of(times), sum(held.values()))
            for held, times in zip(shape.held, shape.n_gathers)
            if times and own_work_of(times) in found["seconds"]
        )

    def by_torch(self, in_bf16: bool = False) -> float:
        return sum(times * self._torch_s(held, in_bf16) for held, times, _ in self._units)

    def _torch_s(self, held: Held, in_bf16: bool = False) -> float:
        if is_one(held):
            (dtype,) = held
            return cost(self._found, f"torch gather {'bf16' if in_bf16 else dtype}", held[dtype])
        return cost(self._found, "torch gather fp32", held_bytes(held, in_bf16) / 4)

    def by_tagc(self, parameters: str) -> float:
        """Returns seconds where tagc gathers units of one dtype, in that format, and torch the others."""
        seconds = 0.0
        for held, times, is_trained in self._units:
            if not is_one(held):
                seconds += times * self._torch_s(held)
                continue
            ((dtype, n),) = held.items()
            seconds += times * copies(self._found, dtype, n // self._shape.world_size, n // self._per_host)
            n_first = self._n_sent(parameters, times, is_trained)
            seconds += n_first * (cost(self._found, f"gather {parameters}", n) + self._agree_s)
            if times > n_first:
                again_s = cost(self._found, f"gather {parameters} again", n) + self._agree_s
                seconds += (times - n_first) * again_s
        return seconds

    @staticmethod
    def _n_sent(parameters: str, times: int, is_trained: bool) -> int:
        """Returns how many of the gathers send something: deltas of values that have not changed do not."""
        return int(is_trained) if parameters.startswith("delta") else times

    def torchs_bytes(self, in_bf16: bool = False) -> float:
        """Returns bytes of all of torch's gathers."""
        return sum(times * held_bytes(held, in_bf16) for held, times, _ in self._units)

    def bytes_of(self, parameters: str) -> float | None:
        """Returns bytes of a host to others where tagc gathers in that format; None: not measured."""
        bits = self._found["bits"].get(f"gather {parameters}")
        if bits is None:
            return None
        n_ranks, n_bytes = self._shape.world_size, 0.0
        for held, times, is_trained in self._units:
            if is_one(held):
                n_bytes += bits / 8 * sum(held.values()) * self._n_sent(parameters, times, is_trained)
            else:
                n_bytes += times * held_bytes(held) * (n_ranks - 1) / n_ranks
        return n_bytes


def bucket_of(
    shape: Shape, found: Mapping[str, Any], step_s: float | None, name: str
) -> dict[str, Any] | None:
    """Returns how many elements units should have at least, for the row of that name: the smallest power of
    two beside which no other makes a difference; None where larger units do not pay. {"elems", "n_units",
    "comm_s" (with them), "how" (what to write)}."""

    def row_of(one: Shape) -> dict[str, Any]:
        return next(row for row in forecast(one, found, step_s) if row["name"] == name)

    of, now = ("comm_s" if step_s is None else "step_s"), row_of(shape)
    tried: list[tuple[int, int, dict[str, Any]]] = []  # (elements, units, row)
    for exponent in range(1, max(1, shape.n_elems).bit_length() + 1):
        joined = shape.joined(2**exponent)
        if len(joined.units) < (tried[-1][1] if tried else len(shape.units)):
            tried.append((2**exponent, len(joined.units), row_of(joined)))
    if not tried:
        return None
    best = mildest([row for _, _, row in tried], of)
    elems, n_units, row = next(one for one in tried if one[2] is best)
    if lib.verdict(now[of], row[of]) != "pays":
        return None
    how = advised(shape.wrap).units_of(elems)
    return {"elems": elems, "n_units": n_units, "comm_s": row["comm_s"], "now_s": now["comm_s"], "how": how}


def local_of(
    shape: Shape, found: Mapping[str, Any], advice: Mapping[str, Any], every: int | str, n_reducers: int
) -> dict[str, Any]:
    """Returns what local steps would take, beside the row that was chosen. n_reducers: exchanges one after
    the other, one for each parameter."""
    fixed_s = cost(found, LOCAL, 0)
    exchange_s = cost(found, LOCAL, shape.n_elems) + (n_reducers - 1) * fixed_s
    chosen = next(row for row in advice["rows"] if row["name"] == advice["name"])
    compute_s, bits = advice["compute_s"], found["bits"][LOCAL]
    if compute_s is None:
        steps = EVERY[-1] if every == "auto" else int(every)
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
    steps = choose_every(compute_s, exchange_s) if every == "auto" else int(every)
    row = {"name": LOCAL, "every": steps, "step_s": local_step_s(compute_s, exchange_s, steps)}
    verdict, reason = choose_local(chosen, row, compute_s)
    return row | {
        "bits": bits / steps,
        "exchange_s": exchange_s,
        "verdict": verdict,
        "reason": reason,
        "choice": "local steps" if verdict == "pays" else "every step",
    }


def link_of(shape: Shape, found: Mapping[str, Any]) -> dict[str, float]:
    """Returns what each rank sent in a second: through tagc's connection, and what torch's own reduction came
    to if it had sent no more than it must. From and to a device, where tensors are on one: copy_out and
    copy_back."""
    n = max(int(size) for size in found["seconds"]["all-to-all"])
    share_of = (shape.world_size - 1) / shape.world_size
    must = 4 * n * share_of * (2 if shape.all_reduce else 1)
    link = {
        what.replace(" ", "_") + "_bytes_per_s": 4 * max(by_size) / by_size[max(by_size)]
        for what, by_size in found["seconds"].items()
        if what.startswith("copy ")
    }
    return link | {
        "agree_s": found["seconds"]["agree"][0],
        "bytes_per_s": 4 * n * share_of / found["seconds"]["all-to-all"][n],
        "torch_bytes_per_s": must / found["seconds"]["torch reduce fp32"][n],
    }


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
