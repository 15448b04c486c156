"""Runs for quality: what is compared begins from one trained state, kept for later experiments with the same
base, and goes on with each arm, seed by seed: differences of a tenth of a percent show only in pairs that
share weights and data.

With `rates`, every arm's learning rate is chosen with the first seed, and the other seeds run with the best
one."""

import hashlib
import json
import os
import shutil

from common import ROOT, LabError
from experiment import split_arm

import results

CACHE = ROOT / "runs" / "lab" / "cache"
BASE_CONFIG = "experiments/configs/fsdp.conf"


def _digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def words_of(options):
    return [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in options.items()
    ]


class Quality:
    def __init__(self, runner):
        self.runner, self.experiment = runner, runner.experiment
        self.base = self._base()

    # ---- the state that all begin from ----

    def _base(self):
        """The folder of the base run; trained now unless the cache has it."""
        data = ROOT / self.runner.data
        about = {
            "base": self.experiment.base,
            "config": (ROOT / BASE_CONFIG).read_text(),
            "data": [_digest(data / name) for name in ("train.bin", "val.bin")],
        }
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        folder = CACHE / key
        if folder.exists():
            self.runner.say(f"base: from {folder.relative_to(ROOT)}")
            return folder
        self.runner.say(f"base: {' '.join(words_of(self.experiment.base))}")
        made = self.runner.scratch / "base"
        self.runner.run_command(
            [
                self.runner.tagc,
                "train",
                f"--config={BASE_CONFIG}",
                f"--data={self.runner.data}",
                "--quiet",
                f"--out={made}",
                *words_of(self.experiment.base),
            ]
        )
        CACHE.mkdir(parents=True, exist_ok=True)
        part = CACHE / f".{key}.{os.getpid()}"
        shutil.copytree(made, part)  # the scratch folder may be on another file system
        (part / "about.json").write_text(json.dumps(about, indent=1) + "\n")
        try:
            os.rename(part, folder)
        except OSError:  # another process was faster
            shutil.rmtree(part)
        return folder

    def base_summary(self):
        _, steps, evals = results.read_metrics(self.base / "metrics.jsonl")
        return {
            "n_steps": len(steps),
            "loss": steps[-1]["loss"],
            "evals": evals[-1:],
            "folder": str(self.base.relative_to(ROOT)),
        }

    # ---- forks ----

    def case(self, case):
        """runs: of each arm with its best rate; other_runs: with the other rates."""
        first, *others = self.experiment.seeds
        todo = sum(len(self._rates(arm)) + len(others) for arm in case.arms)
        done, runs, other_runs = 0, [], []
        for arm in case.arms:
            tried = []
            for rate in self._rates(arm):
                tried.append(self._fork(case, arm, first, rate))
                done += 1
                self._told(done, todo, tried[-1])
            best = min(tried, key=_final_loss)
            runs.append(best)
            other_runs += [run for run in tried if run is not best]
            for seed in others:
                runs.append(self._fork(case, arm, seed, best["rate"]))
                done += 1
                self._told(done, todo, runs[-1])
        return {"base": self.base_summary(), "runs": runs, "other_runs": other_runs}

    def _rates(self, arm):
        has_own = any(word.startswith("--lr=") for word in split_arm(arm)[2])
        return [None] if has_own else self.experiment.rates or [None]

    def _fork(self, case, arm, seed, rate):
        label, config, extras = split_arm(arm)
        folder = self.runner.scratch / "run"
        shutil.rmtree(folder, ignore_errors=True)
        tried = [f"--lr={rate:g}", f"--min-lr={rate / 10:g}"] if rate else []
        words = [
            self.runner.tagc,
            "train",
            f"--config={config}",
            f"--data={self.runner.data}",
            f"--fork={self.base.relative_to(ROOT)}",
            f"--seed={seed}",
            f"--ranks={case.world_size}",
            *words_of(case.options),
            *tried,
            *extras,
        ]
        run = {"label": label, "seed": seed, "rate": rate}
        run["wall_s"] = self.runner.run_command([*words, "--quiet", f"--out={folder}"])
        run |= results.run_summary(folder / "metrics.jsonl")
        _, steps, _ = results.read_metrics(folder / "metrics.jsonl")
        return run

    def _told(self, done, todo, run):
        loss = _final_loss(run)
        self.runner.say(
            f"[{done}/{todo}] {run['label']}, seed {run['seed']}"
            + (f", rate {run['rate']:g}" if run["rate"] else "")
            + f": {run['wall_s']:.0f} s, validation loss {loss:.4f}"
        )


def _final_loss(run):
    loss = run["evals"][-1]["val_loss"] if run["evals"] else None
    return float("inf") if loss is None else loss


def check_base(experiment):
    """What the options cannot say by themselves."""
    base = experiment.base
    if not isinstance(base.get("steps"), int):
        raise LabError(f"{experiment.name}: base has no steps, allowed: a whole number")
    for case in experiment.cases:
        if case.hosts != 1:
            raise LabError(f"{experiment.name}: hosts is {case.hosts}, allowed with base: 1")
        if case.options.get("steps", 0) <= base["steps"]:
            raise LabError(
                f"{experiment.name}: steps is {case.options.get('steps')}, allowed: more than the base's "
                f"{base['steps']}, from which arms go on"
            )
