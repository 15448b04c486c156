"""Statistics of a step against what the connection counted, and against sums made here."""

import json
import threading

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from models import Even, batch_of, loss_of
from wrappers import present, wrapped

from tagc import _library as lib


def numbers_only(value):
    if isinstance(value, dict):
        return all(isinstance(key, str) and numbers_only(inner) for key, inner in value.items())
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def counted(handle):
    """Bytes by leg, of all connections."""
    comms = [*handle.passes._comms.values(), *handle.passes._gather_comms.values()]
    return {leg: sum(comm.bytes_sent()[leg] for comm in comms) for leg in lib.LEGS}


def check_step(kind, world_size, options):
    import tagc.torch as tagc

    rank = dist.get_rank()
    model = wrapped(kind)
    seen = []
    with tagc.compress(model, verbose=False, on_step=seen.append, **tagc.grouped(options)) as handle:
        assert handle.stats() == {}
        for step in range(3):  # DDP makes its buckets anew, and units their reducers
            before = counted(handle)
            model.zero_grad()
            loss_of(model, batch_of(rank, step)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01 * torch.ones_like(parameter))
        stats, after = handle.stats(), counted(handle)
        assert len(seen) == 3 and seen[-1] == stats and [s["step"] for s in seen] == [1, 2, 3]
        assert numbers_only(stats) and json.loads(json.dumps(stats)) == stats
        sent = {leg: after[leg] - before[leg] for leg in after}
        assert stats["bytes_by_leg"] == sent, (kind, options)
        assert stats["bytes_sent"] == sum(sent.values()) > 0
        everyone = [None] * world_size
        dist.all_gather_object(everyone, stats)
        assert sum(s["bytes_sent"] for s in everyone) == sum(s["bytes_received"] for s in everyone)
        n = sum(p.numel() for p in Even().parameters())  # even: no padding, but that of FSDP1
        assert n <= stats["n_elems"] < n + 64 and stats["world_size"] == world_size
        assert stats["n_units"] == (3 if kind != "ddp" else 1)
        share = (world_size - 1) / world_size
        assert stats["dense_bytes"] == pytest.approx(
            (2 if kind == "ddp" else 1) * 4 * stats["n_elems"] * share
        )
        for_gradients = (
            stats["bytes_sent"]
            - sent["gather"]
            - (control_of_gathers(stats, world_size) if sent["gather"] else 0)
        )
        assert stats["bits_per_param"] == pytest.approx(8 * for_gradients / stats["n_elems"] / share)
        assert stats["ratio"] == pytest.approx(stats["dense_bytes"] / for_gradients)
        words = repr(handle)
        assert all(
            word in words
            for word in (
                type(model).__name__,
                kind,
                f"{world_size} ranks",
                "exchanges so far: 3",
                f"{stats['bits_per_param']:.3g} bits",
                handle.table().splitlines()[-1],
            )
        ), words
        assert len(words.splitlines()) == 1
        assert (
            stats["exchange_s"] > 0
            # exchanges of libtagc's alone agree in their own messages
            and (stats["agree_s"] > 0) == ("parameters" in options)
            and stats["n_nonfinite"] == 0
            and not stats["nonfinite_units"]
        )
        assert (
            all(0 <= seconds < 100 for seconds in stats["time_s"].values())
            and sum(stats["time_s"].values()) > 0
        )
        stats["bytes_sent"] = -1
        assert handle.stats()["bytes_sent"] > 0, "not a copy"
        return handle.stats()


def control_of_gathers(stats, world_size):
    n_gathers = 6  # three modules, before forward and before backward; but the root is kept
    return 64 * (world_size - 1) * (n_gathers - 1)


def values_of_a_step(rank, world_size):
    n = sum(p.numel() for p in Even().parameters())
    for kind in present(("fsdp2", "ddp", "fsdp1")):
        stats = check_step(kind, world_size, dict(layers="all", sparsity=0.9))
        assert stats["n_compressed"] == n
        # under DDP a rank's own row counts by its sums, of which 2.4 times as many travel
        least = 0.82 if kind == "ddp" else 0.89
        assert least < stats["sparsity"] < 0.93, stats["sparsity"]
        assert stats["ratio"] > 2 and 0.5 < stats["bits_per_param"] < 32, stats
        stats = check_step(kind, world_size, dict(sparsity=0, layers="none"))
        assert stats["n_compressed"] == 0 and stats["sparsity"] == 0.0
        assert 0.9 < stats["ratio"] < 1.001, stats["ratio"]
    stats = check_step("fsdp2", world_size, dict(layers="all", sparsity=0, values="fp32"))
    assert stats["sparsity"] == 0.0 and 0.9 < stats["ratio"] <= 1.0, stats
    by_gloo, stats = (
        check_step(
            "fsdp2", world_size, dict(layers="all", sparsity=0.9, parameters="int8", transport=transport)
        )
        for transport in ("gloo", "native")
    )
    for leg in ("index", "gather", "control"):  # native pads the others
        assert by_gloo["bytes_by_leg"][leg] == stats["bytes_by_leg"][leg] > 0
    assert stats["gather_s"] > 0 and 8 < stats["gather_bits"] < 9.2, stats[
        "gather_bits"
    ]  # with words of units
    assert stats["n_gathered"] % n == 0 or stats["n_gathered"] > n


def test_flat_numbers():
    """For loggers: no dict is left, no number is lost, and no name is there twice."""
    from tagc.torch import flat
    from tagc.torch.statistics import Recorder

    stats = Recorder().end(3, 2.0) | {"nonfinite_units": {"h.0": 1}}
    found = flat(stats)
    assert (
        found["tagc/step"] == 3
        and found["tagc/loss_scale"] == 2.0
        and "tagc/time_s/encode" in found
        and "tagc/bytes_by_leg/index" in found
    )
    inner = {
        key: value for key, value in stats.items() if isinstance(value, dict) and key != "nonfinite_units"
    }
    assert len(found) == len(stats) - len(inner) - 1 + sum(map(len, inner.values())) and not any(
        "h.0" in key for key in found
    )
    assert all(isinstance(value, (int, float)) for value in found.values()) and set(flat(stats, "")) == {
        key[5:] for key in found
    }


def while_training(rank, world_size):
    """From another thread; and what a callback raises reaches the user, and does no harm."""
    import tagc.torch as tagc

    model = wrapped("fsdp2")
    handle = tagc.compress(model, layers="all", sparsity=0.9, verbose=False)
    found, done = [], threading.Event()

    def look():
        while not done.is_set():
            found.append(handle.stats().get("step", 0))

    thread = threading.Thread(target=look)
    thread.start()
    for step in range(4):
        loss_of(model, batch_of(rank, step)).backward()
    done.set()
    thread.join()
    assert found == sorted(found) and set(found) <= set(range(5))

    def fails(stats):
        raise KeyError("the logger's own")

    handle.passes.on_step = fails
    with pytest.raises(KeyError, match="the logger's own"):
        loss_of(model, batch_of(rank)).backward()
    handle.passes.on_step = None
    loss_of(model, batch_of(rank)).backward()
    assert handle.stats()["step"] == handle.n_steps == 6
    x, y = batch_of(rank)
    loss_of(model, (x * float("nan") if rank else x, y)).backward()
    assert handle.stats()["n_nonfinite"] == 3 and set(handle.stats()["nonfinite_units"]) == set(
        handle.state.units
    )
    handle.close()


def accumulated(rank, world_size):
    """One dict for each backward pass that exchanges, none for the others."""
    import tagc.torch as tagc

    model, seen = wrapped("fsdp2"), []
    with tagc.compress(model, verbose=False, on_step=seen.append):
        for step in range(4):
            model.set_requires_gradient_sync(step % 2 == 1)
            loss_of(model, batch_of(rank, step)).backward()
    assert [stats["step"] for stats in seen] == [1, 2]
    assert seen[0]["n_elems"] == seen[1]["n_elems"] and seen[0]["n_units"] == 3


@pytest.mark.parametrize("world_size", [2, 4])
def test_statistics(world_size):
    ranks.run_each([values_of_a_step, while_training, accumulated][: 3 if world_size == 2 else 1], world_size)
