"""Runs the scripts of run_scripts/ as two ranks, under `python -m tagc run` and as they are, for test_run.py
and test_run_trainers.py. Ranks are forks with what torchrun sets."""

import contextlib
import faulthandler
import json
import multiprocessing.connection
import os
import pathlib
import re
import runpy
import signal
import sys
import time

import ranks
import torch

from tagc.commands import main

SCRIPTS = pathlib.Path(__file__).parent / "run_scripts"
TRIAL = ("--even-on-one-host",)
SELECTING = (*TRIAL, "--sparsity", "0.9", "--values", "fp32")
# Ranks hang if together they use less of a processor than this, for so long. A loaded machine is slow: there
# a trainer's imports alone take minutes.
PATIENCE_S, IDLE_S = 100, 0.5


def rank_main(words, folder, environment, output):
    """One rank: words of `tagc run`, or a script as it is."""
    os.environ.update(environment)
    os.chdir(folder)
    to = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(to, 1)
    os.dup2(to, 2)
    faulthandler.register(signal.SIGUSR1, file=to)
    torch.set_num_threads(1)
    code = 0
    # What the script made stays until the process ends, as under `tagc run`. If DDP's reducer has the last
    # process group, as where a script destroys the group before its model, then freeing it waits for gloo's
    # threads and holds the GIL, and such a thread may need it to free a tensor.
    kept = {}
    try:
        if words[0] == "run":
            sys.path[0] = str(folder)
            code = main.main(words)
        else:
            sys.path[0], sys.argv = os.path.dirname(words[0]), list(words)
            kept = runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def started(folder, *words, n=2):
    """Returns what the ranks print. Their store is here, as torchrun's is in its agent."""
    store, output = ranks._store(), folder / f"output{time.monotonic_ns()}"
    environment = {
        "WORLD_SIZE": f"{n}", "LOCAL_WORLD_SIZE": f"{n}", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{store.port}", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none",
        "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0", "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    processes = [
        ranks.fresh().Process(
            target=rank_main,
            args=(words, folder, environment | {"RANK": f"{r}", "LOCAL_RANK": f"{r}"}, output),
        )
        for r in range(n)
    ]
    for process in processes:
        process.start()
    used, since = 0.0, time.monotonic()
    while (
        any(p.is_alive() for p in processes)
        and not any(p.exitcode for p in processes)
        and time.monotonic() < since + PATIENCE_S
    ):
        multiprocessing.connection.wait([p.sentinel for p in processes if p.is_alive()], 1)
        now = sum(map(used_s, processes))
        if now > used + IDLE_S:
            used, since = now, time.monotonic()
        used = min(used, now)  # a rank that has ended counts no more
    left = [process for process in processes if process.is_alive()]
    hang = "" if any(process.exitcode for process in processes) else "".join(map(stacks, left))
    for process in left:  # as torchrun does, if one has failed
        process.kill()
    for process in processes:
        process.join()
    text = output.read_text()
    assert not left and not any(process.exitcode for process in processes), text + hang
    return text


def used_s(process):
    """Returns the seconds of processors that a rank has used; 0 if it has ended."""
    with contextlib.suppress(OSError):
        fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def stacks(process):
    """Writes the Python stacks of a rank that hangs into its output, and returns in which call of the kernel
    each of its threads is."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1)  # a loaded machine may need more, and then the stacks are missing
    folder = pathlib.Path(f"/proc/{process.pid}/task")
    lines = [f"rank process {process.pid} has done nothing for {PATIENCE_S} s"]
    for task in sorted(folder.glob("*")):
        with contextlib.suppress(OSError):  # a thread that ends meanwhile
            lines.append(
                f"  thread {task.name}: {(task / 'comm').read_text().strip()}, {(task / 'wchan').read_text()}"
            )
    return "\n".join(["", *lines])


def ran(folder, options, script, *words):
    return started(folder, "run", *options, str(SCRIPTS / script), *words)


def plain(folder, script, *words):
    return started(folder, str(SCRIPTS / script), *words)


def losses(text):
    found = {int(step): loss for step, loss in re.findall(r"loss (\d+) (\S+)", text)}
    assert found, text
    return found


def furthest(some, others):
    assert some.keys() == others.keys()
    return max(abs(float(some[step]) - float(others[step])) / float(others[step]) for step in some)


def share_sent(path):
    """Of what gradients take uncompressed."""
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [step for step in steps if "bytes_sent" in step]
    return sum(step["bytes_sent"] for step in steps) / sum(step["dense_bytes"] for step in steps)


def check(folder, script, *words, off=True):
    """A script as it is; with --off, if that is asked for, the same bits; compressed, other losses that are
    near, from fewer bytes. Returns the losses of the script as it is."""
    expected = losses(plain(folder, script, *words))
    if off:
        text = ran(folder, ("--off",), script, *words)
        assert losses(text) == expected and "off: nothing is compressed" in text
    said = ran(folder, (*TRIAL, "--record", "record.jsonl"), script, *words)
    assert losses(said) != expected and furthest(losses(said), expected) < 0.1, (said, expected)
    assert share_sent(folder / "record.jsonl") < 0.45 and "this rank sent" in said
    return expected


def resumed(folder, script, saving, resuming, exact=True, forgets=True):
    """A run broken off at its checkpoint and resumed, beside the one that went on: the same bits, and other
    ones without the residuals (forgets)."""
    on = losses(ran(folder, SELECTING, script, *saving))
    text = ran(folder, SELECTING, script, *resuming)
    assert "residuals go on from" in text
    again = losses(text)
    assert 1 < len(again) < len(on)
    assert not exact or again == {step: on[step] for step in again}
    folders = [path for path in folder.rglob("*tagc") if path.is_dir()]
    assert folders and all((path / "0" / f"rank{r}.pt").is_file() for path in folders for r in range(2))
    if not forgets:
        return
    for path in folders:
        path.rename(path.with_name("elsewhere"))
    anew = ran(folder, SELECTING, script, *resuming)
    assert anew.count("residuals begin anew") == 1 and losses(anew) != again
