"""What an exchange between sites takes, every step and with local steps, over links whose two directions may
differ. Pure functions: nothing is measured here. docs/guide/sites.md has the formulas, which `tagc plan`
shares.

    out, back    bits per parameter: what a site sends to the owners of the others' shards, and as owner of
                 its own shard to each of them"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tagc._library import Error, verdict
from tagc.torch.schedule.options import EVERY_VALUE_BLOCK, number

PAYLOAD = 1448 / 1538  # of a link's rate: a frame of 1538 bytes has 1448 bytes of TCP's data
MOST_STEPS = 10**6  # between exchanges
EVERY = (5, 10, 20, 30, 50, 100, 200, 300, 500)  # what is chosen from
POSITIONS = 1.09  # what the code of positions takes, as a multiple of their entropy
EVERY_VALUE_BITS = 4 + 16 / EVERY_VALUE_BLOCK  # of compress(sparsity=0, values="int4"), scales included
MESSAGES = 5  # of an all-reduce one after the other: the agreement, bodies and their rests, sums and theirs
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class Link(NamedTuple):
    """Of a site, bits per second of payload."""

    up: float
    down: float


def link_of(text: str) -> Link:
    """Parses "500mbit", or "110mbit/500mbit", up and down."""
    rates = [re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", part) for part in str(text).split("/")]
    if not 1 <= len(rates) <= 2 or not all(rate and float(rate[1]) > 0 for rate in rates):
        raise Error(
            "argument",
            (
                f'link is {text!r}, must be a rate in kbit, mbit or gbit as "500mbit", or two as '
                '"110mbit/500mbit", up and down'
            ),
        )
    numbers = [PAYLOAD * float(rate[1]) * _UNITS[rate[2]] for rate in rates if rate]
    return Link(numbers[0], numbers[-1])


# ---- one exchange ----


def bits_of(sparsity: float, value_bits: float) -> float:
    """Returns bits per parameter of values that are sent at independent positions, and of these positions;
    scales included."""
    density = 1 - sparsity
    entropy = -density * math.log2(density) - sparsity * math.log2(sparsity) if 0 < sparsity < 1 else 0.0
    return POSITIONS * entropy + density * (value_bits + 0.125)


def ways(sparsity: float = 0.95, value_bits: float = 2) -> dict[str, tuple[float, float]]:
    """Returns name -> (out, back) of an all-reduce. Owners send back the largest of their sums, 2.4 times as
    many as came from each site, in 4 bits or finer: tagc_reducer_options."""
    return {
        "fp32": (32.0, 32.0),
        "bf16": (16.0, 16.0),
        "direct, every value as int4": (EVERY_VALUE_BITS, EVERY_VALUE_BITS),
        f"direct, {100 * sparsity:g} % zero": (
            bits_of(sparsity, value_bits),
            bits_of(max(0.0, 1 - 2.4 * (1 - sparsity)), max(value_bits, 4)),
        ),
    }


def bytes_s(n_params: float, links: Sequence[Link], out: float, back: float) -> float:
    """Returns the seconds that the bytes of one exchange take. gloo does one half after the other: to the
    owners, then the sums from them. In each a site sends as much as it receives, so the slowest direction of
    any site decides."""
    return n_params * (len(links) - 1) / len(links) * (out + back) / min(min(link) for link in links)


# ---- a step ----


def local_step_s(
    compute_s: float, exchange_s: float, every: int, fragments: int = 1, delay: int = 0
) -> float:
    """Returns the mean seconds of a step, where an exchange of one fragment takes exchange_s and `delay`
    steps hide it."""
    return compute_s + fragments / every * max(0.0, exchange_s - delay * compute_s)


def choose_every(compute_s: float, exchange_s: float, fragments: int = 1, delay: int = 0) -> int:
    """Returns the fewest steps between exchanges at which these make no difference to a step, or the most
    that are offered."""
    fitting = (
        every
        for every in EVERY
        if every >= fragments
        and every > delay
        and verdict(compute_s, local_step_s(compute_s, exchange_s, every, fragments, delay)) != "costs"
    )
    return next(fitting, max(EVERY[-1], fragments, delay + 1))


def mildest(rows: Sequence[Mapping[str, Any]], of: str) -> Mapping[str, Any]:
    """Returns the first of rows, from the mildest to the strongest, beside which the fastest makes no
    difference."""
    fastest_s = min(row[of] for row in rows)
    return next(
        row for row in rows if row[of] == fastest_s or verdict(row[of], fastest_s) == "makes no difference"
    )


def choice(rows: Sequence[Mapping[str, Any]], compute_s: float) -> tuple[Mapping[str, Any], str, str]:
    """Returns (row, verdict, reason). rows: "name", "every" (1: an exchange in each step), "step_s", from the
    mildest to the strongest. Of either kind the mildest that is about as fast as any; but local steps in fp32
    are not chosen, since 4 bits lose little more."""
    each, others = ([row for row in rows if (row["every"] == 1) == is_each] for is_each in (True, False))
    local, mild = (
        mildest(some, "step_s")
        for some in ([row for row in others if not row["name"].startswith("fp32")], each)
    )
    says = verdict(mild["step_s"], local["step_s"])
    gain = mild["step_s"] / local["step_s"]
    text = (
        f"a step takes {mild['step_s']:.3g} s with {mild['name']} in each step, {local['step_s']:.3g} s "
        f"with {local['name']}; {compute_s:.3g} s "
        f"of it compute; {gain:.2f} times as fast"
    )
    if says == "pays":
        return (
            local,
            says,
            f"local steps pay, every={local['every']}: {text}; what they cost in loss, only training shows",
        )
    return mild, says, f"exchange in each step, taking local steps {says}: {text}"


def plan_sites(
    n_params: float,
    links: Sequence[str],
    *,
    step_s: float,
    latency_s: float = 0.0,
    every: int | None = None,
    fragments: int = 1,
    delay: int = 0,
    sparsity: float = 0.95,
    value_bits: float = 2,
    units: int = 1,
    verbose: bool = True,
) -> dict[str, Any]:
    """Says whether sites should exchange in every step or take local steps, from the rates of their links;
    nothing is measured, and no process group is needed.

    links: of each site, "500mbit" or "110mbit/500mbit", up and down. step_s: seconds that a step computes.
        latency_s: one way. every, fragments,
    delay: of LocalSteps; every=None: chosen. sparsity, value_bits: of what is compressed. units: exchanges
    one after the other, each with its own messages.

    Returns {"choice" ("every step" or "local steps"), "verdict" (local steps "pays", "makes no difference" or
    "costs"), "every", "reason", "rows", "text"}; of each row name, every, bits (per parameter and step that a
    site sends), exchange_s and step_s."""
    for name, real, low, high in (
        ("n_params", n_params, 1, 1e15),
        ("step_s", step_s, 1e-9, 1e6),
        ("latency_s", latency_s, 0, 1e3),
        ("sparsity", sparsity, 0, 0.999999),
        ("value_bits", value_bits, 1, 32),
    ):
        number(name, real, low, high)
    for name, whole, least, most in (
        ("fragments", fragments, 1, MOST_STEPS),
        ("delay", delay, 0, MOST_STEPS - 1),
        ("units", units, 1, MOST_STEPS),
    ):
        number(name, whole, least, most, int)
    number("every", MOST_STEPS if every is None else every, max(2, fragments, delay + 1), MOST_STEPS, int)
    if isinstance(links, str) or not isinstance(links, Sequence) or len(links) < 2:
        raise Error("argument", f"links is {links!r}, must be a list with the link of each site, 2 or more")
    sites = [link_of(text) for text in links]
    fixed_s, n = units * MESSAGES * latency_s, len(sites)
    rows: list[dict[str, Any]] = []

    def add(name: str, bits: tuple[float, float], steps: int) -> None:
        parts = 1 if steps == 1 else fragments
        whole_s = fixed_s + bytes_s(n_params / parts, sites, *bits)
        step = step_s + whole_s if steps == 1 else local_step_s(step_s, whole_s, steps, parts, delay)
        rows.append(
            {
                "name": name,
                "every": steps,
                "bits": (n - 1) / n * sum(bits) / steps,
                "exchange_s": whole_s,
                "step_s": step,
            }
        )

    found = ways(sparsity, value_bits)
    for name, bits in found.items():
        add(name, bits, 1)
    for name in [name for name in found if name != "bf16"]:
        part_s = fixed_s + bytes_s(n_params / fragments, sites, *found[name])
        steps = choose_every(step_s, part_s, fragments, delay) if every is None else every
        add(f"{name}, every {steps} steps", found[name], steps)
    row, says, reason = choice(rows, step_s)
    advice: dict[str, Any] = {
        "choice": "every step" if row["every"] == 1 else "local steps",
        "verdict": says,
        "every": row["every"],
        "reason": reason,
        "rows": rows,
    }
    advice["text"] = _text(advice)
    if verbose:
        print(advice["text"], flush=True)
    return advice


def _text(advice: Mapping[str, Any]) -> str:
    lines = [f"{'between sites':44} {'bits/step':>10} {'exchange s':>11} {'step s':>9}"]
    for row in advice["rows"]:
        lines.append(f"{row['name']:44} {row['bits']:10.3g} {row['exchange_s']:11.3g} {row['step_s']:9.3g}")
    return "\n".join([*lines, advice["reason"]])
