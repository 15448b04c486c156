"""Runs an example as a user does: as several processes, by torchrun."""

import os
import pathlib
import signal
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "pytorch"


def torchrun(script, *arguments, n_ranks=2, timeout_s=200, **environment):
    """(exit code, what it said). Nothing of it lives on, whatever happens."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(n_ranks),
        str(script),
    ]
    started = subprocess.Popen(
        [*command, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = started.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        started.send_signal(signal.SIGTERM)  # it ends its workers
        try:
            said, _ = started.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            said = ""
        raise AssertionError(f"{script} hangs after {timeout_s} s:\n{said}") from None
    finally:
        try:
            os.killpg(started.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return started.returncode, said
