"""compress() and advise() on some ranks only: the others hear which, soon, and nothing of
torch's is touched."""

import os
import time

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from models import batch_of, loss_of
from wrappers import wrapped

TIMEOUT_S = 3


def store():
    """By which ranks tell each other what has happened, so that no test depends on how fast they are."""
    from tagc.torch.exchange import internals

    return internals.default_store()


def calls_of(kind, options):
    """What a user calls, by its name in the message, and the model. options: read at each call."""
    import tagc.torch as tagc

    model = wrapped(kind)
    calls = {
        "compress()": lambda: tagc.compress(model, **options),
        "advise()": lambda: tagc.advise(model, seconds=0.5, **options),
    }
    return calls | ({"ddp_state()": lambda: tagc.ddp_state(model, **options)} if kind == "ddp" else {}), model


def one_does_not_call(rank, world_size, kind, calls_of=calls_of):
    """Rank 1 goes on to its forward pass instead, whose collectives meet nothing of tagc's. When the others
    have given up, they come to the same, and training goes on without tagc."""
    import tagc.torch as tagc

    options = dict(verbose=False, timeout_s=TIMEOUT_S)
    calls, model = calls_of(kind, options)
    silent = world_size - 1
    for name, call in calls.items():
        if rank != silent:
            begin = time.monotonic()
            with pytest.raises(tagc.Error) as raised:
                call()
            assert str(raised.value).startswith(f"rank {silent} has not called {name} within 3 s: every rank")
            assert raised.value.status == "transport" and time.monotonic() - begin < 30
        if model is None:
            dist.barrier()
        else:
            loss_of(model, batch_of(rank)).backward()
    options["timeout_s"] = 100
    for name, call in calls.items():  # and called on all of them, each works
        if name != "compress()":
            handle = call()
            if name == "ddp_state()":
                handle = handle.handle
            if hasattr(handle, "close"):
                handle.close()


def test_one_does_not_call():
    ranks.run(one_does_not_call, 2, "fsdp2")


@pytest.mark.slow
def test_one_of_three_does_not_call():
    ranks.run(one_does_not_call, 3, "ddp")


def late(rank, world_size):
    """A rank that comes after the others have given up waits for them to call again."""
    import tagc.torch as tagc

    model = wrapped("fsdp2")
    if rank == 0:
        with pytest.raises(tagc.Error, match="^rank 1 has not called compress"):
            tagc.compress(model, verbose=False, timeout_s=1)
        store().set("rank 0 has given up", "")
        tagc.compress(model, verbose=False, timeout_s=60).close()
    else:
        store().wait(["rank 0 has given up"])
        tagc.compress(model, verbose=False, timeout_s=60).close()


def different_calls(rank, world_size):
    import tagc.torch as tagc

    model = wrapped("ddp")
    with pytest.raises(tagc.Error, match=r"rank 0 has called compress\(\), and rank 1 has called advise\(\)"):
        (tagc.advise if rank else tagc.compress)(model, verbose=False)


def again_and_again(rank, world_size):
    """Ranks do not wait for each other at the end of a call, so one may be a call ahead."""
    from tagc.torch.exchange.arrivals import meet

    for call in range(200):
        if rank == call % world_size:
            time.sleep(0.002)
        meet(dist.group.WORLD, "it", 20)


def own_failure_first(rank, world_size):
    """Where one rank fails and the others never come, it raises what was wrong on itself."""
    import tagc.torch as tagc

    if rank == 0:
        with pytest.raises(tagc.Error, match="^sparsity is 7"):
            tagc.compress(wrapped("ddp"), sparsity=7, timeout_s=1)
    else:
        wrapped("ddp")
    dist.barrier()


def a_warning_comes_first(rank, world_size, patience_s=0.1):
    import tagc.torch as tagc
    from tagc.torch.exchange import arrivals

    def warn(*arguments, warned=arrivals._warn):
        warned(*arguments)
        store().set("rank 0 has warned", "")

    arrivals.PATIENCE_S, arrivals._warn, model = patience_s, warn, wrapped("ddp")
    if rank == 1:
        store().wait(["rank 0 has warned"])
        tagc.compress(model, verbose=False).close()
    else:
        with pytest.warns(UserWarning, match=r"rank 1 has not called compress\(\) yet; .* up to 1800 s"):
            tagc.compress(model, verbose=False).close()


def test_two_ranks():
    ranks.run_each([late, different_calls, again_and_again, own_failure_first, a_warning_comes_first], 2)


def test_three_ranks_again_and_again():
    ranks.run(again_and_again, 3)


# ---- ranks that end within torch's own collectives ----


def ends_in_a_gather(rank, world_size):
    import tagc.torch as tagc

    model = wrapped("fsdp2")
    tagc.compress(model, verbose=False, timeout_s=5)
    loss_of(model, batch_of(rank)).backward()
    if rank == 1:
        os._exit(0)
    with pytest.raises((RuntimeError, tagc.Error)):  # torch's own, or that of the exchange behind it
        for step in range(3):
            loss_of(model, batch_of(rank, step)).backward()
    time.sleep(2)  # rank 0 has the store
    os._exit(0)


def test_a_rank_that_ends_ends_the_others():
    outcomes = ranks.attempt(ends_in_a_gather, 2)
    assert outcomes == [(None, "ended with 0")] * 2, outcomes
