"""The end of a process: no thread of tagc is left in torch's calls, where Python would end it by force and
abort the process."""

import contextlib
import threading
import time

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


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
