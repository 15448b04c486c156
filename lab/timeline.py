"""What share of the backward pass of two consecutive units was spent on what: the paper's Figure 3 in figures, from a
trace that `tagc train --trace` wrote."""
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
            start = e["ts"] / 1e6
            ranks.setdefault(e["pid"], []).append((streams[e["pid"], e["tid"]], name, unit, start, start + e["dur"] / 1e6))
    return {rank: sorted(spans, key=lambda span: span[3]) for rank, spans in ranks.items()}


def covered(spans, first, last):
    """Seconds of [first, last] in which at least one of the (start, end) goes on."""
    total, at = 0.0, first
    for start, end in sorted(spans):
        start, end = max(start, at), min(end, last)
        if end > start:
            total, at = total + end - start, end
    return total


def _window(path, spans, units):
    """From the start of the first unit's backward to the start of what comes behind the second's."""
    backward = [span for span in spans if span[0] == "compute" and span[1] == "backward"]
    known = list(dict.fromkeys(span[2] for span in backward))
    for unit in units:
        if unit not in known:
            raise LabError(f'{path} has no backward pass of the unit "{unit}"; it has: {", ".join(known)}')
    if known.index(units[1]) != known.index(units[0]) + 1:
        raise LabError(f"{path}: {units[1]} does not follow {units[0]} in the backward pass; the order is: "
                       f"{', '.join(known)}")
    first = next(span[3] for span in backward if span[2] == units[0])
    behind = [span for span in backward if span[3] > first]
    seen_second = False
    for _, _, unit, start, end in behind:
        if seen_second and unit not in units:
            return first, start
        if unit == units[1]:
            seen_second, last = True, end
    return first, last


def shares(path, units):
    """Shares of the window, mean over ranks. Compressing counts as computing, as in the paper. "with gaps" is from a
    unit's first byte of gradients to its last."""
    sums, ranks = {}, _spans(path)
    for spans in ranks.values():
        first, last = _window(path, spans, units)
        comm = [span for span in spans if span[0] == "comm"]
        exchange = [span for span in comm if span[1] in GRADIENT_LEGS]
        whole = {}
        for _, _, unit, start, end in exchange:
            low, high = whole.get(unit, (start, end))
            whole[unit] = min(low, start), max(high, end)
        model = [span[3:] for span in spans if span[0] == "compute" and span[1] != "wait"]
        codec = [span[3:] for span in spans if span[0] == "codec" and span[1] != "wait"]
        parts = {"computing": model + codec, "model": model, "codec": codec, "communicating": [s[3:] for s in comm],
                 "gradient_exchange": [s[3:] for s in exchange], "gradient_exchange_with_gaps": list(whole.values()),
                 "gather": [s[3:] for s in comm if s[1] == "gather"]}
        rank_shares = {name: covered(part, first, last) / (last - first) for name, part in parts.items()}
        for name, value in (rank_shares | {"window_s": last - first}).items():
            sums[name] = sums.get(name, 0) + value / len(ranks)
    return {"units": list(units), **sums}
