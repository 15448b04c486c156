"""Markdown of a result: loss and bits of every arm, then what that means over three links."""

import statistics

import arms
import runner
import simulate

BUDGETS = (100, 1000)  # bits per parameter, over the whole run


def rows_of(found):
    """(setting, rows, whether all arms are tuned). A row for each arm that has a run, in the order of
    arms.ALL, with its runs by seed at the rate that runner.chosen_rate says; until all are tuned at the first
    rate, so that no arm looks bad for not being tuned."""
    setting = arms.Setting(**{k: tuple(v) if isinstance(v, list) else v for k, v in found["setting"].items()})
    runs_of = {
        name: [run for run in found["runs"] if run["arm"] == name and run["evals"]] for name in arms.BY_NAME
    }
    whole_of = {name: [run for run in runs if run["is_whole"]] for name, runs in runs_of.items() if runs}
    best = {name: runner.best_rate(setting, whole) for name, whole in whole_of.items() if whole}
    is_even = all(is_tuned for _, is_tuned in best.values())
    rows = []
    for name, whole in whole_of.items():
        rate = runner.chosen_rate(setting, whole) if whole and is_even else setting.first_rate
        runs = [run for run in whole or runs_of[name] if run["rate"] == rate]
        if runs:
            rows.append({"arm": arms.BY_NAME[name], "rate": rate, "is_whole": bool(whole),
                         "runs": {run["seed"]: run for run in runs}})  # fmt: skip
    return setting, rows, is_even


def baseline(rows, is_even):
    """The dense arm that is best on average over the seeds that all dense arms have; None where there is
    none. Until all are tuned, AdamW as it is."""
    dense = [row for row in rows if row["arm"].is_baseline and row["is_whole"]]
    if not dense or not is_even:
        return next((row for row in dense if row["arm"].name == "dense"), None)
    common = set.intersection(*(set(row["runs"]) for row in dense))
    return min(
        dense,
        key=lambda row: statistics.mean(row["runs"][seed]["loss"] for seed in common) if common else 9e9,
    )


def gap(row, base):
    """How far a row's losses are above the baseline's of the same seeds."""
    if base is None or row is base:
        return "-" if base is None else "the baseline"
    gaps = [
        100 * (run["loss"] / base["runs"][seed]["loss"] - 1)
        for seed, run in row["runs"].items()
        if seed in base["runs"]
    ]
    return spread(gaps, "+.2f") + " %" if gaps else "-"


def markdown(found):
    setting, rows, is_even = rows_of(found)
    whole = [row for row in rows if row["is_whole"]]
    parts = [_losses(rows, baseline(rows, is_even), setting.n_ranks)]
    if not is_even:
        parts.append(
            f"Unfinished: not every arm is tuned yet, so all are shown at the rate {setting.first_rate:g}. "
            "The table of rates has the "
            "other runs.\n"
        )
    if whole and not setting.n_hosts:  # else wall_clock.py has what was measured
        parts += [_links(setting, whole), _budgets(setting, whole)]
    if whole:
        parts.append(_rates(found, setting))
    return "\n".join(parts + [_origin(found, setting)])


def grid(head, lines):
    return (
        "\n".join(
            "| " + " | ".join(map(str, line)) + " |"
            for line in [head, ["---", *["---:"] * (len(head) - 1)], *lines]
        )
        + "\n"
    )


def spread(values, form):
    text = format(statistics.mean(values), form)
    return f"{text} ({format(min(values), form)} to {format(max(values), form)})" if len(values) > 1 else text


def gradient_bits(run, arm, n_ranks):
    """Bits per element and direction since the last evaluation but one, without agreements and headers,
    before the factor (W-1)/W; None for what was not counted."""
    points = run["evals"][-2:]
    if len(points) < 2 or not points[1].get("gradient_bits"):
        return None
    gradient, control = (points[1][name] - points[0][name] for name in ("gradient_bits", "control_bits"))
    control *= n_ranks / (n_ranks - 1) / (1 if arm.wrap == "fsdp2" else 2)  # as gradient_bits, which has them
    return (gradient - control) / (points[1]["step"] - points[0]["step"])


def _losses(rows, base, n_ranks):
    lines = []
    for row in rows:
        arm, runs = row["arm"], row["runs"]
        last = [run["evals"][-1] for run in runs.values()]
        if row["is_whole"]:
            loss, above = spread([run["loss"] for run in runs.values()], ".4f"), gap(row, base)
        else:
            loss, above = f"{last[0]['loss']:.3f} at step {last[0]['step']}", "unfinished"
        bits = [
            f"{statistics.mean(values):.3g}"
            for values in ([p["bits"] / p["step"] for p in last], [p["step_bits"] for p in last])
        ]
        gradients = [
            found for run in runs.values() if (found := gradient_bits(run, arm, n_ranks)) is not None
        ]
        own = f"{statistics.mean(gradients):.3g}" if gradients else ""
        lines.append(
            [
                f"`{arm.name}`: {arm.about} ({arm.source})",
                loss,
                above,
                *bits,
                own,
                f"{row['rate']:g}",
                len(runs),
            ]
        )
    name = base["arm"].name if base else "dense"
    return grid(
        ["arm", "validation loss", f"above `{name}`, by seed", "bits per parameter and step",
         "... of the last step",
         "gradients alone, bits per element at the end", "rate", "seeds"], lines,
    )  # fmt: skip


def _rates(found, setting):
    """Every finished run, so that nothing of the tuning is hidden."""
    losses = {}
    for run in found["runs"]:
        if run["is_whole"]:
            losses.setdefault((run["arm"], run["rate"]), {})[run["seed"]] = f"{run['loss']:.4f}"
    rates = sorted({rate for _, rate in losses})
    names = [name for name in arms.BY_NAME if any(arm == name for arm, _ in losses)]

    def cell(of_seed):
        return ", ".join(of_seed.get(seed, "-") for seed in setting.seeds if seed <= max(of_seed, default=0))

    lines = [[f"`{name}`", *(cell(losses.get((name, rate), {})) for rate in rates)] for name in names]
    seeds = f", seeds {', '.join(map(str, setting.seeds))}" if len(setting.seeds) > 1 else ""
    return grid([f"loss by rate{seeds}", *(f"{rate:g}" for rate in rates)], lines)


def _mean_curve(setting, row, x):
    """Mean over the seeds that the arm has."""
    curves = [simulate.curve(run, setting.n_vocabulary, x) for run in row["runs"].values()]
    return [
        (statistics.mean(p[0] for p in points), statistics.mean(p[1] for p in points))
        for points in zip(*curves)
    ]


def time_of(rate):
    return lambda point: simulate.seconds(point["step"], point["bits"], point["latencies"], rate)


def _links(setting, rows):
    """At equal time: where the fastest arm ends its constant learning rate. And how much sooner than fp32 an
    arm is at the loss that fp32 has there."""
    lines, end = [[f"`{row['arm'].name}`"] for row in rows], setting.steps - setting.steps // 5
    reference = next((row for row in rows if row["arm"].name == "dense"), rows[0])
    head = ["arm"]
    for name, rate in simulate.LINKS.items():
        curves = [_mean_curve(setting, row, time_of(rate)) for row in rows]
        ends = [simulate.at(_mean_steps(setting, row, rate), end) for row in rows]
        budget = min(ends)
        target = simulate.at(_by_step(setting, reference), end)
        slow = simulate.reaches(_mean_curve(setting, reference, time_of(rate)), target)
        head += [f"{name}: loss after {budget:.0f} s", "as fast as `dense` to its loss"]
        for line, points in zip(lines, curves):
            found = simulate.reaches(points, target)
            line += [
                f"{simulate.at(points, budget):.3f}",
                "not reached" if found is None else f"{slow / found:.2f}",
            ]
    return grid(head, lines)


def _by_step(setting, row):
    return _mean_curve(setting, row, lambda point: point["step"])


def _mean_steps(setting, row, rate):
    """[(step, seconds)]"""
    time, run = time_of(rate), next(iter(row["runs"].values()))
    return [(0, 0.0)] + [(point["step"], time(point)) for point in run["evals"]]


def _budgets(setting, rows):
    """At equal bits."""
    lines = []
    for row in rows:
        points = _mean_curve(setting, row, lambda point: point["bits"])
        lines.append(
            [
                f"`{row['arm'].name}`",
                *(
                    f"{simulate.at(points, budget):.3f}"
                    + ("" if points[-1][0] >= budget else f" (all of {points[-1][0]:.3g})")
                    for budget in BUDGETS
                ),
            ]
        )
    return grid(["arm", *(f"loss after {budget:,} bits per parameter" for budget in BUDGETS)], lines)


def _machines(runs):
    """Where which arms were run, and at which commit."""
    arms_of = {}
    for run in runs:
        place = (
            f"{run['cpu']}, commit {run['commit']}" if "cpu" in run else "before runs noted their processor"
        )
        arms_of.setdefault(place, {}).setdefault(run["arm"], []).append(run)
    return " ".join(
        (
            f"{place[0].upper()}{place[1:]}, runs: {sum(map(len, own.values()))} of "
            f"{', '.join(f'`{name}`' for name in sorted(own))}."
        )
        for place, own in arms_of.items()
    )


def _origin(found, setting):
    n_params = next((run["n_params"] for run in found["runs"]), 0)
    text, with_bias = found["corpus"], "" if setting.bias else ", without biases"
    packages = ", ".join(f"{p['name']} {p['version']}" for p in text["packages"])
    n_chars, n_kept = (sum(p[name] for p in text["packages"]) for name in ("n_chars", "n_chars_kept"))
    missing = [f"`{name}`" for name in setting.arms if name not in {run["arm"] for run in found["runs"]}]
    whole = [run for run in found["runs"] if run["is_whole"]]
    more = sorted(
        {name for name, rate, seed in runner.wanted(setting, whole, setting.arms)}
        - {name.strip("`") for name in missing}
    )
    lines = [
        f"GPT-2 of {n_params / 1e6:.2f} M parameters, {'tied' if setting.tied else 'untied'}{with_bias} "
        f"({setting.n_layer} layers of "
        f"{setting.n_embd}, vocabulary {setting.n_vocabulary}), {setting.n_ranks} ranks with "
        f"{setting.batch_size} x {setting.n_positions} tokens each, "
        f"{setting.steps} steps. Times are simulated, for {simulate.N_PARAMS / 1e6:.0f} M parameters and "
        f"{simulate.COMPUTE_S} s of "
        "computing a step.",
        (
            f"`python {' '.join(found['command'])}`, {len(found['runs'])} runs, torch {found['torch']}. "
            f"{_machines(found['runs'])}"
        ),
        f"Not run yet: {', '.join(missing)}." if missing else "",
        f"Runs missing: {', '.join(f'`{name}`' for name in more)}." if more else "",
        f"Text: {n_chars / 1e6:.0f} M characters of {packages}. {100 * (1 - n_kept / n_chars):.0f} % stood "
        "in paragraphs that had "
        "come before, and were dropped; of all windows of 64 bytes in what is left, "
        f"{100 * text['repeated_windows']:.0f} % had come "
        "before.",
    ]
    return "\n\n".join(line for line in lines if line) + "\n"
