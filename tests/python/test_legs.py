"""Sums of which one leg stays within hosts: DDP in two levels, and FSDP2's meshes of shards and replicas. The
oracle is the method in plain loops over all ranks, in one process: it shares no code with tagc."""

import json
import math

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
import wrapper_checks
from models import Odd, batch_of, loss_of
from oracles import check_alike, check_equal, full_gradients
from torch import nn
from wrapper_checks import mesh_of
from wrappers import HAS_FSDP1, gradients, heard, residuals_of, wrapped

SHAPE = (64, 32)  # divided by all numbers of ranks here, so that no fragment is padded
SPARSITY = 0.875
RETURNED = 1 - 2.4 * (1 - SPARSITY)  # share of its sums that an owner does not send back in an all-reduce


class Matrix(nn.Module):
    """A matrix whose gradient is what forward() gets."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


class Matrices(nn.Module):
    shapes = (SHAPE, SHAPE)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(map(Matrix, self.shapes))

    def forward(self, gradients):
        return sum(layer(gradient) for layer, gradient in zip(self.layers, gradients))


class OddMatrices(Matrices):
    """No number of ranks divides what these have."""

    shapes = ((11, 3), (1, 7), (5, 23))


def gradients_of(rank, step, shapes=Matrices.shapes):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def exact(**options):
    """Options of an exchange that rounds nothing: what is selected travels as it is, the rest stays."""
    own = {"values": "fp32", "sparsity": SPARSITY, "layers": "all", "residual": "fp32", "verbose": False}
    return own | options


# ---- the oracle ----


def selected(values, sparsity):
    """The largest values, and zeros."""
    n = values.numel() - math.ceil(sparsity * values.numel() - 1e-9)
    places = values.abs().topk(n).indices
    return torch.zeros_like(values).index_copy(0, places, values[places])


class ReduceScatter:
    """Error feedback of one matrix: each member adds its residual and sends the largest of that to owners."""

    def __init__(self, n_members, n):
        self.residuals = torch.zeros(n_members, n_members, n // n_members)  # of a member, for an owner

    def step(self, given):
        """Returns the mean of what the members send."""
        total = torch.stack(given).view_as(self.residuals) + self.residuals
        sent = torch.stack([torch.stack([selected(row, SPARSITY) for row in rows]) for rows in total])
        self.residuals = total - sent
        return sent.mean(0).flatten()


class AllReduce(ReduceScatter):
    """The owner keeps all of its own, and sends the largest of its sums to all."""

    def step(self, given):
        total, n = torch.stack(given).view_as(self.residuals) + self.residuals, len(given)
        found = []
        for owner in range(n):
            sent = [selected(total[member, owner], SPARSITY) for member in range(n) if member != owner]
            sums = total[owner, owner] + sum(sent)
            found.append(selected(sums, RETURNED))
            others = [member for member in range(n) if member != owner]
            self.residuals[others, owner] = total[others, owner] - torch.stack(sent)
            self.residuals[owner, owner] = sums - found[-1]
        return torch.cat(found) / n


class Rows:
    """The mean of a host, of which its ranks exchange every other row."""

    def __init__(self, n_hosts, per_host, n):
        self.n_hosts, self.per_host = n_hosts, per_host
        self.residuals = torch.zeros(n_hosts, n_hosts * per_host, n // (n_hosts * per_host))

    def step(self, given):
        n_ranks = self.n_hosts * self.per_host
        means = torch.stack(given).view(self.n_hosts, self.per_host, n_ranks, -1).mean(1)
        total = means + self.residuals
        sent = torch.stack([torch.stack([selected(row, SPARSITY) for row in host]) for host in total])
        self.residuals = total - sent
        return sent.mean(0).flatten()

    def held(self, host, place):
        mine = torch.zeros_like(self.residuals[host])
        mine[place :: self.per_host] = self.residuals[host][place :: self.per_host]
        return mine.flatten()


class TwoLevels:
    """The mean of a host, cut into a part for each of its ranks, of which each is exchanged between hosts."""

    def __init__(self, n_hosts, per_host, n):
        self.n_hosts, self.per_host = n_hosts, per_host
        self.parts = [AllReduce(n_hosts, n // per_host) for _ in range(per_host)]

    def held(self, host, place):
        parts = torch.zeros(self.per_host, self.parts[place].residuals[host].numel())
        parts[place] = self.parts[place].residuals[host].flatten()
        return parts.flatten()

    def step(self, given):
        hosts = torch.stack(given).view(self.n_hosts, self.per_host, -1).mean(1)
        pieces = [host.chunk(self.per_host) for host in hosts]
        return torch.cat(
            [part.step([piece[place] for piece in pieces]) for place, part in enumerate(self.parts)]
        )


def check_against_oracle(rank, world_size, n_hosts, found_at, residuals_at, n_steps=4, place=None):
    """found_at(step, gradients) -> this rank's gradients, whole. residuals_at() -> its residuals, by matrix.
    place: of this rank's slice."""
    per_host = world_size // n_hosts
    host, place = rank // per_host, rank % per_host if place is None else place
    oracles = [TwoLevels(n_hosts, per_host, SHAPE[0] * SHAPE[1]) for _ in range(2)]
    for step in range(n_steps):
        everyone = [gradients_of(other, step) for other in range(world_size)]
        found = found_at(step, gradients_of(rank, step))
        for i, oracle in enumerate(oracles):
            expected = oracle.step([gradients[i].flatten() for gradients in everyone])
            torch.testing.assert_close(found[i].flatten(), expected, rtol=1e-5, atol=1e-6)
    for i, (oracle, residual) in enumerate(zip(oracles, residuals_at())):
        expected = oracle.parts[place].residuals[host].flatten()
        assert expected.count_nonzero() > 100
        torch.testing.assert_close(residual.flatten(), expected, rtol=1e-5, atol=1e-6, msg=str(i))


# ---- DDP ----


def ddp(make, **options):
    return wrapped("ddp", make, **{"bucket_cap_mb": 0.002} | options)


def ddp_oracle(rank, world_size, n_hosts):
    import tagc.torch as tagc

    model = ddp(Matrices, bucket_cap_mb=1e-6)
    with tagc.compress(model, hosts=n_hosts, **tagc.grouped(exact())) as handle:

        def found_at(step, given):
            model.zero_grad()
            model(given).backward()
            for parameter in model.parameters():
                check_alike(parameter.grad, "a gradient")
            return [parameter.grad for parameter in model.parameters()]

        found_at(0, [torch.zeros(SHAPE)] * 2)  # then DDP has rebuilt its buckets, one for each matrix
        check_against_oracle(rank, world_size, n_hosts, found_at, lambda: list(residuals_of(handle).values()))
        stats = handle.stats()
        assert stats["world_size"] == world_size and stats["ranks_per_host"] == world_size // n_hosts
        assert stats["n_units"] == 2 and stats["bytes_within"] > 0
        n_held = sum(values.numel() for values in residuals_of(handle).values())
        assert n_held == 2 * SHAPE[0] * SHAPE[1] * n_hosts // world_size


def ddp_by_hand(rank, world_size):
    """join(), where ranks without data call the hook outside of a pass; a loop that registers the hook."""
    import tagc.torch as tagc

    model = ddp(Odd)
    with tagc.compress(model, hosts=2, **tagc.grouped(exact(sparsity=0))) as handle:
        with model.join():
            for step in range(1 + rank % 2):
                model.zero_grad()
                loss_of(model, batch_of(rank, step)).backward()
        assert handle.n_steps == 2
    model = ddp(Odd)
    model.register_comm_hook(tagc.ddp_state(model, hosts=2, **tagc.grouped(exact(sparsity=0))), tagc.ddp_hook)
    loss_of(model, batch_of(rank)).backward()
    check_equal(gradients(model), full_gradients(Odd, world_size))


# ---- FSDP2 on a mesh of shards and replicas ----


def given_to(model):
    """found_at() of check_against_oracle()"""

    def found_at(step, given):
        model.zero_grad()
        model(given).backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    return found_at


def replicas_oracle(rank, world_size):
    """Shards inside hosts: between hosts go the sums of shards, selected. hosts=None: all ranks are on this
    host, and those of a shard group count as one."""
    import tagc.torch as tagc

    for n_hosts in (2, 4) if world_size == 8 else (2,):
        for hosts in (n_hosts, None):
            model = wrapped("fsdp2", Matrices, mesh=mesh_of(n_hosts, world_size // n_hosts))
            with tagc.compress(model, hosts=hosts, **tagc.grouped(exact())) as handle:
                check_against_oracle(
                    rank, world_size, n_hosts, given_to(model), lambda: list(residuals_of(handle).values())
                )
                assert handle.stats()["world_size"] == n_hosts and handle.stats()["n_units"] == 2


def replicas_on_hosts_oracle(rank, world_size):
    """Hosts of two replicas each: these are added up inside their host, too, and each sends a half."""
    import tagc.torch as tagc

    model = wrapped("fsdp2", Matrices, mesh=mesh_of(4, world_size // 4))
    with tagc.compress(model, hosts=2, **tagc.grouped(exact())) as handle:
        n_shards, shard, part = world_size // 4, rank % (world_size // 4), rank // (world_size // 4) % 2

        def held():
            """This rank's part of its shard, which is zero elsewhere."""
            for values in residuals_of(handle).values():
                parts = values.view(-1).chunk(2) if n_shards > 1 else [values.view(-1)] * 2
                assert n_shards == 1 or not parts[1 - part].any()
                yield parts[part]

        # the oracle's places within a host are in the order of slices
        place = shard * 2 + part
        check_against_oracle(rank, world_size, 2, given_to(model), held, place=place)
        assert handle.stats()["world_size"] == 4 and handle.stats()["ranks_per_host"] == 2


def shards_oracle(rank, world_size):
    """Replicas inside hosts: between hosts go fragments of shards, selected; torch averages within."""
    import tagc.torch as tagc

    n_hosts = 2
    n_replicas = world_size // n_hosts
    model = wrapped("fsdp2", Matrices, mesh=mesh_of(n_replicas, n_hosts, across=True))
    with tagc.compress(model, hosts=n_hosts, **tagc.grouped(exact())) as handle:
        oracles = [[ReduceScatter(n_hosts, SHAPE[0] * SHAPE[1]) for _ in range(n_replicas)] for _ in range(2)]
        for step in range(4):
            found = given_to(model)(step, gradients_of(rank, step))
            everyone = [gradients_of(other, step) for other in range(world_size)]
            for i, replicas in enumerate(oracles):
                means = [
                    replica.step([everyone[host * n_replicas + r][i].flatten() for host in range(n_hosts)])
                    for r, replica in enumerate(replicas)
                ]
                torch.testing.assert_close(
                    found[i].flatten(), torch.stack(means).mean(0), rtol=1e-5, atol=1e-6
                )
        assert handle.stats()["world_size"] == n_hosts


def what_stays_dense_is_said(rank, world_size):
    import tagc.torch as tagc

    for hosts, n_said in ((4, 1), (2, 0), (None, 0)):
        model = wrapped("fsdp2", Matrices, mesh=mesh_of(2, 2))
        with heard() as said:
            tagc.compress(model, hosts=hosts, **tagc.grouped(exact())).close()
        assert len(said) == n_said * (rank == 0), said
        if said:
            assert "2 of 2 units, such as layers.0, are sharded over 2 ranks on several hosts" in said[0]
            assert "replicated over 2 on several hosts, too, where torch sums" in said[0], said


def odd_hosts(rank, world_size):
    """All ranks take over the same of torch's two sums, also where not all hosts are alike."""
    import tagc.torch as tagc
    from tagc.torch.advise import first_words

    own = first_words.identity
    for identities, is_dense in (("aaab", True), ("abab", False), ("abcc", True)):
        first_words.identity = lambda identities=identities: identities[rank]
        try:
            model = wrapped("fsdp2", Odd, mesh=mesh_of(2, 2))
            with heard("replicated over 2 on several hosts, too") as said:
                handle = tagc.compress(model, **tagc.grouped(exact(sparsity=0)))
        finally:
            first_words.identity = own
        loss_of(model, batch_of(rank)).backward()
        check_equal(gradients(model), full_gradients(Odd, world_size), identities)
        handle.close()
        assert len(said) == (is_dense and rank == 0), (identities, said)


def one_fails(rank, world_size):
    """An exchange that fails on one rank, the first of a unit or a later one, is an error on all that names
    that rank and says why, and no rank waits for it within its host."""
    import tagc.torch as tagc
    from tagc.torch.exchange import model_exchanges

    def fail(*_):
        raise tagc.Error("device", "it is lost")

    for make in (lambda: ddp(Matrices), lambda: wrapped("fsdp2", Matrices, mesh=mesh_of(4, 1))):
        for n_before in (0, 1):
            model, check = make(), model_exchanges.check_tensors
            handle = tagc.compress(model, hosts=2, timeout_s=5, **tagc.grouped(exact()))
            for step in range(n_before):
                model(gradients_of(rank, step)).backward()
            if rank == 1:
                model_exchanges.check_tensors = fail
            try:
                model(gradients_of(rank, 2)).backward()
                text = "no error"
            except tagc.Error as error:
                text = str(error)
            finally:
                model_exchanges.check_tensors = check
            assert "rank 1: it is lost" in text, (n_before, text)
            handle.close()


def hsdp_as_torch(rank, world_size):
    """With every value as it is, gradients are those of torch: accumulated whole, divided as the user wants,
    on a mesh of shards alone, in other dtypes; and gathers inside a host are torch's."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import tagc.torch as tagc

    for *sizes, across in ((2, 2, False), (2, 2, True), (4, 1, False), (1, 4, False)):
        hosts, both = (None if sizes == [1, 4] else 2), (sizes, across)
        model = wrapped("fsdp2", Odd, mesh=mesh_of(*sizes, across))
        with tagc.compress(model, hosts=hosts, **tagc.grouped(exact(sparsity=0))) as handle:
            for step in range(2):
                model.set_requires_all_reduce(step == 1)
                loss_of(model, batch_of(rank, step)).backward()
            check_equal(gradients(model), full_gradients(Odd, world_size, (0, 1)), both)
            for module in (*model.layers, model):
                module.set_gradient_divide_factor(3.0)
            model.zero_grad()
            loss_of(model, batch_of(rank)).backward()
            expected = {n: g * world_size / 3 for n, g in full_gradients(Odd, world_size).items()}
            check_equal(gradients(model), expected, (both, "divided by 3"))
            assert sizes == [1, 4] or handle.stats()["bytes_by_leg"]["gather"] == 0
    for reduce_dtype in (torch.bfloat16, torch.float16):
        found = []
        for compresses in (True, False):
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
            model = wrapped("fsdp2", Odd, mesh=mesh_of(2, 2), mp_policy=policy)
            handle = tagc.compress(model, hosts=2, **tagc.grouped(exact(sparsity=0))) if compresses else None
            loss_of(model, batch_of(rank)).backward()
            found.append(gradients(model))
            if handle is not None:
                handle.close()
        for name, gradient in found[0].items():
            size = max(1e-3, found[1][name].abs().max().item())
            assert (gradient - found[1][name]).abs().max() <= 2e-2 * size, (name, reduce_dtype)


def deltas_within_hosts(rank, world_size):
    """Gathers inside a host are torch's, whatever is asked for."""
    import tagc.torch as tagc

    model = wrapped("fsdp2", Odd, mesh=mesh_of(2, 2))
    with tagc.compress(model, hosts=2, **tagc.grouped(exact(parameters="delta4"))) as handle:
        for step in range(2):
            loss_of(model, batch_of(rank, step)).backward()
        assert handle.stats()["bytes_by_leg"]["gather"] == 0


# ---- FSDP1 ----


def fsdp1(make, strategy, sizes=None):
    mesh = mesh_of(*sizes) if sizes else None
    return wrapped("fsdp1", make, sharding_strategy=strategy, device_mesh=mesh)


def own(handle, n):
    """The n values of each residual that are of this rank; the others are zero."""
    for values in residuals_of(handle).values():
        assert values.count_nonzero() <= n
        yield values.flatten()


FSDP1 = (
    ("FULL_SHARD", None),
    ("SHARD_GRAD_OP", None),
    ("NO_SHARD", None),
    ("HYBRID_SHARD", (2, 2, False)),
    ("_HYBRID_SHARD_ZERO2", (2, 2, False)),
    ("HYBRID_SHARD", (2, 2, True)),
)


def fsdp1_oracle(rank, world_size):
    """Rows, a slice, or the shards of replicas: what a rank exchanges with the other host is a half of what
    its host has."""
    import tagc.torch as tagc

    n, (host, place) = SHAPE[0] * SHAPE[1], divmod(rank, 2)
    for strategy, sizes in FSDP1:
        if sizes and sizes[2]:
            continue  # shards_oracle() is of that exchange
        model = fsdp1(Matrices, strategy, sizes)
        is_rows = strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
        oracles = [Rows(2, 2, n) if is_rows else TwoLevels(2, 2, n) for _ in range(2)]
        with tagc.compress(model, hosts=2, **tagc.grouped(exact())) as handle:
            for step in range(4):
                model.zero_grad()
                model(gradients_of(rank, step)).backward()
                everyone = [gradients_of(other, step) for other in range(world_size)]
                for i, (oracle, found) in enumerate(zip(oracles, gradients(model).values())):
                    expected = oracle.step([gradients[i].flatten() for gradients in everyone])
                    torch.testing.assert_close(found.flatten(), expected, rtol=1e-5, atol=1e-6, msg=strategy)
            for oracle, residual in zip(oracles, own(handle, n // 2)):
                expected = oracle.held(host, place)
                assert expected.count_nonzero() > 100
                torch.testing.assert_close(residual, expected, rtol=1e-5, atol=1e-6, msg=strategy)


def fsdp1_on_other_hosts(rank, world_size):
    """Shards and replicas both between hosts, which is said; and shards between them, replicas inside."""
    import tagc.torch as tagc

    for sizes, hosts, n_said in (((2, 2), 4, 1), ((2, 2, True), 2, 0)):
        model = fsdp1(Odd, "HYBRID_SHARD", sizes)
        with heard() as said:
            handle = tagc.compress(model, hosts=hosts, **tagc.grouped(exact(sparsity=0)))
        assert len(said) == n_said * (rank == 0), said
        assert all("replicated over 2 on several hosts, too" in text for text in said)
        loss_of(model, batch_of(rank)).backward()
        check_equal(gradients(model), full_gradients(Odd, world_size))
        handle.close()


# ---- checkpoints ----


def layouts_of(world_size):
    """{name: (function that makes the model, hosts)}"""
    half = world_size // 2
    of_fsdp1 = {
        "fsdp1": (lambda: fsdp1(OddMatrices, "FULL_SHARD"), 2),
        "fsdp1, whole": (lambda: fsdp1(OddMatrices, "NO_SHARD"), 2),
        "fsdp1, replicas": (lambda: fsdp1(OddMatrices, "HYBRID_SHARD", (half, 2)), 2),
    }
    return (of_fsdp1 if HAS_FSDP1 else {}) | {
        "ddp": (lambda: ddp(OddMatrices), 2),
        "ddp, flat": (lambda: ddp(OddMatrices), None),
        "replicas": (lambda: wrapped("fsdp2", OddMatrices, mesh=mesh_of(2, half)), 2),
        "replicas of whole": (lambda: wrapped("fsdp2", OddMatrices, mesh=mesh_of(world_size, 1)), 2),
        "replicas on hosts": (
            lambda: wrapped("fsdp2", OddMatrices, mesh=mesh_of(half, 2)),
            2 if world_size > 4 else None,
        ),
        "shards": (lambda: wrapped("fsdp2", OddMatrices, mesh=mesh_of(half, 2, across=True)), 2),
    }


def save_each(rank, world_size, folder, names):
    """Returns {layout: what is still to come of each matrix}"""
    import tagc.torch as tagc

    found = {}
    for name, (make, hosts) in layouts_of(world_size).items():
        if name not in names:
            continue
        model = make()
        with tagc.compress(model, hosts=hosts, **tagc.grouped(exact())) as handle:
            given = [torch.zeros(shape, dtype=torch.float64) for shape in OddMatrices.shapes]
            for step in range(3):
                model.zero_grad()
                everyone = [gradients_of(other, step, OddMatrices.shapes) for other in range(world_size)]
                model(everyone[rank]).backward()
                for total, received, *mine in zip(given, gradients(model).values(), *everyone):
                    total += sum(gradient.double() for gradient in mine) / world_size - received
            handle.save(f"{folder}/{name}")
            found[name] = given
            assert all(total.abs().max() > 0.1 for total in given)
    return found


def load_each(rank, world_size, folder, to_come, names, one_in):
    """Steps without gradients send the rest: it is what was still to come, whichever ranks saved it."""
    import tagc.torch as tagc

    for i, (name, (make, hosts)) in enumerate(layouts_of(world_size).items()):
        for j, (saved, expected) in enumerate(to_come.items()):
            if name not in names or (i + j) % one_in:
                continue
            model = make()
            with tagc.compress(model, hosts=hosts, **tagc.grouped(exact(sparsity=0.5))) as handle:
                handle.load(f"{folder}/{saved}")
                check_saved(handle, expected, f"{saved} -> {name}")
                found = [torch.zeros(shape, dtype=torch.float64) for shape in OddMatrices.shapes]
                for _ in range(4):
                    model.zero_grad()
                    model([torch.zeros(shape) for shape in OddMatrices.shapes]).backward()
                    for total, received in zip(found, gradients(model).values()):
                        total += received
                for total, rest in zip(found, expected):
                    torch.testing.assert_close(total, rest, rtol=1e-5, atol=1e-5, msg=f"{saved} -> {name}")


def save_before_a_step(rank, world_size, folder, saved, again):
    """Loads what another number of ranks has saved, and saves it at once."""
    import tagc.torch as tagc

    make, hosts = layouts_of(world_size)["fsdp1"]
    with tagc.compress(make(), hosts=hosts, **tagc.grouped(exact())) as handle:
        handle.load(f"{folder}/{saved}")
        handle.save(f"{folder}/{again}")


def check_saved(handle, expected, what):
    """What all ranks would save before a step is what they have loaded: no part of it twice."""
    from tagc.torch.checkpoint import ABOUT

    (mine,) = handle.state_dict().values()
    n_replicas = json.loads(mine[ABOUT])["replicas"]
    sums = torch.stack([values.double().sum() / n_replicas for values in mine["residuals"].values()])
    dist.all_reduce(sums)
    wanted = torch.stack([values.sum() for values in expected])
    torch.testing.assert_close(sums, wanted, rtol=1e-4, atol=1e-4, msg=lambda text: f"{what}: {text}")


def ddp_oracles(rank, world_size):
    for n_hosts in {2: (2,), 4: (2,), 8: (2, 4)}[world_size]:
        ddp_oracle(rank, world_size, n_hosts)


@pytest.mark.slow
def test_on_four_ranks():
    ranks.run_each(
        [
            ddp_oracles,
            ddp_by_hand,
            replicas_oracle,
            replicas_on_hosts_oracle,
            shards_oracle,
            what_stays_dense_is_said,
            odd_hosts,
            one_fails,
            hsdp_as_torch,
            deltas_within_hosts,
            *([fsdp1_oracle, fsdp1_on_other_hosts] if HAS_FSDP1 else []),
        ],
        4,
        timeout_s=400,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "hsdp", *["fsdp1"] * HAS_FSDP1])
def test_every_wrappers(kind):
    tied = [wrapper_checks.parameters_that_differ] if kind != "ddp" else []
    checks = [check for check in wrapper_checks.CHECKS if check not in tied]
    ranks.run_each(checks, 4, kind, 2, timeout_s=400)


@pytest.mark.slow
def test_on_eight_ranks():
    ranks.run_each([ddp_oracles, replicas_oracle, replicas_on_hosts_oracle, shards_oracle], 8, timeout_s=400)


@pytest.mark.slow
def test_checkpoints(tmp_path):
    every, two = list(layouts_of(4)), ["ddp", "replicas on hosts"]
    to_come = ranks.run(save_each, 4, str(tmp_path), every)[0]
    ranks.run(load_each, 4, str(tmp_path), to_come, every, 3)
    ranks.run(load_each, 8, str(tmp_path), to_come, two, 3)
    if HAS_FSDP1:
        for world_size, saved, again in ((2, "fsdp1", "by two"), (4, "by two", "by four")):
            ranks.run(save_before_a_step, world_size, str(tmp_path), saved, again)
        ranks.run(load_each, 2, str(tmp_path), {"by four": to_come["fsdp1"]}, ["fsdp1"], 1)
    to_come = ranks.run(save_each, 8, str(tmp_path), two)[0]
    ranks.run(load_each, 4, str(tmp_path), to_come, every, 2)
