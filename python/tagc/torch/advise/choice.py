"""From rows, each a way to communicate with its seconds, to what to take, and why, in words: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tagc import _library as lib
from tagc._library import Error
from tagc.torch.schedule.options import grouped

UNSTEADY = "runs of the same measurement differ by more, so measure again"


def choose(
    rows: Sequence[dict[str, Any]], what_shows: str = "step= or step_s= shows", spread: float = 1.0
) -> dict[str, Any]:
    """Returns what to take, and why, in words: compression, if it pays against the fastest way without it,
    the baseline. Among the rows with compression, and among those without, it takes the mildest beside which
    the fastest makes no difference. Where computing is not known, communication alone is compared. spread:
    how many times as long as the fastest run of a measurement its slowest took. A smaller gain counts as
    none."""
    column, off = "comm_s" if rows[0]["step_s"] is None else "step_s", rows[0]
    plain_rows, packed_rows = (
        [row for row in rows if (row["choice"] == "compress") == is_packed] for is_packed in (False, True)
    )
    plain, packed = mildest(plain_rows, column), mildest(packed_rows, column)
    baseline, strongest = (min(some, key=lambda row: row[column]) for some in (plain_rows, packed_rows))
    verdict = lib.verdict(baseline[column], packed[column], apart_s(baseline, packed, column, spread))
    is_steady = verdict == lib.verdict(baseline[column], packed[column])
    chosen = packed if verdict == "pays" else plain
    what = "a step" if column == "step_s" else "communication"
    now = "" if off is baseline else f" (it takes {seconds_text(off[column])} now)"
    text = (
        f"{what} takes {seconds_text(packed[column])} with {packed['name']}, and "
        f"{seconds_text(baseline[column])} with {baseline['name']}, the fastest without tagc{now}: "
        f"{factor_of(baseline, packed, column):.2f} times as fast"
    )
    if chosen is packed:
        is_lossless = packed["options"].get("exchange") == "dense"
        text = f"{'use tagc, uncompressed' if is_lossless else 'compress'}, it pays: {text}"
        if packed[column] > strongest[column]:
            text += f" (with {strongest['name']} it would take {seconds_text(strongest[column])})"
        text += "" if is_lossless else "; what it costs in loss, only training shows"
    else:
        what_else = "leave it off" if chosen is off else f"leave tagc off, use {chosen['name']}"
        differ = "" if is_steady else f"; {UNSTEADY}"
        text = f"{what_else}, tagc {verdict}{differ}: {text}"
    if column == "step_s":
        share = 100 * off["exposed_s"] / off[column]
        text += f"; {share:.0f} % of a step is now communication that nothing hides"
    else:
        text += f"; how much of a step that is, {what_shows}"
    return {key: chosen[key] for key in ("choice", "options", "torch", "name")} | {
        "verdict": verdict,
        "baseline": baseline["name"],
        "gain": factor_of(baseline, chosen, column),
        "reason": text,
    }


def off(name: str, reason: str) -> dict[str, Any]:
    """Returns the same where there is nothing to compare. name: of what is there."""
    made = {"choice": "off", "options": {}, "torch": {}, "name": name, "baseline": name, "gain": 1.0}
    return made | {"verdict": "makes no difference", "reason": reason, "rows": [], "text": reason}


def check_seconds(step_s: Any, seconds: Any) -> None:
    """Raises Error unless these options of who advises are numbers that can be, or None. Local."""
    for name, value, most in (("step_s", step_s, 1e6), ("seconds", seconds, 3600)):
        if value is not None and not (isinstance(value, (int, float)) and 0 < value <= most):
            raise Error("argument", f"{name} is {value!r}, must be a number above 0, at most {most:g}")


def call_of(options: Mapping[str, Any]) -> str:
    """Returns the call of compress() with these options. One that selects needs the optimizer."""
    given = grouped(options)
    inner = given.pop("options", None)
    words = [f"{name}={_literal(value)}" for name, value in given.items()]
    if inner is not None:
        inner_words = (f"{name}={_literal(options[name])}" for name in vars(inner) if name in options)
        words.append(f"options=tagc.Options({', '.join(inner_words)})")
    optimizer = ["optimizer"] if options.get("sparsity") else []
    return f"handle = tagc.compress({', '.join(['model', *optimizer, *words])})"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def apart_s(
    one: Mapping[str, Any], other: Mapping[str, Any], column: str, spread: float, compute_s: float = 0.0
) -> float:
    """Returns by how many seconds two ways may differ by chance, if runs of what the faster one communicates
    differ by spread. compute_s: of a row that does not say what it communicates."""
    faster = min(one, other, key=lambda row: float(row[column]))
    measured = (
        faster["comm_s"] + faster.get("own_s", 0.0) if "comm_s" in faster else faster[column] - compute_s
    )
    return (spread - 1) * float(min(measured, faster[column]))


def mildest(rows: Sequence[Mapping[str, Any]], column: str) -> Mapping[str, Any]:
    """Returns the first of rows, from the mildest to the strongest, beside which the fastest makes no
    difference."""
    fastest_s = min(row[column] for row in rows)
    return next(
        row
        for row in rows
        if row[column] == fastest_s or lib.verdict(row[column], fastest_s) == "makes no difference"
    )


def factor_of(baseline: Mapping[str, Any], row: Mapping[str, Any], column: str) -> float:
    """Returns how many times as fast as the baseline a row is."""
    return float(baseline[column] / row[column]) if row[column] > 0 else 1.0


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


def choose_local(
    dense: Mapping[str, Any], local: Mapping[str, Any], compute_s: float, spread: float = 1.0
) -> tuple[str, str]:
    """Returns (verdict, reason) of local steps beside an exchange in each step. Both have "name" and
    "step_s"; local has "every". spread: of choose()."""
    says = lib.verdict(dense["step_s"], local["step_s"], apart_s(dense, local, "step_s", spread, compute_s))
    differ = "" if says == lib.verdict(dense["step_s"], local["step_s"]) else f"; {UNSTEADY}"
    text = (
        f"a step takes {dense['step_s']:.3g} s with {dense['name']} in each step, {local['step_s']:.3g} s "
        f"with {local['name']}; {compute_s:.3g} s of it compute; "
        f"{dense['step_s'] / local['step_s']:.2f} times as fast"
    )
    if says == "pays":
        return says, (
            f"local steps pay, every={local['every']}: {text}; what they cost in loss, only training shows"
        )
    return says, f"exchange in each step, taking local steps {says}{differ}: {text}"
