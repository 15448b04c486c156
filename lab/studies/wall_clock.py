"""Loss against wall-clock on two hosts of two ranks: losses of lab/results/parity/NAME.json (parity.py NAME),
times of a step of lab/results/cluster.json (lab run cluster).

    python lab/studies/wall_clock.py            # a model of 0.2 M parameters, 9 ways to train it
    python lab/studies/wall_clock.py curve      # one of 12 M, dense and tagc with every leg

It prints a table and draws wall-clock.svg, or curve.svg and curve-gap.svg, beside the losses. The times are
those of a model of 14 M parameters in the lab, whose shape is that of `curve`: a small model's own step is
nothing but latencies.
A step of tagc takes as long as its bits say, on the line through the lab's two arms (every value in 4 bits,
and the last level). 4-bit blocks and DeMo have no distributed form here: they get the lab's step with
PowerSGD, with the bytes of their own messages, each through a host's card once."""

import argparse
import json
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lab" / "parity"))

import drawing
import runner
import simulate

NEAR = 0.01  # of the baseline's last loss
# name in the table -> (arm of the losses, arms of the lab: of every step, or (every value, last level))
ARMS = {
    "FSDP2, bf16": ("bf16", ("fsdp2-bf16",)),
    "HSDP, bf16": ("bf16", ("hsdp-bf16",)),
    "DDP, bf16": ("bf16", ("ddp-bf16",)),
    "DDP, PowerSGD rank 1": ("powersgd-1", ("ddp-powersgd",)),
    "4-bit blocks (LoCo)": ("blocks-4", ()),
    "DeMo, 32 of 4,096": ("demo-32", ()),
    "tagc, FSDP2, 4-bit parameters": (
        "tagc-all-optimizer",
        ("fsdp2-tagc-4bit-delta4-bf16", "fsdp2-tagc-delta4-bf16"),
    ),
    "tagc, HSDP": ("tagc-optimizer", ("hsdp-tagc-4bit-bf16", "hsdp-tagc-bf16")),
    "tagc, HSDP, without the optimizer": ("tagc", ("hsdp-tagc-4bit-bf16", "hsdp-tagc-bf16")),
}
BASELINE = "FSDP2, bf16"
PICTURES = {"cluster": "wall-clock.svg", "curve": "curve.svg"}  # by the name of the losses


class Link:
    """A case of the lab: how long a step takes there."""

    def __init__(self, case):
        number, unit = case["link"]["rate"][:-4], case["link"]["rate"][-4:]
        self.rate = float(number) * {"mbit": 1e6, "gbit": 1e9}[unit]
        self.rate_text = f"{number} {unit.capitalize()}/s"
        self.arms = {arm["name"]: arm for arm in case["torch"]["arms"]}
        self.n_params = case["torch"]["model"]["n_params"]

    def seconds(self, name):
        return self.arms[name]["total_s"]["median"]

    def card_bits(self, name):
        """Bits per parameter that leave a host in a step."""
        return 8 * self.arms[name]["n_bytes_sent"] / self.n_params

    def clock(self, setting, labs, run):
        """evaluation -> seconds since the beginning."""
        if not labs:
            # of W = 4 ranks that send by themselves, to the two of a host that send once to one other host
            share = 2 / 3
            wire_s = self.n_params / self.rate
            base = self.seconds("ddp-powersgd") - self.card_bits("ddp-powersgd") * wire_s
            return {
                point["step"]: base * point["step"] + share * point["bits"] * wire_s for point in run["evals"]
            }
        if len(labs) == 1:
            each = self.seconds(labs[0])
            n_dense = setting["warmup"] if "powersgd" in labs[0] else 0
            more = self.seconds("ddp") - each if n_dense else 0.0
            return {
                point["step"]: each * point["step"] + more * min(n_dense, point["step"])
                for point in run["evals"]
            }
        every, last = labs
        per_bit = (self.seconds(every) - self.seconds(last)) / (self.card_bits(every) - self.card_bits(last))
        base = self.seconds(last) - per_bit * self.card_bits(last)
        per_host = setting["n_ranks"] // setting["n_hosts"]
        return {
            point["step"]: base * point["step"] + per_bit * per_host * point["bits"] for point in run["evals"]
        }


def curve(setting, link, labs, runs):
    """[(seconds, mean loss over seeds)], from the first evaluation on."""
    clocks = [link.clock(setting, labs, run) for run in runs]
    return [
        (
            statistics.mean(clock[point["step"]] for clock in clocks),
            statistics.mean(run["evals"][i]["loss"] for run in runs),
        )
        for i, point in enumerate(runs[0]["evals"])
    ]


def above(runs, base):
    """[(step, how much higher the mean loss is than the baseline's there)]"""
    return [
        (
            point["step"],
            statistics.mean(
                run["evals"][i]["loss"] / dense["evals"][i]["loss"] - 1 for run, dense in zip(runs, base)
            ),
        )
        for i, point in enumerate(base[0]["evals"])
    ]


def made(losses, lab):
    """{link: {arm: {"curve", "near_s", "gap", "step_s"}}}"""
    setting = losses["setting"]
    runs = {}
    for run in map(runner.whole, losses["runs"]):
        if run["is_whole"]:
            runs.setdefault(run["arm"], {})[run["seed"]] = run
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in runs.values())))
    found = {}
    for case in lab["cases"]:
        if case["ranks_per_host"] != 2:
            continue
        link = Link(case)
        rows = {}
        for name, (arm, labs) in ARMS.items():
            if arm == "bf16" and arm not in runs:
                arm = "dense"  # whose losses are as low, with larger messages
            if arm in runs:
                own = [runs[arm][seed] for seed in seeds]
                rows[name] = {
                    "runs": own,
                    "curve": curve(setting, link, labs, own),
                    "loss": statistics.mean(run["loss"] for run in own),
                }
        base = rows[BASELINE]
        for row in rows.values():
            row["above"] = above(row["runs"], base["runs"])
        goal = base["curve"][-1][1] * (1 + NEAR)
        for row in rows.values():
            row["near_s"] = simulate.reaches([(0.0, 99.0), *row["curve"]], goal)
            row["gap"] = row["loss"] / base["loss"] - 1
            row["whole_s"] = row["curve"][-1][0]
        found[link.rate_text] = rows
    return found, seeds


def table(found):
    """One for all links: times as fast as the baseline to a loss near its last one."""
    links = list(found)
    lines = [
        "| 2 hosts x 2 ranks | " + " | ".join(f"to that loss, {link}" for link in links) + " | "
        + " | ".join(f"all steps, {link}" for link in links) + " | loss at the end |",
        "|---|" + "---:|" * (2 * len(links) + 1),
    ]  # fmt: skip
    for name in found[links[0]]:
        cells = [name]
        for key in ("near_s", "whole_s"):
            for link in links:
                own, base = found[link][name][key], found[link][BASELINE][key]
                cells.append("never" if own is None else f"{base / own:.1f}")
        gap = found[links[0]][name]["gap"]
        cells.append("" if name == BASELINE else f"{100 * gap:+.2f} %")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(found, path):
    panels = {
        f"seconds at {link}": [
            {"arm": name, "x": seconds, "y": loss}
            for name, row in rows.items()
            for seconds, loss in row["curve"]
        ]
        for link, rows in found.items()
    }
    about = "Losses of a small model, over the time that a step of a larger one takes in the lab."
    drawing.write(path, panels, list(ARMS), drawing.LOSS, "Loss against time", about, True)


def draw_gaps(found, path):
    """Of the arms that do not compute what the baseline does."""
    rows = next(iter(found.values()))
    points = [
        {"arm": name, "x": step, "y": 100 * above}
        for name, row in rows.items()
        if name == BASELINE or row["gap"]
        for step, above in row["above"]
    ]
    about = "At each evaluation, against the run without compression."
    title = "loss above that without compression, %"
    drawing.write(
        path, {"steps": points}, list(ARMS), title, "Loss above that without compression", about, False
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    folder = ROOT / "lab" / "results" / "parity"
    parser.add_argument(
        "losses", nargs="?", choices=PICTURES, default="cluster", help="of parity.py (%(default)s)"
    )
    parser.add_argument("--lab", type=pathlib.Path, default=ROOT / "lab" / "results" / "cluster.json")
    args = parser.parse_args()
    losses = json.loads((folder / f"{args.losses}.json").read_text())
    found, seeds = made(losses, json.loads(args.lab.read_text()))
    print(
        f"seeds {', '.join(map(str, seeds))}; near: within {100 * NEAR:g} % of the last loss of {BASELINE}\n"
    )
    print(table(found))
    try:
        draw(found, folder / PICTURES[args.losses])
        if args.losses == "curve":
            draw_gaps(found, folder / "curve-gap.svg")
    except ModuleNotFoundError as error:  # the table is what most want
        print(f"no picture: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
