"""The inputs of a report: a run's folder, metrics, a trace, or a result. Their content shows which they
are."""

from __future__ import annotations

import os
from typing import Any

from tagc.report import groups
from tagc.report.model import MOST_INPUTS, Report, Source
from tagc.report.reading import Node, ReportError, clean, parse, read_text
from tagc.report.results import add_bench, add_lab
from tagc.report.runs import is_metrics, read_run
from tagc.report.traces import read_trace


def _add_run(report: Report, path: str) -> None:
    run = read_run(path)
    if not run.steps:
        report.notes.append(f"{path} holds no steps and is left out")
        return
    report.runs.append(run)
    origin = run.about.get("origin")
    report.sources.append(Source(path, "run", origin if isinstance(origin, dict) else {}, run))
    if run.is_torn:
        report.notes.append(f"the last line of the run {run.label} is incomplete and was ignored")


def _add_trace(report: Report, root: object, path: str, label: str) -> None:
    trace = read_trace(root, path, label)
    report.traces.append(trace)
    if trace.n_dropped > 0:
        report.notes.append(
            f"the timeline of {label} lacks {trace.n_dropped:.0f} events: its buffer was full"
        )


def _trace_label(path: str) -> str:
    """Returns what a file is about: "runs/fsdp.trace.json" is about fsdp."""
    name = os.path.basename(path)
    for ending in (".json", ".trace", "-trace"):
        if name.endswith(ending) and len(name) > len(ending):
            name = name[: -len(ending)]
    return clean(name)


def _add_result(report: Report, value: Any, path: str, source: Source) -> None:
    node = Node(value, path)
    kind = node.get("type")
    if not isinstance(kind, str):
        raise ReportError(
            f'{path} has neither traceEvents nor a "type": it is no result, trace or run of tagc'
        )
    if kind not in ("bench", "lab"):
        raise ReportError(f'{path} is of type "{kind[:40]}", allowed: bench, lab, a trace, a run')
    if node.get("format") != 1:
        raise ReportError(f'{path}: "format" is {node.get("format")!r}, allowed: 1')
    source.what = kind
    source.origin = source.origin or node.node_or_empty("origin").value
    if kind == "bench":
        add_bench(report, node)
    else:
        add_lab(
            report,
            node,
            path,
            lambda name, label: _add_trace(report, parse(read_text(name), name), name, label),
        )


def add(report: Report, path: str) -> None:
    """Adds the input at `path`. A folder without a run is noted and left out. An input that is named twice
    counts once."""
    try:
        about = os.stat(path)
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise ReportError(f"{path!r} is no path") from None
    if len(report.seen) >= MOST_INPUTS:
        raise ReportError(f"more than {MOST_INPUTS} files are named")
    is_folder = os.path.isdir(path)
    if is_folder and not os.path.exists(os.path.join(path, "metrics.jsonl")):
        report.notes.append(f"{path} holds no metrics.jsonl and is left out")
        return
    if is_folder:
        about = os.stat(os.path.join(path, "metrics.jsonl"))
    if (about.st_dev, about.st_ino) in report.seen:  # the same run twice would look like two equal runs
        return
    report.seen.add((about.st_dev, about.st_ino))
    if is_folder or is_metrics(path):
        _add_run(report, path)
        return
    value = parse(read_text(path), path)
    if isinstance(value, dict) and "traceEvents" in value:
        _add_trace(report, value, path, _trace_label(path))
        report.sources.append(Source(path, "trace"))
        return
    source = Source(path, "?")
    report.sources.append(source)
    if value == []:
        raise ReportError(f"{path} is an empty list")
    for item in value if isinstance(value, list) else [value]:
        _add_result(report, item, path, source)


def _name_torch_runs(report: Report) -> None:
    """Gives PyTorch runs whose files have the same name their folders' names, and adds the note on all."""
    runs = [(source.path, source.run) for source in report.sources if source.run and source.run.is_torch]
    labels = [run.label for _, run in runs]
    for path, run in runs:
        folder = os.path.basename(os.path.dirname(os.path.abspath(path)))
        if labels.count(run.label) > 1 and os.path.isfile(path) and folder:
            run.label = clean(folder)
    if runs:
        names = ", ".join(dict.fromkeys(run.label for _, run in runs))
        report.notes.append(
            f"PyTorch runs ({names}): exposed time is the time in exchanges and gathers, also where "
            "computing hides it; other time is computing and all else"
        )


def read_report(paths: list[str]) -> Report:
    report = Report()
    for path in paths:
        add(report, path)
    _name_torch_runs(report)
    groups.finish(report)
    if not report.sets and not report.traces:
        why = f"; {report.notes[0]}" if report.notes else ""
        raise ReportError(
            f"nothing to report: name folders of runs, timelines, or results of bench or the lab{why}"
        )
    return report
