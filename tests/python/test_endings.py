"""The end of a process: no thread of tagc is left in torch's calls, where Python would end it by force and
abort the process."""

import atexit
import contextlib
import ctypes
import gc
import os
import pathlib
import re
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tagc._library import Error


def ends_in_the_middle(rank, world_size):
    """Rank 0 ends while its exchange waits for rank 1, in the thread of DDP's buckets and in libtagc's."""
    import tagc.torch as tagc
    from tagc.torch.exchange import endings

    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    handle = tagc.compress(model, sparsity=0, verbose=False, timeout_s=60)
    model(torch.ones(2, 64)).sum().backward()
    (comm,) = handle.passes._comms.values()
    if rank == 0:

        def exchange():
            with contextlib.suppress(tagc.Error):
                comm.agree("what comes", {"number": 1})

        handle.passes.runners.host.future(exchange)
        begin = time.monotonic()
        while comm.wait(0) and time.monotonic() - begin < 10:
            time.sleep(0.01)
        assert not comm.wait(0), "this test shows nothing if nothing is under way"
        begin = time.monotonic()
        endings.end()
        assert time.monotonic() - begin < endings.PATIENCE_S, "it has not waited in vain"
        assert comm.wait(0)
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("tagc-")]
        assert not left, left
    dist.barrier()
    if rank == 1:
        with pytest.raises(tagc.Error, match="rank 0.*its process ends"):
            for _ in range(2):  # rank 0 may have said all of the first
                comm.agree("what comes", {"number": 1})


def test_the_end():
    ranks.run(ends_in_the_middle, 2)


def ends_without_a_word(rank, world_size, folder):
    from tagc.torch.exchange.comm import Comm

    comm = Comm(dist.group.WORLD, 60, "native")
    if rank == 0:
        child = os.fork()
        if child == 0:  # as multiprocessing ends a data loader's worker
            atexit._run_exitfuncs()
            del comm
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    if rank == 2:  # as a data loader's worker that outlives it
        child = os.fork()
        if child == 0:
            time.sleep(100)
            os._exit(0)
        (pathlib.Path(folder) / "fork").write_text(str(child))
    comm.all_gather(b"all are there")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        comm.all_gather(b"rank 2 is not")
    except Error as failure:
        (pathlib.Path(folder) / str(rank)).write_text(str(failure))
        assert time.monotonic() - begin < 50, "the fork kept the connections"
    atexit._run_exitfuncs()
    ctypes.CDLL(None).exit(0)  # as Python ends, with libtagc's threads running


def test_a_fork_a_kill_and_exits_without_a_word(tmp_path):
    """A fork that ends takes nothing with it. A rank that is killed is named by both others, although a fork
    of it lives; then they end without destroying anything."""
    outcomes = ranks.attempt(ends_without_a_word, 3, str(tmp_path))
    os.kill(int((tmp_path / "fork").read_text()), signal.SIGKILL)  # it lived until now
    assert [outcome[1] for outcome in outcomes] == ["ended with 0", "ended with 0", "ended with -9"], outcomes
    for rank in range(2):
        assert re.fullmatch(
            r"(rank [01] gave up: )?rank 2 ended or cannot be reached any more: .* \(while ranks agreed\)",
            (tmp_path / str(rank)).read_text(),
        )
