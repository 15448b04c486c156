"""Tables of the page: numbers are right-aligned, unknown ones are a dash, and text from files is escaped."""

from __future__ import annotations

import html
import json
import math
import shlex
from collections.abc import Sequence
from typing import Any

from tagc.report import style, summary, units
from tagc.report.model import ArmSet, Report, Result, Source, Units
from tagc.report.reading import as_number, clean
from tagc.report.results import pair_ratio
from tagc.report.traces import Shares, backward_shares, shown_units, step_shares

MOST_ARMS, MOST_OPTIONS = 64, 96
_PLACES = ("out", "trace", "config", "quiet", "seed")  # options that always differ between runs


def escaped(text: str) -> str:
    return html.escape(clean(text))


def _cell(text: str, classes: str = "") -> str:
    return (
        f'<td class="{classes}">{escaped(text or "-")}</td>'
        if classes
        else f"<td>{escaped(text or '-')}</td>"
    )


def _swatch(color: int) -> str:
    return f'<span class="swatch b{color % len(style.LINES)}"></span>'


def _arm(report: Report, name: str) -> str:
    """Returns a name; only a long one may break."""
    classes = ' class="long"' if len(name) > 20 else ""
    return f'<th scope="row"{classes}>{_swatch(report.color(name))}{escaped(name)}</th>'


def _head(text: str) -> str:
    return f'<th scope="row">{escaped(text)}</th>'


def _table(caption: str, heads: Sequence[str], n_left: int, rows: Sequence[str]) -> str:
    """Returns a table of rows of cells; nothing without rows."""
    if not rows:
        return ""
    columns = "".join(
        f'<th scope="col"{" class=" + chr(34) + "left" + chr(34) if i < n_left else ""}>{escaped(head)}</th>'
        for i, head in enumerate(heads)
    )
    body = "\n".join(row if row.startswith("<tr") else f"<tr>{row}</tr>" for row in rows)
    title = f"<caption>{escaped(caption)}</caption>" if caption else ""
    head = f"<thead><tr>{columns}</tr></thead>"
    return f'<div class="scroll"><table>{title}\n{head}\n<tbody>\n{body}\n</tbody></table></div>\n'


def _hint(text: str) -> str:
    return f'<p class="hint">{escaped(text)}</p>\n'


def summary_of(report: Report, arms: ArmSet) -> str:
    """Leaves out columns without values in this set."""
    cells = [summary.row(arms, i) for i in range(len(arms.results))]
    used = [c for c in range(len(summary.HEADS)) if c == 0 or any(row[c] for row in cells)]
    best = summary.best(arms)
    rows = []
    for i, row in enumerate(cells):
        inner = _arm(report, arms.results[i].name) + "".join(_cell(row[c]) for c in used[1:])
        rows.append(f'<tr class="best">{inner}</tr>' if i == best and len(cells) > 1 else inner)
    return _table(arms.title, [summary.HEADS[c] for c in used], 1, rows)


def shares(report: Report, asked: Units) -> str:
    def row(label: str, what: str, measured: Shares) -> str:
        values = (
            measured.model,
            measured.computing,
            measured.communicating,
            measured.overlapped,
            measured.gradient_exchange,
            measured.gradient_exchange_with_gaps,
        )
        return (
            _head(label)
            + _cell(what, "left wrap")
            + _cell(units.time(measured.length_s))
            + "".join(_cell(units.percent(value)) for value in values)
        )

    rows = []
    for trace in report.traces:
        wanted = shown_units(trace, asked)
        found = (
            ("whole step", step_shares(trace)),
            (f"backward of {', '.join(wanted)}", backward_shares(trace, wanted)),
        )
        rows += [row(trace.label, what, measured) for what, measured in found if measured.n]
    heads = (
        "timeline",
        "window",
        "length",
        "model",
        "computing",
        "communi\u00adcating",
        "overlapped",
        "gradient exchange",
        "with gaps",
    )
    return _table("Shares of time", heads, 2, rows) + _hint(
        "Over all ranks and windows. Computing: the model or the codec works. Communicating: at least one "
        "transfer is under way. Gradient "
        "exchange: at least one transfer of gradients; with gaps: from the first transfer of a unit's "
        "exchange to its last."
    )


def link(report: Report) -> str:
    rows = []
    for arms in report.sets:
        about = arms.bench.node_or_empty("link") if arms.bench else None
        if about and about.value:
            rates = [
                8 * about.number_or_nan(f"{name}_bytes_per_s")
                for name in ("one_way", "both_ways", "all_to_all")
            ]
            rows.append(
                _head(arms.title)
                + _cell(units.time(about.number_or_nan("latency_s")))
                + "".join(_cell(units.rate(rate)) for rate in rates)
            )
    return _table(
        "The link, per rank and direction",
        ("result", "latency", "one way", "both ways", "all to all"),
        1,
        rows,
    )


def _range(ends: tuple[float, float]) -> str:
    low, high = map(units.rate, ends)
    return _cell(low if low == high else f"{low} to {high}")


def _lab_times(report: Report) -> str:
    rows = []
    for case in report.cases:
        for i, result in enumerate(case.arms.results if case.arms else ()):
            cells = summary.row(case.arms, i) if case.arms else []
            rows.append(
                _head(case.title if i == 0 else "")
                + f'<td class="left">{_swatch(report.color(result.name))}{escaped(result.name)}</td>'
                + "".join(
                    _cell(text) for text in (cells[1], cells[2], cells[3], str(result.speedup.n), cells[6])
                )
            )
    return _table(
        "Iteration time", ("case", "arm", "step", "ratio", "least to most", "rounds", "all bits"), 2, rows
    )


def _pairs(report: Report) -> str:
    """Returns ratios of the pairs of arms that an experiment of the lab names, per round, since arms take
    turns."""
    rows = []
    for case in report.cases:
        pairs = case.settings.get("pairs")
        for pair in pairs if isinstance(pairs, list) and case.arms and case.arms.bench else ():
            if (
                not (
                    isinstance(pair, list) and len(pair) == 2 and all(isinstance(name, str) for name in pair)
                )
                or not case.arms
                or not case.arms.bench
            ):
                continue
            ratio = pair_ratio(case.arms.bench, *pair)
            if ratio.n:
                spread = f"{min(ratio.least, 9999):.3f}–{min(ratio.most, 9999):.3f}" if ratio.n > 1 else ""
                rows.append(
                    _cell(case.title, "left wrap")
                    + _cell(pair[0], "left wrap")
                    + _cell(pair[1], "left wrap")
                    + _cell(f"{min(ratio.middle, 9999):.3f}")
                    + _cell(spread)
                    + _cell(str(ratio.n))
                )
    return _table(
        "Ratio per pair", ("case", "time of", "over that of", "median", "least–most", "rounds"), 3, rows
    )


def lab(report: Report) -> str:
    parts, said = [], set()
    for case in report.cases:  # the experiments
        title = case.settings.get("title")
        if isinstance(title, str) and case.experiment not in said:
            said.add(case.experiment)
            parts.append(f"<p><strong>{escaped(case.experiment)}</strong>: {escaped(title)}</p>\n")
    rows = [
        _head(case.title)
        + _cell(units.count(case.n_ranks))
        + _cell(case.rate)
        + _cell(units.count(case.mtu))
        + _range(case.tcp_one_way)
        + _range(case.tcp_both_ways)
        + _cell(units.n_bytes(case.sent_bytes))
        + _cell(units.n_bytes(case.received_bytes))
        + _cell(units.fixed(case.overhead, 3))
        for case in report.cases
    ]
    heads = (
        "case",
        "ranks",
        "link set to",
        "MTU",
        "TCP, one way",
        "TCP, both ways",
        "sent by all hosts",
        "received",
        "sent / counted",
    )
    parts += [
        _lab_times(report),
        _pairs(report),
        _table("Links as iperf3 and the interfaces saw them", heads, 1, rows),
    ]
    return "".join(parts) + _hint(
        "Ratio: the first arm's time over this arm's, per round; the arms take turns."
    )


# ---- the runs ----


def _value(options: dict[str, Any], name: str) -> str:
    value = options.get(name)
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    number = as_number(value)
    return "" if math.isnan(number) else f"{number:.10g}"


def options(report: Report) -> str:
    arms: dict[str, Result] = {}
    for result in (result for arm_set in report.sets for result in arm_set.results if result.options):
        arms.setdefault(result.name, result)
    shown = list(arms.values())[:MOST_ARMS]
    names = dict.fromkeys(name for result in shown for name in result.options if name not in _PLACES)
    differing = [name for name in names if len({_value(result.options, name) for result in shown}) > 1][
        :MOST_OPTIONS
    ]
    rows = [
        _arm(report, result.name) + "".join(_cell(_value(result.options, name), "left") for name in differing)
        for result in shown
    ]
    return (
        _table("Options that differ between the arms", ["arm", *differing], 1 + len(differing), rows)
        if differing
        else ""
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _origin(origin: dict[str, Any]) -> list[str]:
    """Returns lines of HTML."""
    given = origin.get("machine")
    machine: dict[str, Any] = given if isinstance(given, dict) else {}
    about = [
        f"tagc {_text(origin.get('version')) or '?'}",
        *(text for text in [_text(origin.get("date"))] if text),
    ]
    about[1:1] = [f"commit {text}" for text in [_text(origin.get("commit"))] if text]
    lines = [escaped(", ".join(about))]
    if _text(machine.get("cpu")):
        n_cpus, memory = (
            units.count(as_number(machine.get("n_cpus"))),
            units.n_bytes(as_number(machine.get("memory_bytes"))),
        )
        lines.append(escaped(f"{machine['cpu']}, {n_cpus} CPUs, {memory}, {_text(machine.get('os'))}"))
    blas = machine.get("blas")
    if isinstance(blas, dict) and _text(blas.get("name")):
        lines.append(escaped(f"products: {blas['name']}, kernel {_text(blas.get('kernel')) or '?'}"))
    command = origin.get("command")
    if isinstance(command, list):
        words = (shlex.quote(word) if isinstance(word, str) else json.dumps(word) for word in command[:200])
        lines.append(f"<code>{escaped(' '.join(words))}</code>")
    return lines


def _source(source: Source) -> str:
    lines: list[str] = []
    if source.run:
        version = _text(source.run.about.get("tagc"))
        first = f"tagc {version}, " if version and not source.origin else ""
        ranks, steps = (
            units.plural(source.run.world_size, "rank"),
            units.plural(len(source.run.steps), "step"),
        )
        lines.append(escaped(f"{first}{ranks}, {steps}, {units.count(source.run.n_params)} parameters"))
    lines += _origin(source.origin) if source.origin else []
    path, about = escaped(source.path), "<br>".join(lines)
    return (
        f'<td class="left wrap"><code>{path}</code></td>{_cell(source.what, "left")}<td class="left '
        f'wrap">{about}</td>'
    )


def sources(report: Report) -> str:
    return _table(
        "What this page was made from",
        ("file", "what", "where it comes from"),
        3,
        [_source(source) for source in report.sources],
    )
