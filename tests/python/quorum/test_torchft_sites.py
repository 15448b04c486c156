"""Local steps under torchft: sites are killed, come and fail alone, and nothing of a survivor's
pseudo-gradients is lost."""

import concurrent.futures
import copy
import datetime
import os
import pickle
import signal
import time

import pytest

pytest.importorskip("torchft", reason="torchft is not installed")  # imports torch
torch = pytest.importorskip("torch")
LocalSteps = pytest.importorskip("tagc.local").LocalSteps
import torch.distributed as dist
from test_docs import SNIPPETS
from test_torchft import (
    Replica,
    documented_state,
    flat,
    lighthouse,
    local,
    shard,
    start,
    the_model,
    wait_until,
)

from tagc.quorum import Sites

EVERY, MOMENTUM, PLANTED = 3, 0.5, 4  # PLANTED: exchanges before something happens to a site


def of_model(model):
    return flat(local(parameter) for parameter in model.parameters())


def state_of(handle, model):
    """kind -> (n,) in the order of the model's parameters."""
    (state,) = handle.state_dict().values()
    return {
        kind: flat(
            state.get(kind, {}).get(name, torch.zeros(local(p).numel()))
            for name, p in model.named_parameters()
        )
        for kind in ("anchor", "residual", "velocity")
    }


def a_manager(name, model, inner, store, rank=0, n_ranks=1):
    """The Manager of a rank of a site, and a list that gets an element whenever torchft loads a state."""
    from torchft import Manager, ProcessGroupGloo

    second, healed = datetime.timedelta(seconds=1), []

    def load(state):
        healed.append(True)
        if n_ranks == 1:
            model.load_state_dict(state["model"])
            inner.load_state_dict(state["optimizer"])
        else:
            documented_state(model, inner)[1](state)

    def state():
        return (
            {"model": model.state_dict(), "optimizer": inner.state_dict()}
            if n_ranks == 1
            else documented_state(model, inner)[0]()
        )

    return Manager(
        pg=ProcessGroupGloo(timeout=60 * second),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        rank=rank,
        world_size=n_ranks,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{name}",
        timeout=120 * second,
        quorum_timeout=120 * second,
        use_async_quorum=False,
    ), healed


def train(name, folder, script, n_ranks=1, rank=0, port=0, **options):
    """Trains until the file "stop" has a number of exchanges that is reached, and writes down each exchange
    that it takes part in."""
    import tagc.torch as tagc

    site = int(str(name).split(".")[0])
    model = the_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * site)  # torchft makes them equal
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if n_ranks > 1:
        dist.init_process_group("gloo", store=dist.PrefixStore("site", store), rank=rank, world_size=n_ranks)
        shard(model, n_ranks)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager, healed = a_manager(name, model, inner, store, rank, n_ranks)
    there = []  # (parameters) that the optimizer came to, before tagc's own hook
    inner.register_step_post_hook(lambda *_: there.append(of_model(model)))
    handle = LocalSteps(
        model,
        inner,
        every=EVERY,
        manager=Sites(manager),
        outer_momentum=MOMENTUM,
        layers="all",
        timeout_s=60,
        **{"sparsity": 0.9, "values": "int2"} | options,
    )
    quorum, key, n_planted, written = handle.managed.quorum, [None], [], []
    begin, goes_on, exchange = quorum.begin, quorum.goes_on, handle.managed._exchange

    def begin_and_note(member):
        begin(member)
        key[0] = quorum.attempt()

    def goes_on_or_dies(names):
        if (
            script == "dies in the middle of an exchange"  # before it sends what the others wait for
            and written  # or what it keeps of the exchange in which it joined is not known
            and handle.n_exchanges >= PLANTED
            and quorum.size() == 3
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        goes_on(names)

    def exchange_or_fail(flight):
        stats = exchange(flight)
        if (
            script == "fails alone"
            and written
            and handle.n_exchanges >= 2 * PLANTED
            and quorum.size() > 1
            and not n_planted
        ):
            n_planted.append(1)
            manager.report_error(RuntimeError("planted"))
        return stats

    quorum.begin, quorum.goes_on, handle.managed._exchange = begin_and_note, goes_on_or_dies, exchange_or_fail
    step = 0
    with (folder / f"replica{name}").open("ab") as notes:
        while not (folder / "stop").exists() or handle.n_exchanges < int((folder / "stop").read_text()):
            step += 1
            inner.zero_grad()
            x = torch.randn(16, 24, generator=torch.Generator().manual_seed(1000 * site + 10 * step + rank))
            (model(x) - x.roll(1, 1)).square().mean().backward()
            if not handle.is_open:
                handle._before_step()  # what step() does first: the quorum in which a new site gets its state
                assert torch.equal(of_model(model), state_of(handle, model)["anchor"])
            before, n_before, at_before = state_of(handle, model), handle.n_exchanges, manager.current_step()
            key[0] = None
            healed.clear()
            inner.step()
            if key[0]:
                after = state_of(handle, model)
                counts = handle.n_exchanges > n_before and manager.current_step() > at_before
                if not counts and not healed:
                    assert all(torch.equal(before[kind], after[kind]) for kind in before) and torch.equal(
                        of_model(model), there[-1]
                    ), "it changed"
                mask = torch.zeros(0)
                if counts:
                    names = [
                        place.trained.name for place in handle.fragments[handle.stats()["fragment"]].places
                    ]
                    mask = flat(
                        torch.full((local(p).numel(),), float(name in names))
                        for name, p in model.named_parameters()
                    ).bool()
                    mask_of_equal = torch.ones_like(mask) if healed else mask
                    assert torch.equal(of_model(model)[mask_of_equal], after["anchor"][mask_of_equal])
                pickle.dump(
                    {
                        "mask": mask,
                        "key": key[0],
                        "counts": counts,
                        "heals": bool(healed),
                        "own": before["anchor"] - there[-1],
                        "mean": after["velocity"] - MOMENTUM * before["velocity"],
                        "residual": after["residual"],
                        "weights": of_model(model),
                        "velocity": after["velocity"],
                        "told": dict(quorum.counts),
                        "exchanges": handle.n_exchanges,
                        "stats": handle.stats(),
                    },
                    notes,
                )
                notes.flush()
                written += [1] * counts
            time.sleep(0.02)
    saved = handle.state_dict()
    handle.load_state_dict(saved)
    with pytest.raises(tagc.Error, match="saved where sites join and leave"):
        handle.load_state_dict(
            {
                key: {**entry, "about": entry["about"].replace('"managed": 1', '"managed": 0')}
                for key, entry in saved.items()
            }
        )
    handle.close()
    time.sleep(1)  # peers have come to the end, too
    manager.shutdown(wait=False)


@pytest.mark.parametrize(
    "n_ranks, options",
    [(1, {}), (1, {"fragments": 2}), (2, {})],
    ids=["plain", "in fragments", "sharded inside"],
)
def test_sites_come_and_go(tmp_path, n_ranks, options):
    sites, everyone = [], []
    with lighthouse() as address:
        try:
            for name, script in enumerate(["", "fails alone", "dies in the middle of an exchange"]):
                sites.append(start(name, tmp_path, address, script, train, n_ranks, **options))
            everyone = [rank for site in sites for rank in site]
            wait_until(lambda: any(rank.process.exitcode is not None for rank in sites[2]), everyone)
            for rank in sites[2]:
                rank.process.kill()
            sites.append(start(3, tmp_path, address, "", train, n_ranks, **options))
            everyone = [*sites[0], *sites[1], *sites[3]]
            wait_until(
                lambda: (
                    sum(
                        one["counts"] and not one["heals"] and one["told"]["replicas"] == 3
                        for one in sites[3][0].passes()
                    )
                    > 3
                    and any(
                        one["key"] and not one["counts"] and one["exchanges"] >= 2 * PLANTED
                        for one in sites[1][0].passes()
                    )
                ),
                everyone,
            )
            (tmp_path / "stop").write_text(str(max(one["exchanges"] for one in sites[0][0].passes()) + 4))
            wait_until(lambda: all(rank.process.exitcode is not None for rank in everyone), everyone)
        finally:
            for rank in (rank for site in sites for rank in site):
                rank.process.kill()
                rank.process.join()
    assert [site[0].process.exitcode for site in sites] == [0, 0, -signal.SIGKILL, 0], "\n".join(
        rank.said() for rank in everyone
    )
    for rank in range(n_ranks):
        check([site[rank] for site in sites], survivors=[0, 1, 3], dead=2)


def check(replicas, survivors, dead):
    passes = [replica.passes() for replica in replicas]
    counted = {}
    for found in passes:
        for one in found:
            if one["counts"]:
                counted.setdefault(one["key"], []).append(one)
    assert (
        len(counted) > 8
        and any(not one["counts"] for one in passes[1])
        and any(one["heals"] for one in passes[1])
    )
    sent = due = 0
    for key, ones in counted.items():
        # The same weights and outer momentum wherever an exchange counted.
        mask = ones[0]["mask"]
        assert all(
            torch.equal(one[what][mask], ones[0][what][mask])
            for one in ones
            for what in ("weights", "velocity")
        ), key
        # Of those for which it failed at its end, too.
        there = [one for found in passes for one in found if one["key"] == key and not one["heals"]]
        due = due + mask * sum(one["own"].double() for one in there) / len(there)
        sent = sent + mask * next(one["mean"] for one in ones if not one["heals"]).double()
    assert (
        any(one["key"] in counted and not one["counts"] for one in passes[1])
        and max(map(len, counted.values())) == 3
    )
    # What was applied and what residuals hold is what pseudo-gradients came to: of all exchanges that
    # counted, and of no other.
    ends = [passes[i][-1] for i in survivors] + [one for one in passes[dead] if one["counts"]][-1:]
    kept = sum(one["residual"].double() for one in ends)
    assert kept.abs().max() > 1e-3
    torch.testing.assert_close(sent + kept, due, rtol=0, atol=5e-6)
    # It is counted and told.
    told = passes[0][-1]["told"]
    assert (
        told["replicas"] == 3
        and told["gone"] >= 1
        and told["joined"] >= 1
        and told["undone"] >= 1
        and told["lost"] == 0
    ), told
    assert passes[0][-1]["stats"]["world_size"] == 3 and passes[0][-1]["stats"]["bytes_sent"] > 0


def documented(name, folder, script):
    import tagc.torch as tagc

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    (snippet,) = (
        snippet for snippet in SNIPPETS if snippet.library == "torchft" and "LocalSteps" in snippet.text
    )
    model = the_model()
    program = {"model": model, "adam": torch.optim.AdamW(model.parameters()), "tagc": tagc}
    exec(snippet.text, program)
    handle = program["handle"]
    for step in range(60):
        program["adam"].zero_grad()
        model(torch.randn(16, 24)).square().mean().backward()
        program["adam"].step()
    handle.synchronize()
    assert handle.n_exchanges == 3 and torch.equal(of_model(model), state_of(handle, model)["anchor"])
    handle.close()
    program["manager"].shutdown(wait=False)


def test_one_that_differs_ends_and_the_others_go_on(tmp_path):
    with lighthouse() as address:
        sites = [start(name, tmp_path, address, "", train)[0] for name in (0, 1)]
        try:
            wait_until(lambda: sites[0].passes() and sites[0].passes()[-1]["told"]["replicas"] == 2, sites)
            odd = start(2, tmp_path, address, "", train, sparsity=0.5)[0]
            sites.append(odd)
            wait_until(lambda: odd.process.exitcode is not None, sites[:2])
            assert (
                odd.process.exitcode == 1
                and "sparsity is 0.9 on replica" in odd.said()
                and "mismatch" not in sites[0].said()
            )
            n = len(sites[0].passes())
            wait_until(lambda: sum(one["counts"] for one in sites[0].passes()[n:]) > 2, sites[:2])
            (tmp_path / "stop").write_text("0")
            wait_until(lambda: all(site.process.exitcode is not None for site in sites[:2]), sites[:2])
        finally:
            for site in sites:
                site.process.kill()
                site.process.join()
    assert [site.process.exitcode for site in sites] == [0, 0, 1]


def alone(name, folder, script):
    """What is refused, and a failure of this site's own."""
    from torchft import DistributedDataParallel, Optimizer

    import tagc.torch as tagc

    model = the_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager, _ = a_manager(name, model, inner, store)

    def refused(what, *arguments, **options):
        with pytest.raises(tagc.Error, match=what):
            LocalSteps(*(arguments or (model, inner)), **{"every": 4, "manager": Sites(manager)} | options)

    refused("delay is 2: under torchft it must be 0", delay=2)
    refused("between is 'site', must be None where a manager is given", between="site")
    refused("manager is a int, must be torchft's Manager", manager=Sites(3))
    refused("optimizer is torchft's", model, Optimizer(manager, inner))
    refused("give it the model itself and manager=", DistributedDataParallel(manager, model), inner)
    refused("every is 0", every=0)
    manager._use_async_quorum = True
    refused("use_async_quorum=True: LocalSteps needs False")
    manager._use_async_quorum = False
    handle = LocalSteps(model, inner, every=1, manager=Sites(manager), verbose=False)
    other = the_model()
    refused("this Manager has LocalSteps already", other, torch.optim.AdamW(other.parameters()))

    def step():
        inner.zero_grad()
        model(torch.randn(16, 24)).square().mean().backward()
        inner.step()

    step()
    assert handle.n_exchanges == 1
    before = state_of(handle, model)
    model[0].weight.grad.fill_(float("nan"))
    with pytest.raises(
        tagc.Error, match="what fragment 0 of this site came to is not finite; nothing was changed"
    ):
        inner.step()
    assert handle.n_exchanges == 1 and all(
        torch.equal(values, before[kind]) for kind, values in state_of(handle, model).items()
    )
    handle.close()
    model = the_model()
    # for which the Manager is free now
    check_resumed(model, torch.optim.AdamW(model.parameters(), lr=1e-2), manager)
    manager.shutdown(wait=False)


def check_resumed(model, inner, manager):
    """A run that was saved between two exchanges goes on bit for bit."""

    def steps(first, last):
        for step in range(first, last):
            inner.zero_grad()
            x = torch.randn(16, 24, generator=torch.Generator().manual_seed(step))
            (model(x) - x.roll(1, 1)).square().mean().backward()
            inner.step()

    def local_steps():
        return LocalSteps(
            model,
            inner,
            every=3,
            manager=Sites(manager),
            outer_momentum=MOMENTUM,
            layers="all",
            sparsity=0.9,
            values="int2",
            verbose=False,
        )

    with local_steps() as handle:
        steps(0, 7)
        saved = copy.deepcopy([model.state_dict(), inner.state_dict(), handle.state_dict()])
        steps(7, 14)
        expected, after = of_model(model), state_of(handle, model)
    model.load_state_dict(saved[0])
    inner.load_state_dict(saved[1])
    with local_steps() as handle:
        handle.load_state_dict(saved[2])
        steps(7, 14)
        assert handle.n_exchanges == 4 and torch.equal(of_model(model), expected)
        assert all(torch.equal(values, after[kind]) for kind, values in state_of(handle, model).items())


@pytest.mark.parametrize("program", [documented, alone])
def test_one_site(tmp_path, program):
    with lighthouse() as address:
        replica = Replica(0, tmp_path, address, "", program=program)
        replica.process.join(120)
        replica.process.kill()
    assert replica.process.exitcode == 0, replica.said()


def quorum_of(join_timeout_ms):
    """Who is in the quorum of three sites and one that has waited for them, when the third comes last."""
    from torchft.coordination import LighthouseClient, LighthouseServer

    second = datetime.timedelta(seconds=1)
    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=join_timeout_ms,
        quorum_tick_ms=10,
        heartbeat_timeout_ms=60000,
    )
    client, pool = LighthouseClient(server.address(), 5 * second), concurrent.futures.ThreadPoolExecutor(4)

    def come(name):
        quorum = client.quorum(name, 20 * second, address=name)
        return sorted(member.replica_id for member in quorum.participants)

    def all_heard(*names):
        for name in names:
            client.heartbeat(name)
        return names

    try:
        while not all(one == ["a", "b", "c"] for one in pool.map(come, all_heard("a", "b", "c"))):
            pass
        all_heard("waits")
        waits = pool.submit(come, "waits")
        time.sleep(1)
        early = pool.submit(come, "a"), pool.submit(come, "b")
        time.sleep(1)
        pool.submit(come, "c")
        found = early[0].result()
        assert waits.result() == found
        return found
    finally:
        server.shutdown()
        pool.shutdown(wait=False, cancel_futures=True)


def test_who_waits_cuts_others_off_unless_the_join_timeout_is_long():
    """docs/guide/torchft.md, of torchft's lighthouse: it counts from the first one that came."""
    assert quorum_of(500) == ["a", "b", "waits"]
    assert quorum_of(20000) == ["a", "b", "c", "waits"]
