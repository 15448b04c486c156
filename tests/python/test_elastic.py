"""Ranks come, stop and go under torchrun. All begin again from the newest checkpoint, with as many as there
are, unless a rank stops for less than the time-out."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")

WORKER = pathlib.Path(__file__).with_name("elastic_worker.py")
SMALL = [
    "--n-layer",
    1,
    "--n-embd",
    64,
    "--n-positions",
    32,
    "--batch-size",
    4,
    "--warmup",
    2,
    "--eval-batches",
    2,
    "--lr",
    1e-2,
]
# With the second one torch 2.13 lets hosts join later: the store that it shares tells its address in the
# first round alone.
SETTINGS = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TIMEOUT_S": "6"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Host:
    """A torchrun of one worker, as it would be on a host of its own."""

    def __init__(self, port, log, *script, **environment):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "1:2",
            "--nproc-per-node",
            "1",
            "--max-restarts",
            "3",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
            "--rdzv-id",
            "elastic",
            "--rdzv-conf",
            "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6",
            *map(str, script),
        ]
        self.log = log
        self._process = subprocess.Popen(
            command,
            env=os.environ | SETTINGS | environment,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, timeout_s):
        return self._process.wait(timeout_s)

    def is_running(self):
        return self._process.poll() is None

    def kill(self):
        """And what it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


def mean_residuals(notes, what, step, n_ranks):
    """name -> mean over ranks of what they wrote down."""
    each = [torch.load(notes / f"{what}-{step}-of-{n_ranks}-rank{rank}.pt") for rank in range(n_ranks)]
    return {name: sum(one[name].double() for one in each) / n_ranks for name in each[0]}


def check_same_residuals(notes, step, before, after):
    saved, loaded = mean_residuals(notes, "saved", step, before), mean_residuals(notes, "loaded", step, after)
    assert saved.keys() == loaded.keys() and any(values.any() for values in saved.values())
    for name, values in saved.items():
        torch.testing.assert_close(loaded[name], values, rtol=1e-5, atol=1e-9)


@pytest.mark.slow
def test_a_host_comes_stops_and_goes(tmp_path):
    """At the beginning of a step, the second host joins (5), stops for a second (6), stops for longer than
    the time-out (9), is killed (10)."""
    text, notes, save = tmp_path / "text.txt", tmp_path / "notes", tmp_path / "runs"
    text.write_bytes(b"".join(b"line %d of a text to learn\n" % (i * i % 997) for i in range(1000)))
    notes.mkdir()
    (save / "step-000099").mkdir(parents=True)  # a checkpoint that was never finished
    script = [
        WORKER,
        notes,
        "--wrap",
        "ddp",
        "--sparsity",
        0.9,
        "--data",
        text,
        *SMALL,
        "--steps",
        12,
        "--save-every",
        4,
        "--eval-every",
        4,
        "--save",
        save,
        "--resume",
        "newest",
    ]
    port = free_port()
    hosts = [Host(port, tmp_path / "host0.log", *script)]  # it keeps the rendezvous
    everything = lambda: "\n".join(f"--- {host.log.name}:\n{host.log.read_text()}" for host in hosts)
    try:
        end = time.monotonic() + 240
        while (
            not (save / "step-000004" / ".metadata").exists()
            and hosts[0].is_running()
            and time.monotonic() < end
        ):
            time.sleep(0.1)
        hosts.append(Host(port, tmp_path / "host1.log", *script, LEAVES="1"))
        assert hosts[0].wait(240) == 0, everything()
        assert not hosts[1].is_running(), everything()
    finally:
        for host in hosts:
            host.kill()
    said = everything()
    starts = re.findall(r"goes on at step (\d+)", said)
    # more if the machine was too busy for the time-out
    assert set(starts) == {"4", "8"} and starts.count("8") >= 2, said
    assert re.search("no answer from rank [01] within 6 s", said), said
    check_same_residuals(notes, 4, before=1, after=2)
    check_same_residuals(notes, 8, before=2, after=2)
    check_same_residuals(notes, 8, before=2, after=1)
    losses = {
        int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  evaluation loss ([\d.]+)", said)
    }
    assert losses.keys() == {3, 7, 11} and losses[3] > losses[7] > losses[11], said
