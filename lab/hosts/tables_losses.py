"""Tables of what `tagc train` lost: runs from random weights, and forks of one trained state."""

import math
import statistics

import cells
from common import LabError


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
    by_label, theirs = final_losses(result), cells.paper(result["experiment"])
    if not by_label:
        raise LabError(f"the result {result['experiment']} holds no validation losses")
    base_label, base = next(iter(by_label.items()))
    sent = {label: cells.total_bits(carrier) for label, carrier in cells.carriers(result)}
    rows = []
    for label, of_seed in by_label.items():
        values = [cells.or_nan(value) for value in of_seed.values()]
        gaps = [
            cells.or_nan(value) / cells.or_nan(base[seed]) - 1
            for seed, value in of_seed.items()
            if seed in base
        ]
        mean = statistics.fmean(values)
        wide = (max(values) - min(values)) / mean
        row = [
            f"`{label}`",
            cells.number(sent.get(label), 1),
            cells.number(mean, 4),
            cells.number(100 * wide, 2, " %"),
            "-" if label == base_label else gap_text(gaps),
            len(values),
        ]
        rows.append(row + ([cells.percent(theirs.get(label))] if theirs else []))
    head = [
        "configuration",
        "bits per parameter, all legs",
        "validation loss, mean over seeds",
        "spread between seeds",
        f"against `{base_label}`, same seed",
        "seeds",
    ]
    return cells.grid(head + (["paper"] if theirs else []), rows)


def gap_text(gaps):
    if not gaps:
        return "no seed in common"
    lost = sum(map(math.isnan, gaps))  # a run that came to nothing is not left out of the mean without a word
    if lost:
        return f"no finite loss in {lost} of {len(gaps)}"
    mean, least, most = (cells.percent(gap, 2) for gap in (statistics.fmean(gaps), min(gaps), max(gaps)))
    return f"{mean} ({least} to {most})"


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
            sum(run["bits_per_param"].get(leg, 0) for leg in cells.GRADIENT_LEGS) for run in runs
        )
        total = statistics.fmean(cells.total_bits(run) for run in runs)
        rate = (case.get("options", {}) | runs[0]["options"]).get("lr")
        rows.append(
            [
                f"`{label}`",
                cells.number(gradients, 2),
                cells.number(statistics.fmean(run["bits_per_param"].get("gather", 0) for run in runs), 2)
                if "gather" in bits
                else "-",
                cells.number(total, 2),
                rate or "-",
                cells.number(statistics.fmean(values), 4),
                "-" if number_of == 0 else gap_text(gaps),
                cells.number(100 * statistics.stdev(gaps), 2, " %")
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
    text = cells.grid(head, rows) + (
        f"\n{cells.case_text(case)}. All runs are forks of one state after {about.get('n_steps', '?')} dense "
        "steps. Seeds are orders of the "
        f"data; the first arm differs by {wide:.2f} % between them. Bits are counted, for the whole "
        "model, per rank and optimizer step, before the factor (W-1)/W.\n"
    )
    return (f"\n**{cells.case_text(case)}**\n\n" if is_one_of_many else "") + text


def run_loss(run):
    return cells.or_nan(run["evals"][-1]["val_loss"]) if run["evals"] else float("nan")
