"""Collectives: torch's collectives for loops that call them by themselves, with error feedback by key. Sums
are compared with those in plain torch; what is rounded off, with a law: what was sent and what is kept are
what came."""

import contextlib
import datetime
import functools
import gc
import io
import queue
import threading
import time
import weakref

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from oracles import check_alike, check_error, check_loss_of_a_rank, lose_a_rank
from torch import nn
from torch.distributed.tensor import DTensor

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
N = 4224  # of a rank's row: no multiple of a block times the ranks, and large enough to be compressed


def given(rank, step, n, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(31 * step + rank)).to(dtype)


def total_of(world_size, step, n, dtype=torch.float32):
    """The sum in the order of ranks."""
    total = torch.zeros(n)
    for rank in range(world_size):
        total += given(rank, step, n, dtype).float()
    return total


def check_close(found, expected, what):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")


def collectives(**options):
    from tagc.collectives import Collectives

    return Collectives(**{"timeout_s": 30, "residual": "fp32"} | options)


# ---- what comes out ----


def exact_sums_are_those_in_rank_order(rank, world_size):
    with collectives(values="fp32") as comm:
        for dtype in (torch.float32, torch.bfloat16):
            for step, key in enumerate(("one", "one", None)):
                for op, factor in (AVG, 1 / world_size), (SUM, 1.0):
                    key = key and f"{key} of {dtype}"
                    mine, own = given(rank, step, world_size * N, dtype), torch.empty(N, dtype=dtype)
                    total = total_of(world_size, step, world_size * N, dtype) * factor
                    every, before = mine.clone(), mine.clone()
                    works = [
                        comm.reduce_scatter(own, mine, key=key and f"rows {key}", op=op, async_op=True),
                        comm.all_reduce(every.view(world_size, N), key=key, op=op, async_op=True),
                    ]
                    assert all(work.wait() for work in works)
                    assert works[0].get_future().wait()[0] is own and works[0].is_success()
                    assert mine.equal(before), "the input is lost"
                    assert own.equal(total.view(world_size, N)[rank].to(dtype)), (dtype, key, op)
                    assert every.equal(total.to(dtype)), (dtype, key, op)
        doubled = given(rank, 5, 48)
        comm.all_reduce(doubled, op=dist._make_nccl_premul_sum(2.0))
        assert doubled.equal(total_of(world_size, 5, 48) * 2)
        row, full = given(rank, 6, N), torch.empty(world_size, N)
        for key in ("one", None, "one"):  # a key of a reduction, too
            full.zero_()
            comm.all_gather(full, row, key=key)
            assert full.equal(torch.stack([given(other, 6, N) for other in range(world_size)]))
        if world_size == 2:  # whose sum has no order
            mine, theirs = given(rank, 7, N), given(rank, 7, N)
            comm.all_reduce(mine, key="with torch")
            dist.all_reduce(theirs)
            assert mine.equal(theirs)


def residual_of(comm, name):
    """What all ranks have not sent. Collective."""
    held = comm.state_dict()[f"rank{dist.get_rank()}"]["residuals"][name].clone().float()
    dist.all_reduce(held)
    return held


def what_is_rounded_off_comes_later(rank, world_size, **options):
    """By the law that nothing is lost, which a result that is scaled, shifted or left out breaks; and by a
    bound of each result that 4 bits with a scale per 32 values have."""
    came = {name: torch.zeros(world_size * N) for name in ("rows", "whole")}
    sums = torch.zeros(world_size * N)
    n_hosts = options.get("hosts", world_size)
    with collectives(**options) as comm:
        for step in range(4):
            mine = given(rank, step, world_size * N)
            own, every = torch.empty(N), mine.clone()
            comm.reduce_scatter(own, mine, key="rows", async_op=True), comm.all_reduce(every, key="whole")
            comm.synchronize()
            exact = total_of(world_size, step, world_size * N)
            if step == 0 and n_hosts == world_size:
                largest = sum(
                    given(other, 0, world_size * N).view(-1, 32).abs().amax(1) for other in range(world_size)
                )
                bound = (1.01 * largest / 14).repeat_interleave(32).view(world_size, N)[rank]
                error = (own - exact.view(world_size, N)[rank]).abs()
                assert (error <= bound).all() and error.max() > 0.3 * bound.max(), (error.max(), bound.max())
            rows = [torch.empty(N) for _ in range(world_size)]
            dist.all_gather(rows, own)
            came["rows"] += torch.cat(rows)
            came["whole"] += every
            sums += exact
            assert not own.equal(exact.view(world_size, N)[rank])
        # what ranks of a host have is the mean or the sum of the host, by which they rounded
        for name in came:
            held = residual_of(comm, name)
            check_close(came[name] + held, sums, name)
            assert held.abs().max() > 0.01, "nothing was rounded"
        stats = comm.stats()
        per_host = world_size // n_hosts
        assert stats["n_units"] == 2 and stats["step"] == 4 and stats["ranks_per_host"] == per_host, stats
        assert (stats["bytes_within"] > 0) == (per_host > 1), stats
        assert stats["n_compressed"] == 2 * world_size * N and stats["sparsity"] == 0, stats
        assert 6 < stats["bits_per_param"] < 10, stats  # of a reduce-scatter 5, of an all-reduce twice that
        memory = comm.memory()
        assert memory.host.residual >= 2 * 4 * world_size * N / per_host, memory


def selection_and_sums_over_hosts(rank, world_size):
    what_is_rounded_off_comes_later(rank, world_size, hosts=world_size // 2)
    with collectives(values="fp32", hosts=world_size // 2) as comm:
        for op, factor in (SUM, 1.0), (AVG, 1 / world_size):
            mine, own = given(rank, 1, world_size * N), torch.empty(N)
            comm.reduce_scatter(own, mine, key="w", op=op)
            check_close(own, (factor * total_of(world_size, 1, world_size * N)).view(-1, N)[rank], "rows")
            comm.all_reduce(mine, key="all", op=op)
            check_close(mine, factor * total_of(world_size, 1, world_size * N), "whole")
        row, full = given(rank, 6, 40), torch.empty(world_size * 40)
        comm.all_gather(full, row, key="w")
        assert full.equal(torch.cat([given(other, 6, 40) for other in range(world_size)]))
    with collectives(sparsity=0.9, values="fp32") as comm:
        came = torch.zeros(N)
        for step in range(6):
            mine = given(rank, step, N)
            comm.all_reduce(mine, key="w")
            assert 0.5 < (mine == 0).float().mean() < 1
            came += mine
        check_close(came + residual_of(comm, "w"), sum(total_of(world_size, s, N) for s in range(6)), "w")
        assert comm.stats()["sparsity"] > 0.85, comm.stats()


def gathers_come_near_what_their_owner_has(rank, world_size):
    """Rounding errors do not add up: the owner's values move by less than a delta's smallest step, and in the
    end all ranks have them to bf16 and that step."""
    start, change = given(rank, 1, N), 1e-3 * given(rank, 2, N)
    for parameters, worst in {"bf16": 2**-7, "int8": 0.05, "delta4": 2**-7, "delta8": 2**-7}.items():
        with collectives(parameters=parameters) as comm:
            row, full = start.clone(), torch.empty(world_size * N)
            for _ in range(12):
                row += change
                comm.all_gather(full, row, key="w")
                check_alike(full, parameters)
            assert not full.view(world_size, N)[rank].equal(row)
            assert (full.view(world_size, N)[rank] - row).abs().max() < worst * 4, parameters
            for _ in range(12):
                comm.all_gather(full, row, key="w")
            own = full.view(world_size, N)[rank]
            if parameters.startswith("delta"):  # nothing moves: what is left is bf16's
                assert ((own - row).abs() <= 2**-7 * row.abs() + 1e-3).all(), (own - row).abs().max()
            stats = comm.stats()
            assert (stats["gather_bits"] < 12) == (parameters != "bf16"), stats["gather_bits"]
            if parameters.startswith("delta"):
                row.mul_(-1)
                comm.reset_parameters()
                comm.all_gather(full, row, key="w")
                assert full.view(world_size, N)[rank].equal(row.bfloat16().float())
                assert comm.memory().host.replicas == 2 * world_size * N
            comm.all_gather(full, row)  # without a key there are no deltas
            check_alike(full, parameters)
            error = (full.view(world_size, N)[rank] - row).abs().max()
            assert (error == 0) == (parameters == "bf16") and error <= row.abs().max() / 100, (
                parameters,
                error,
            )


# ---- without a key ----


def mean_errors(comm, rank, world_size, dtype=torch.float32, n_calls=16):
    """Root mean square errors of reduce_scatter(), all_reduce() and all_gather() without a key: of the first
    of several calls with one tensor, and of their mean."""
    mine, row = given(rank, 0, world_size * N, dtype), given(rank, 1, N, dtype)
    whole = total_of(world_size, 0, world_size * N, dtype)
    rows = torch.cat([given(other, 1, N, dtype).float() for other in range(world_size)])
    exact = [whole.view(world_size, N)[rank], whole, rows]
    first, sums = [], [torch.zeros_like(each) for each in exact]
    for call in range(n_calls):
        own, every = torch.empty(N, dtype=dtype), mine.clone()
        full, before = torch.empty(world_size * N, dtype=dtype), mine.clone()
        (
            comm.reduce_scatter(own, mine, async_op=True),
            comm.all_reduce(every.view(world_size, N), async_op=True),
            comm.all_gather(full, row, async_op=True),
        )
        comm.synchronize()
        assert mine.equal(before), "the input is lost"
        check_alike(every, "sums"), check_alike(full, "rows")
        came = [own.float(), every.float(), full.float()]
        first = first or [(one - wanted).square().mean().sqrt() for one, wanted in zip(came, exact)]
        for total, one in zip(sums, came):
            total += one
    means = [(total / n_calls - wanted).square().mean().sqrt() for total, wanted in zip(sums, exact)]
    return first, means


def without_a_key_the_mean_is_right(rank, world_size, hosts=None):
    """What rounding to the nearest, or the same random numbers again, leave in each call."""
    for values, parameters, most in ("int4", "int8", 0.25), ("int2", "delta4", 0.25), ("int8", "int8", 0.03):
        with collectives(values=values, parameters=parameters, hosts=hosts) as comm:
            first, means = mean_errors(comm, rank, world_size)
            n_hosts = hosts or world_size
            for one, mean, bound in zip(first, means, (most * n_hosts**0.5, most * n_hosts**0.5, 0.02)):
                assert 0 < one < bound, (values, first)
                assert mean < 0.35 * one, (values, first, means)
            stats = comm.stats()
            # the mean of a reduce-scatter and an all-reduce, whose sums travel in 8 bits
            assert stats["bits_per_param"] < (13 if values == "int8" else 10), stats
            assert stats["gather_bits"] < 9 and comm.state_dict()[f"rank{rank}"]["residuals"] == {}, stats
            own = torch.ones(N)
            comm.reduce_scatter(own, torch.zeros(world_size * N))
            assert not own.any(), "something of the last tensor was left"
            same, (largest, block) = given(0, 9, world_size * N), (127, 128) if values == "int8" else (7, 32)
            comm.reduce_scatter(own, same.clone())
            error = (own - world_size * same.view(world_size, N)[rank]).square().mean()
            # f of a scale from the lower value, f (1 - f) scales squared: a sixth on average
            scales = world_size / n_hosts * same.view(-1, block).abs().amax(1) / largest
            assert 0.8 < error / (n_hosts * scales.square().mean() / 6) < 1.2, "ranks round alike"
    with collectives(hosts=hosts) as comm:
        first, means = mean_errors(comm, rank, world_size, torch.bfloat16)
        assert all(mean < 0.35 * one for one, mean in zip(first[:2], means)), (first, means)
        spoilt = given(rank, 0, N)
        spoilt[5 * rank] = float("nan")
        comm.all_reduce(spoilt)
        assert spoilt.isnan().any()


def calls_without_a_key_are_those_of_a_run_that_goes_on(rank, world_size):
    def some(comm):
        tensors = [given(rank, step, N) for step in range(2)]
        for tensor in tensors:
            comm.all_reduce(tensor)
        return torch.cat(tensors)

    with collectives() as comm:
        once, saved, again = some(comm), comm.state_dict(), some(comm)
    assert not once.equal(again)
    with collectives() as comm:
        assert some(comm).equal(once)
    with collectives() as comm:
        comm.load_state_dict(saved)
        assert some(comm).equal(again)


# ---- the schedule ----


class Given(nn.Module):
    """Matrices whose gradients are given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.mlp = nn.ParameterDict({"noise": torch.randn(72, 64), "steady": torch.randn(72, 64)})
        self.attn = nn.ParameterDict({"q": torch.randn(72, 64), "late": torch.randn(72, 64)})
        self.attn["late"].requires_grad_(False)

    def gradients(self, rank, step):
        """Of "steady" they point one way."""
        found = [given(rank, 100 * step + i, 72 * 64).view(72, 64) for i in range(3)]
        found[1] = 0.2 * found[1] + given(0, 0, 72 * 64).view(72, 64)
        return found

    def forward(self, gradients):
        trained = [p for p in self.parameters() if p.requires_grad]
        return sum((p * gradient).sum() for p, gradient in zip(trained, gradients))


def gentle_steps(comm, model, rank, steps):
    """What each step sends."""
    sent = []
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in steps:
        gradients = model.gradients(rank, step)
        for parameter, gradient in zip(trained, gradients):
            comm.all_reduce(gradient, key=parameter, op=AVG, async_op=True)
        sent.append(gradients)
        stats = comm.stats()
        sent[-1] = stats["n_gentle"], round(stats["sparsity"], 2), torch.stack(gradients)
    return sent


def follows_the_schedule_of_compress(rank, world_size, hosts=None):
    """At each step what DDP's hook sends at that level."""
    import tagc.torch as tagc

    def optimizer(model):
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.0)

    n_steps, expected, model = 64, [], Given()
    wrapped = nn.parallel.DistributedDataParallel(model)
    with tagc.compress(wrapped, optimizer(wrapped), hosts=hosts, verbose=False) as handle:
        for step in range(n_steps):
            wrapped(model.gradients(rank, step)).backward()
            stats = handle.stats()
            expected.append((stats["n_gentle"], round(stats["sparsity"], 2)))
            model.zero_grad()
    n = 72 * 64
    assert expected[0] == (3 * n, 0.0) and expected[-1][0] < 3 * n and expected[-1][1] > 0.4, expected
    model = Given()
    with collectives(names=model, optimizer=optimizer(model), gentle=True, hosts=hosts) as comm:
        comm.watch(1.0)
        found = gentle_steps(comm, model, rank, range(n_steps))
        assert [one[:2] for one in found] == expected
        saved = comm.state_dict()
        going_on = gentle_steps(comm, model, rank, range(n_steps, n_steps + 24))
    with collectives(names=model, optimizer=optimizer(model), gentle=True, hosts=hosts) as comm:
        comm.load_state_dict(saved)
        for one, other in zip(gentle_steps(comm, model, rank, range(n_steps, n_steps + 24)), going_on):
            assert one[:2] == other[:2] and one[2].equal(other[2])


def the_schedule_is_for_names(rank, world_size, hosts=None):
    model, last = Given(), rank == world_size - 1
    for options, text in (
        ({"gentle": True}, "gentle is True, and names is None: the schedule follows the keys that names has"),
        ({"gentle": True, "names": model, "sparsity": 0}, "and sparsity is 0"),
        ({"gentle": 3, "names": model}, "gentle is 3, must be one of"),
        ({"optimizer": torch.optim.SGD(model.parameters(), 0.1)}, "optimizer is given, and no key is"),
        ({"gentle": not last, "names": model, "sparsity": 0.9, "values": "int4"}, "gentle is True on rank 0"),
        ({"gentle": True, "names": model, "optimizer": 3}, "optimizer is a int"),
    ):
        check_error(lambda: collectives(**options), text)
    said = io.StringIO()
    trained = [p for p in model.parameters() if p.requires_grad]
    with contextlib.redirect_stdout(said), collectives(names=model, gentle=True, hosts=hosts) as comm:
        comm.adapt(torch.optim.AdamW(trained))
        check_error(
            lambda: comm.all_reduce(torch.ones(3), key="other"), "names does not have", same=hosts is None
        )
        gentle_steps(comm, model, rank, range(20))
        # some ranks would end the step
        key = model.attn["late"] if last else model.mlp["noise"]
        check_error(
            lambda: comm.all_reduce(torch.ones(72, 64), key=key),
            "the end of step 20, and rank .* with gradients of attn.late",
            same=hosts is None,
        )
        gentle_steps(comm, model, rank, range(20, 40))
        assert comm.stats()["step"] == 40
    assert (rank == 0) == ("tagc: AdamW: beta1 is 0.5 for what is compressed" in said.getvalue()), (
        said.getvalue()
    )


def on_hosts_of_two(rank, world_size):
    for check in without_a_key_the_mean_is_right, follows_the_schedule_of_compress, the_schedule_is_for_names:
        check(rank, world_size, world_size // 2)


# ---- keys ----


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.attn_q, self.norm = nn.Linear(80, 64), nn.Linear(80, 64), nn.LayerNorm(5000)


def classes_follow_names(rank, world_size):
    model = Model()
    for names in (model, None, ((name, p) for name, p in model.named_parameters())):
        with collectives(names=names) as comm, torch.no_grad():
            for parameter in model.parameters():
                comm.all_reduce(parameter.data.clone(), key=parameter, async_op=True)
            stats = comm.stats()
            assert stats["n_units"] == 6 and stats["n_elems"] == 2 * 80 * 64 + 128 + 10000, stats
            compressed = 2 * 80 * 64 + 10000 if names is None else 2 * 80 * 64
            assert stats["n_compressed"] == compressed, stats
            if names is None:
                check_error(comm.state_dict, "are tensors without names.*give names=model")
                check_error(lambda: comm.save("never"), "are tensors without names.*give names=model")
                continue
            held = comm.state_dict()[f"rank{rank}"]["residuals"]
            assert sum(each.numel() for each in held.values()) == compressed, held.keys()
            assert set(held) == {"mlp.weight", "attn_q.weight"}, held.keys()
    with collectives(names=model) as comm:
        check_error(lambda: comm.all_reduce(torch.ones(3), key=torch.ones(3)), "names does not have")
        comm.all_reduce(torch.ones(80, 64), key=model.mlp.weight)
        comm.all_reduce(torch.ones(80, 64), key="mlp.weight")  # the same one
        assert comm.stats()["step"] == 2
    with collectives() as comm:
        comm.all_reduce(torch.ones(3), key=model.mlp.bias)
        check_error(lambda: comm.all_reduce(torch.ones(3), key="0"), "key is '0', which is the name of a par")
        comm.all_reduce(torch.ones(3), key="1")
        check_error(lambda: comm.all_reduce(torch.ones(3), key=model.mlp.weight), "'1' is a name that came")


def keys_that_are_gone(rank, world_size):
    """A tensor that is another one each time is no key; one that stays is."""
    parameter, stays = nn.Parameter(torch.ones(N)), torch.ones(N)
    for key_of in (lambda: parameter.data, lambda: parameter.grad, lambda: stays):
        with collectives() as comm:
            for step in range(3):
                parameter.grad = torch.ones(N)
                if step and key_of() is not stays:
                    text = f"shape .{N},.*that of key 0 is gone.*give the parameter p itself"
                    check_error(lambda: comm.all_reduce(parameter.grad, key=key_of()), text)
                else:
                    comm.all_reduce(parameter.grad, key=key_of())
            comm.all_reduce(torch.ones(N), key=parameter)
            check_error(lambda: comm.all_reduce(torch.ones(3), key="0"), "the name of a parameter")
            check_error(comm.state_dict, "are tensors without names")
    for hosts in (None, 1):  # what has a name has no number
        with collectives(names=[("w", parameter), ("t", stays)], hosts=hosts) as comm:
            for _ in range(2):
                comm.all_reduce(torch.ones(N), key=parameter)
                comm.all_reduce(torch.ones(N), key=stays)
            comm.state_dict()


def many_calls_from_many_threads(rank, world_size):
    """In the order in which they were made, whatever thread makes them; gradients of parameters too, which
    autograd watches."""
    with collectives(values="fp32") as comm:
        tensors = [nn.Parameter(given(rank, step, 700 + step)) for step in range(24)]
        turn, works, done = queue.SimpleQueue(), {}, queue.SimpleQueue()

        def make():
            while (step := turn.get()) is not None:
                works[step] = comm.all_reduce(
                    tensors[step], key=str(step % 7) if step % 7 == step else None, async_op=True
                )
                done.put(step)

        threads = [threading.Thread(target=make) for _ in range(3)]
        for thread in threads:
            thread.start()
        for step in range(24):
            turn.put(step)
            done.get()
        for _ in threads:
            turn.put(None)
        for thread in threads:
            thread.join()
        for step in reversed(range(24)):
            assert works[step].wait(datetime.timedelta(seconds=30)) and works[step].is_completed()
            assert tensors[step].detach().equal(total_of(world_size, step, 700 + step)), step
            assert tensors[step].requires_grad
        if rank:
            time.sleep(0.3)
        late = comm.all_reduce(torch.ones(3), async_op=True)
        if rank == 0:  # the others have not called it yet
            assert not late.is_completed()
            try:
                late.wait(datetime.timedelta(milliseconds=1))
                raise AssertionError("a result without the other ranks")
            except Exception as failure:
                assert "no result within 0.001 s" in str(failure), failure
        assert late.wait()
        pending = comm.all_reduce(tensors[3], async_op=True)
    assert pending.wait() and comm.is_closed  # close() has waited
    check_error(lambda: comm.all_reduce(tensors[3], async_op=True), "this Collectives is closed")
    comm.close()


# ---- what is wrong ----


def wrong_calls_are_errors_on_all_ranks(rank, world_size):
    last = rank == world_size - 1
    small, large, own = torch.ones(N), torch.ones(world_size * N), torch.empty(N)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    of_two = {}, {"hosts": 1}, {"transport": "gloo"}
    for options in of_two if world_size == 2 else [{"hosts": world_size // 2}]:
        # hosts of several ranks find it host by host, and say so
        same = options.get("hosts") == 1 or "hosts" not in options
        with collectives(values="fp32", **options) as comm:
            reduce, gather, scatter = (
                functools.partial(call, async_op=True)
                for call in (comm.all_reduce, comm.all_gather, comm.reduce_scatter)
            )

            def wrong(call, text):
                check_error(lambda: call().wait(), text, same=same)

            def right(key="a"):  # no call has failed for good
                comm.all_reduce(tensor := torch.ones(N), key=key)
                assert (tensor == world_size).all()

            order = f"rank .* comes with .*key a, and rank {world_size - 1} with .* of key b"
            wrong(lambda: reduce(small, key="b" if last else "a"), order)
            wrong(lambda: reduce(large if last else small, key="a"), "do not agree")
            wrong(lambda: reduce(small.bfloat16() if last else small, key="a"), "bfloat16")
            wrong(lambda: reduce(small, key="a", op=AVG if last else SUM), "has .*factor of op 1.0")
            right()
            one, other = (nn.Parameter(torch.ones(N)) for _ in range(2))
            for key in (one, "0"):  # the number of no other, and no name that has come
                wrong(lambda: reduce(small, key=3 if last else key), "key is 3, must be")
            wrong(lambda: reduce(small.long() if last else small.clone()), "of torch.int64")
            for key in (other, one):
                right(key)
            first = "first call was all_reduce of 4224 elements of float32"
            wrong(lambda: reduce(large if last else small, key="a"), f"key a: .*{first}")
            wrong(lambda: reduce(large, key="a"), f"key a: .*{first}")
            wrong(lambda: scatter(own, large, key="a"), first)
            wrong(lambda: reduce(small.bfloat16(), key="a"), f"of bfloat16; its {first}")
            placed = DTensor.from_local(small, mesh)
            bad = {
                "key is 3, must be": lambda: reduce(small, key=3),
                "key is '', must be": lambda: reduce(small, key=""),
                "tensor is a list": lambda: reduce([1.0], key="a"),
                "tensor is a DTensor, must be a plain tensor: pass .to_local": lambda: reduce(
                    placed, key="a"
                ),
                "is not contiguous": lambda: reduce(large.view(2, -1).T, key="a"),
                "of torch.int64": lambda: reduce(small.long(), key="a"),
                "reduce op": lambda: reduce(small, key="a", op=dist.ReduceOp.MAX),
                "has no elements": lambda: reduce(small[:0]),
                f"input must have {world_size} times": lambda: scatter(own, large[:-16], key="c"),
                f"output must have {world_size} times": lambda: gather(large[:-16], own, key="c"),
                "of torch.float32 into torch.float16": lambda: gather(large.half(), own, key="c"),
            }
            for text, call in bad.items():
                wrong(call, text)
                wrong(lambda: call() if last else gather(large.clone(), small, key="c"), text)
            right()
            wrong(lambda: gather(large, small, key=3 if last else "c"), r"all_gather\(\): rank.* 3,")
            right("e")
            one_of_two = gather if last else lambda _, mine, key: reduce(mine.clone(), key=key)
            wrong(lambda: one_of_two(large, small, key="a"), "do not agree")
            right("f")
            check_alike(torch.tensor([comm.stats()["step"], comm._keys.n_calls]), "the step")
            with pytest.raises(Exception, match="key is 3"):
                reduce(small, key=3 if last else "a").get_future().wait()
            failed = reduce(small, key=3 if last else "a")
            comm.all_gather(large, small, key="c")
            check_error(comm.synchronize, "key is 3", same=same)  # which nobody has waited for
            comm.synchronize()
            assert not failed.is_success()
            right()


def failures_end(rank, world_size):
    """They leave no tensors behind, and none gets lost."""
    comm = collectives(values="fp32")
    bad = 3 if rank else "a"
    tensors = [torch.ones(N)]
    left = weakref.ref(tensors[0])
    check_error(lambda: comm.all_reduce(tensors.pop(), key=bad), "key is 3")
    for _ in range(500):  # the thread that ran the call may still be at its end
        gc.collect()
        if left() is None:
            break
        time.sleep(0.01)
    assert left() is None, "a failed call keeps its tensor"
    comm.synchronize()  # it has been raised
    comm.all_reduce(torch.ones(N), key=bad, async_op=True)
    check_error(comm.close, "key is 3")
    assert comm.is_closed
    comm.close()
    try:
        with collectives(values="fp32") as comm:
            comm.all_reduce(torch.ones(N), key=bad, async_op=True)
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert comm.is_closed


def a_group_that_is_gone(rank, world_size):
    group = dist.new_group(range(world_size))
    with collectives(group=group) as comm:
        comm.all_reduce(torch.ones(N), key="a")
        dist.destroy_process_group(group)
        for call in (
            lambda: comm.all_reduce(torch.ones(N), key="a", async_op=True),
            lambda: comm.all_gather(torch.ones(world_size), torch.ones(1), async_op=True),
        ):
            check_error(call, "the process group of this Collectives was destroyed")


def in_inference_mode(rank, world_size):
    """As without it, before and after and where only one rank has it."""
    last = rank == world_size - 1
    of_two = {"hosts": 1}, {"parameters": "delta4"}
    for options in of_two if world_size == 2 else [{"hosts": world_size // 2, "parameters": "delta4"}]:
        found = {}
        for modes in ((), (0, 1), (1, 2), (2,)):
            with collectives(**options) as comm:
                steps = []
                for step in range(4):
                    is_on = step in modes and (last or step != 1)
                    with torch.inference_mode(is_on):
                        mine, every = given(rank, step, world_size * N), given(rank, step, N)
                        own, full = torch.empty(N), torch.empty(world_size * N)
                        for key in ("w", None):
                            comm.reduce_scatter(own, mine, key=key and "rows", async_op=True)
                            comm.all_reduce(every.view(2, -1), key=key, async_op=True)
                            comm.all_gather(full, own if key is None else every, key=key, async_op=True)
                            comm.synchronize()
                            steps += [own.clone(), every.clone(), full.clone()]
                        assert mine.is_inference() == is_on
                found[modes] = torch.cat(steps)
        for modes, values in found.items():
            assert values.equal(found[()]), (options, modes)


def wrong_options_are_errors_on_all_ranks(rank, world_size):
    with pytest.raises(TypeError, match=r"Collectives\(\) has no option 'sparcity': did you mean 'sparsity'"):
        collectives(sparcity=0.9)
    check_error(lambda: collectives(values="int3"), "values is 'int3', must be one of")
    check_error(lambda: collectives(group=3), "group is 3, must be a process group")
    check_error(lambda: collectives(names=["w"]), "names has 'w', must be a model")
    check_error(lambda: collectives(rules={"*": "dense"}), "and names is None")
    check_error(lambda: collectives(hosts=7), "hosts is 7, must divide")
    check_error(
        lambda: collectives(sparsity=0.5 if rank else 0.6), "sparsity is 0.6 on rank 0 and 0.5 on rank 1"
    )
    names = [("w", torch.empty(64, 64 + rank))]
    check_error(lambda: collectives(names=names), "do not agree on parameters: w")
    if rank == 1:
        check_error(lambda: collectives(threads=0), "threads is 0", same=False)
    else:
        check_error(collectives, "rank 1: threads is 0", same=False)


def a_rank_outside(rank, world_size):
    """It learns that at once, and the others do not wait for it."""
    mesh = dist.device_mesh.DeviceMesh("cpu", [0])
    for group in (dist.new_group([0]), mesh):
        begin = time.monotonic()
        if rank == 0:
            collectives(group=group).close()
        else:
            check_error(lambda: collectives(group=group), "this rank is not in the group", same=False)
        assert time.monotonic() - begin < 15


def on_few_ranks(rank, world_size):
    """Of a group, of one rank, within one host, and by the caller's own group."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    with collectives(group=alone) as comm:
        tensor, out = given(rank, 1, N), torch.empty(N)
        comm.reduce_scatter(out, tensor, key="w", op=AVG)
        assert out.equal(tensor) and comm.all_gather(out, tensor, async_op=True).wait()
        work = comm.all_reduce(tensor, key=3, async_op=True)
        check_error(work.wait, "key is 3")
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("a", "b"))
    first = rank // 2 * 2
    for options in ({}, {"transport": "gloo"}, {"hosts": 1}):
        with collectives(group=mesh["b"], values="fp32", **options) as comm:
            for step in range(2):
                mine, total = given(rank, step, N), given(first, step, N) + given(first + 1, step, N)
                work = comm.all_reduce(mine, key="w", async_op=True)
                dist.all_reduce(other := torch.ones(1))  # meanwhile
                assert work.wait() and other == world_size
                check_close(mine, total, options)
                full = torch.empty(2 * N)
                comm.all_gather(full, mine, key="w")
                assert full.view(2, N)[rank % 2].equal(mine)
            if "hosts" not in options:
                check_error(
                    lambda: comm.all_reduce(mine, key=3 if rank % 2 else "w"),
                    f"rank {first + 1}: key",
                    same=False,
                )


def gone(rank, world_size, folder):
    comm = collectives(timeout_s=20)
    comm.all_reduce(torch.ones(N), key="w")
    lose_a_rank(rank, world_size, folder, True, lambda: comm.all_reduce(torch.ones(N), key="w"))


# ---- checkpoints ----


def step_of(comm, rank, world_size, step):
    """What comes out of a step of each kind."""
    own, every, full = torch.empty(N), given(rank, step, 3 * N), torch.empty(world_size * N)
    comm.reduce_scatter(own, given(rank, step, world_size * N), key="rows", op=AVG, async_op=True)
    comm.all_reduce(every, key="whole", op=AVG, async_op=True)
    comm.all_gather(full, given(rank, step, N), key="rows", async_op=True)
    comm.synchronize()
    return torch.cat([own, every, full])


def goes_on_as_if_nothing_had_been(rank, world_size):
    options = {"values": "int4", "residual": "int8", "parameters": "delta4"}
    for hosts in (None, world_size // 2):
        with collectives(hosts=hosts, **options) as comm:
            for step in range(3):
                step_of(comm, rank, world_size, step)
            saved = comm.state_dict()
            expected = [step_of(comm, rank, world_size, step) for step in (3, 4)]
        with collectives(hosts=hosts, **options) as comm:
            comm.load_state_dict(saved)
            assert comm.state_dict()[f"rank{rank}"].keys() == saved[f"rank{rank}"].keys()
            for step, wanted in zip((3, 4), expected):
                assert step_of(comm, rank, world_size, step).equal(wanted), (hosts, step)
            check_error(
                lambda: comm.all_reduce(torch.ones(5), key="rows"),
                "first call was reduce_scatter",
                same=hosts is None,
            )
        with collectives(hosts=hosts, **options) as comm:
            for bad in ({}, 3, {f"rank{rank}": {}}, [saved, saved]):
                check_error(lambda: comm.load_state_dict(bad), "tagc state: ", same=False)
            broken = {name: dict(entry) for name, entry in saved.items()}
            broken[f"rank{rank}"]["residuals"] = {"rows": torch.zeros(3), "whole": torch.zeros(3)}
            check_error(lambda: comm.load_state_dict(broken), "residual of rows", same=False)
            assert (
                comm.stats() == {} and comm.state_dict()[f"rank{rank}"]["residuals"] == {}
            )  # nothing has changed
            step_of(comm, rank, world_size, 0)


def by_files_and_by_dcp(rank, world_size, folder):
    """Into a new object: as if nothing had been."""
    import torch.distributed.checkpoint as dcp

    options = {"values": "int4", "residual": "int8", "parameters": "delta4"}
    files, where = f"{folder}/files", f"{folder}/dcp"

    def as_saved(comm, load):
        with comm:
            load(comm)
            assert step_of(comm, rank, world_size, 3).equal(expected), load
        return comm

    with collectives(**options) as comm:
        for step in range(3):
            step_of(comm, rank, world_size, step)
        comm.save(files)
        check_error(lambda: collectives().save(files), "was saved by another open handle", same=False)
        dcp.save({"model": torch.ones(3), "comm": comm}, checkpoint_id=where)
        expected = step_of(comm, rank, world_size, 3)
    as_saved(collectives(**options), lambda comm: comm.load(files))
    as_saved(collectives(**options), lambda comm: dcp.load({"comm": comm.at(where)}, checkpoint_id=where))
    with collectives(**options) as comm:
        advice = f"rank {rank} saved of key .* is not here.*comm.at"
        check_error(lambda: dcp.load({"comm": comm}, checkpoint_id=where), advice, same=False)
        step_of(comm, rank, world_size, 7)  # it is as it was, and now it has these keys
        as_saved(comm, lambda comm: dcp.load({"comm": comm}, checkpoint_id=where))


def states_fit_by_name(rank, world_size):
    model = nn.Sequential(nn.Linear(70, 70), nn.Linear(70, 70))
    with collectives(names=model) as comm:
        for parameter in model.parameters():
            comm.all_reduce(torch.ones_like(parameter), key=parameter, async_op=True)
        comm.all_reduce(torch.ones(N), key="other", async_op=True)
        saved = comm.state_dict()
    for names, text in (
        (None, "key 0.weight was of names, and names is None here"),
        ([("a", model[0].weight)], "key 0.weight was of names, which does not have it here"),
    ):
        with collectives(names=names) as comm:
            check_error(lambda: comm.load_state_dict(saved), text)
            comm.all_reduce(torch.ones(3), key="0.weight")  # it does not know it from there
    with collectives(names=model) as comm:
        comm.all_reduce(torch.ones(5), key="other", async_op=True)
        text = f"key other: all_reduce of {N} elements of float32; its first call here was .* of 5 elem"
        check_error(lambda: comm.load_state_dict(saved), text)
    with collectives() as comm:
        comm.all_reduce(torch.ones(N), key="0", async_op=True)
        saved = comm.state_dict()
    with collectives() as comm:  # the number of a tensor is no name
        comm.all_reduce(torch.ones(N), key=model[0].weight, async_op=True)
        check_error(lambda: comm.load_state_dict(saved), "key is '0', which is the name of a param")
    with collectives() as comm:
        comm.load_state_dict(saved)
        text = "number 0, and '0' is a name that came"
        check_error(lambda: comm.all_reduce(torch.ones(N), key=model[0].weight), text)


def saves(rank, world_size, hosts, folder):
    import torch.distributed.checkpoint as dcp

    with collectives(hosts=hosts, parameters="delta4") as comm:
        for step in range(3):
            n = N * 4 // world_size
            comm.reduce_scatter(torch.empty(n), given(rank, step, 4 * N), key="rows", async_op=True)
            comm.all_reduce(given(rank, step, 3 * N), key="whole", async_op=True)
            comm.all_gather(torch.empty(4 * N), given(rank, step, n), key="rows", async_op=True)
        comm.save(f"{folder}/files")
        dcp.save({"comm": comm}, checkpoint_id=f"{folder}/dcp")
        return comm.state_dict()


def loads(rank, world_size, hosts, folder, saved):
    """By other numbers of ranks and hosts: the mean over replicas is what it was."""
    import torch.distributed.checkpoint as dcp

    for load in (
        lambda comm: comm.load_state_dict(saved),
        lambda comm: comm.load(f"{folder}/files"),
        lambda comm: dcp.load({"comm": comm.at(f"{folder}/dcp")}, checkpoint_id=f"{folder}/dcp"),
    ):
        with collectives(hosts=hosts, parameters="delta4") as comm:
            load(comm)
            for name in ("rows", "whole"):
                total = sum(state[f"rank{r}"]["residuals"][name].float() for r, state in enumerate(saved))
                assert total.abs().max() > 0.01
                check_close(residual_of(comm, name) / (hosts or world_size), total / 2, name)
            n = N * 4 // world_size
            comm.reduce_scatter(torch.empty(n), given(rank, 3, 4 * N), key="rows")
            comm.all_gather(full := torch.empty(4 * N), given(rank, 3, n), key="rows")
            check_alike(full, "rows")


# ---- on a device ----


def by_a_devices_streams(rank, world_size):
    from fake_device import Installed

    def outcome(lazy):
        found = []
        for options in ({}, {"parameters": "delta4"}, {"hosts": world_size // 2} if world_size > 2 else {}):
            with collectives(**options) as comm:
                for step in range(4):
                    found.append(step_of(comm, rank, world_size, step))
        return found

    expected = outcome(False)
    with Installed(rank) as device:
        for mine, wanted in zip(outcome(True), expected):
            assert mine.equal(wanted)
        with collectives() as comm:
            comm.all_reduce(given(rank, 0, N), key="w", async_op=True)
            comm.synchronize()
            work = comm.all_reduce(given(rank, 0, N), key=3 if rank else "w", async_op=True)
            if rank == 0:
                work.wait()  # a stream waits, not the host
            check_error(
                comm.synchronize, "rank 1 gave up: .*key is 3" if rank == 0 else "key is 3", same=False
            )
        said = io.StringIO()
        with contextlib.redirect_stdout(said), collectives(codec=None) as comm:
            for step in range(2):
                comm.all_reduce(given(rank, step, N), key="w", async_op=True)
            comm.synchronize()
        assert (
            rank or said.getvalue().count("tagc: compressed on the host: kernels for CUDA are missing") == 1
        )
        assert device.tasks, "libtagc ran none by itself"
        device.check()


# ---- the example ----


def example(rank, world_size, runs):
    """The losses of each of `runs`, arguments of the script."""
    import sys

    import launch

    sys.path.insert(0, str(launch.EXAMPLES))
    import own_collectives

    dist.init_process_group = dist.destroy_process_group = lambda *_: None  # there is one already
    small = ["--n-embd", "64", "--steps", "24"]
    return [own_collectives.main([*small, *arguments]) for arguments in runs]


def test_an_optimizer_that_communicates_by_itself():
    """Exact, its losses are those with torch's calls; in four bits, with deltas, nearly."""
    runs = [["--torch"], ["--values", "fp32"], ["--parameters", "delta4"]]
    torchs, exact, four_bits = ranks.run(example, 2, runs)[0]
    assert exact == torchs
    assert torchs[-1] < torchs[0] - 1, torchs
    assert four_bits != torchs
    assert abs(sum(four_bits[-8:]) / sum(torchs[-8:]) - 1) < 0.01, (four_bits[-8:], torchs[-8:])


# ---- all of them ----


def test_two_ranks():
    ranks.run_each(
        [
            exact_sums_are_those_in_rank_order,
            what_is_rounded_off_comes_later,
            gathers_come_near_what_their_owner_has,
            without_a_key_the_mean_is_right,
            calls_without_a_key_are_those_of_a_run_that_goes_on,
            follows_the_schedule_of_compress,
            the_schedule_is_for_names,
            classes_follow_names,
            keys_that_are_gone,
            many_calls_from_many_threads,
            wrong_calls_are_errors_on_all_ranks,
            failures_end,
            a_group_that_is_gone,
            in_inference_mode,
            a_rank_outside,
            states_fit_by_name,
            wrong_options_are_errors_on_all_ranks,
            by_a_devices_streams,
        ],
        2,
    )


def test_four_ranks():
    ranks.run_each(
        [
            exact_sums_are_those_in_rank_order,
            what_is_rounded_off_comes_later,
            selection_and_sums_over_hosts,
            on_hosts_of_two,
            wrong_calls_are_errors_on_all_ranks,
            in_inference_mode,
            on_few_ranks,
            goes_on_as_if_nothing_had_been,
        ],
        4,
    )


def test_other_numbers_of_ranks(tmp_path):
    for n_saved, hosts_saved in (2, None), (4, 2):  # two replicas
        folder = tmp_path / f"{n_saved}"
        saved = ranks.run(saves, n_saved, hosts_saved, folder)
        for n_ranks, hosts in (4, 2), (4, None), (2, None):
            ranks.run(loads, n_ranks, hosts, folder, saved)


@pytest.mark.parametrize("world_size", [2, 4])
def test_files(world_size, tmp_path):
    ranks.run(by_files_and_by_dcp, world_size, tmp_path)


def test_a_rank_that_ends(tmp_path):
    ranks.attempt(gone, 3, str(tmp_path))
    check_loss_of_a_rank(3, tmp_path)


def timeouts(rank, world_size):
    """Unless it is given, the time-out is that of the user's group."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=77))
    for given_s, wanted_s in ((None, 77), (5, 5)):
        with collectives(group=group, timeout_s=given_s) as comm:
            assert {one._timeout_s for one in comm._passes.comms()} == {wanted_s}


def test_timeouts_are_the_groups():
    ranks.run(timeouts, 2)
