"""Runs an example as a user does: as several processes, by torchrun, or by what starts in less time."""

import os
import pathlib
import runpy
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


def as_main(rank, world_size, code, *arguments):
    """Runs a script, or a module by its name, in a rank of ranks.run() as torchrun would: it makes the
    process group itself. torchrun and its ranks import torch anew, which takes 9 processor seconds. door.py
    runs torchrun.

    The script's group and the last one get stores without keys of another: a rank that reads where its peer
    listened in an earlier group waits there for ever."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    scripts = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == 0 else None
    port = [scripts.port if scripts else None]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0]), "LOCAL_RANK": str(rank)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # it is there already
    sys.argv = [str(code), *map(str, arguments)]
    sys.path.insert(0, str(pathlib.Path(code).parent))
    try:
        (runpy.run_path if pathlib.Path(code).suffix else runpy.run_module)(str(code), run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.PrefixStore("after the script", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)  # which ranks.run() ends
