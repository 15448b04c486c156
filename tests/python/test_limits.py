"""A rank at the limits of its host: no file descriptors left, a full disk."""

import os
import resource
import signal
import time

import pytest

torch = pytest.importorskip("torch")
import ranks
from oracles import check_error
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def no_file_descriptors(rank, world_size):
    """Of one rank: all raise the same Error at once, which names it, and none waits for its time to end."""
    import tagc.torch as tagc

    model = DistributedDataParallel(nn.Linear(128, 128))
    held = []
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))  # a soft limit alone would be raised
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            for _ in range(3):
                os.close(held.pop())
    begin = time.monotonic()
    check_error(
        lambda: tagc.compress(model, verbose=False, timeout_s=60),
        r"no connection can be made: rank 1: Too many open files: .* and 3 are free",
    )
    assert time.monotonic() - begin < 20
    for file in held:
        os.close(file)
    with tagc.compress(model, verbose=False):
        model(torch.ones(1, 128)).sum().backward()


def a_full_disk(rank, world_size, folder):
    """save() names the file, leaves nothing of it, and keeps what was saved before."""
    import tagc.torch as tagc

    model = DistributedDataParallel(nn.Linear(256, 256))
    with tagc.compress(model, verbose=False) as handle:
        model(torch.ones(1, 256)).sum().backward()
        handle.save(folder)
        before = sorted(os.listdir(folder))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        check_error(lambda: handle.save(folder), f"rank{rank}.part cannot be written", same=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert sorted(os.listdir(folder)) == before
        handle.load(folder)
        check_error(lambda: handle.save("/proc/nothing"), "/proc/nothing cannot be made", same=False)


def test_file_descriptors():
    ranks.run(no_file_descriptors, 3)


def test_a_full_disk(tmp_path):
    ranks.run(a_full_disk, 1, str(tmp_path / "state"))
