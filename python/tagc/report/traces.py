"""Reads traces, and computes for a window which streams worked, and for which share of the time. The lab's
tables and the page use the same windows."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tagc.report.model import LEGS
from tagc.report.reading import Node, ReportError, as_number, clean

COMPUTE, CODEC, COMM = 0, 1, 2  # tracks; transfers that run together lie in tracks 2 and up
_KINDS = (("forward", "backward", "optimizer", "wait"), ("select", "index", "encode", "decode", "wait"), LEGS)
GRADIENT_LEGS = ("index", "values", "leftover", "result")
MOST_EVENTS, MOST_LANES, MOST_RANKS = 1 << 26, 64, 16  # at most so many ranks are averaged

Window = tuple[float, float]  # seconds


@dataclass(slots=True)
class Span:
    start_s: float
    end_s: float
    rank: int
    track: int
    kind: str  # of its track's kinds, or "other"
    unit: str  # may be empty
    n_bytes: float

    @property
    def is_model(self) -> bool:
        return self.track == COMPUTE and self.kind != "wait"

    @property
    def is_codec(self) -> bool:
        return self.track == CODEC and self.kind != "wait"

    @property
    def is_exchange(self) -> bool:
        return self.track >= COMM and self.kind in GRADIENT_LEGS


@dataclass
class Trace:
    label: str
    spans: list[Span] = field(default_factory=list)  # by start
    n_dropped: float = 0.0

    @property
    def ranks(self) -> list[int]:
        return sorted({span.rank for span in self.spans})

    def of_rank(self, rank: int) -> list[Span]:
        return [span for span in self.spans if span.rank == rank]

    @property
    def units(self) -> list[str]:
        return list(dict.fromkeys(span.unit for span in self.spans if span.unit))


def _track(name: str) -> int:
    """Returns the rank of a stream, -1 for streams of another program."""
    if name in ("compute", "codec", "comm"):
        return ("compute", "codec", "comm").index(name)
    match = re.fullmatch(r"comm ([0-9]{1,3})\b.*", name)
    return int(match[1]) + 1 if match and 1 <= int(match[1]) <= MOST_LANES else -1


def _tracks(trace: Trace, events: Sequence[object]) -> dict[tuple[object, object], int]:
    tracks: dict[tuple[object, object], int] = {}
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "M":
            continue
        about = event.get("args")
        about = about if isinstance(about, dict) else {}
        if event.get("name") == "tagc":
            n_dropped = as_number(about.get("n_dropped"))
            trace.n_dropped = 0.0 if math.isnan(n_dropped) else n_dropped
        if event.get("name") == "thread_name" and _track(str(about.get("name", ""))) >= 0:
            tracks[str(event.get("pid")), str(event.get("tid"))] = _track(str(about.get("name")))
    return tracks


def _add_event(trace: Trace, event: dict[str, object], track: int, place: str) -> None:
    start, length = as_number(event.get("ts")), as_number(event.get("dur"))
    if math.isnan(start) or not length >= 0:
        raise ReportError(f'{place} lacks a number as "{"ts" if math.isnan(start) else "dur"}"')
    word, _, rest = str(event.get("name", "")).partition(" ")
    about = event.get("args")
    about = about if isinstance(about, dict) else {}
    unit = about.get("unit")
    n_bytes = as_number(about.get("n_bytes"))
    rank = as_number(event.get("pid"))
    trace.spans.append(Span(1e-6 * start, 1e-6 * (start + length), 0 if math.isnan(rank) else int(rank),
                            track,
                            word if word in _KINDS[min(track, COMM)] else "other",
                            unit if isinstance(unit, str) else rest,
                            0.0 if math.isnan(n_bytes) else n_bytes))  # fmt: skip


def read_trace(root: object, path: str, label: str) -> Trace:
    """Reads a timeline. root: an object with traceEvents, in Chrome's format. Streams are known by the names
    of their threads."""
    events = Node(root, path).get("traceEvents")
    if not isinstance(events, list):
        raise ReportError(f"{path}: traceEvents is not a list")
    if len(events) > MOST_EVENTS:
        raise ReportError(f"{path} holds {len(events)} events, allowed: {MOST_EVENTS}")
    trace = Trace(clean(label))
    tracks = _tracks(trace, events)
    for i, event in enumerate(events):
        if isinstance(event, dict) and event.get("ph") == "X":
            track = tracks.get((str(event.get("pid")), str(event.get("tid"))), -1)
            if track >= 0:
                _add_event(trace, event, track, f"{path}: traceEvents[{i}]")
    if not trace.spans:
        raise ReportError(
            f"{path}: no event of a stream compute, codec or comm; tagc train --trace writes such"
        )
    trace.spans.sort(key=lambda span: (span.start_s, span.end_s))
    return trace


# ---- windows ----


def _is_of(units: Sequence[str], unit: str) -> str:
    """Returns which of `units` this unit is or is part of (h.5.mlp is part of h.5); "" for none."""
    return next((name for name in units if unit == name or unit.startswith(f"{name}.")), "")


def step_windows(trace: Trace, rank: int) -> list[Window]:
    """Returns windows from the first event of compute to the last part of the optimizer, so that validation
    between steps is left out."""
    windows: list[Window] = []
    start: float | None = None
    optimizer_end: float | None = None
    for span in trace.of_rank(rank):
        if span.track != COMPUTE:
            continue
        if start is not None and optimizer_end is not None and (span.kind == "forward" or span.unit):
            windows.append((start, optimizer_end))
            start = optimizer_end = None
        start = span.start_s if start is None else start
        optimizer_end = span.end_s if span.kind == "optimizer" else optimizer_end
    if start is not None and optimizer_end is not None:
        windows.append((start, optimizer_end))
    return windows or [(trace.spans[0].start_s, max(span.end_s for span in trace.spans))]


def backward_windows(trace: Trace, rank: int, units: Sequence[str]) -> list[Window]:
    """Returns windows from the start of the backward pass of the first of the units to that of the next unit
    that is none of them. A unit that came earlier in the same pass, such as a root, does not end the window.
    Passes that lack one of the units do not count."""
    windows: list[Window] = []
    passed: set[str] = set()  # units met in this backward pass
    seen: set[str] = set()  # of the units asked for, those in the open window
    start = end = math.nan

    def close(at: float) -> None:
        if seen == set(units):
            windows.append((start, at))
        seen.clear()

    for span in trace.of_rank(rank):
        if not span.is_model:
            continue
        if span.kind != "backward" or not span.unit:
            if seen:
                close(end)
            if span.kind == "forward":
                passed.clear()
            continue
        is_new, name = span.unit not in passed, _is_of(units, span.unit)
        passed.add(span.unit)
        if seen and is_new and not name:
            close(span.start_s)
        elif seen:
            end = span.end_s
        elif is_new and name:
            start, end = span.start_s, span.end_s
        if is_new and name:
            seen.add(name)
    if seen:
        close(end)
    return windows


def backward_order(trace: Trace, rank: int) -> list[str]:
    """Returns units in the order in which their backward passes first begin."""
    return list(
        dict.fromkeys(
            span.unit
            for span in trace.of_rank(rank)
            if span.is_model and span.kind == "backward" and span.unit
        )
    )


def middle(windows: Sequence[Window]) -> Window:
    """Returns the window of median length."""
    return sorted(windows, key=lambda window: window[1] - window[0])[(len(windows) - 1) // 2]


def step_window(trace: Trace, inside: Window | None) -> Window:
    """Returns the step of the first rank that contains `inside`, or the one of median length."""
    steps = step_windows(trace, trace.ranks[0])
    return next(
        (step for step in steps if inside and step[0] <= inside[0] and inside[1] <= step[1]), middle(steps)
    )


def shown_units(trace: Trace, asked: Sequence[str] | None) -> list[str]:
    """Returns the units whose backward pass is shown: the given ones, or two neighbours in the middle of the
    pass. The first and the last would not be typical."""
    if asked is not None:
        return list(asked)
    order = backward_order(trace, trace.ranks[0])
    first = (len(order) - 1) // 2 if len(order) > 2 else 0
    return order[first : first + 2]


# ---- shares ----


@dataclass
class Shares:
    """Shares over all windows. Compression counts as computing, as in the paper."""

    n: int = 0  # windows times ranks
    length_s: float = math.nan  # mean
    model: float = 0.0
    codec: float = 0.0
    computing: float = 0.0
    communicating: float = 0.0
    overlapped: float = 0.0
    gradient_exchange: float = 0.0
    gradient_exchange_with_gaps: float = 0.0  # from the first transfer of a unit's exchange to its last
    gather: float = 0.0


def covered(spans: Iterable[Window], window: Window) -> float:
    """Returns seconds of the window in which at least one of the spans is active."""
    total, at = 0.0, window[0]
    for start, end in spans:  # by start
        start, end = max(start, at), min(end, window[1])
        if end > start:
            total, at = total + end - start, end
    return total


def _exchanges(spans: Sequence[Span]) -> list[Window]:
    """Returns windows from the first transfer of a unit's gradients to its last, per pass; the unit's next
    forward starts a new one."""
    whole: list[list[float]] = []
    open_: dict[str, list[float]] = {}
    for span in spans:
        if span.kind == "forward":
            open_.pop(span.unit, None)
        elif span.is_exchange and span.unit:
            if span.unit not in open_:
                open_[span.unit] = [span.start_s, span.end_s]
                whole.append(open_[span.unit])
            open_[span.unit][1] = max(open_[span.unit][1], span.end_s)
    return sorted((start, end) for start, end in whole)


def measure(trace: Trace, find: Callable[[int], Sequence[Window]]) -> Shares:
    """Returns shares of time. find(rank): the windows of a rank."""
    sums, total_s, n = Shares(), 0.0, 0
    for rank in trace.ranks[:MOST_RANKS]:
        windows = [window for window in find(rank) if window[1] > window[0]]
        spans = trace.of_rank(rank)
        total_s += sum(end - start for start, end in windows)
        n += len(windows)

        def seconds(
            is_wanted: Callable[[Span], bool], spans: list[Span] = spans, windows: list[Window] = windows
        ) -> float:
            chosen = [(span.start_s, span.end_s) for span in spans if is_wanted(span)]
            return sum(covered(chosen, window) for window in windows)

        computing = seconds(lambda span: span.is_model or span.is_codec)
        communicating = seconds(lambda span: span.track >= COMM)
        sums.model += seconds(lambda span: span.is_model)
        sums.codec += seconds(lambda span: span.is_codec)
        sums.computing += computing
        sums.communicating += communicating
        sums.overlapped += (
            computing
            + communicating
            - seconds(lambda span: span.is_model or span.is_codec or span.track >= COMM)
        )
        sums.gradient_exchange += seconds(lambda span: span.is_exchange)
        sums.gradient_exchange_with_gaps += sum(covered(_exchanges(spans), window) for window in windows)
        sums.gather += seconds(lambda span: span.track >= COMM and span.kind == "gather")
    if not n:
        return Shares()
    shares = {
        name: max(value, 0.0) / total_s for name, value in vars(sums).items() if name not in ("n", "length_s")
    }
    return Shares(n, total_s / n, **shares)


def step_shares(trace: Trace) -> Shares:
    return measure(trace, lambda rank: step_windows(trace, rank))


def backward_shares(trace: Trace, units: Sequence[str]) -> Shares:
    """Returns shares of time; n = 0 if there is no such window."""
    return measure(trace, lambda rank: backward_windows(trace, rank, units)) if units else Shares()


def pair_shares(trace: Trace, patterns: Sequence[str]) -> tuple[Shares, list[str]]:
    """Returns shares of all windows of two consecutive units that match the two patterns (as in fnmatch); and
    the two units to draw, whose window has the median length on the first rank."""
    windows: dict[int, list[tuple[Window, list[str]]]] = {}
    for rank in trace.ranks:
        order = backward_order(trace, rank)
        pairs = [
            [a, b]
            for a, b in zip(order, order[1:])
            if fnmatch.fnmatchcase(a, patterns[0]) and fnmatch.fnmatchcase(b, patterns[1])
        ]
        windows[rank] = [(window, pair) for pair in pairs for window in backward_windows(trace, rank, pair)]
        if not windows[rank]:
            raise ReportError(
                f"{trace.label}: nothing matches {patterns[0]} and, next in the backward pass, "
                f"{patterns[1]}; "
                f"the order is: {', '.join(order) or 'no backward pass'}"
            )
    by_length = sorted(windows[trace.ranks[0]], key=lambda found: found[0][1] - found[0][0])
    shares = measure(trace, lambda rank: [window for window, _ in windows[rank]])
    return shares, by_length[len(by_length) // 2][1]
