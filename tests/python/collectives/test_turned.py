"""Turned: reductions in the basis of a matrix's directions. Sums are compared with those in plain torch, and
what is rounded off with the singular vectors that the gradients were made of."""

import functools

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from oracles import check_alike, check_error
from torch import nn

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
EVERY = 24
SHAPES = ((4, 24, 64), (4, 64, 24), (96, 64), (64, 256))  # stacks and matrices, whose rows 4 ranks divide


def given(rank, step, shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(31 * step + rank)).to(dtype)


def signal(shape, falls=0.8):
    """The same in each step: singular values that fall by a factor, in bases that are dense."""
    generator = torch.Generator().manual_seed(7)
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=generator))[0] for n in shape)
    n = min(shape)
    return left[:, :n], right[:, :n], falls ** torch.arange(n)


def turned(every=EVERY, **options):
    from tagc.collectives import Collectives, Turned

    comm = Collectives(**{"timeout_s": 30, "residual": "fp32"} | options)
    return comm, Turned(comm, every)


def is_turned(matrices):
    """Whether bases are there, and orthogonal, and turn much."""
    if matrices.bases is None:
        return False
    one = torch.eye(matrices.n_short)
    assert (matrices.bases.mT @ matrices.bases - one).abs().max() < 1e-5
    assert (matrices.bases.abs() - one).abs().max() > 0.5
    return True


def exact_sums_come_back(rank, world_size):
    for dtype, bound in (torch.float32, 1e-4), (torch.bfloat16, 2e-2):
        comm, muon = turned(values="fp32")
        bases = []
        with comm:
            for step in range(2 * EVERY + 21):
                works, wanted, outputs = [], [], []
                for shape in SHAPES:
                    for op, factor in (SUM, 1.0), (AVG, 1 / world_size):
                        inputs = [given(other, step, shape, dtype) for other in range(world_size)]
                        total = sum(one.float() for one in inputs) * factor
                        source, whole = inputs[rank], inputs[rank].clone()
                        own = torch.empty(source.numel() // world_size, dtype=dtype)
                        rows, all_of_it = f"rows {shape} {op}", f"whole {shape} {op}"
                        works.append(muon.reduce_scatter(own, source, key=rows, op=op, async_op=True))
                        works.append(muon.all_reduce(whole, key=all_of_it, op=op, async_op=True))
                        outputs += [own, whole]
                        wanted += [total.view(world_size, -1)[rank], total]
                for work, output, exact in zip(works, outputs, wanted, strict=True):
                    assert work.wait() and work.is_completed() and work.get_future().wait()[0] is output
                    torch.testing.assert_close(output.float(), exact, rtol=bound, atol=bound)
                found = list(muon._matrices.values())
                assert [is_turned(one) for one in found] == [step >= 20] * len(found), step
                bases.append([one.bases for one in found])
            new = [i for i in range(1, len(bases)) if any(a is not b for a, b in zip(bases[i - 1], bases[i]))]
            assert new == [20, 20 + EVERY, 20 + 2 * EVERY], "after 20 calls, and then each EVERY"
            assert not any(a.equal(b) for a, b in zip(bases[20], bases[-1]))
            for one in found:
                check_alike(one.bases, "bases")


def small_directions_are_rounded_finely(rank, world_size):
    """Errors of Turned are in proportion to the singular values; without it they are the same in all."""
    shape, n_seen = (64, 96), EVERY
    left, right, sizes = signal(shape)
    errors = {}
    comm, muon = turned()
    with comm:
        for calls in muon, comm:
            errors[calls] = torch.zeros(len(sizes))
            for step in range(EVERY + 20):
                gradient = left * sizes @ right.mT
                exact = gradient * sum(1 + 0.1 * other + 0.01 * step for other in range(world_size))
                gradient *= 1 + 0.1 * rank + 0.01 * step
                calls.all_reduce(gradient, key=f"{type(calls).__name__}")
                if step >= EVERY + 20 - n_seen:
                    errors[calls] += (left.mT @ (gradient - exact) @ right).square().sum(1) / n_seen
        assert is_turned(muon._matrices["Turned"])
    turned_errors, plain = (errors[calls].sqrt() for calls in (muon, comm))
    small, large = slice(48, 64), slice(0, 8)
    assert plain[small].mean() > 0.3 * plain[large].mean(), plain
    # a basis in 4 bits lets a little of large directions into small ones
    assert turned_errors[small].mean() < 0.22 * plain[small].mean(), (turned_errors, plain)
    assert turned_errors[large].mean() < 4 * plain[large].mean(), (turned_errors, plain)


def what_is_rounded_off_comes_later(rank, world_size, hosts=None):
    """What came and what is kept are what was given, over two changes of bases; on hosts of several ranks, as
    long as a basis stays."""
    comm, muon = turned(hosts=hosts)
    shape = (64, 96)
    rows, whole, sums = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    n_steps, seen = 20 + EVERY + 7, set()
    with comm:
        for step in range(n_steps):
            inputs = [given(other, step, shape) for other in range(world_size)]
            own, mine = torch.empty(64 // world_size, 96), inputs[rank].clone()
            muon.reduce_scatter(own, inputs[rank], key="rows")
            muon.all_reduce(mine, key="whole")
            seen.add(muon._matrices["whole"].bases)
            if hosts and step < 20 + EVERY:
                continue
            everyone = [torch.empty_like(own) for _ in range(world_size)]
            dist.all_gather(everyone, own)
            rows, whole, sums = rows + torch.cat(everyone), whole + mine, sums + sum(inputs)
        assert len(seen) == 3, "no bases, and two"
        held = comm.state_dict()[f"rank{dist.get_rank()}"]["residuals"]
        for name, came in ("rows", rows), ("whole", whole):
            residual = held[name].clone().float()
            dist.all_reduce(residual)
            matrices = muon._matrices[name]
            short = matrices.bases @ residual.view(*matrices.shape[:2], matrices.n_short, -1)
            residual = matrices.long(short).view(shape)
            assert residual.abs().max() > 0.01, "nothing was rounded"
            torch.testing.assert_close(came + residual, sums, rtol=1e-3, atol=1e-3)
        assert 4.5 < comm.stats()["bits_per_param"] < 9, comm.stats()  # fp32 has 48


def over_hosts(rank, world_size):
    what_is_rounded_off_comes_later(rank, world_size, hosts=world_size // 2)


def bases_travel_together_in_four_bits(rank, world_size):
    """One message to each other rank has those of all keys."""
    comm, muon = turned()
    n_calls, exchange, connection = 0, comm.all_to_all, comm._passes.comm(comm._group)

    def counted(*arguments):
        nonlocal n_calls
        n_calls += 1
        return exchange(*arguments)

    comm.all_to_all, sent = counted, []
    with comm:
        for step in range(42):
            for name in "abcd":
                muon.all_reduce(given(rank, step, (128, 192)), key=name)
            sent.append(sum(connection.bytes_sent().values()))
        assert n_calls == 1, n_calls
    steps = [b - a for a, b in zip(sent, sent[1:])]  # steps[i]: the bytes of step i + 1
    extra = torch.tensor([steps[19] - steps[20], steps[20]], dtype=torch.float64)
    dist.all_reduce(extra)
    n_values = 4 * 128 * 128 * (world_size - 1)
    assert 4.5 < 8 * extra[0] / n_values < 4.7, extra  # and what ranks agree on


def failures_are_on_all_ranks_and_leave_no_rank_behind(rank, world_size):
    """A rank that failed has counted another number of calls: all begin anew, together."""
    comm, muon = turned()
    shape = (64, 96)
    with comm:
        for step in range(60):
            gradient = given(rank, step, shape)
            if step in (7, 30):
                is_wrong = rank == world_size - 1
                tensor = gradient.flatten() if is_wrong else gradient
                words = r"of shape \(6144,\)" if is_wrong else f"rank {world_size - 1}"
                check_error(functools.partial(muon.all_reduce, tensor, key="w"), words, same=False)
                assert "w" not in muon._matrices
                continue
            muon.all_reduce(gradient, key="w")
            check_alike(gradient, "sums")
            assert is_turned(muon._matrices["w"]) == (step in (28, 29) or step >= 51), step


def a_gradient_that_is_not_finite(rank, world_size):
    """It makes its own sum NaN, and does not count for a basis."""
    comm, muon = turned()
    with comm:
        for step in range(70):
            gradient = given(rank, step, (64, 96))
            if step in (3, 41) and rank == 0:
                gradient[1, 1] = float("inf")
            muon.all_reduce(gradient, key="w")
            assert gradient.isfinite().all() == (step not in (3, 41)), step
            assert is_turned(muon._matrices["w"]) == (step >= 20), step


def small_ones_and_one_host_go_as_without(rank, world_size):
    comm, muon = turned()
    with comm:
        for step in range(22):
            small = given(rank, step, (8, 8))
            muon.all_reduce(small, key="small")
            exact = sum(given(other, step, (8, 8)) for other in range(world_size))
            torch.testing.assert_close(small, exact)
        assert not muon._matrices
    comm, muon = turned(hosts=1)
    with comm:
        gradient, theirs = given(rank, 1, (64, 96)), given(rank, 1, (64, 96))
        muon.all_reduce(gradient, key="w")
        dist.all_reduce(theirs)
        assert gradient.equal(theirs)


def a_parameter_as_key_and_a_run_that_goes_on(rank, world_size):
    """What a former run kept was in a basis that this one does not have."""
    model = nn.Linear(96, 64)
    comm, muon = turned(names=model)
    with comm:
        for step in range(25):
            muon.all_reduce(given(rank, step, (64, 96)), key=model.weight)
        saved = comm.state_dict()
    first = {}
    for is_resumed in (False, True):
        comm, muon = turned(names=model)
        with comm:
            if is_resumed:
                comm.load_state_dict(saved)
            gradient = given(rank, 25, (64, 96))
            muon.all_reduce(gradient, key=model.weight)
            first[is_resumed] = gradient
    assert first[False].equal(first[True])


def in_inference_mode(rank, world_size):
    """What is made there does for calls outside, and the other way round."""
    comm, muon = turned(values="fp32")
    with comm:
        for step in range(46):
            with torch.inference_mode(step % 3 == 0):
                gradient = given(rank, step, (64, 96))
                own = torch.empty(gradient.numel() // world_size)
                work = muon.reduce_scatter(own, gradient, key="rows", async_op=True)
                muon.all_reduce(gradient, key="whole")
            work.wait()
            exact = sum(given(other, step, (64, 96)) for other in range(world_size))
            torch.testing.assert_close(gradient.clone(), exact, rtol=1e-4, atol=1e-4)
            mine = exact.view(world_size, -1)[rank]
            torch.testing.assert_close(own.clone(), mine, rtol=1e-4, atol=1e-4)
        assert all(map(is_turned, muon._matrices.values()))


def by_a_devices_streams(rank, world_size):
    """The same bits as in CPU memory, though memory is used again as soon as nothing here holds it."""
    from fake_device import Installed

    def outcome():
        found = []
        comm, muon = turned()
        with comm:
            for step in range(23):
                gradient, own = given(rank, step, (64, 96)), torch.empty(64 * 96 // world_size)
                works = [
                    muon.reduce_scatter(own, gradient, key="rows", async_op=True),
                    muon.all_reduce(gradient.clone(), key="whole", async_op=True),
                ]
                for work in works:
                    work.wait()
                found += [own, works[1].result()[0]]
            comm.synchronize()
            assert all(map(is_turned, muon._matrices.values()))
        return found

    expected = outcome()
    with Installed(rank) as device:
        for mine, wanted in zip(outcome(), expected, strict=True):
            assert mine.equal(wanted)
        device.check()


def what_is_refused(rank, world_size):
    from tagc import Error
    from tagc.collectives import Collectives, Turned

    with pytest.raises(Error, match="comm is a int"):
        Turned(3)
    with Collectives(timeout_s=30, sparsity=0.9) as comm, pytest.raises(Error, match="sparsity of 0.9"):
        Turned(comm)
    comm, muon = turned()
    with comm:
        for every in (19, True, 20.0):
            with pytest.raises(Error, match="every is"):
                Turned(comm, every)
        gradient = torch.ones(64, 96)
        for key, words in (3, "key is a int"), (gradient, "key is a Tensor"):
            with pytest.raises(Error, match=words):
                muon.all_reduce(gradient, key=key)
        for shape in (64 * 96,), (2, 2, 64, 96):
            with pytest.raises(Error, match="must be"):
                muon.all_reduce(torch.ones(shape), key="w")
        with pytest.raises(Error, match="ranks get whole matrices"):
            muon.reduce_scatter(torch.ones(63 * 96), torch.ones(63, world_size, 96), key="odd rows")
        muon.all_reduce(gradient, key="w")
        with pytest.raises(Error, match="a key of its own"):
            muon.all_reduce(torch.ones(96, 64), key="w")


def test_a_basis_that_its_code_spoils(monkeypatch):
    """is not sent: sums of what such a one turns would be wrong."""
    from tagc.collectives import turned as module

    encoded, one = module.encoded, torch.eye(64)
    for spoils in (False, True):
        cpu = torch.device("cpu")
        matrices = module.Matrices("w", (1, 1, 64, 96), 0, True, [0], cpu)
        matrices.add(given(0, 1, (1, 64, 96)))
        factor = 0.0 if spoils else 1.0
        monkeypatch.setattr(module, "encoded", lambda x: encoded(x if x[0].equal(one) else x * factor))
        sent = module.decoded(matrices.new_bases(), (1, 64, 64), cpu)[0]
        assert (sent.mT @ sent - one).abs().max() < 1e-5
        assert sent.equal(one) == spoils and matrices.follows == (not spoils)


def test_two_ranks():
    ranks.run_each(
        [
            exact_sums_come_back,
            small_directions_are_rounded_finely,
            what_is_rounded_off_comes_later,
            bases_travel_together_in_four_bits,
            failures_are_on_all_ranks_and_leave_no_rank_behind,
            a_gradient_that_is_not_finite,
            small_ones_and_one_host_go_as_without,
            a_parameter_as_key_and_a_run_that_goes_on,
            in_inference_mode,
            by_a_devices_streams,
            what_is_refused,
        ],
        2,
    )


def test_four_ranks():
    ranks.run_each([exact_sums_come_back, what_is_rounded_off_comes_later, over_hosts], 4)
