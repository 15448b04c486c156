"""From rows, each a way to communicate with its seconds, to what to take, and why, in words: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tagc import _library as lib


def choose(rows: Sequence[dict[str, Any]], what_shows: str = "step= or step_s= shows") -> dict[str, Any]:
    """Returns what to take, and why, in words: compression, if it pays against the fastest way without it,
    the baseline. Among the rows with compression, and among those without, it takes the mildest beside which
    the fastest makes no difference. Where computing is not known, communication alone is compared."""
    of, off = "comm_s" if rows[0]["step_s"] is None else "step_s", rows[0]
    plain_rows, packed_rows = (
        [row for row in rows if (row["choice"] == "compress") == is_packed] for is_packed in (False, True)
    )
    plain, packed = mildest(plain_rows, of), mildest(packed_rows, of)
    baseline, strongest = (min(some, key=lambda row: row[of]) for some in (plain_rows, packed_rows))
    verdict = lib.verdict(baseline[of], packed[of])
    chosen = packed if verdict == "pays" else plain
    what = "a step" if of == "step_s" else "communication"
    now = "" if off is baseline else f" (it takes {seconds_text(off[of])} now)"
    text = (
        f"{what} takes {seconds_text(packed[of])} with {packed['name']}, and {seconds_text(baseline[of])} "
        f"with {baseline['name']}, the fastest without tagc{now}: {factor_of(baseline, packed, of):.2f} "
        "times as fast"
    )
    if chosen is packed:
        is_lossless = packed["options"].get("exchange") == "dense"
        text = f"{'use tagc, uncompressed' if is_lossless else 'compress'}, it pays: {text}"
        if packed[of] > strongest[of]:
            text += f" (with {strongest['name']} it would take {seconds_text(strongest[of])})"
        text += "" if is_lossless else "; what it costs in loss, only training shows"
    else:
        what_else = "leave it off" if chosen is off else f"leave tagc off, use {chosen['name']}"
        text = f"{what_else}, tagc {verdict}: {text}"
    if of == "step_s":
        text += (
            f"; {100 * off['exposed_s'] / off[of]:.0f} % of a step is now communication that nothing hides"
        )
    else:
        text += f"; how much of a step that is, {what_shows}"
    return {key: chosen[key] for key in ("choice", "options", "torch", "name")} | {
        "verdict": verdict,
        "baseline": baseline["name"],
        "gain": factor_of(baseline, chosen, of),
        "reason": text,
    }


def mildest(rows: Sequence[Mapping[str, Any]], of: str) -> Mapping[str, Any]:
    """Returns the first of rows, from the mildest to the strongest, beside which the fastest makes no
    difference."""
    fastest_s = min(row[of] for row in rows)
    return next(
        row
        for row in rows
        if row[of] == fastest_s or lib.verdict(row[of], fastest_s) == "makes no difference"
    )


def factor_of(baseline: Mapping[str, Any], row: Mapping[str, Any], of: str) -> float:
    """Returns how many times as fast as the baseline a row is."""
    return float(baseline[of] / row[of]) if row[of] > 0 else 1.0


def bytes_text(n_bytes: float | None) -> str:
    if n_bytes is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.3g} {unit}"
    return f"{n_bytes / 1e3:.3g} kB"


def seconds_text(seconds: float) -> str:
    for unit, scale in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


# ---- local steps ----


def choose_local(each: Mapping[str, Any], local: Mapping[str, Any], compute_s: float) -> tuple[str, str]:
    """Returns (verdict, reason) of local steps beside an exchange in each step. Both have "name" and
    "step_s"; local has "every"."""
    says = lib.verdict(each["step_s"], local["step_s"])
    text = (
        f"a step takes {each['step_s']:.3g} s with {each['name']} in each step, {local['step_s']:.3g} s "
        f"with {local['name']}; {compute_s:.3g} s of it compute; "
        f"{each['step_s'] / local['step_s']:.2f} times as fast"
    )
    if says == "pays":
        return says, (
            f"local steps pay, every={local['every']}: {text}; what they cost in loss, only training shows"
        )
    return says, f"exchange in each step, taking local steps {says}: {text}"
