"""Result files; docs/reference/results-format.md describes them."""

import datetime
import json
import os
import pathlib
import platform
import re
import shutil
import time

from common import ROOT, LabError, call, write_atomically

MOST_IN_A_LINE = 3000  # letters: an arm is a line
LEGS = ("index", "values", "leftover", "result", "gather", "control")


def now_text():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def kept_cases(path, experiment, numbers):
    """number -> case, of those that an earlier run left in the file and that are not to be measured again."""
    if not pathlib.Path(path).exists():
        return {}
    before = read(path)
    if before["settings"] != json.loads(json.dumps(experiment.settings)):
        raise LabError(
            f"{path} holds {experiment.name} with other settings, whose cases do not go with these: move it "
            "away, or choose another --out"
        )
    return {case["number"]: case for case in before["cases"] if case.get("number") not in (None, *numbers)}


def _first_line(path, start):
    try:
        for line in pathlib.Path(path).read_text().splitlines():
            if line.startswith(start):
                return line.split(":" if ":" in line else "=", 1)[1].strip().strip('"')
    except OSError:
        pass
    return None


def available_memory_bytes():
    text = _first_line("/proc/meminfo", "MemAvailable")
    return 1024 * int(text.split()[0]) if text else None


def _commit():
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return None
    git = ("git", "-c", "safe.directory=*", "-C", ROOT)  # root reads a user's folder
    head = call(*git, "rev-parse", "--short", "HEAD", check=False).strip()
    changed = call(*git, "status", "--porcelain", "--untracked-files=no", check=False).strip()
    return (head + ("-dirty" if changed else "")) or None


def _blas(about):
    """What `tagc version` says that it computes products with."""
    found = re.search(r"^products: (.+), kernel (.+)$", about, re.MULTILINE)
    return {"name": found[1], "kernel": found[2]} if found else None


def _machine(n_hosts, about):
    system = _first_line("/etc/os-release", "PRETTY_NAME") or platform.system()
    return {
        "cpu": _first_line("/proc/cpuinfo", "model name") or platform.machine(),
        "n_cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": f"{system}, Linux {platform.release()}",
        "hosts": [f"h{host}" for host in range(1, n_hosts + 1)] if n_hosts > 1 else [platform.node()],
        "blas": _blas(about),
    }


def _busy_share(seconds=1):
    """Share of all cores that others use just now. (The load average remembers the experiment before this
    one.)"""

    def ticks():
        numbers = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:6]
        user, nice, system, idle, wait = map(int, numbers)
        return user + nice + system, user + nice + system + idle + wait

    busy, total = ticks()
    time.sleep(seconds)
    busy_now, total_now = ticks()
    return (busy_now - busy) / max(1, total_now - total)


def origin(command, tagc, n_hosts):
    """Where a result comes from, asked before the work. What in the environment changes the speed of the
    ranks is part of it, and what else the machine is doing."""
    busy = _busy_share()
    about = call(tagc, "version")
    telling = ("OPENBLAS_", "OMP_", "OMPI_MCA_", "GOTO_")
    return {
        "version": about.split()[1].rstrip(","),
        "commit": _commit(),
        "date": now_text(),
        "command": command,
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(telling)
        },
        "busy_before": busy,
        "is_busy": busy > 0.2,
        "machine": _machine(n_hosts, about),
    }


def spread(samples):
    ordered = sorted(samples)
    n = len(ordered)
    return {
        "median": (ordered[(n - 1) // 2] + ordered[n // 2]) / 2,
        "min": ordered[0],
        "max": ordered[-1],
        "n": n,
    }


def laid_out(value, indent=1):
    """Returns JSON in which an object or a list has one line if that is not too long, else a line for each of
    its members."""
    text = json.dumps(value, separators=(",", ":"))
    if len(text) <= MOST_IN_A_LINE or not isinstance(value, (dict, list)):
        return text
    start, end = "{}" if isinstance(value, dict) else "[]"
    members = (
        [f"{json.dumps(name)}:{laid_out(item, indent + 1)}" for name, item in value.items()]
        if isinstance(value, dict)
        else [laid_out(item, indent + 1) for item in value]
    )
    lines = f",\n{' ' * indent}".join(members)
    return f"{start}\n{' ' * indent}{lines}\n{' ' * (indent - 1)}{end}"


def write(path, result):
    write_atomically(path, laid_out(result) + "\n")


def load(path):
    """Returns what the file says that it holds, and that: "lab", "torch-quality", another word, or None."""
    try:
        found = json.loads(pathlib.Path(path).read_text())
    except OSError as error:
        raise LabError(f"{path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LabError(f"{path} is no JSON: {error}") from None
    return found.get("type") if isinstance(found, dict) else None, found


def read(path):
    """Returns a result of the lab, or raises an error that names the file."""
    kind, result = load(path)
    if kind != "lab" or not isinstance(result, dict):
        raise LabError(f'{path} is no result of the lab: its "type" is not "lab"')
    if result.get("format") != 1:
        raise LabError(f'{path}: "format" is {result.get("format")!r}, allowed: 1')
    for member in ("experiment", "title", "origin", "settings", "cases"):
        if member not in result:
            raise LabError(f'{path}: the member "{member}" is missing')
    return result


def read_metrics(path):
    """The metrics of a run of `tagc train`: its first line, its steps, its validation losses."""
    about, steps, evals = {}, [], []
    for line in pathlib.Path(path).read_text().splitlines():
        entry = json.loads(line)
        if entry["type"] == "run":
            about = entry
        elif entry["type"] == "step":
            steps.append(entry)
        elif entry["type"] == "eval":
            evals.append({"step": entry["step"], "val_loss": entry["val_loss"]})
    if not steps:
        raise LabError(f"{path} holds no steps")
    return about, steps, evals


def run_summary(path):
    """The part of a run that a result stores. Bits are before the factor (W-1)/W."""
    about, steps, evals = read_metrics(path)
    world_size = about["world_size"]
    whole = world_size / (world_size - 1) if world_size > 1 else 0
    mean_bytes = {leg: sum(step["n_bytes_sent"][leg] for step in steps) / len(steps) for leg in LEGS}
    unions = [step["n_union"] for step in steps]
    return {
        "world_size": world_size,
        "n_params": about["n_params"],
        "n_compressed": about["n_compressed"],
        "n_union": sum(unions) / len(unions),
        "n_bytes_sent": mean_bytes,
        "n_steps": len(steps),
        "bits_per_param": {leg: mean_bytes[leg] * 8 * whole / about["n_params"] for leg in LEGS},
        "total_s": spread([step["total_s"] for step in steps]),
        "evals": evals,
        "options": about["options"],
    }
