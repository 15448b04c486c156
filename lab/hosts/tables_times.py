"""Tables of what `tagc bench` measured: iterations of arms, exchanges alone, the codec."""

import statistics

import cells
import linkcheck
import results

MOST_COLUMNS = 6  # of places; with more each has a row


def is_dense(arm):
    return arm["options"]["compress"] == "none"


def exchange_ms_per_mb(arm):
    """As in the paper: time of the gradient exchange, codec included, over megabytes of gradients."""
    busy = arm["iterations"][0].get("gradient_s")
    return None if busy is None else 1e3 * busy / (4e-6 * arm["n_params"])


def times(result):
    cases = result["cases"]
    return sweep(result) if len(cases) > 1 else one_case_times(result, cases[0])


def one_case_times(result, case):
    theirs, arms = cells.paper(result["experiment"]), case["bench"]["arms"]
    head = [
        "arm",
        "iteration",
        "waits for the network",
        "gradient exchange, ms per MB",
        "bits per parameter, all legs",
    ]
    rows = []
    for arm in arms:
        row = [
            f"`{arm['name']}`",
            cells.seconds(arm["total_s"]),
            cells.seconds(cells.only(arm["exposed_s"]["median"])),
            cells.number(exchange_ms_per_mb(arm)),
            cells.number(cells.total_bits(arm), 1),
        ]
        if theirs:
            facts = theirs.get(arm["name"], {})
            row += [
                cells.number(facts.get("iteration_s"), 1, " s"),
                cells.number(facts.get("exchange_ms_per_mb")),
            ]
        rows.append(row)
    text = cells.grid(
        head + (["paper: iteration", "paper: gradient exchange, ms per MB"] if theirs else []), rows
    )
    pairs = result["settings"].get("pairs") or [[arms[0]["name"], arm["name"]] for arm in arms[1:]]
    noise = cells.noise(case["bench"])
    text += "\n" + pair_table({arm["name"]: arm for arm in arms}, pairs, theirs, noise)
    return text + (
        f"\n{cells.case_text(case)}; {cells.link_text(case['link'])}.\n"
        if case["link"]
        else f"\n{cells.case_text(case)}.\n"
    )


def pair_table(arms, pairs, theirs, noise):
    rows = []
    for slow, fast in pairs:
        if slow not in arms or fast not in arms:
            continue
        samples = cells.ratios(arms[slow], arms[fast])
        by_bytes = cells.total_bits(arms[slow]) / cells.total_bits(arms[fast])
        row = [
            f"`{fast}` against `{slow}`",
            cells.spread_text(results.spread(samples), 3, "x"),
            cells.verdict(samples, noise, by_bytes),
            cells.number(by_bytes, 3, "x"),
        ]
        if theirs:
            both = slow in theirs and fast in theirs
            row.append(
                cells.number(
                    theirs[slow]["iteration_s"] / theirs[fast]["iteration_s"] if both else None, 3, "x"
                )
            )
        rows.append(row)
    head = ["pair", "how many times as fast, per round", "", "if bytes alone counted"]
    return cells.grid(head + (["paper"] if theirs else []), rows)


def sweep(result):
    """Arms over cases: links, or numbers of ranks."""
    cases = result["cases"]
    names = list(dict.fromkeys(arm["name"] for case in cases for arm in case["bench"]["arms"]))
    if len(cases) > MOST_COLUMNS:
        return long_sweep(cases, names)
    rows = [[f"`{name}`"] + [sweep_cell(case, name) for case in cases] for name in names]
    rows.append(
        ["plain TCP, both directions at once"]
        + [
            f"{min(case['link']['tcp_both_ways_bits_per_s']) / 1e9:.2f} Gbit/s" if case["link"] else "-"
            for case in cases
        ]
    )
    text = cells.grid(["arm"] + [cells.case_text(case) for case in cases], rows)
    notes = [
        f"{cells.case_text(case)}: {note}"
        for case in cases
        if case["link"] and (note := linkcheck.shortfall(case["link"]))
    ]
    return (
        text
        + f"\nMedian iteration; in brackets, how many times as fast as `{names[0]}`, and as the best arm "
        "without compression.\n" + too_few(cases) + "".join(f"\n{note}.\n" for note in notes)
    )


def long_sweep(cases, names):
    """A row for each of many places."""
    rows = []
    for case in cases:
        link = case["link"] or {}
        pings = (link.get("latency") or {}).get("ping_round_trip_s")
        rows.append(
            [cells.case_text(case)]
            + [sweep_cell(case, name) for name in names]
            + [
                cells.number(1e3 * statistics.median(pings), 1, " ms") if pings else "-",
                f"{min(link['tcp_both_ways_bits_per_s']) / 1e9:.2f} Gbit/s" if link else "-",
            ]
        )
    return (
        cells.grid(
            ["place", *(f"`{name}`" for name in names), "round trip by ping", "plain TCP, both directions"],
            rows,
        )
        + f"\nMedian iteration (least to most), then how many times as fast as `{names[0]}`, and as the best "
        "arm without compression.\n" + too_few(cases)
    )


def too_few(cases):
    """Returns a line where cells have no verdict."""
    n_rounds = min(len(arm["round_s"]) for case in cases for arm in case["bench"]["arms"])
    if n_rounds >= cells.LEAST_ROUNDS:
        return ""
    return f"\nRounds: {n_rounds}, too few to say of small differences whether they are more than chance.\n"


def sweep_cell(case, name):
    arms = {arm["name"]: arm for arm in case["bench"]["arms"]}
    if name not in arms:
        return "-"
    arm, first = arms[name], case["bench"]["arms"][0]
    best = min((a for a in arms.values() if is_dense(a)), key=lambda a: a["total_s"]["median"], default=first)
    is_far = case["link"] and case["link"].get("latency")
    text = cells.seconds(arm["total_s"] if is_far else cells.only(arm["total_s"]["median"]))
    if arm is first:
        return text
    against = statistics.median(cells.ratios(first, arm))
    if is_dense(arm):
        return f"{text} ({against:.2f}x)"
    gain = cells.ratios(best, arm)
    said = cells.verdict(gain, cells.noise(case["bench"]), cells.total_bits(best) / cells.total_bits(arm))
    sure = "" if said in ("faster", "slower", cells.TOO_FEW) else f", {said}"
    return f"{text} ({against:.2f}x, {statistics.median(gain):.2f}x as fast{sure})"


def exchanges(result):
    """What each exchange sends in a second, and the share of what plain TCP gets in both directions at
    once."""
    cases = result["cases"]
    names = list(dict.fromkeys(item["name"] for case in cases for item in case["bench"]["exchanges"]))
    rows = []
    for name in names:
        row = [name]
        for case in cases:
            plain = min(case["link"]["tcp_both_ways_bits_per_s"])
            rates = [8 * item["bytes_per_s"] for item in case["bench"]["exchanges"] if item["name"] == name]
            row += [f"{rates[0] / 1e6:.0f} Mbit/s, {100 * rates[0] / plain:.0f} %" if rates else "-"]
        rows.append(row)
    rows.append(
        ["plain TCP (iperf3), both directions at once"]
        + [f"{min(case['link']['tcp_both_ways_bits_per_s']) / 1e6:.0f} Mbit/s" for case in cases]
    )
    return (
        cells.grid(["one exchange at a time"] + [cells.case_text(case) for case in cases], rows)
        + "\n"
        + codec(cases[0])
    )


def codec(case):
    phases = ("select", "index", "encode", "decode")
    rows = []
    if not case["bench"]["codec"] or not case["bench"]["floor"]:
        return ""  # options.only left it out
    for item in case["bench"]["codec"]:
        what = " ".join(
            filter(
                None,
                [
                    item["exchange"],
                    f"{item['ratio']:g}x" if item["ratio"] else "",
                    item["wire"] if item["exchange"] == "dense" else item["index"],
                ],
            )
        )
        rows.append(
            [what, f"{item['n_elems'] / 1e6:.2f} M x {item['n_tensors']}"]
            + [cells.number(item["to_floor"][phase]) for phase in phases]
            + [cells.number(item["total_to_floor"])]
        )
    floor = case["bench"]["floor"]
    return (
        cells.grid(["codec, times of the memory floor", "elements", *phases, "all"], rows)
        + f"\nMemory floor: {floor['bytes_per_s'] / 1e9:.1f} GB/s per rank, all ranks at once.\n"
    )
