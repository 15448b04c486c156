"""Markdown of a result: loss and bits of every arm, then what that means over three links."""

import statistics

import arms
import runner
import simulate

BUDGETS = (100, 1000)  # bits per parameter, over the whole run


def rows_of(found):
    """For each arm that has a run, in the order of arms.ALL: its best rate, whether it is tuned, and its runs at that rate by seed."""
    setting = arms.Setting(**{k: tuple(v) if isinstance(v, list) else v for k, v in found["setting"].items()})
    rows = []
    for arm in arms.ALL:
        own = [run for run in found["runs"] if run["arm"] == arm.name]
        whole = [run for run in own if run["is_whole"]]
        if whole:
            rate, is_tuned = runner.best_rate(setting, whole)
            rows.append(
                {
                    "arm": arm,
                    "rate": rate,
                    "is_tuned": is_tuned,
                    "n_runs": len(whole),
                    "is_whole": True,
                    "runs": {run["seed"]: run for run in whole if run["rate"] == rate},
                }
            )
        elif own and own[0]["evals"]:
            rows.append(
                {
                    "arm": arm,
                    "rate": own[0]["rate"],
                    "is_tuned": False,
                    "n_runs": 0,
                    "is_whole": False,
                    "runs": {own[0]["seed"]: own[0]},
                }
            )
    return setting, rows


def baseline(rows):
    """Loss by seed of the dense arm that is best on average over the seeds that all dense arms have."""
    dense = [row for row in rows if row["arm"].is_baseline and row["is_whole"]]
    if not dense:
        return None, {}
    common = set.intersection(*(set(row["runs"]) for row in dense))
    best = min(dense, key=lambda row: statistics.mean(row["runs"][seed]["loss"] for seed in common) if common else 9e9)
    return best["arm"].name, {seed: run["loss"] for seed, run in best["runs"].items()}


def markdown(found):
    setting, rows = rows_of(found)
    whole = [row for row in rows if row["is_whole"]]
    name, dense = baseline(rows)
    parts = [_losses(setting, rows, name, dense)]
    if whole:
        parts += [_links(setting, whole, dense), _budgets(setting, whole)]
    return "\n".join(parts + [_origin(found, setting)])


def grid(head, lines):
    return (
        "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [head, ["---", *["---:"] * (len(head) - 1)], *lines])
        + "\n"
    )


def spread(values, form):
    text = format(statistics.mean(values), form)
    return f"{text} ({format(min(values), form)} to {format(max(values), form)})" if len(values) > 1 else text


def _losses(setting, rows, name, dense):
    lines = []
    for row in rows:
        arm, runs = row["arm"], row["runs"]
        last = [run["evals"][-1] for run in runs.values()]
        bits = statistics.mean(point["bits"] / point["step"] for point in last)
        if row["is_whole"]:
            gaps = [100 * (run["loss"] / dense[seed] - 1) for seed, run in runs.items() if seed in dense]
            loss = spread([run["loss"] for run in runs.values()], ".4f")
            gap = "the baseline" if arm.name == name else spread(gaps, "+.2f") + " %" if gaps else "-"
        else:
            loss, gap = f"{last[0]['loss']:.3f} at step {last[0]['step']}", "unfinished"
        rate = f"{row['rate']:g}" + ("" if row["is_tuned"] else ", not tuned yet")
        lines.append(
            [
                f"`{arm.name}`: {arm.about} ({arm.source})",
                loss,
                gap,
                f"{bits:.3g}",
                f"{statistics.mean(p['step_bits'] for p in last):.3g}",
                rate,
                len(runs),
            ]
        )
    return grid(
        [
            "arm",
            "validation loss",
            f"above `{name}`, by seed",
            "bits per parameter and step",
            "... of the last step",
            "learning rate",
            "seeds",
        ],
        lines,
    )


def _mean_curve(setting, row, x):
    """Mean over the seeds that the arm has."""
    curves = [simulate.curve(run, setting.n_vocabulary, x) for run in row["runs"].values()]
    return [(statistics.mean(p[0] for p in points), statistics.mean(p[1] for p in points)) for points in zip(*curves)]


def time_of(rate):
    return lambda point: simulate.seconds(point["step"], point["bits"], point["latencies"], rate)


def _links(setting, rows, dense):
    """At equal time: where the fastest arm ends its constant learning rate. And how much sooner than fp32 an arm is at the loss that
    fp32 has there."""
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
            line += [f"{simulate.at(points, budget):.3f}", "not reached" if found is None else f"{slow / found:.2f}"]
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
                    f"{simulate.at(points, budget):.3f}" + ("" if points[-1][0] >= budget else f" (all of {points[-1][0]:.3g})")
                    for budget in BUDGETS
                ),
            ]
        )
    return grid(["arm", *(f"loss after {budget:,} bits per parameter" for budget in BUDGETS)], lines)


def _origin(found, setting):
    n_params = next((run["n_params"] for run in found["runs"]), 0)
    text = found["corpus"]
    packages = ", ".join(f"{p['name']} {p['version']}" for p in text["packages"])
    n_chars, n_kept = (sum(p[name] for p in text["packages"]) for name in ("n_chars", "n_chars_kept"))
    missing = [f"`{name}`" for name in setting.arms if name not in {run["arm"] for run in found["runs"]}]
    lines = [
        f"GPT-2 of {n_params / 1e6:.2f} M parameters, tied ({setting.n_layer} layers of {setting.n_embd}, vocabulary "
        f"{setting.n_vocabulary}), {setting.n_ranks} ranks with {setting.batch_size} x {setting.n_positions} tokens each, "
        f"{setting.steps} steps. Times are simulated, for {simulate.N_PARAMS / 1e6:.0f} M parameters and {simulate.COMPUTE_S} s of "
        "computing a step.",
        f"`python {' '.join(found['command'])}`, {len(found['runs'])} runs, torch {found['torch']}, {found['cpu']}, commit "
        f"{found['commit']}.",
        f"Not run yet: {', '.join(missing)}." if missing else "",
        f"Text: {n_chars / 1e6:.0f} M characters of {packages}. {100 * (1 - n_kept / n_chars):.0f} % stood in paragraphs that had "
        f"come before, and were dropped; of all windows of 64 bytes in what is left, {100 * text['repeated_windows']:.0f} % had come "
        "before.",
    ]
    return "\n\n".join(line for line in lines if line) + "\n"
