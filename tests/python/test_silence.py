"""A rank that says nothing any more: every other one gets an Error within the time-out, wherever it waits,
and the rank itself does when it goes on."""

import datetime
import multiprocessing
import os
import signal
import time

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from models import batch_of, loss_of
from wrappers import wrapped

TIMEOUT_S = 3
PATIENCE_S = 60  # of the test: what a busy machine may take on top; without the time-out it is half an hour


def pause(rank):
    """Collective: the last rank stops. Returns what wakes it."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, os.getpid())
    if rank == len(everyone) - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return lambda: os.kill(everyone[-1], signal.SIGCONT)


# What the silent rank hears when it goes on: a peer's reason; its own clock, which ran meanwhile, where it
# waited already; or the end of a peer, where the store ended with it.
WOKEN = "gave up: no answer|no answer from rank|ended or cannot be reached|rank 0 left"


def silenced(rank, world_size, kind, place, options, words):
    """Ends the process with 0 where all is well: torch's own groups can only fail from here on."""
    import tagc.torch as tagc

    model = wrapped(kind)
    tagc.compress(model, timeout_s=TIMEOUT_S, verbose=False, **tagc.grouped(options))
    for step in range(2):
        loss_of(model, batch_of(rank, step)).backward()
    wake = pause(rank) if place == "forward" else None
    begin = time.monotonic()
    with pytest.raises(tagc.Error, match=words[rank]) as raised:
        loss = loss_of(model, batch_of(rank, 2))
        wake = wake or pause(rank)
        begin = time.monotonic()
        loss.backward()
    assert raised.value.status == ("timeout" if "no answer" in str(raised.value) else "transport")
    assert time.monotonic() - begin < TIMEOUT_S + PATIENCE_S
    if rank == 0:
        time.sleep(1)  # the others have noticed by then, and the silent one finds all of them gone
        wake()
    os._exit(0)


def check(world_size, *arguments):
    outcomes = ranks.attempt(silenced, world_size, *arguments)
    assert outcomes == [(None, "ended with 0")] * world_size, outcomes


def test_in_our_gather_under_fsdp2():
    check(2, "fsdp2", "forward", {"parameters": "delta4"}, ["no answer from rank 1 within 3 s", WOKEN])


@pytest.mark.slow
def test_in_a_reduction_under_ddp():
    words = "no answer from rank 2 within 3 s.* .leg"
    for transport in ("native", "gloo"):
        check(3, "ddp", "backward", {"transport": transport}, [words, words, WOKEN])


def gives_up(rank, world_size):
    """A rank that gives up by itself, as where its worker finds something that cannot be mended, tells the
    others."""
    import tagc.torch as tagc
    from tagc import _library as lib
    from tagc.torch.exchange.comm import Comm

    for transport in ("native", "gloo"):
        comm = Comm(dist.group.WORLD, 100, transport)
        begin = time.monotonic()
        if rank == world_size - 1:
            time.sleep(0.5)
            lib.load().tagc_comm_abort(comm.handle, b"the disk is full")
        with pytest.raises(tagc.Error, match=f"ank \\(?{world_size - 1}\\)? gave up: the disk is full"):
            for _ in range(3):
                comm.all_gather(bytes(8))
        assert time.monotonic() - begin < PATIENCE_S
        comm.close()


def rounds(rank, world_size):
    """Rounds on both sides of the length from which gloo sends them point to point."""
    from tagc.torch.exchange.comm import Comm
    from tagc.torch.exchange.gloo import COLLECTIVE_BYTES

    for transport in ("native", "gloo"):
        comm = Comm(dist.group.WORLD, 100, transport)
        assert comm.transport == transport
        for n_bytes in (1, 8, COLLECTIVE_BYTES - 1, COLLECTIVE_BYTES, COLLECTIVE_BYTES + 1, 300_000):
            everyone = comm.all_gather(bytes([rank + 1]) * n_bytes)
            assert everyone == [bytes([r + 1]) * n_bytes for r in range(world_size)], n_bytes
        comm.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_rounds_and_abort(world_size):
    ranks.run_each([rounds, gives_up], world_size)


OF_GROUP_S = 77.0


def torchs_reduce_scatter(rank, world_size):
    """As within a host under HSDP: gloo's own wait for it takes no time-out."""
    import tagc.torch as tagc
    from tagc.torch.exchange import waits

    group = dist.new_group()
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(tagc.Error, match="reduce-scatter.*no answer from rank 1 within 1 s") as raised:
            waits.ReduceScatter("a", 1.0)(torch.empty(2), torch.ones(4), group, dist.ReduceOp.SUM)
        assert raised.value.status == "timeout" and time.monotonic() - begin < PATIENCE_S
    dist.barrier()


def test_in_torchs_reduce_scatter():
    ranks.run(torchs_reduce_scatter, 2)


def timeouts_of_groups(rank, world_size):
    """Unless it is given, the time-out of all that tagc makes is that of the user's group, and not one that
    ends a job that may wait longer."""
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import tagc.torch as tagc

    group = dist.new_group(timeout=datetime.timedelta(seconds=OF_GROUP_S))
    of_world_s = torch.distributed.default_pg_timeout.total_seconds()
    mesh = DeviceMesh.from_group(group, "cpu")

    def seconds_of(comm):
        return comm._timeout_s

    for options, given_s in (({}, None), ({"timeout_s": 5}, 5)):
        for model, wanted_s in (
            (DistributedDataParallel(nn.Linear(8, 8)), of_world_s),
            (DistributedDataParallel(nn.Linear(8, 8), process_group=group), OF_GROUP_S),
            (fully_shard(nn.Linear(8, 8), mesh=mesh), OF_GROUP_S),
        ):
            with tagc.compress(model, verbose=False, **tagc.grouped(options)) as handle:
                assert {seconds_of(comm) for comm in handle.passes.comms()} == {given_s or wanted_s}


def patience_of_a_group(rank, world_size):
    """A rank that comes later than the group's time-out is an Error on the others; one that comes earlier is
    awaited."""
    from torch.nn.parallel import DistributedDataParallel

    import tagc.torch as tagc

    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    model = DistributedDataParallel(torch.nn.Linear(8, 8), process_group=group)
    if rank == 0:
        with pytest.raises(tagc.Error, match=f"rank 1 has not called compress.. within {TIMEOUT_S} s"):
            tagc.compress(model)
    dist.barrier()
    with tagc.compress(model, verbose=False):
        dist.barrier()


@pytest.mark.parametrize("function", [timeouts_of_groups, patience_of_a_group])
def test_timeouts_are_the_groups(function):
    ranks.run(function, 2)


def connects(port, rank, numbers, took):
    """Makes connections of three ranks until one fails, and says how long that one took."""
    from tagc.torch.exchange.gloo import Gloo

    second = datetime.timedelta(seconds=1)
    store = dist.TCPStore("127.0.0.1", port, None, False, PATIENCE_S * second, wait_for_workers=False)
    timeout_s, kept = TIMEOUT_S if rank < 2 else PATIENCE_S, []  # what is connected must not end
    try:
        for number in numbers:
            begin = time.monotonic()
            kept.append(Gloo(dist.PrefixStore(str(number), store), rank, (0, 1, 2), timeout_s))
    except RuntimeError:
        took.put(time.monotonic() - begin)
    time.sleep(2 * PATIENCE_S)


def test_while_it_connects(monkeypatch):
    """Rank 2 has said in the store where it listens, and stops before the others come. Gloo itself waits for
    it five times as long. By chance it is for rank 2 to call them, or they need nothing of it to connect; so
    there are several connections."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("fork")
    store, took = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), context.Queue()
    processes = []

    def start(rank, *numbers):
        words = store.port, rank, numbers, took
        processes.append(context.Process(target=connects, args=words))
        processes[-1].start()

    try:
        for number in range(8):
            for rank in range(2):
                store.set(f"{number}/came {rank}", "")
            start(2, number)
        store.wait([f"{number}/came 2" for number in range(8)])
        time.sleep(0.5)  # until they listen
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        start(0, *range(8))
        start(1, *range(8))
        assert max(took.get(timeout=2 * PATIENCE_S) for _ in range(2)) < 4 * TIMEOUT_S
    finally:
        for process in processes:
            process.kill()
            process.join()
