"""The small form of a result, which the lab writes and lab/results/ holds: a summary of each arm and run, not
every sample."""

import statistics

import results

MOST_POINTS = 50  # of a curve of losses
DIGITS, DIGITS_OF_LOSS = 7, 10  # of a loss, tables show small differences
# Options of a run that say where and for how long, and not what is measured; and what an option says that was
# not given.
NO_MATTER = (
    "data",
    "val-data",
    "init-from",
    "out",
    "eval-every",
    "eval-batches",
    "save-every",
    "keep",
    "resume",
    "fork",
    "trace",
    "trace-steps",
    "quiet",
    "config",
    "timeout",
    "seed",
    "ranks",
    "transport",
)
NOT_GIVEN = ("", "preset")
OFF = {
    "accumulate": "1",
    "codec-threads": "1",
    "exchange-each-micro-step": "no",
    "gather-check-every": "never",
    "ranks-per-host": "1",
    "two-level": "no",
}
# what the bench says once for all arms
OF_THE_BENCH = ("model", "n-layer", "n-head", "n-embd", "block-size", "vocab-size", "batch-size", "seq-len")
# which no time depends on
OF_LEARNING = ("steps", "lr", "min-lr", "warmup", "schedule-from", "weight-decay", "clip")
OF_COMPRESSION = (
    "values",
    "block",
    "mild",
    "mild-sparsity",
    "sparsity",
    "compressed-beta1",
    "compressed-beta2",
)
OF_SKETCHES = ("ratio", "index", "cells", "unpeeled", "fill-union")
OF_A_STEP = ("total_s", "compute_s", "wait_gather_s", "wait_reduce_s", "optimizer_s", "gradient_s", "phase_s")


def rounded(value, digits=DIGITS):
    """Returns the value with a few significant digits in each of its numbers."""
    if isinstance(value, float):
        short = float(f"{value:.{digits}g}")
        return int(short) if short.is_integer() else short
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        digits_of = {"val_loss": DIGITS_OF_LOSS}
        return {
            name: sent(item) if name == "bits_per_param" else rounded(item, digits_of.get(name, DIGITS))
            for name, item in value.items()
        }
    return value


def sent(legs):
    """Returns the bits of those legs that sent something."""
    return {leg: rounded(bits) for leg, bits in legs.items() if bits}


def thinned(curve):
    """Returns at most MOST_POINTS points of a curve, the first and the last among them."""
    last = len(curve) - 1
    return curve if last < MOST_POINTS else [curve[i * last // (MOST_POINTS - 1)] for i in range(MOST_POINTS)]


def of(found, names):
    """Returns those members that have one of these names."""
    return {name: found[name] for name in names if name in found}


def without(found, *names):
    """Returns the members that have none of these names."""
    return {name: item for name, item in found.items() if name not in names}


def options(given, *needless):
    """Returns the options that tell one recipe from another."""
    is_dense, has_union = given.get("compress") == "none", given.get("exchange") in ("sketch", "packed")
    needless += (
        NO_MATTER + (OF_COMPRESSION if is_dense else ()) + (() if has_union and not is_dense else OF_SKETCHES)
    )
    return {
        name: value
        for name, value in given.items()
        if name not in needless and value not in NOT_GIVEN and value != OFF.get(name)
    }


def medians(steps):
    """Returns the median of each number that all steps have."""
    made = {}
    for name in steps[0]:
        values = [step.get(name) for step in steps]
        if all(isinstance(value, dict) for value in values):
            made[name] = medians(values)
        elif None not in values:
            made[name] = statistics.median(values)
    return made


def arm(found):
    """Returns an arm with the spread of its iterations, the median of each round, and one iteration: the
    median of each part."""
    if "round_s" in found:
        return found
    steps, rounds = found["iterations"], {}
    for step in steps:
        rounds.setdefault(step["round"], []).append(step["total_s"])
    made = found | {
        "total_s": results.spread([step["total_s"] for step in steps]),
        "round_s": [statistics.median(rounds[number]) for number in sorted(rounds)],
        "iterations": [medians([of(step, OF_A_STEP) for step in steps])],
    }
    return without(made, "speedup", "memory_bytes", *(["n_bytes_sent"] if "bits_per_param" in made else []))


def bench(found):
    """Returns the summary of what `tagc bench` or lab/studies/torch_bench.py measured."""
    arms = [
        arm(item)
        | ({"options": options(item["options"], *OF_THE_BENCH, *OF_LEARNING)} if "options" in item else {})
        for item in found["arms"] or []
    ]
    about = found["origin"]  # the rest of it is that of the whole result
    made = found | {"arms": arms, "origin": {"machine": {"n_cpus": about["machine"]["n_cpus"]}}}
    said = made.pop("recommendation", None)
    if said and "again" in said:
        made["again"] = said["again"]
    if made.get("link"):
        made["link"] = without(made["link"], "pairs")
    if made.get("advice"):
        made["advice"] = without(made["advice"], "text")
    return made


def runs(found):
    """Returns (the options that all runs of `tagc train` have, summaries of the runs). The first run of a
    label has its options."""
    made = []
    for run in found:
        run = run | {"evals": thinned(run["evals"])}
        if any(other["label"] == run["label"] for other in made):
            run = without(run, "options")
        elif "options" in run:
            run["options"] = options(run["options"])
        made.append(without(run, "command", "step_losses", "n_bytes_sent"))
    given = [run["options"].items() for run in made if "options" in run]
    common = (
        dict(item for item in given[0] if all(item in items for items in given[1:])) if len(given) > 1 else {}
    )
    for run in made:
        if "options" in run:
            run["options"] = without(run["options"], *common)
    return common, made


def case(found):
    """Returns the summary of a case of an experiment."""
    made = dict(found)
    for name in ("bench", "torch"):
        if name in made:
            made[name] = bench(made[name])
    if "runs" in made:
        common, made["runs"] = runs(made["runs"])
        made["options"] = made.get("options", {}) | common
    if "other_runs" in made:  # tried, and not chosen
        made["other_runs"] = [
            of(run, ("label", "seed", "rate")) | {"evals": run["evals"][:1] + run["evals"][1:][-1:]}
            for run in made["other_runs"]
        ]
    return rounded(made)


def keep(path):
    """Rewrites a result of the lab in its small form."""
    made = results.read(path)
    made["cases"] = [case(item) for item in made["cases"]]
    results.write(path, made)
