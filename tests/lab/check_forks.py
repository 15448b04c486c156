"""A result of forks: who began where, with which rate and seed, and what was counted."""

import json
import sys

with open(sys.argv[1]) as file:
    (case,) = json.load(file)["cases"]
runs, others = case["runs"], case["other_runs"]
# Arms in order, seeds in order; the rate that learns wins over the one that does not, and the second seed
# takes it over.
assert [(run["label"], run["seed"], run["rate"]) for run in runs] == [
    ("dense", 1, 3e-3),
    ("dense", 2, 3e-3),
    ("half", 1, 3e-3),
    ("half", 2, 3e-3),
    ("own rate", 1, None),
    ("own rate", 2, None),
], runs
assert [(run["label"], run["rate"]) for run in others] == [("dense", 1e-9), ("half", 1e-9)], others
assert case["base"]["n_steps"] == 6
assert all(run["evals"][0]["step"] == 6 and run["evals"][-1]["step"] == 12 for run in runs), (
    "steps go on counting"
)
assert len({run["evals"][0]["val_loss"] for run in runs + others}) == 1, "all begin from one state"
assert all(run["n_steps"] == 6 for run in runs)
for run in others:  # a rate of next to nothing leaves the model as it was
    assert abs(run["evals"][-1]["val_loss"] / run["evals"][0]["val_loss"] - 1) < 1e-4
dense = runs[0]["bits_per_param"]
assert abs(dense["values"] - 32) < 0.5 and dense["gather"] > 40, dense
assert (case["options"] | runs[4]["options"])["lr"] == "0.001"
print("all well")
