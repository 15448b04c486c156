"""Ranks as forks of one process that has imported torch and has called nothing of CUDA: a fresh import for
each would take what a lent machine has no time for."""

import datetime
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback

try:
    import torch
    import torch._dynamo  # torch does so itself when a model is wrapped: seconds, in each rank
    import torch.distributed as dist
except ImportError as problem:
    print(f"skipped: {problem}")
    sys.exit(77)


def run(function, n_ranks, limit_s, environment=(), arguments=()):
    """function(rank, *arguments) in each of n_ranks processes with torch.distributed over gloo, for arrays on
    the device, too. Returns what is wrong: "" or words. After limit_s all are killed."""
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.flush()
        ranks = [_fork(function, rank, n_ranks, folder, environment, arguments) for rank in range(n_ranks)]
        return _wait(ranks, limit_s)


def _fork(function, rank, n_ranks, folder, environment, arguments):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(n_ranks))
        # else names are looked up, perhaps without a network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{pathlib.Path(folder) / 'store'}",
            rank=rank,
            world_size=n_ranks,
            timeout=datetime.timedelta(seconds=60),
        )
        function(rank, *arguments)
        dist.barrier()
        code = 0
    except BaseException:
        sys.stdout.write(f"rank {rank}: {traceback.format_exc()}\n")
    sys.stdout.flush()
    os._exit(code)  # torch's threads may still hold what interpreters take apart


def _wait(ranks, limit_s):
    end, codes = time.monotonic() + limit_s, {}
    while len(codes) < len(ranks) and time.monotonic() < end and not any(codes.values()):
        for rank, pid in enumerate(ranks):
            if rank not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(found[1])
        time.sleep(0.02)
    left = [rank for rank in range(len(ranks)) if rank not in codes]
    is_late = bool(left) and not any(codes.values())
    if left and not is_late:
        time.sleep(1)  # for the words of the others
    for rank in left:
        os.kill(ranks[rank], signal.SIGKILL)
    _reap([ranks[rank] for rank in left])
    if is_late:
        return f"stopped after {limit_s:.0f} s"
    return "; ".join(f"rank {rank} ended with {code}" for rank, code in sorted(codes.items()) if code)


def _reap(pids, limit_s=5):
    """A process that the driver does not let go is left alone."""
    end = time.monotonic() + limit_s
    while pids and time.monotonic() < end:
        pids = [pid for pid in pids if not os.waitpid(pid, os.WNOHANG)[0]]
        time.sleep(0.02)
