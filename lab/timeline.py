"""What share of the backward pass of two consecutive units was spent on what: the paper's Figure 3 in figures, from a
trace that `tagc train --trace` wrote."""
import fnmatch
import json

from common import LabError

GRADIENT_LEGS = ("index", "values", "leftover", "result")


def _spans(path):
    """rank -> [(stream, name, unit, start, end)] in seconds, in order of start."""
    try:
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise LabError(f"{path} is no trace: {error}") from None
    streams = {(e["pid"], e["tid"]): e["args"]["name"].split()[0]
               for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    ranks = {}
    for e in events:
        if e["ph"] == "X":
            name, _, unit = e["name"].partition(" ")
            start, end = e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6
            ranks.setdefault(e["pid"], []).append((streams[e["pid"], e["tid"]], name, unit, start, end))
    return {rank: sorted(spans, key=lambda span: span[3]) for rank, spans in ranks.items()}


def covered(spans, first, last):
    """Seconds of [first, last] in which at least one of the (start, end) goes on."""
    total, at = 0.0, first
    for start, end in sorted(spans):
        start, end = max(start, at), min(end, last)
        if end > start:
            total, at = total + end - start, end
    return total


def _windows(path, spans, units):
    """[(two units, start, end)] for all that match the two patterns: from the start of the first one's backward to the
    start of what is new behind the second's (a root unit comes back in between). Of the first step in the trace."""
    backward = [span for span in spans if span[0] == "compute" and span[1] == "backward"]
    if not backward:
        raise LabError(f"{path} has no backward pass")
    behind = [s[3] for s in spans if s[0] == "compute" and s[1] == "forward" and s[3] > backward[0][3]]
    backward = [span for span in backward if not behind or span[3] < behind[0]]
    firsts = {}
    for _, _, unit, start, _ in backward:
        firsts.setdefault(unit, start)
    names = list(firsts)
    starts = [*firsts.values(), max(span[4] for span in backward)]
    found = [((a, b), starts[i], starts[i + 2]) for i, (a, b) in enumerate(zip(names, names[1:]))
             if fnmatch.fnmatchcase(a, units[0]) and fnmatch.fnmatchcase(b, units[1])]
    if not found:
        raise LabError(f"{path}: nothing matches {units[0]} and, next in the backward pass, {units[1]}; the order is: "
                       f"{', '.join(names)}")
    return found


def _parts(spans):
    """What a window is split into: lists of (start, end). "with gaps" is from a unit's first gradients to its last, of one
    pass: the unit's next forward begins anew."""
    comm = [span for span in spans if span[0] == "comm"]
    exchange = [span for span in comm if span[1] in GRADIENT_LEGS]
    whole, going_on = [], {}
    for stream, name, unit, start, end in spans:
        if stream == "compute" and name == "forward":
            going_on.pop(unit, None)
        elif stream == "comm" and name in GRADIENT_LEGS:
            if unit not in going_on:
                going_on[unit] = [start, end]
                whole.append(going_on[unit])
            going_on[unit][1] = max(going_on[unit][1], end)
    model = [span[3:] for span in spans if span[0] == "compute" and span[1] != "wait"]
    codec = [span[3:] for span in spans if span[0] == "codec" and span[1] != "wait"]
    return {"computing": model + codec, "model": model, "codec": codec, "communicating": [s[3:] for s in comm],
            "gradient_exchange": [s[3:] for s in exchange], "gradient_exchange_with_gaps": whole,
            "gather": [s[3:] for s in comm if s[1] == "gather"]}


def shares(path, units):
    """Shares of all windows together, on all ranks. Compressing counts as computing, as in the paper. "shown" are the
    two units whose window is of middle length on rank 0: those to draw."""
    sums, window_s, n, shown = {}, 0.0, 0, None
    for rank, spans in sorted(_spans(path).items()):
        windows = _windows(path, spans, units)
        if rank == 0:
            shown = sorted(windows, key=lambda window: window[2] - window[1])[len(windows) // 2][0]
        for name, part in _parts(spans).items():
            sums[name] = sums.get(name, 0.0) + sum(covered(part, first, last) for _, first, last in windows)
        window_s += sum(last - first for _, first, last in windows)
        n += len(windows)
    if not n:
        raise LabError(f"{path} is an empty trace")
    return {"units": list(units), "shown": list(shown or ()), "n_windows": n, "window_s": window_s / n,
            **{name: covered_s / window_s for name, covered_s in sums.items()}}
