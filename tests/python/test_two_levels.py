"""FSDP2 on hosts of several ranks: gradients are averaged within hosts, and tagc exchanges the means between
hosts. `hosts=` makes hosts of the processes of one machine. What comes out is compared with a simulation in
plain torch, and with one process over the whole batch."""

import contextlib
import os
import pathlib

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
import wrapper_checks
from models import Even, Odd, batch_of, loss_of
from oracles import check_alike, check_equal, check_error, full_gradients
from torch import nn
from wrapper_checks import held
from wrappers import gradients, heard, wrapped

# ---- the method in plain torch ----


def rows_of(gradient, world_size):
    """A parameter's chunks along its first dimension, padded: (W, elements of a chunk)."""
    n = -(-gradient.shape[0] // world_size)
    padded = torch.zeros(n * world_size, *gradient.shape[1:])
    padded[: gradient.shape[0]] = gradient
    return padded.reshape(world_size, -1)


class Simulated:
    """All ranks at once: residuals of each host's mean, the largest values of each fragment, sums in the
    order of hosts. Values are sent as they are."""

    def __init__(self, shapes, n_hosts, per_host, sparsity):
        self.shapes, self.n_hosts, self.per_host, self.sparsity = shapes, n_hosts, per_host, sparsity
        n = sum(rows_of(torch.zeros(shape), n_hosts * per_host)[0].numel() for shape in shapes.values())
        self.residuals = torch.zeros(n_hosts, n_hosts * per_host, n)

    def step(self, gradients):
        """gradients: of each rank, {name: gradient}. Returns the mean that every owner gets, by name."""
        world_size = self.n_hosts * self.per_host
        rows = torch.stack(
            [torch.cat([rows_of(mine[name], world_size) for name in self.shapes], 1) for mine in gradients]
        )  # (rank, W, row)
        means = rows.view(self.n_hosts, self.per_host, world_size, -1).sum(1) * (1 / self.per_host)
        total = torch.zeros(rows.shape[1:])
        for host in range(self.n_hosts):
            sums = means[host] + self.residuals[host]
            sent = torch.zeros_like(sums)
            for owner, fragment in enumerate(sums):
                k = round(len(fragment) * (1 - self.sparsity))
                largest = fragment.abs().sort(descending=True, stable=True).indices[:k]
                sent[owner, largest] = fragment[largest]
            self.residuals[host] = sums - sent
            total += sent * (1 / self.n_hosts)
        return self._by_name(total)

    def held(self, host):
        """What a host has not sent, by name."""
        return self._by_name(self.residuals[host])

    def _by_name(self, rows):
        found, at = {}, 0
        for name, shape in self.shapes.items():
            n = rows_of(torch.zeros(shape), len(rows))[0].numel()
            whole = rows[:, at : at + n].reshape(-1)
            found[name] = whole[: shape.numel()].view(shape)
            at += n
        return found


class Given(nn.Module):
    """Matrices whose gradients are given."""

    def __init__(self, shapes):
        super().__init__()
        torch.manual_seed(4)
        self.of = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(*shape)) for name, shape in shapes.items()}
        )

    def forward(self, gradients):
        return sum((self.of[name] * gradient).sum() for name, gradient in gradients.items())


SHAPES = {"one": torch.Size([24, 16]), "three": torch.Size([13, 8]), "two": torch.Size([5, 32])}


def given_gradients(rank, step, scale=1.0):
    generator = torch.Generator().manual_seed(97 * step + rank)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Beside:
    """A model whose gradients must be the oracle's, bit for bit."""

    def __init__(self, rank, world_size, hosts, residual="fp32"):
        import tagc.torch as tagc

        self.rank, self.n_ranks, self.hosts = rank, world_size, hosts
        self.model = wrapped("fsdp2", lambda: Given(SHAPES))
        self.oracle = Simulated(SHAPES, hosts, world_size // hosts, 0.75)
        options = dict(sparsity=0.75, values="fp32", layers="all", verbose=False, residual=residual)
        self.handle = tagc.compress(self.model, hosts=hosts, **tagc.grouped(options))

    def backward(self, given):
        self.model.zero_grad()
        self.model(given).backward()
        return {name.removeprefix("of."): gradient for name, gradient in gradients(self.model).items()}

    def step(self, step, scale=1.0):
        found = self.backward(given_gradients(self.rank, step, scale))
        expected = self.oracle.step([given_gradients(other, step) for other in range(self.n_ranks)])
        for name, gradient in found.items():
            assert torch.equal(gradient / scale, expected[name]), (name, step)

    def held(self):
        return {name.removeprefix("of."): one for name, one in held(self.handle, self.hosts).items()}


def simulated(rank, world_size, hosts=2):
    """Bit for bit: gradients and residuals, step by step, also of a run that is saved and goes on."""
    both = Beside(rank, world_size, hosts)
    with both.handle:
        for step in range(4):
            both.step(step)
        found = both.held()
        for host in range(hosts):
            for name, values in both.oracle.held(host).items():
                assert torch.equal(found[name][host], values), name
                assert values.count_nonzero() > 0.5 * values.numel()
        assert both.handle.stats()["sparsity"] == 0.75
        saved = both.handle.state_dict()
    again = Beside(rank, world_size, hosts)
    again.oracle = both.oracle
    with again.handle:
        again.handle.load_state_dict(saved)
        again.step(4)
        assert again.handle.n_steps == 5


def in_eight_bits(rank, world_size, hosts=2):
    """Step by step from the residual that is there, what comes out is the simulation's bit for bit. What
    stays is the simulation's to one step of 8 bits, of the smallest power of two for each 128 values of a
    fragment, and rounded to either side so that nothing is lost on average."""
    both, errors = Beside(rank, world_size, hosts, "int8"), []
    with both.handle:
        for step in range(8):
            both.step(step)
            found = {name: values.float() for name, values in both.held().items()}
            for host in range(hosts):
                rows = torch.cat([rows_of(found[name][host], world_size) for name in SHAPES], 1)
                for exact, kept in zip(both.oracle.residuals[host].split(128, 1), rows.split(128, 1)):
                    largest = exact.abs().amax(1, keepdim=True).clamp(min=127 * 2.0**-126)
                    unit = 2.0 ** torch.ceil(torch.log2(largest / 127))
                    codes = kept / unit
                    assert torch.equal(codes.round(), codes) and codes.abs().max() <= 127
                    assert ((kept - exact).abs() < unit).all(), (step, host)
                    errors.append(((kept - exact) / unit).flatten())
                both.oracle.residuals[host] = rows
    errors = torch.cat(errors)
    rounded = errors[errors != 0]
    assert len(rounded) > 1000 and abs(rounded.mean()) < 4 * rounded.std() / len(rounded) ** 0.5
    assert rounded.min() < -0.9 and rounded.max() > 0.9, "not to the nearest"


def left_out(rank, world_size, hosts=2):
    """A parameter without a gradient makes the exchange dense, and all residuals stay. Torch 2.13 gives zeros
    for it in the next pass."""
    from tagc.torch.exchange import internals

    both = Beside(rank, world_size, hosts)
    everyone = [given_gradients(other, 0) for other in range(world_size)]
    part = {name: everyone[rank][name] for name in ("one", "two")}
    with both.handle:
        both.step(0)
        before = both.held()
        with heard("got no gradient") as said:
            found = both.backward(part)
        assert (rank == 0) == bool(said)
        assert all(torch.equal(before[name], values) for name, values in both.held().items())
        torch.testing.assert_close(found["one"], sum(one["one"] for one in everyone) / world_size)
        if not internals.can_reduce_unused():
            return
        found = both.backward(part)
        expected = both.oracle.step([one | {"three": torch.zeros(SHAPES["three"])} for one in everyone])
        assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


def along_columns(rank, world_size, hosts=2):
    """With every value as it is, gradients are those of one process, of layers gathered early and kept."""
    import tagc.torch as tagc

    model = wrapped("fsdp2", columns=True, reshard_after_forward=False)
    model.set_modules_to_backward_prefetch(list(model.layers))
    with tagc.compress(model, sparsity=0, layers="all", hosts=hosts, verbose=False):
        loss_of(model, batch_of(rank)).backward()
        check_equal(gradients(model), full_gradients(Even, world_size))


def precisions(rank, world_size, hosts=2):
    """Parameters in bf16, sums in fp32 or in bf16: as torch itself does it, to the rounding of these."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import tagc.torch as tagc

    for reduce, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.02), (torch.float16, 0.004)):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        found = []
        for compresses in (False, True):
            model = wrapped("fsdp2", Even, mp_policy=policy)
            options = dict(sparsity=0, layers="all", hosts=hosts, verbose=False)
            with (
                tagc.compress(model, **tagc.grouped(options))
                if compresses
                else contextlib.nullcontext() as handle
            ):
                loss_of(model, batch_of(rank)).backward()
                found.append(gradients(model))
        for name, expected in found[0].items():
            scale = expected.abs().max().item()
            torch.testing.assert_close(
                found[1][name], expected, rtol=tolerance, atol=tolerance * scale, msg=name
            )
        n = handle.stats()["n_elems"]
        size = 2 if reduce == torch.bfloat16 else 4  # within hosts; fp16 is added up in fp32
        assert (
            handle.stats()["bytes_within"] - n * size * (world_size // hosts - 1) * hosts // world_size < 1000
        )


def scaled(rank, world_size, hosts=2):
    """Residuals follow the loss scale. A gradient that is not finite leaves them as they are on all ranks,
    and the next one goes on."""
    both = Beside(rank, world_size, hosts)
    with both.handle:
        for step, scale in enumerate((1.0, 8.0, 0.5)):
            both.handle.loss_scale(scale)
            both.step(step, scale)
        before, last = both.held(), given_gradients(rank, 3, 0.5)
        if rank == 1:
            last["one"][0] = float("inf")
        assert not both.backward(last)["one"].isfinite().all()
        assert both.handle.stats()["n_nonfinite"] == 1, both.handle.stats()
        assert all(torch.equal(before[name], values) for name, values in both.held().items())
        both.step(4, 0.5)


def counted(rank, world_size, hosts=2):
    """Bytes between hosts and within them; bits of a host, which do not grow with its ranks."""
    import tagc.torch as tagc

    n = 256 * 96
    for options, low, high in (
        (dict(sparsity=0, values="fp32"), 32, 32.7),
        (dict(sparsity=0, values="int4"), 4.2, 5.2),
    ):
        found = []
        for split in (hosts, world_size):
            model = wrapped("fsdp2", lambda: Given({"one": torch.Size([256, 96])}))
            with tagc.compress(
                model, layers="all", hosts=split, verbose=False, **tagc.grouped(options)
            ) as handle:
                model({"one": torch.randn(256, 96)}).backward()
                found.append(handle.stats())
        two, flat = found
        per_host = world_size // hosts
        assert two["ranks_per_host"] == per_host and flat["ranks_per_host"] == 1
        assert two["world_size"] == flat["world_size"] == world_size
        assert two["n_elems"] == flat["n_elems"] == two["n_compressed"] == flat["n_compressed"] == n
        assert low <= two["bits_per_param"] <= high, two
        assert two["dense_bytes"] == 4 * n // per_host * (hosts - 1) // hosts
        assert flat["bytes_within"] == 0
        within = 4 * n * (per_host - 1) // per_host
        assert within < two["bytes_within"] <= within + 136 * (per_host - 1), two
        if options["values"] == "fp32":
            assert two["bytes_by_leg"]["values"] == two["dense_bytes"]
            assert flat["bytes_by_leg"]["values"] == 4 * n * (world_size - 1) // world_size


def levels(rank, world_size, hosts=2):
    """Ranks of all places and hosts change levels and moments together, though none of them sees what the
    others do: of `one` the gradient of one host points one way, in what place 0 exchanges."""
    import tagc.torch as tagc

    shapes = {"one": torch.Size([80, 64]), "two": torch.Size([64, 96])}
    model = wrapped("fsdp2", lambda: Given(shapes))
    optimizer = torch.optim.AdamW(model.parameters(), 0.001, foreach=False)
    steady = 3 * torch.randn(hosts, 80 * 64 // world_size, generator=torch.Generator().manual_seed(7))
    with tagc.compress(model, optimizer, hosts=hosts, verbose=False) as handle:
        for step in range(65):
            generator = torch.Generator().manual_seed(97 * step + rank)
            noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            if rank < world_size // hosts:
                noise["one"].view(world_size, -1)[:: world_size // hosts] = steady
            optimizer.zero_grad()
            model(noise).backward()
            optimizer.step()
            handle.watch(1.0 + rank)
        found = handle.state.schedule.levels(), sorted(handle.state.schedule.memories().items())
        everyone = [None] * world_size
        dist.all_gather_object(everyone, str(found))
        assert all(other == str(found) for other in everyone), everyone
        assert found[0]["of.one"] == 1 < found[0]["of.two"], found
    for name, parameter in model.named_parameters():
        check_alike(parameter.full_tensor().detach(), name)


def nothing_between(rank, world_size):
    """hosts=1: gradients are torch's own, whatever else is asked for, and no byte is tagc's."""
    import tagc.torch as tagc

    found = []
    for compresses in (False, True):
        model, seen = wrapped("fsdp2", Even), []
        options = dict(hosts=1, sparsity=0.9, parameters="delta4", layers="all", on_step=seen.append)
        with (
            tagc.compress(model, verbose=False, **tagc.grouped(options))
            if compresses
            else contextlib.nullcontext() as handle
        ):
            for step in range(2):
                loss_of(model, batch_of(rank, step)).backward()
            found.append(gradients(model))
            if compresses:
                assert len(seen) == 2 == handle.n_steps
                assert seen[0]["bytes_sent"] == 0 == seen[0]["bits_per_param"] and seen[0]["bytes_within"]
                assert seen[0]["ranks_per_host"] == world_size and not held_names(handle)
                assert "0 of 8,872" in handle.table() or handle.table().splitlines()[-1].startswith("0 of")
    assert all(torch.equal(found[1][name], expected) for name, expected in found[0].items())


def held_names(handle):
    return set().union(*(unit.names_of_residuals() for unit in handle.state.units.values()))


def words(rank, world_size):
    """One line says what is done, and where; a wrong layout is a warning, and goes flat."""
    import io

    import tagc.torch as tagc
    from tagc.torch.exchange import hosts as module

    def said(identities, **options):
        own, module.identity = module.identity, lambda: identities[rank]
        from tagc.torch.advise import first_words

        first_words.identity = module.identity
        try:
            with contextlib.redirect_stdout(io.StringIO()) as output, heard("hosts") as told:
                handle = tagc.compress(
                    wrapped("fsdp2", Even), sparsity=0.9, layers="all", **tagc.grouped(options)
                )
            loss_of(handle.model, batch_of(rank)).backward()
            per_host = handle.stats()["ranks_per_host"]
            handle.close()
        finally:
            module.identity = first_words.identity = own
        text = output.getvalue()
        assert (rank == 0) == bool(text)
        return text, per_host, told

    text, per_host, told = said("aabb")
    line = "\n2 hosts x 2 ranks: sums within hosts by gloo, compressed between hosts"
    assert per_host == 2 and not told and (rank or line in text and "gains nothing" not in text), text
    text, per_host, told = said("aaaa")
    alone = "all 4 ranks" in text and "gains nothing: each counts as a host" in text
    assert per_host == 1 and not told and (rank or alone), text
    text, per_host, told = said("aaaa", hosts=2)
    assert per_host == 2 and not told and (rank or line in text), text
    assert rank or "gains nothing: they count as 2 hosts" in text and "each counts" not in text, text
    text, per_host, told = said("aaaa", hosts=1)
    assert per_host == 4 and not told
    assert rank or "1 host: nothing is compressed" in text and "gains nothing" not in text, text
    for identities, why in (("aaab", "3, 1 on 2 hosts"), ("abba", "numbers 0 and 1 of its 4")):
        text, per_host, told = said(identities)
        assert per_host == 1 and (rank or len(told) == 1 and why in told[0]), (text, told)


def slow_inside(rank, world_size):
    """A mesh that is said to be inside a host, and is not: torch then sums between hosts."""
    from torch.distributed.device_mesh import init_device_mesh

    import tagc.torch as tagc
    from tagc.torch.advise import first_words

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))
    own = first_words.identity
    for identities, says in (("aabb", False), ("abab", True)):
        first_words.identity = lambda identities=identities: identities[rank]
        try:
            with heard("uncompressed, before tagc") as found:
                tagc.compress(
                    wrapped("fsdp2", Even, mesh=mesh["local"]), between="host", verbose=False
                ).close()
        finally:
            first_words.identity = own
        assert len(found) == (says and rank == 0), found
        assert not found or "over 2 ranks on 2 hosts, such as ranks 0 and 1" in found[0], found


def refused(rank, world_size):
    import tagc.torch as tagc

    model = wrapped("fsdp2", Even)
    for options, text in (
        (dict(hosts=3), "hosts is 3, must divide the 4 ranks that train the model"),
        (dict(hosts=0), "hosts is 0, must be a whole number from 1"),
        (dict(hosts=2.5), "hosts is 2.5, must be a whole number"),
        (
            dict(hosts=2, between=dist.group.WORLD),
            "between says which ranks are on other hosts: leave hosts out",
        ),
        (dict(hosts=2 if rank < 2 else 4), "ranks do not agree: hosts is 2 on rank 0 and 4 on rank 2"),
        (dict(hosts=2 if rank != 3 else None), "ranks do not agree: hosts is 2 on rank 0 and None on rank 3"),
    ):
        check_error(lambda: tagc.compress(model, verbose=False, **tagc.grouped(options)), text)
    assert "hosts" in tagc.compress.__doc__


def one_fails(rank, world_size):
    """What one rank does otherwise is the same error on all ranks of all hosts, and the next step goes on."""
    from tagc.torch.exchange import internals

    both, given = Beside(rank, world_size, 2), given_gradients(rank, 0)
    with both.handle:
        both.backward(given)
        odd = {name: given[name] for name in ("one", "two")} if rank == 3 else given
        text = r"gradients of the root module: ranks do not agree: rank 2 has .*rank 3"
        check_error(lambda: both.model(odd).backward(), text)
        if internals.version() >= (2, 15):  # before, some gradients outlive it
            both.model.reset_iter_state()
            assert all(gradient.isfinite().all() for gradient in both.backward(given).values())


# ---- checkpoints on other hosts ----


def start(hosts, columns=False, mesh=None, make=None, **options):
    import tagc.torch as tagc

    model = wrapped("fsdp2", make or (Even if columns else Odd), mesh=mesh, columns=columns)
    # int8, too, is saved as it is: the sum over ranks stays
    residual = "fp32" if columns or make else "int8"
    options |= dict(sparsity=0.75, layers="all", verbose=False, residual=residual)
    return tagc.compress(model, hosts=hosts, **tagc.grouped(options))


def train(handle, *steps):
    for step in steps:
        loss_of(handle.model, batch_of(dist.get_rank(), step)).backward()
        handle.model.zero_grad()


def check_same_mean(found, expected):
    """What is still to be applied is the same, however many share it."""
    assert found.keys() == expected.keys()
    for name, values in found.items():
        was, now = expected[name].double().mean(0), values.double().mean(0)
        assert was.any() or was.numel() < 20, name
        torch.testing.assert_close(now, was, rtol=1e-6, atol=1e-7 * was.abs().max().item(), msg=name)


def other_hosts(rank, world_size, folder):
    """Residuals of hosts of two ranks go to ranks that exchange flat, to those with `between`, and back."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    import tagc.torch as tagc

    for columns in (False, True):
        with start(2, columns) as handle:
            train(handle, 0, 1)
            handle.save(f"{folder}/{columns}")
            dcp.save({"tagc": handle}, checkpoint_id=f"{folder}/dcp{columns}")
            two, states = held(handle, 2, columns), [None] * world_size
            dist.all_gather_object(states, handle.state_dict())
        with start(4, columns) as flat:
            with pytest.raises(tagc.Error, match=r"saved by 4 \(2 per host\) ranks, and there are 4 now"):
                flat.load_state_dict(states[rank])
            flat.load_state_dict(states)
            check_same_mean(held(flat, 4), two)
            assert flat.n_steps == 2
            dcp.load({"tagc": flat.at(f"{folder}/dcp{columns}")}, checkpoint_id=f"{folder}/dcp{columns}")
            check_same_mean(held(flat, 4), two)
            train(flat, 2)
            one = held(flat, 4)
            dist.all_gather_object(states, flat.state_dict())
        with start(2, columns) as handle:
            handle.load_state_dict(states)
            check_same_mean(held(handle, 2, columns), one)
            train(handle, 3)
            handle.load(f"{folder}/{columns}")
            assert all(torch.equal(values, two[name]) for name, values in held(handle, 2, columns).items())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))
    with start(None, mesh=mesh["local"], between="host") as handle:
        handle.load(f"{folder}/False")
        with start(2) as other:
            other.load(f"{folder}/False")
            expected = held(other, 2)
        check_same_mean(held(handle, 2), expected)
        train(handle, 3)


def along_another_dimension(rank, world_size, folder):
    """Residuals of matrices that were cut along columns go to ranks that cut them along rows, and back, also
    of square ones, of which both chunks have as many elements."""
    import tagc.torch as tagc

    for columns in (True, False):
        with start(2, columns, make=Even) as handle:
            train(handle, 0, 1)
            handle.save(f"{folder}/cut {columns}")
            expected, states = held(handle, 2, columns), [None] * world_size
            dist.all_gather_object(states, handle.state_dict())
        for hosts in (2, 4):
            with start(hosts, not columns, make=Even) as other:
                with pytest.raises(tagc.Error, match="load a list of all ranks' state_dict"):
                    other.load_state_dict(states[rank])
                other.load(f"{folder}/cut {columns}")
                check_same_mean(held(other, hosts, not columns), expected)
                train(other, 2)


def more_ranks(rank, world_size, folder):
    """Four ranks on two hosts become eight on two or on four."""
    for columns in (False, True):
        every = [torch.load(f"{folder}/{columns}/rank{old}.pt", weights_only=True) for old in range(4)]
        expected = {}
        for hosts in (2, 4):
            with start(hosts, columns) as handle:
                handle.load_state_dict(every)
                found = held(handle, hosts, columns)
                expected = expected or found
                check_same_mean(found, expected)
                train(handle, 2)
                assert handle.n_steps == 3 and handle.stats()["n_nonfinite"] == 0
        sums = {name: values.double().sum() for name, values in expected.items()}
        for name, total in sums.items():
            saved = sum(next(iter(one.values()))["residuals"][name].double().sum() for one in every)
            torch.testing.assert_close(total, saved, rtol=1e-6, atol=1e-7)


# ---- other exchanges, and larger hosts ----


def tensor_parallel(rank, world_size):
    """Two ranks share each matrix, four average gradients: on two hosts, two of a host go together. What
    tensor parallelism replicates stays equal bit by bit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    import tagc.torch as tagc

    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = Given({"split": torch.Size([96, 64]), "whole": torch.Size([80, 64])})
    model.of["split"] = nn.Parameter(distribute_tensor(model.of["split"].data, mesh["tp"], [Shard(0)]))
    model.forward = lambda given: sum(
        ((p.to_local() if hasattr(p, "to_local") else p) * given[name]).sum() for name, p in model.of.items()
    )
    fully_shard(model, mesh=mesh["dp"])
    data, half = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tagc.compress(
        model, optimizer, sparsity=0.9, hosts=2, verbose=False, options=tagc.Options(residual="int8")
    ) as handle:  # whose rounding is the same, too
        hosts = handle.wrapper.hosts(mesh["dp"].get_group())
        assert (hosts.n_hosts, hosts.per_host, hosts.host, hosts.place) == (2, 2, data // 2, data % 2)
        assert dist.get_process_group_ranks(hosts.between) == [rank % 4, rank % 4 + 4]
        for step in range(3):
            generator = torch.Generator().manual_seed(97 * step + data)
            given = {
                "split": torch.randn(96, 64, generator=generator).chunk(2)[half],
                "whole": torch.randn(80, 64, generator=generator),
            }
            optimizer.zero_grad()
            model(given).backward()
            optimizer.step()
            whole = model.of["whole"].to_local().detach()
            check_alike(whole, "what is whole", mesh["tp"].get_group())
        assert handle.stats()["ranks_per_host"] == 2 and handle.stats()["sparsity"] > 0.88
        assert all(p.grad.to_local().any() for p in model.of.values())


def on_larger_hosts(rank, world_size):
    """Four hosts of two ranks, bit for bit; two of four."""
    simulated(rank, world_size, 4)
    counted(rank, world_size, 2)
    wrapper_checks.nothing_is_lost(rank, world_size, "fsdp2", 2)


# ---- ranks that are gone ----


def lose_ranks(rank, world_size, folder, lost):
    """Those ranks die in a backward pass. Writes down what each other gets."""
    import tagc.torch as tagc

    model = wrapped("fsdp2", lambda: Given(SHAPES))
    tagc.compress(model, sparsity=0.75, layers="all", hosts=2, timeout_s=8, verbose=False)
    model(given_gradients(rank, 0)).backward()
    loss = model(given_gradients(rank, 1))
    if rank in lost:
        os._exit(7)
    try:
        loss.backward()
        text = "no error"
    except tagc.Error as error:
        text = f"{error.status}: {error}"
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    pathlib.Path(folder, f"{rank}.part").write_text(text)
    pathlib.Path(folder, f"{rank}.part").rename(f"{folder}/{rank}")
    os._exit(0)


@pytest.mark.parametrize("lost", [(3,), (2, 3)], ids=["a rank", "a host"])
def test_lost(lost, tmp_path):
    """All ranks that are left raise, and name one that is gone, also where it is not in their host."""
    ranks.attempt(lose_ranks, 4, str(tmp_path), lost, timeout_s=60)
    for rank in set(range(4)) - set(lost):
        text = (tmp_path / str(rank)).read_text()
        assert text.startswith("transport: "), text
        assert any(f"rank {gone}" in text for gone in lost), f"rank {rank} does not say who is gone: {text}"


CHECKS = [
    simulated,
    in_eight_bits,
    left_out,
    along_columns,
    precisions,
    scaled,
    counted,
    levels,
    nothing_between,
    words,
    slow_inside,
    refused,
    one_fails,
]


def test_four_ranks():
    ranks.run_each(CHECKS, 4)


def test_every_wrappers():
    """test_legs.py has DDP and others."""
    ranks.run_each([wrapper_checks.nothing_is_lost, wrapper_checks.micro_steps], 4, "fsdp2", 2)


def test_eight_ranks():
    ranks.run_each([on_larger_hosts, tensor_parallel], 8)


def test_checkpoints_of_other_hosts(tmp_path):
    ranks.run(other_hosts, 4, str(tmp_path))
    ranks.run(along_another_dimension, 4, str(tmp_path))
    ranks.run(more_ranks, 8, str(tmp_path))
