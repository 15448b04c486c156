"""DDP under torchft: replicas are killed, come, fail and are healed, and nothing of a survivor's gradients is
lost."""

import contextlib
import ctypes
import datetime
import os
import pickle
import re
import signal
import socket
import sys
import time
import traceback

import pytest

pytest.importorskip("torchft", reason="torchft is not installed")  # imports torch
torch = pytest.importorskip("torch")
import ranks
from test_docs import SNIPPETS
from torch import nn

SEED_OF_DATA = 1000


class Replica:
    """A process that trains, and what it wrote down of each pass."""

    def __init__(self, name, folder, lighthouse, script, program=None, **options):
        self.notes = folder / f"replica{name}"
        environment = os.environ | {
            "TORCHFT_LIGHTHOUSE": lighthouse,
            "OMP_NUM_THREADS": "1",
            "RUST_LOG": "error",
        }
        self.process = ranks.fresh().Process(
            target=_main,
            args=(program or train, name, folder, script, options, environment, os.path.dirname(__file__)),
        )
        self.process.start()

    def passes(self):
        found = []
        with (
            contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError),
            self.notes.open("rb") as file,
        ):
            while True:
                found.append(pickle.load(file))
        return found

    def said(self):
        log = self.notes.with_name(self.notes.name + ".log")
        return log.read_text(errors="replace") if log.exists() else ""


def _main(program, name, folder, script, options, environment, tests):
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, tests)
    log = os.open(folder / f"replica{name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    code = 0
    try:
        program(name, folder, script, **options)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def the_model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 24))


def local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def shard(model, n_ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (n_ranks,))
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh)


def documented_state(model, adam):
    """(save, load) of the page's snippet for FSDP2."""
    (snippet,) = (
        snippet for snippet in SNIPPETS if snippet.library == "torchft" and "between=manager" in snippet.text
    )
    program = {"model": model, "adam": adam}
    exec(snippet.text.split("\nmanager = ")[0], program)
    return program["save"], program["load"]


def gradient_of(model, batches, rank, n_ranks):
    """What this rank has of the mean gradient of its replica."""
    whole = the_model()
    with torch.no_grad():
        for own, parameter in zip(whole.parameters(), model.parameters()):
            own.copy_(parameter.full_tensor() if n_ranks > 1 else parameter)
    losses = [(whole(x) - x.roll(1, 1)).square().mean() for x in batches]
    return flat(
        gradient.chunk(n_ranks)[rank]
        for gradient in torch.autograd.grad(sum(losses) / n_ranks, list(whole.parameters()))
    )


def add_noise(model, schedule, n_times):
    """Gives the schedule what it would have seen of as many exchanges more."""
    from tagc import _library as lib

    named = [p for p in model._parameters if schedule._has_levels[p.name]]
    numbers = [schedule._numbers[p.name] for p in named]
    counts, unused = [], (ctypes.c_uint64 * lib.SCHEDULE_SAMPLE)()
    for parameter in named:
        n = ctypes.c_size_t()
        lib.load().tagc_schedule_positions(parameter.numel, unused, ctypes.byref(n))
        counts.append(n.value)
    several, n_full = ctypes.c_uint32 * len(named), ctypes.c_size_t()
    full = several()
    noise = torch.randn(sum(counts))
    for i in range(n_times if named else 0):
        values = noise * (-1) ** i
        of_all = several(*numbers), several(*counts), len(named), values.data_ptr()
        lib.call("tagc_schedule_add", schedule._handle, *of_all, full, ctypes.byref(n_full))
        if n_full.value:
            sums = (lib.ScheduleSums * n_full.value)()
            lib.call("tagc_schedule_take", schedule._handle, full, n_full.value, sums)
            for one in sums:
                one.gradient = 1.0
            schedule.keep(model.sum.levels.between, dict(zip(full[: n_full.value], sums)))


def train(name, folder, script, is_async=True, sparsity=None, n_ranks=1, rank=0, port=0):
    """Trains until the file "stop" in the folder has a step that is reached. script: what happens to this
    replica. With several ranks FSDP2 shards the model over them."""
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    import tagc.torch as tagc
    from tagc.torch.exchange.model import UnitModel

    def end_often(self, keeper, end=UnitModel.end):
        """A window is full after three exchanges, and looks like noise."""
        stats = end(self, keeper)
        add_noise(self, keeper, 6)
        return stats

    UnitModel.end = end_often
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    model, second, number = the_model(), datetime.timedelta(seconds=1), int(str(name).split(".")[0])
    if n_ranks > 1:
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("replica", store), rank=rank, world_size=n_ranks
        )
        shard(model, n_ranks)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def save():
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    if n_ranks > 1:
        save, load = documented_state(model, inner)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=60 * second),
        load_state_dict=load,
        min_replica_size=1,
        rank=rank,
        world_size=n_ranks,
        state_dict=save,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{name}",
        timeout=120 * second,
        quorum_timeout=120 * second,
        use_async_quorum=is_async,
    )
    if script == "as documented":
        (snippet,) = (
            snippet
            for snippet in SNIPPETS
            if snippet.library == "torchft" and "DistributedDataParallel" in snippet.text
        )
        program = {"manager": manager, "model": model, "adam": inner, "tagc": tagc}
        exec(snippet.text, program)
        wrapped, handle, optimizer = program["model"], program["handle"], program["optimizer"]
    elif n_ranks > 1:
        wrapped, optimizer = model, Optimizer(manager, inner)
        handle = tagc.compress(
            model,
            between=manager,
            sparsity=0.9,
            values="int2",
            gentle=False,
            layers="all",
            timeout_s=60,
            options=tagc.Options(residual="fp32"),
        )
    else:
        wrapped = DistributedDataParallel(manager, model, bucket_cap_mb=0.01)
        handle = tagc.compress(
            wrapped,
            inner,
            sparsity=sparsity,
            layers="all",
            timeout_s=60,
            options=tagc.Options(residual="fp32"),
        )
        optimizer = Optimizer(manager, inner)
    quorum, n_passes = handle.wrapper.quorum, 0
    n_buckets, prepare = [0], handle.wrapper.prepare

    def prepare_or_die(source):
        n_buckets[0] += 1
        if script == "dies in the middle of a pass" and rank == 0 and n_passes == 8 and n_buckets[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        prepare(source)

    handle.wrapper.prepare = prepare_or_die
    with (folder / f"replica{name}").open("ab") as notes:
        while not (folder / "stop").exists() or manager.current_step() < int((folder / "stop").read_text()):
            n_passes, n_buckets[0] = n_passes + 1, 0
            optimizer.zero_grad()
            seed = SEED_OF_DATA * n_ranks * number + n_passes
            batches = [
                torch.randn(16, 24, generator=torch.Generator().manual_seed(seed + SEED_OF_DATA * i))
                for i in range(n_ranks)
            ]
            own, x = gradient_of(model, batches, rank, n_ranks), batches[rank]
            (wrapped(x) - x.roll(1, 1)).square().mean().backward()
            part, n = manager.is_participating(), manager.num_participants()
            key, mean = quorum.attempt(), flat(local(p.grad) for p in model.parameters())
            if script == "fails alone" and rank == 0 and n_passes == 14:
                manager.report_error(RuntimeError("planted"))
            before = manager.current_step()
            optimizer.step()
            counts = manager.current_step() > before
            if script == "steps alone" and n == 3:  # not while others have yet to come
                quorum._last = "a connection of its own", before
            residual = flat(handle.state_dict()[f"rank{rank}"]["residuals"].values())
            pickle.dump(
                {
                    "key": key,
                    "counts": counts,
                    "own": own if part else torch.zeros_like(own),
                    "n": n,
                    "mean": mean,
                    "residual": residual,
                    "weights": flat(local(p) for p in model.parameters()),
                    "told": dict(quorum.counts),
                    "heals": not part,
                    "beta1 is short": any(
                        memory.moment < 1 for memory in handle.state.moments.memories.values()
                    ),
                },
                notes,
            )
            notes.flush()
            time.sleep(0.02)
    check_saved(handle, rank)
    handle.close()
    assert "should_commit" not in vars(manager)
    time.sleep(1)  # peers have come to the end, too
    manager.shutdown(wait=False)


def check_saved(handle, rank):
    """What this replica saves it can load, and what was saved elsewhere, in other units, it refuses."""
    import tagc.torch as tagc

    saved = handle.state_dict()
    (mine,) = saved.values()
    before = {name: values.clone() for name, values in mine["residuals"].items()}
    handle.load_state_dict(saved)
    after = handle.state_dict()[f"rank{rank}"]["residuals"]
    assert (
        all(torch.equal(values, after[name]) for name, values in before.items())
        and before.keys() == after.keys()
    )
    (key,) = mine.keys() - {"residuals"}
    with pytest.raises(tagc.Error, match="not saved by replicas that join"):
        handle.load_state_dict(
            {f"rank{rank}": mine | {key: mine[key].replace('"managed": 1', '"managed": 0')}}
        )


def flat(tensors):
    return torch.cat([torch.empty(0), *(tensor.detach().reshape(-1).clone() for tensor in tensors)])


@contextlib.contextmanager
def lighthouse():
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=10000, quorum_tick_ms=20, heartbeat_timeout_ms=2000
    )
    yield server.address()
    server.shutdown()


def wait_until(what, replicas, timeout_s=150):
    end = time.monotonic() + timeout_s
    while not what():
        said = "\n".join(
            f"--- {replica.notes.name} ({replica.process.exitcode}):\n{replica.said()[-4000:]}"
            for replica in replicas
        )
        assert time.monotonic() < end, f"nothing after {timeout_s} s:\n{said}"
        assert not any(replica.process.exitcode == 1 for replica in replicas), said
        time.sleep(0.05)


def n_of(replica, *wanted):
    return sum(all(one[key] == value for key, value in wanted) for one in replica.passes())


@pytest.mark.parametrize("is_async", [True, False], ids=["heals meanwhile", "heals first"])
def test_replicas_come_and_go(tmp_path, is_async):
    replicas = []
    with lighthouse() as address:
        try:
            scripts = ["", "fails alone", "dies in the middle of a pass"]
            for name, script in enumerate(scripts):
                replicas.append(Replica(name, tmp_path, address, script, is_async=is_async))
            wait_until(lambda: replicas[2].process.exitcode is not None, replicas)
            replicas.append(Replica(3, tmp_path, address, "", is_async=is_async))
            wait_until(
                lambda: n_of(replicas[3], ("n", 3), ("counts", True)) > 6 and len(replicas[1].passes()) > 20,
                replicas,
            )
            (tmp_path / "stop").write_text(
                str(max(one["key"][1] for one in replicas[0].passes() if one["key"]) + 4)
            )
            wait_until(lambda: all(replica.process.exitcode is not None for replica in replicas), replicas)
        finally:
            for replica in replicas:
                replica.process.kill()
                replica.process.join()
    assert [replica.process.exitcode for replica in replicas] == [0, 0, -signal.SIGKILL, 0]
    check(replicas, survivors=[0, 1, 3], dead=2)
    assert re.search(r"\d gone, and with (it its residual|them their residuals)", replicas[0].said())
    assert re.search(r"\d joined", replicas[0].said()), replicas[0].said()
    assert all(replicas[i].passes()[-1]["beta1 is short"] for i in (0, 1, 3))


def start(name, folder, address, script, program=train, n_ranks=1, **options):
    """The ranks of a replica."""
    if n_ranks == 1:
        return [Replica(str(name), folder, address, script, program, **options)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        Replica(
            f"{name}.{rank}",
            folder,
            address,
            script,
            program,
            n_ranks=n_ranks,
            rank=rank,
            port=port,
            **options,
        )
        for rank in range(n_ranks)
    ]


def test_sharded_replicas_come_and_go(tmp_path):
    """FSDP2 over two ranks inside each replica. What happens to a replica happens to its first rank."""
    replicas = []
    with lighthouse() as address:
        try:
            for name, script in enumerate(["", "fails alone", "dies in the middle of a pass"]):
                replicas.append(start(name, tmp_path, address, script, n_ranks=2, is_async=False))
            everyone = [rank for replica in replicas for rank in replica]
            wait_until(lambda: replicas[2][0].process.exitcode is not None, everyone)
            replicas[2][1].process.kill()
            replicas.append(start(3, tmp_path, address, "", n_ranks=2, is_async=False))
            everyone = [*replicas[0], *replicas[1], *replicas[3]]
            wait_until(
                lambda: (
                    n_of(replicas[3][0], ("n", 3), ("counts", True)) > 6 and len(replicas[1][0].passes()) > 20
                ),
                everyone,
            )
            (tmp_path / "stop").write_text(
                str(max(one["key"][1] for one in replicas[0][0].passes() if one["key"]) + 4)
            )
            wait_until(lambda: all(rank.process.exitcode is not None for rank in everyone), everyone)
        finally:
            for rank in (rank for replica in replicas for rank in replica):
                rank.process.kill()
                rank.process.join()
    assert [rank.process.exitcode for rank in everyone] == [0] * 6 and replicas[2][
        0
    ].process.exitcode == -signal.SIGKILL
    for rank in (0, 1):
        check([replica[rank] for replica in replicas], survivors=[0, 1, 3], dead=2)


def check(replicas, survivors, dead):
    passes = [replica.passes() for replica in replicas]
    counted = list({one["key"]: one for found in passes for one in found if one["counts"]}.values())
    assert max(one["n"] for one in counted) == 3 and any(not one["counts"] for one in passes[1])
    # The same weights wherever a step counted, the same mean gradient.
    for one in counted:
        others = [
            other for found in passes[1:] for other in found if other["key"] == one["key"] and other["counts"]
        ]
        assert all(
            torch.equal(other["weights"], one["weights"]) and torch.equal(other["mean"], one["mean"])
            for other in others
        ), one["key"]
    assert len({found[-1]["key"] for found in (passes[i] for i in survivors)}) == 1
    # What was applied and what residuals hold is what gradients came to: of all steps that counted, and of no
    # other.
    sent, due = (
        sum(one["mean"].double() for one in counted),
        torch.zeros(passes[0][0]["own"].numel(), dtype=torch.float64),
    )
    for one in counted:
        due += (
            sum(other["own"].double() for found in passes for other in found if other["key"] == one["key"])
            / one["n"]
        )
    kept = sum(passes[i][-1]["residual"].double() for i in survivors)
    kept += passes[dead][-1]["residual"].double()
    assert kept.abs().max() > 1e-3
    torch.testing.assert_close(sent + kept, due, rtol=0, atol=2e-6)
    # It is counted and told.
    told = passes[0][-1]["told"]
    assert told["replicas"] == 3 and told["gone"] >= 1 and told["joined"] >= 1 and told["undone"] >= 1, told


def test_as_documented(tmp_path):
    with lighthouse() as address:
        (tmp_path / "stop").write_text("4")
        replica = Replica(0, tmp_path, address, "as documented")
        replica.process.join(120)
        replica.process.kill()
    assert replica.process.exitcode == 0, replica.said()
    assert [one["counts"] for one in replica.passes()] == [True] * 4


def test_one_that_differs_ends_and_the_others_go_on(tmp_path):
    replicas = []
    with lighthouse() as address:
        try:
            replicas += [Replica(name, tmp_path, address, "", sparsity=0.9) for name in (0, 1)]
            wait_until(lambda: n_of(replicas[0], ("n", 2), ("counts", True)) > 3, replicas)
            odd = Replica(2, tmp_path, address, "", sparsity=0.5)
            replicas.append(odd)
            wait_until(lambda: odd.process.exitcode is not None, replicas[:2])
            assert (
                odd.process.exitcode == 1
                and "sparsity is 0.9 on replica" in odd.said()
                and "mismatch" not in replicas[0].said()
            )
            n = len(replicas[0].passes())
            wait_until(lambda: sum(one["counts"] for one in replicas[0].passes()[n:]) > 3, replicas[:2])
            (tmp_path / "stop").write_text("0")
            wait_until(
                lambda: all(replica.process.exitcode is not None for replica in replicas[:2]), replicas[:2]
            )
        finally:
            for replica in replicas:
                replica.process.kill()
                replica.process.join()
    assert [replica.process.exitcode for replica in replicas] == [0, 0, 1]


def test_one_that_made_the_last_step_alone_ends(tmp_path):
    """torchft lets two quorums make the same step, each with replicas that the other one lacks, and takes
    them for equal afterwards."""
    replicas = []
    with lighthouse() as address:
        try:
            replicas += [
                Replica(name, tmp_path, address, script)
                for name, script in enumerate(["", "", "steps alone"])
            ]
            wait_until(lambda: n_of(replicas[2], ("n", 3), ("counts", True)) > 2, replicas)
            replicas.append(Replica(3, tmp_path, address, ""))  # a new quorum
            others = [replicas[i] for i in (0, 1, 3)]
            wait_until(lambda: replicas[2].process.exitcode is not None, others)
            assert replicas[2].process.exitcode == 1 and "replica 2 made step" in replicas[2].said(), (
                replicas[2].said()
            )
            wait_until(lambda: n_of(replicas[3], ("n", 3), ("counts", True)) > 3, others)
            (tmp_path / "stop").write_text("0")
            wait_until(lambda: all(replica.process.exitcode is not None for replica in others), others)
        finally:
            for replica in replicas:
                replica.process.kill()
                replica.process.join()
    assert [replica.process.exitcode for replica in replicas] == [0, 0, 1, 0]


def test_what_is_refused():
    from torchft import Manager
    from torchft.process_group import ProcessGroupDummy

    import tagc.torch as tagc

    with pytest.raises(tagc.Error, match="not initialised"):
        tagc.compress(nn.Linear(4, 4))
    with pytest.raises(tagc.Error, match="or fully_shard.. with between=manager"):
        ranks_of_one(lambda: tagc.compress(nn.Linear(4, 4), between=ProcessGroupDummy(0, 1)))
    manager = object.__new__(Manager)
    with pytest.raises(tagc.Error, match="it must be fully_shard"):
        ranks_of_one(lambda: tagc.compress(nn.Linear(4, 4), between=manager))

    def sharded(**options):
        shard(model := the_model(), 1)
        tagc.compress(model, between=manager, **tagc.grouped(options))

    with pytest.raises(tagc.Error, match="parameters is 'delta4': under torchft it must be None"):
        ranks_of_one(lambda: sharded(parameters="delta4"))
    with pytest.raises(tagc.Error, match="transport is 'native'"):
        ranks_of_one(lambda: sharded(transport="native"))
    manager._use_async_quorum = True
    with pytest.raises(tagc.Error, match="use_async_quorum=True: FSDP2 needs False"):
        ranks_of_one(sharded)


def ranks_of_one(function):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return function()
    finally:
        dist.destroy_process_group()
