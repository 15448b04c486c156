"""Which run comes next, until a table is complete. Every finished run is a file and is not repeated."""

import importlib.metadata
import json
import math
import pathlib
import subprocess
import threading
import time

import arms


def path_of(folder, arm, rate, seed):
    return folder / f"{arm}-{rate:g}-{seed}.json"


def best_rate(setting, runs):
    """(the rate with the least final loss of the first seed's runs, whether its neighbours have been
    tried)."""
    tried = {run["rate"]: run["loss"] for run in runs if run["seed"] == setting.seeds[0]}
    if not tried:
        return setting.first_rate, False
    best = min(
        tried, key=lambda rate: (math.isnan(tried[rate]), rate if math.isnan(tried[rate]) else tried[rate])
    )  # from what diverges, down
    return best, not [rate for rate in _neighbours(setting, best) if rate not in tried]


def _neighbours(setting, rate):
    at = setting.rates.index(rate)
    return setting.rates[max(0, at - 1) : at + 2]


def finalists(setting, runs):
    """The best rate of the first seed, and the better of its neighbours: with one seed alone, chance may have
    chosen between them."""
    best, is_tuned = best_rate(setting, runs)
    losses = {run["rate"]: run["loss"] for run in runs if run["seed"] == setting.seeds[0]}
    near = [
        rate
        for rate in _neighbours(setting, best)
        if rate != best and not math.isnan(losses.get(rate, math.nan))
    ]
    return [best] if len(setting.seeds) == 1 or not is_tuned else [best, *sorted(near, key=losses.get)[:1]]


def chosen_rate(setting, runs):
    """Of the finalists that all seeds have run, the one with the least mean loss; until there is one, the
    first seed's best."""
    means = {}
    for rate in finalists(setting, runs):
        losses = {run["seed"]: run["loss"] for run in runs if run["rate"] == rate}
        if set(losses) == set(setting.seeds):
            means[rate] = sum(losses.values()) / len(losses)
    finite = {rate: mean for rate, mean in means.items() if not math.isnan(mean)}
    return min(finite, key=finite.get) if finite else best_rate(setting, runs)[0]


def wanted(setting, runs, names):
    """Runs that are missing now, (arm, rate, seed), first those of the arms that have the fewest. Every arm
    is tuned by the same
    rule: the neighbours of its best rate until none is better; then come the other seeds at its finalists."""
    missing = []
    for name in names:
        own = [run for run in runs if run["arm"] == name]
        best, is_tuned = best_rate(setting, own)
        tried = {(run["rate"], run["seed"]) for run in own}
        if not own:
            jobs = [(best, setting.seeds[0])]
        elif is_tuned:
            jobs = [
                (rate, seed)
                for rate in finalists(setting, own)
                for seed in setting.seeds
                if (rate, seed) not in tried
            ]
        else:
            jobs = [
                (rate, setting.seeds[0])
                for rate in _neighbours(setting, best)
                if (rate, setting.seeds[0]) not in tried
            ]
        missing += [(len(own) + i, (name, *job)) for i, job in enumerate(jobs)]
    return [job for _, job in sorted(missing, key=lambda pair: pair[0])]


def read(folder, is_whole=True):
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [run for run in runs if run["is_whole"] or not is_whole]


LAST = ("control_bits", "step_bits", "gradient_bits")  # of these a table asks for the last two


def small(run):
    """Returns the run with its evaluations as a list for each of their numbers."""
    evals, digits = run["evals"], {"loss": 6, "bits": 7}
    columns = {}
    for name in evals[0] if evals else ():
        points = [point[name] for point in (evals[-2:] if name in LAST else evals)]
        columns[name] = [_short(value, digits.get(name, 9)) for value in points]
    return {name: _short(value, 9) for name, value in run.items()} | {"evals": columns}


def _short(value, n_digits):
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    value = float(f"{value:.{n_digits}g}")
    return int(value) if value.is_integer() else value


def whole(run):
    """Returns the run with an object for each evaluation again: the opposite of small()."""
    columns = run["evals"]
    evals = [{} for _ in columns.get("step", ())]
    for name, values in columns.items():
        for point, value in zip(evals[-len(values) :], values):
            point[name] = value
    return run | {"evals": evals}


def take_over(folder, found):
    """Finished runs of a result file, where the folder has none of that arm, rate and seed: another machine
    goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in found["runs"]:
        path = path_of(folder, run["arm"], run["rate"], run["seed"])
        if run["is_whole"] and not path.exists():
            path.write_text(json.dumps(whole(run)) + "\n")


def run_all(setting, cache, folder, names, n_jobs, minutes, say):
    """Until nothing is missing or `minutes` are over; runs under way end first."""
    import train  # and torch with it, which tables do not need

    folder.mkdir(parents=True, exist_ok=True)
    end, lock, stop, busy, failed = (
        time.monotonic() + 60 * minutes,
        threading.Lock(),
        threading.Event(),
        set(),
        {},
    )
    made_by = origin()

    def take():
        with lock:
            for job in wanted(setting, read(folder), names):
                if job not in busy and failed.get(job, 0) < 2:
                    busy.add(job)
                    return job
        return None

    def work():
        while time.monotonic() < end and not stop.is_set():
            job = take()
            if job is None:
                if not busy:
                    return
                time.sleep(1)
                continue
            name, rate, seed = job
            begin = time.monotonic()
            try:
                path = path_of(folder, name, rate, seed)
                run = train.run(setting, arms.BY_NAME[name], rate, seed, cache, path, stop)
                path.write_text(json.dumps(run | made_by) + "\n")
                last = run["evals"][-1]
                say(
                    f"{name:16} lr {rate:<8g} seed {seed}: loss {run['loss']:.4f}, "
                    f"{last['bits'] / setting.steps:.3f} bits, "
                    f"{time.monotonic() - begin:.0f} s"
                )
            except RuntimeError as failure:
                failed[job] = failed.get(job, 0) + 1
                if not stop.is_set():
                    say(f"failed: {failure}")
            busy.discard(job)

    workers = [threading.Thread(target=work) for _ in range(n_jobs)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    finally:  # Ctrl-C ends the runs under way
        stop.set()
        for worker in workers:
            worker.join()
    return not wanted(setting, read(folder), names)


def origin():
    """{"commit", "cpu"}: of this checkout, and of this machine with the widest vectors that it has."""
    root = pathlib.Path(__file__).resolve().parents[2]
    commit = subprocess.run(
        ["git", "-C", root, "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    fields = dict(
        line.split(":", 1) for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if ":" in line
    )
    found = {name.strip(): value.split() for name, value in fields.items()}
    level = next(
        (name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in found.get("flags", [])),
        "scalar",
    )
    return {"commit": commit.stdout.strip(), "cpu": f"{' '.join(found.get('model name', ['?']))}, {level}"}


def result(setting, corpus_found, runs, command):
    settings = {name: getattr(setting, name) for name in setting.__dataclass_fields__}
    return {
        "type": "parity",
        "format": 1,
        "command": command,
        "torch": importlib.metadata.version("torch"),
        "setting": settings,
        "corpus": corpus_found,
        "runs": [{k: v for k, v in run.items() if k != "arm_options"} for run in runs],
    }
