"""Markdown tables from results. An experiment's `table` names the view. No figure in a table is typed by
hand."""

import math
import pathlib
import re
import statistics

import formulas
import linkcheck
import plans
import torchquality
from common import LAB, LabError, read_toml, write_atomically

import results

KINDS = ("lab", "plan", "torch-quality")
MOST_COLUMNS = 6  # of places; with more each has a row
GRADIENT_LEGS = ("index", "values", "leftover", "result")


def paper(name):
    return read_toml(LAB / "paper.toml").get(name, {})


def grid(head, rows):
    """A markdown table; the first column is text, the others are numbers."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def number(value, digits=2, unit=""):
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def percent(value, digits=1):
    return "-" if value is None else f"{100 * value:+.{digits}f} %"


def spread_text(spread, digits, unit="", factor=1):
    """Returns the median, and behind it from where to where the samples go."""
    middle, least, most = (factor * spread[name] for name in ("median", "min", "max"))
    text = f"{middle:.{digits}f}{unit}"
    return text if spread["n"] == 1 else text + f" ({least:.{digits}f} to {most:.{digits}f})"


def seconds(spread):
    """Returns the spread in the unit that suits its median."""
    return spread_text(spread, 2, " s") if spread["median"] >= 1 else spread_text(spread, 1, " ms", 1e3)


def only(value):
    return results.spread([value])


def case_text(case):
    ranks = f"{case['hosts'] * case['ranks_per_host']} ranks"
    if not case["link"]:
        return f"{ranks} on one machine"
    hosts = "" if case["ranks_per_host"] == 1 else f" on {case['hosts']} hosts"
    latency = (case["link"].get("latency") or {}).get("asked", "")
    return (
        f"{ranks}{hosts}, {case['link']['rate'].replace('gbit', ' Gbit/s').replace('mbit', ' Mbit/s')}"
        + (", " + latency.replace("us", " us").replace("ms", " ms") if latency else "")
        + (", WireGuard" if case["link"].get("tunnel") else "")
    )


def link_text(link):
    one, both = (f"{min(link[f'tcp_{way}_bits_per_s']) / 1e9:.2f}" for way in ("one_way", "both_ways"))
    note = linkcheck.shortfall(link)
    return (
        f"link {link['rate']}, MTU {link['mtu']}, burst {link['burst']}; plain TCP in the same run: {one} "
        "Gbit/s "
        f"one way, {both} in both directions at once" + (f" ({note})" if note else "")
    )


# ---- times: results of tagc bench ----


def ratios(slow, fast):
    """Returns one sample per round: both arms were measured close to each other."""
    return [one / other for one, other in zip(slow["round_s"], fast["round_s"])]


def total_bits(arm):
    return sum(arm["bits_per_param"].values())


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
    theirs, arms = paper(result["experiment"]), case["bench"]["arms"]
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
            seconds(arm["total_s"]),
            seconds(only(arm["exposed_s"]["median"])),
            number(exchange_ms_per_mb(arm)),
            number(total_bits(arm), 1),
        ]
        if theirs:
            facts = theirs.get(arm["name"], {})
            row += [number(facts.get("iteration_s"), 1, " s"), number(facts.get("exchange_ms_per_mb"))]
        rows.append(row)
    text = grid(head + (["paper: iteration", "paper: gradient exchange, ms per MB"] if theirs else []), rows)
    pairs = result["settings"].get("pairs") or [[arms[0]["name"], arm["name"]] for arm in arms[1:]]
    text += "\n" + pair_table({arm["name"]: arm for arm in arms}, pairs, theirs)
    return text + (
        f"\n{case_text(case)}; {link_text(case['link'])}.\n" if case["link"] else f"\n{case_text(case)}.\n"
    )


def pair_table(arms, pairs, theirs):
    rows = []
    for slow, fast in pairs:
        if slow not in arms or fast not in arms:
            continue
        samples = ratios(arms[slow], arms[fast])
        row = [
            f"`{fast}` against `{slow}`",
            spread_text(results.spread(samples), 3, "x"),
            verdict(samples),
            number(total_bits(arms[slow]) / total_bits(arms[fast]), 3, "x"),
        ]
        if theirs:
            both = slow in theirs and fast in theirs
            row.append(
                number(theirs[slow]["iteration_s"] / theirs[fast]["iteration_s"] if both else None, 3, "x")
            )
        rows.append(row)
    head = ["pair", "how many times as fast, per round", "", "if bytes alone counted"]
    return grid(head + (["paper"] if theirs else []), rows)


def verdict(samples):
    """Returns whether rounds show a difference at all: alike in every round, and by more than rounds differ.
    Whether compression pays, tagc bench says."""
    if len(samples) < 2:
        return "in one round"
    if abs(statistics.median(samples) - 1) <= (max(samples) - min(samples)) / 2:
        return "within the spread"
    if min(samples) > 1:
        return "faster"
    return "slower" if max(samples) < 1 else "within the spread"


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
    text = grid(["arm"] + [case_text(case) for case in cases], rows)
    notes = [
        f"{case_text(case)}: {note}"
        for case in cases
        if case["link"] and (note := linkcheck.shortfall(case["link"]))
    ]
    return (
        text
        + f"\nMedian iteration; in brackets, the speed-up over `{names[0]}`, and over the best arm without "
        "compression.\n" + "".join(f"\n{note}.\n" for note in notes)
    )


def long_sweep(cases, names):
    """A row for each of many places."""
    rows = []
    for case in cases:
        link = case["link"] or {}
        pings = (link.get("latency") or {}).get("ping_round_trip_s")
        rows.append(
            [case_text(case)]
            + [sweep_cell(case, name) for name in names]
            + [
                number(1e3 * statistics.median(pings), 1, " ms") if pings else "-",
                f"{min(link['tcp_both_ways_bits_per_s']) / 1e9:.2f} Gbit/s" if link else "-",
            ]
        )
    return (
        grid(
            ["place", *(f"`{name}`" for name in names), "round trip by ping", "plain TCP, both directions"],
            rows,
        )
        + f"\nMedian iteration (least to most), then the speed-up over `{names[0]}`, and over the best arm "
        "without "
        "compression.\n"
    )


def sweep_cell(case, name):
    arms = {arm["name"]: arm for arm in case["bench"]["arms"]}
    if name not in arms:
        return "-"
    arm, first = arms[name], case["bench"]["arms"][0]
    best = min((a for a in arms.values() if is_dense(a)), key=lambda a: a["total_s"]["median"], default=first)
    is_far = case["link"] and case["link"].get("latency")
    text = seconds(arm["total_s"] if is_far else only(arm["total_s"]["median"]))
    if arm is first:
        return text
    against = statistics.median(ratios(first, arm))
    if is_dense(arm):
        return f"{text} ({against:.2f}x)"
    gain = ratios(best, arm)
    return f"{text} ({against:.2f}x, {statistics.median(gain):.2f}x {verdict(gain)})"


# ---- exchanges alone ----


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
        grid(["one exchange at a time"] + [case_text(case) for case in cases], rows) + "\n" + codec(cases[0])
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
            + [number(item["to_floor"][phase]) for phase in phases]
            + [number(item["total_to_floor"])]
        )
    floor = case["bench"]["floor"]
    return (
        grid(["codec, times of the memory floor", "elements", *phases, "all"], rows)
        + f"\nMemory floor: {floor['bytes_per_s'] / 1e9:.1f} GB/s per rank, all ranks at once.\n"
    )


# ---- bits ----


def carriers(result):
    """What sent bytes: arms of a bench, or runs; (label, it)."""
    for case in result["cases"]:
        for arm in case.get("bench", {}).get("arms", []):
            yield arm["name"], arm
        options = {}  # which the first run of a label has
        for run in case.get("runs", []):
            own = options.setdefault(run["label"], run.get("options", {}))
            yield run["label"], run | {"options": case.get("options", {}) | own}


def compressed_bits(carrier):
    """Returns the bits of gradients in the compressed part: what all legs sent, less what the dense part must
    have sent."""
    n, n_compressed, options = carrier["n_params"], carrier["n_compressed"], carrier["options"]
    if n_compressed == 0 or options.get("mild", "dense") != "dense":
        return None  # what of it the rest has sent is not known
    sent = n * sum(carrier["bits_per_param"].get(leg, 0) for leg in GRADIENT_LEGS)
    return (sent - (n - n_compressed) * formulas.dense_bits(carrier["options"])) / n_compressed


def link_bits(carrier):
    """What left the busiest host through its shaper, headers and start of the run included, per parameter and
    step."""
    if not carrier.get("shaped_bytes"):
        return None
    return 8 * max(carrier["shaped_bytes"]) / carrier["n_params"] / carrier["n_steps"]


def bits(result):
    """Per leg over the whole model, and the gradients of the compressed part beside their formula."""
    carried = list(carriers(result))
    on_link = any(link_bits(carrier) for _, carrier in carried)
    used = [leg for leg in results.LEGS if any(c["bits_per_param"].get(leg, 0) >= 0.005 for _, c in carried)]
    rows = []
    for label, carrier in carried:
        n_compressed, options = carrier["n_compressed"], carrier["options"]
        union = carrier["n_union"] / n_compressed if n_compressed else None
        rows.append(
            [
                f"`{label}`",
                number(100 * n_compressed / carrier["n_params"], 1, " %"),
                number(compressed_bits(carrier), 3),
                number(formulas.gradient_bits(options, union) if n_compressed else None, 3),
                number(formulas.lhc_bits(options) if n_compressed else None, 1),
                *(number(carrier["bits_per_param"].get(leg, 0)) for leg in used),
                number(total_bits(carrier)),
                number(96 / total_bits(carrier), 2, "x"),
                *([number(link_bits(carrier))] if on_link else []),
            ]
        )
    head = [
        "arm",
        "compressed",
        "its gradients, counted",
        "by formula",
        "by formula in LHC",
        *used,
        "all legs",
        "under 96 bits",
        *(["left the busiest host"] if on_link else []),
    ]
    text = grid(head, rows) + (
        "\nBits per parameter, rank and step before the factor (W-1)/W, from bytes that the "
        "transport counted; legs are over the whole model.\n"
    )
    overheads = [
        f"{case['interface']['overhead']:.3f}"
        for case in result["cases"]
        if (case["interface"] or {}).get("overhead")
    ]
    return text + (
        f"\nThe links carried {', '.join(overheads)} times the counted bytes.\n" if overheads else ""
    )


# ---- losses ----


def final_losses(result):
    """label -> {seed: last validation loss}, in the order of the runs."""
    losses = {}
    for case in result["cases"]:
        for run in case["runs"]:
            if run.get("evals"):
                losses.setdefault(run["label"], {})[run["seed"]] = run["evals"][-1]["val_loss"]
    return losses


def losses(result):
    """Against the first label, seed by seed: the data and the first weights are the same then."""
    by_label, theirs = final_losses(result), paper(result["experiment"])
    if not by_label:
        raise LabError(f"the result {result['experiment']} holds no validation losses")
    base_label, base = next(iter(by_label.items()))
    sent = {label: total_bits(carrier) for label, carrier in carriers(result)}
    rows = []
    for label, of_seed in by_label.items():
        values = [or_nan(value) for value in of_seed.values()]
        gaps = [or_nan(value) / or_nan(base[seed]) - 1 for seed, value in of_seed.items() if seed in base]
        mean = statistics.fmean(values)
        wide = (max(values) - min(values)) / mean
        row = [
            f"`{label}`",
            number(sent.get(label), 1),
            number(mean, 4),
            number(100 * wide, 2, " %"),
            "-" if label == base_label else gap_text(gaps),
            len(values),
        ]
        rows.append(row + ([percent(theirs.get(label))] if theirs else []))
    head = [
        "configuration",
        "bits per parameter, all legs",
        "validation loss, mean over seeds",
        "spread between seeds",
        f"against `{base_label}`, same seed",
        "seeds",
    ]
    return grid(head + (["paper"] if theirs else []), rows)


def gap_text(gaps):
    if not gaps:
        return "no seed in common"
    lost = sum(map(math.isnan, gaps))  # a run that came to nothing is not left out of the mean without a word
    if lost:
        return f"no finite loss in {lost} of {len(gaps)}"
    return f"{percent(statistics.fmean(gaps), 2)} ({percent(min(gaps), 2)} to {percent(max(gaps), 2)})"


def or_nan(value):
    return float("nan") if value is None else value


# ---- timeline ----

SHARES = (
    ("computing", "computing, compression included"),
    ("model", "of this the model"),
    ("codec", "of this compression"),
    ("communicating", "communicating"),
    ("gradient_exchange", "exchanging gradients"),
    ("gradient_exchange_with_gaps", "... with the gaps between"),
    ("gather", "gathering parameters"),
)


def timeline(result):
    runs, theirs = [run for case in result["cases"] for run in case["runs"]], paper(result["experiment"])
    first = runs[0]["timeline"]
    head = [f"backward of `{'`, `'.join(first['units'])}`, {first['n_windows']} windows"]
    for run in runs:
        head += [f"`{run['label']}`"] + (["paper"] if run["label"] in theirs else [])
    rows = []
    for key, text in SHARES:
        row = [text]
        for run in runs:
            row.append(number(100 * run["timeline"][key], 1, " %"))
            if run["label"] in theirs:
                fact = theirs[run["label"]].get(key)
                row.append(number(None if fact is None else 100 * fact, 1, " %"))
        rows.append(row)
    row, base = ["seconds of a window"], None
    for run in runs:
        window = run["timeline"]["window_s"]
        base = base or window
        row += [f"{window:.3f} ({window / base:.2f}x)"] + (["-"] if run["label"] in theirs else [])
    return grid(head, rows + [row])


# ---- quality: forks of one trained state ----


def quality(result):
    return "\n".join(quality_case(case, len(result["cases"]) > 1) for case in result["cases"])


def quality_case(case, is_one_of_many):
    """Against the first arm, seed by seed. The spread of the first arm is its runs' distance from their
    mean."""
    by_label = {}
    for run in case["runs"]:
        by_label.setdefault(run["label"], []).append(run)
    base = {run["seed"]: run_loss(run) for run in next(iter(by_label.values()))}
    rows = []
    for number_of, (label, runs) in enumerate(by_label.items()):
        values = [run_loss(run) for run in runs]
        gaps = [run_loss(run) / base[run["seed"]] - 1 for run in runs if run["seed"] in base]
        bits = runs[0]["bits_per_param"]
        gradients = statistics.fmean(
            sum(run["bits_per_param"].get(leg, 0) for leg in GRADIENT_LEGS) for run in runs
        )
        total = statistics.fmean(total_bits(run) for run in runs)
        rate = (case.get("options", {}) | runs[0]["options"]).get("lr")
        rows.append(
            [
                f"`{label}`",
                number(gradients, 2),
                number(statistics.fmean(run["bits_per_param"].get("gather", 0) for run in runs), 2)
                if "gather" in bits
                else "-",
                number(total, 2),
                rate or "-",
                number(statistics.fmean(values), 4),
                "-" if number_of == 0 else gap_text(gaps),
                number(100 * statistics.stdev(gaps), 2, " %")
                if number_of and len(gaps) > 1 and all(map(math.isfinite, gaps))
                else "-",
                len(runs),
            ]
        )
    head = [
        "recipe",
        "gradients, bits per parameter",
        "parameters",
        "all legs",
        "learning rate",
        "validation loss",
        "against the first, same seed",
        "standard deviation of that",
        "seeds",
    ]
    mean = statistics.fmean(base.values())
    wide = 100 * (max(base.values()) - min(base.values())) / mean
    about = case.get("base", {})
    text = grid(head, rows) + (
        f"\n{case_text(case)}. All runs are forks of one state after {about.get('n_steps', '?')} dense "
        "steps. Seeds are orders of the "
        f"data; the first arm differs by {wide:.2f} % between them. Bits are counted, for the whole "
        "model, per rank and optimizer step, before the factor (W-1)/W.\n"
    )
    return (f"\n**{case_text(case)}**\n\n" if is_one_of_many else "") + text


def run_loss(run):
    return or_nan(run["evals"][-1]["val_loss"]) if run["evals"] else float("nan")


def torch(result):
    import torchbench  # which needs this module

    return torchbench.markdown(result)


VIEWS = {
    "times": times,
    "exchanges": exchanges,
    "bits": bits,
    "losses": losses,
    "quality": quality,
    "timeline": timeline,
    "torch": torch,
}


def markdown(result):
    view = result["settings"].get("table")
    if view not in VIEWS:
        raise LabError(f'the result {result["experiment"]}: "table" is {view!r}, allowed: {", ".join(VIEWS)}')
    try:
        return VIEWS[view](result) + "\n" + origin_text(result)
    except KeyError as error:
        raise LabError(f"the result {result['experiment']}: the member {error} is missing") from None
    except (TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
        raise LabError(f"the result {result['experiment']} is damaged: {error}") from None


def origin_text(result):
    about = result["origin"]
    notes = ", a quick run: not for keeping" if result["settings"].get("is_quick") else ""
    if about.get("is_busy"):
        notes += f", while other work kept {100 * about['busy_before']:.0f} % of the cores busy"
    return (
        f"`experiments/lab/lab run {result['experiment']}`, {about['machine']['n_cpus']} cores of "
        f"{about['machine']['cpu']}, commit {about['commit'] or 'unknown'}, {about['date'][:10]}{notes}.\n"
    )


def put_into(path, made):
    """Replaces the text between <!-- table NAME --> and <!-- end --> for each NAME of `made`; returns the
    names it found."""
    try:
        text = pathlib.Path(path).read_text()
    except OSError as error:
        raise LabError(f"{path}: {error.strerror}") from None
    found = []
    for name, table in made.items():
        between = re.compile(rf"(<!-- table {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, n = between.subn(lambda match, table=table: f"{match[1]}\n{table}\n{match[2]}", text)
        found += [name] * (n > 0)
    if not found:
        raise LabError(
            f"{path} has no place for any of {', '.join(made)}: a place is <!-- table NAME --> ... "
            "<!-- end -->"
        )
    write_atomically(path, text)
    return found


def from_paths(paths):
    """Returns name -> markdown for result files, and for all results in folders; skips other files there."""
    files = []
    for path in map(pathlib.Path, paths):
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        inside = [file for file in inside if not file.name.endswith(".trace.json")]
        files += [file for file in inside if not path.is_dir() or results.load(file)[0] in KINDS]
    if not files:
        raise LabError(f"no results in {', '.join(map(str, paths))}; experiments/lab/lab run NAME makes them")
    made = {}
    for file in files:
        kind, found = results.load(file)
        if kind == "plan":
            made[file.stem] = plans.markdown(found, grid)
        elif kind == "torch-quality":
            made[file.stem] = torchquality.markdown(found, grid, number)
        else:
            result = results.read(file)
            made[result["experiment"]] = markdown(result)
    return made
