"""Kind "torch": a program of studies/ as one process for each rank, inside the hosts; and the table of what
torch_bench.py found."""

import json
import os
import pathlib
import socket
import subprocess

import cells
import hosts
import results
from common import ROOT, LabError

STUDIES = ROOT / "lab" / "studies"
PROGRAMS = {"pipeline": "pipeline_bench.py"}  # of a table; of others torch_bench.py
PORT = 29500  # of rank 0's host, whose ports are its own
FILLED = 0.85  # what an exchange should reach of plain TCP, or a ratio to it flatters


# ---- running ----


def find_python(given):
    """An interpreter with torch: --python, $TAGC_PYTHON, or the one that the Python tests use."""
    found = given or os.environ.get("TAGC_PYTHON")
    if not found:
        done = subprocess.run([ROOT / "scripts" / "python.sh", "find"], capture_output=True, text=True)
        if done.returncode != 0:
            raise LabError(
                f"this experiment needs a Python with torch: {(done.stderr or done.stdout).strip()}; "
                "--python or "
                "TAGC_PYTHON names another one"
            )
        found = done.stdout.strip()
    done = (
        subprocess.run([found, "-c", "import torch"], capture_output=True, text=True)
        if os.access(found, os.X_OK)
        else None
    )
    if done is None or done.returncode != 0:
        why = "no program" if done is None else (done.stderr.strip().splitlines() or ["it failed"])[-1]
        raise LabError(f"{found} cannot be used as a Python with torch: {why}")
    return found


def library_beside(tagc):
    path = pathlib.Path(tagc).parent / "libtagc.so"
    if not path.exists():
        raise LabError(f"{path} is not there, which the Python part loads; make build makes it")
    return path


def commands(program, case, network, python, tagc, options, json_path):
    """The words of every rank, rank 0 first."""
    interface, address = ("eth0", hosts.address(1)) if network else ("lo", "127.0.0.1")
    made = []
    shared = {
        "WORLD_SIZE": case.world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": PORT if network else _free_port(),
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": case.options.get("threads", 1),
        "TAGC_LIBRARY": library_beside(tagc),
        "PYTHONDONTWRITEBYTECODE": 1,
    }
    words = [
        python,
        STUDIES / program,
        f"--arms={','.join(case.arms)}",
        *options,
        f"--interface={interface}",
        f"--json={json_path}",
    ]
    for rank in range(case.world_size):
        own = shared | {"RANK": rank, "LOCAL_RANK": rank % case.ranks_per_host}
        rank_words = ["env", *(f"{name}={value}" for name, value in own.items()), *words]
        made.append(network.inside(1 + rank // case.ranks_per_host, *rank_words) if network else rank_words)
    return made


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(runner, case, network, options):
    path = runner.scratch / "torch.json"
    path.unlink(missing_ok=True)
    program = PROGRAMS.get(runner.experiment.table, "torch_bench.py")
    words = commands(program, case, network, runner.python, runner.tagc, options, path)
    runner.run_all(words, network, shows=True)
    try:
        return {"torch": json.loads(path.read_text())}
    except (OSError, json.JSONDecodeError) as error:
        raise LabError(f"{program} ended well, but its result cannot be read: {error}") from None


# ---- the table ----


def markdown(result):
    many = len(result["cases"]) > 1
    parts = []
    for case in result["cases"]:
        text = _arms(result, case) + "\n" + _exchanges(case)
        parts.append((f"**{cells.case_text(case)}**\n\n" if many else "") + text)
    return "\n".join(parts)


def _arms(result, case):
    found = case["torch"]
    arms = {arm["name"]: arm for arm in found["arms"]}
    rows, forecasts = [], _forecasts(found)
    for arm in arms.values():
        needed = cells.number(arm["n_bytes_needed"] and arm["n_bytes_needed"] / 1e6, 2)
        rows.append(
            [
                f"`{arm['name']}`: {arm['about']}",
                cells.seconds(arm["total_s"]),
                cells.number(forecasts.get(arm["name"]), 2, " s"),
                cells.number(arm["n_bytes_sent"] and arm["n_bytes_sent"] / 1e6, 2),
                needed,
            ]
        )
    head = ["arm", "iteration", "forecast by advise()", "MB sent by a rank, counted", "that torch must send"]
    text = cells.grid(head, rows)
    pairs = result["settings"].get("pairs") or [[next(iter(arms)), name] for name in list(arms)[1:]]
    rows = []
    for slow, fast in pairs:
        if slow in arms and fast in arms:
            samples = cells.ratios(arms[slow], arms[fast])
            rows.append(
                [
                    f"`{fast}` against `{slow}`",
                    cells.spread_text(results.spread(samples), 2, "x"),
                    cells.verdict(samples, cells.noise(found), _bytes_ratio(arms[slow], arms[fast])),
                ]
            )
    text += "\n" + cells.grid(["pair", "how many times as fast, per round", ""], rows)
    model = found["model"]
    text += (
        f"\n{cells.case_text(case)}; GPT of {model['n_params'] / 1e6:.1f} M parameters, {found['seq_len']} "
        "tokens a rank and "
        f"step, computing alone {1e3 * found['compute_s']:.0f} ms; sparsity {100 * found['sparsity']:g} %; "
        f"torch {found['torch']}, gloo."
    )
    text += f" {cells.link_text(case['link'])}.\n" if case["link"] else "\n"
    return text + (f"\nadvise(): {found['advice']['reason']}.\n" if found["advice"] else "")


def _bytes_ratio(slow, fast):
    """None where one of them is not known."""
    sent = slow["n_bytes_sent"], fast["n_bytes_sent"]
    return sent[0] / sent[1] if all(sent) else None


def _forecasts(found):
    """Arm -> seconds of a step that advise() expected, where it has a row for it."""
    if not found["advice"] or found["advice"]["wrap"] != "fsdp2":
        return {}
    made = {}
    own = {"": "fsdp2", "reduce": "fsdp2-bf16-reduce", "reduce,param": "fsdp2-bf16"}
    for row in found["advice"]["rows"]:
        if row["choice"] == "off":
            made[own[",".join(row["torch"])]] = row["step_s"]
        elif row["options"].get("exchange") == "dense":
            made |= {"fsdp2-tagc-dense": row["step_s"]} if "parameters" in row["options"] else {}
        elif row["options"]["sparsity"] == found["sparsity"]:
            name = {None: "fsdp2-tagc", "delta4": "fsdp2-tagc-delta4"}.get(row["options"].get("parameters"))
            made |= {name: row["step_s"]} if name else {}
    return made


def _exchanges(case):
    found = case["torch"]["exchanges"]
    if not found:
        return ""
    plain = min(case["link"]["tcp_both_ways_bits_per_s"]) if case["link"] else None
    rows, notes = [], []
    for item in found:
        rate, sent = 8 * item["bytes_per_s"], item["n_bytes_sent"]
        megabytes = [cells.number(n and n / 1e6, 2) for n in (item["n_bytes_needed"], sent)]
        rows.append(
            [
                item["name"],
                cells.seconds(cells.only(item["total_s"]["median"])),
                *megabytes,
                f"{rate / 1e6:.0f}",
                cells.number(plain and 100 * rate / plain, 0, " %"),
            ]
        )
        if plain and item["name"].startswith("torch"):
            if rate < FILLED * plain:
                notes.append(f"{item['name']} fills {100 * rate / plain:.0f} % of what plain TCP gets")
            if sent and sent > 1.2 * item["n_bytes_needed"]:
                notes.append(f"{item['name']} sends {sent / item['n_bytes_needed']:.1f} times what it must")
    text = cells.grid(
        ["one exchange at a time", "seconds", "MB needed", "MB sent", "Mbit/s", "of plain TCP"], rows
    )
    if notes:
        text += (
            f"\nNote: {'; '.join(notes)}: torch's own arms are a weak baseline. "
            "The arms `fsdp2-tagc-dense` send what is needed, fill the link, and are the stricter baseline.\n"
        )
    return text
