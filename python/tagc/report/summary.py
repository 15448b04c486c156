"""The conclusions: which arm is fastest, by how much and how surely, at which loss, with how many bits. The
page and the terminal show the same text. A gain within its own spread counts as none."""

from __future__ import annotations

import math
import textwrap

from tagc.report import units
from tagc.report.model import ArmSet, Report, Result, Units
from tagc.report.traces import backward_shares, shown_units

HEADS = ("arm", "step", "speed-up", "least–most", "exposed", "gradient bits", "all bits", "val. loss", "gap")
_TERMINAL_HEADS = (("", "", "speed-", "least to", "exposed", "gradient", "all", "val.", ""),
                   ("arm", "step", "up", "most", "comm.", "bits", "bits", "loss", "gap"))  # fmt: skip
_WIDTHS = (22, 9, 9, 11, 8, 9, 8, 9, 9)
_WIDTH, _MOST_SENTENCES, _MOST_ADVICE, _NAME = 100, 6, 2, 40


def row(arms: ArmSet, arm: int) -> list[str]:
    """Returns a cell per head; empty if unknown."""
    r = arms.results[arm]
    has_exposed = r.exposed_s.n and r.total_s.middle > 0
    has_bits = math.isfinite(r.all_bits)
    return [r.name, units.time(r.total_s.middle) if r.total_s.n else "",
            f"{units.ratio(r.speedup.middle)}x" if r.speedup.n else "",
            f"{units.ratio(r.speedup.least)}–{units.ratio(r.speedup.most)}" if r.speedup.n > 1 else "",
            units.percent(r.exposed_s.middle / r.total_s.middle) if has_exposed else "",
            units.fixed(r.gradient_bits, 2) if has_bits else "", units.fixed(r.all_bits,
                2) if has_bits else "",
            units.fixed(r.loss.middle, 4) if r.loss.n else "",
            units.change(r.gap.middle) if r.gap.n else ""]  # fmt: skip


def best(arms: ArmSet) -> int:
    """Returns the fastest arm, -1 if times are unknown."""
    timed = [(result.total_s.middle, i) for i, result in enumerate(arms.results) if result.total_s.n]
    return min(timed)[1] if timed else -1


# ---- words ----


def _best_other(arms: ArmSet) -> Result | None:
    """Returns the fastest arm except the first."""
    others = [result for result in arms.results[1:] if result.speedup.n]
    return max(others, key=lambda result: result.speedup.middle) if others else None


def _is_within_spread(arms: ArmSet, r: Result) -> bool:
    """Returns whether chance could explain that this arm is faster than the first: in some round it was
    slower; or, for runs, the middle 80 % of their steps overlap."""
    first = arms.results[0]
    if r.speedup.n > 1:
        return r.speedup.least <= 1 <= r.speedup.most
    return (
        first.total_s.n > 1
        and r.total_s.least <= first.total_s.most
        and r.total_s.most >= first.total_s.least
    )


def _times(arms: ArmSet) -> str:
    first, other = arms.results[0], _best_other(arms)
    name = first.name[:_NAME]
    if len(arms.results) == 1 and first.total_s.n:
        return (
            f"{arms.title}: a step of {name} takes {units.time(first.total_s.middle)}; there is no other "
            "arm to compare it with."
        )
    if not other:
        return ""
    speedup, best_name = other.speedup, other.name[:_NAME]
    ratio = f"{units.ratio(speedup.middle)} times as fast"
    over = (
        f" ({units.ratio(speedup.least)} to {units.ratio(speedup.most)} over {speedup.n} rounds)"
        if speedup.n > 1
        else ""
    )
    if _is_within_spread(arms, other):
        words = f"no arm differs clearly from {name}: {best_name} is {ratio}, within the spread{over}."
    elif speedup.middle > 1:
        words = f"{best_name} is the fastest of {len(arms.results)} arms, {ratio} as {name}{over}."
    else:
        words = f"no arm is faster than {name}; {best_name} comes nearest, {ratio}{over}."
    if other.all_bits > 0 and first.all_bits > 0:
        words += f" It sends {other.all_bits:.3g} bits per parameter and step, {name} {first.all_bits:.3g}."
    if arms.kind == "bench" and speedup.n == 1:
        words += " That was one round, so the spread is unknown."
    if arms.kind == "runs":
        words += (
            " The runs were made one after the other; a bench, whose arms take turns, compares times better."
        )
    return f"{arms.title}: {words}"


def _losses(arms: ArmSet) -> str:
    first = arms.results[0]
    gaps = [result for result in arms.results[1:] if result.gap.n]
    if not gaps:
        return ""
    own = (
        (first.loss.most - first.loss.least) / 2 / abs(first.loss.middle)
        if first.loss.n > 1 and first.loss.middle
        else 0.0
    )
    words = []
    for i, r in enumerate(gaps[:4]):
        text = f"{r.name[:_NAME]} {units.change(r.gap.middle)}"
        text += f" against {first.name[:_NAME]}" if i == 0 else ""
        text += (
            f" ({units.change(r.gap.least)} to {units.change(r.gap.most)} over {r.gap.n} seeds)"
            if r.gap.n > 1
            else ""
        )
        text += ", within the spread" if first.loss.n > 1 and abs(r.gap.middle) <= own else ""
        words.append(text)
    if len(gaps) > 4:
        words.append("others below")
    end = (f"Seeds of {first.name[:_NAME]} alone differ by ±{100 * own:.2g} %." if first.loss.n > 1
           else "One seed: the spread over seeds is unknown.")  # fmt: skip
    return f"Validation loss at the last common step: {', '.join(words)}. {end}"


def _shares(report: Report, asked: Units) -> str:
    words: list[str] = []
    for trace in report.traces:
        wanted = shown_units(trace, asked)
        shares = backward_shares(trace, wanted)
        if not shares.n or len(words) == 3:
            continue
        figures = f"{100 * shares.computing:.1f} %", f"{100 * shares.communicating:.1f} %"
        if not words:
            words.append(
                f"Backward pass of {', '.join(wanted)[:60]}: {trace.label[:_NAME]} computes "
                f"{figures[0]} of the time and "
                f"communicates {figures[1]}"
            )
        else:
            words.append(f"{trace.label[:_NAME]} {figures[0]} and {figures[1]}")
    return f"{', '.join(words)}." if words else ""


def words(report: Report, asked: Units) -> list[str]:
    """Returns one or two sentences per line."""
    lines: list[str] = []
    n_said = n_left = n_advice = 0
    for arms in report.sets:
        if not arms.results:
            continue
        if n_said >= _MOST_SENTENCES:
            n_left += 1
            continue
        times, losses = _times(arms), _losses(arms)
        n_said += bool(times)
        lines += [line for line in (times, losses) if line]
        reason = arms.bench.node_or_empty("recommendation").text_or("reason", "") if arms.bench else ""
        if reason and n_advice < _MOST_ADVICE:
            n_advice += 1
            lines.append(f"tagc bench recommends: {reason}.")
    if not lines and report.sets:
        lines.append("No arm was timed; the page (--out) shows codec and link.")
    if n_left:
        lines.append(f"The tables below have {n_left} more.")
    shares = _shares(report, asked)
    return lines + [shares] if shares else lines


# ---- the terminal ----


def _cell(text: str, column: int) -> str:
    width = _WIDTHS[column]
    text = text if len(text) <= width else f"{text[: width - 1]}…"
    return text.ljust(width) if column == 0 else text.rjust(width)


def _table(arms: ArmSet) -> list[str]:
    lines = textwrap.wrap(arms.title, _WIDTH)
    rows = [*_TERMINAL_HEADS, *(row(arms, i) for i in range(len(arms.results)))]
    for i, cells in enumerate(rows):
        lines.append(
            "".join(
                _cell(cell or ("-" if i > 1 else ""), column) for column, cell in enumerate(cells)
            ).rstrip()
        )
    return [*lines, ""]


def text(report: Report, asked: Units) -> str:
    """Returns text, tables and notes, at most 100 columns wide."""
    lines = [part for line in words(report, asked) for part in textwrap.wrap(line, _WIDTH)] + [""]
    for arms in report.sets:
        lines += _table(arms) if arms.results else []
    for note in report.notes:
        lines += textwrap.wrap(f"note: {note}", _WIDTH)
    return "\n".join(lines).rstrip("\n") + "\n"
