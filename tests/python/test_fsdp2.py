"""FSDP2 with tagc against gradients of one process over the whole batch, and against sums made here, value by
value."""

import warnings

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from models import Even, Odd, Tied, batch_of, loss_of
from oracles import check_alike, check_equal, check_error, full_gradients, mix_of_classes
from torch import nn

# ---- oracles ----


class Spy:
    """Stands before a module's reduce-scatter: sums what it is given and what it gives back, in fp64. The
    latter need not be there before the end of the backward pass."""

    def __init__(self, module):
        self.inner = module._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm
        self._given = self._received = 0
        self._last = self._pending = None
        module.set_custom_reduce_scatter(self)

    def allocate(self, size, *, dtype, device):
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self._take()
        given = input_tensor.clone()
        self.inner(output_tensor, input_tensor, group, op, async_op)
        self._pending = given, output_tensor

    def _take(self):
        if self._pending is not None:
            (given, output), self._pending = self._pending, None
            self._given = self._given + given.double()
            self._received = self._received + output.double()
            self._last = given, output.clone()

    @property
    def given(self):
        self._take()
        return self._given

    @property
    def received(self):
        self._take()
        return self._received

    @property
    def last(self):
        self._take()
        return self._last


def sum_in_rank_order(mine, group=None):
    """Row `rank` of every rank's (W, row), added in rank order in fp32: what an all-to-all and a loop would
    give."""
    world_size = dist.get_world_size(group)
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine, group=group)
    rows = [tensor.view(world_size, -1)[dist.get_rank(group)] for tensor in everyone]
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def sharded(model_class, **options):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = model_class()
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def units_of(model):
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gradients(model):
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


# ---- what all ranks do ----


def sparsity_zero(rank, world_size):
    import tagc.torch as tagc

    for layers in ("all", "none", "non-attention-linear"):
        model = sharded(Odd)
        with tagc.compress(model, sparsity=0, layers=layers, verbose=False) as handle:
            spies = [Spy(module) for module in units_of(model)]
            loss_of(model, batch_of(rank)).backward()
            for spy in spies:
                expected = sum_in_rank_order(spy.last[0]) * torch.tensor(1 / world_size)
                assert torch.equal(spy.last[1], expected), "not the bits of a sum in rank order"
            check_equal(gradients(model), full_gradients(Odd, world_size))
            assert handle.stats()["n_units"] == 3


def conservation(rank, world_size):
    """What was received and what is still to be sent is what was given."""
    import tagc.torch as tagc

    for options in (
        dict(layers="all"),
        dict(layers=mix_of_classes),
        dict(layers="all", values="fp32"),
        dict(layers="all", exchange="packed"),
        dict(layers="all", exchange="sketch", sparsity=0.9875),
        dict(layers="all", sparsity=0, values="int8"),
    ):
        options = {"sparsity": 0.9, "residual": "fp32"} | options
        model = sharded(Odd)
        with tagc.compress(model, verbose=False, **tagc.grouped(options)) as handle:
            spies = [Spy(module) for module in units_of(model)]
            for step in range(4):
                loss_of(model, batch_of(rank, step)).backward()
            for spy, unit in zip(spies, handle.state.units.values()):
                held, layout, residuals = (
                    torch.zeros_like(spy.given),
                    unit.model.layout,
                    unit.residuals_on_the_wire(),
                )
                for i, parameter in enumerate(layout.parameters):
                    for piece in layout.pieces_of(i) if parameter.name in residuals else ():
                        mine = residuals[parameter.name][piece.offset : piece.offset + piece.length]
                        held[piece.start : piece.start + mine.numel()] = mine.double()
                sent = sum_in_rank_order(spy.given - held) / world_size
                torch.testing.assert_close(
                    spy.received, sent, rtol=1e-5, atol=1e-7, msg=str((unit.name, options))
                )
                if options["sparsity"]:
                    assert held.count_nonzero() > 0.05 * held.numel(), (unit.name, options)


def sharded_along_columns(rank, world_size):
    from torch.distributed.tensor import Shard

    import tagc.torch as tagc

    def place(parameter):
        return Shard(1) if parameter.ndim == 2 else Shard(0)

    model = sharded(Even, shard_placement_fn=place)
    with tagc.compress(model, sparsity=0, layers="all", verbose=False):
        loss_of(model, batch_of(rank)).backward()
        check_equal(gradients(model), full_gradients(Even, world_size))
    model = sharded(Even, shard_placement_fn=place)
    exact = dict(values="fp32", residual="fp32")
    with tagc.compress(model, sparsity=0.8, layers="all", verbose=False, **tagc.grouped(exact)) as handle:
        loss_of(model, batch_of(rank)).backward()
        check_residuals_by_parameter(handle, model, world_size)


def check_residuals_by_parameter(handle, model, world_size):
    """Gradient and mean of residuals, parameter by parameter, make the gradient of one process."""
    from tagc.torch.exchange import layout as layouts

    expected = full_gradients(type(model).__bases__[-1], world_size)
    parameters = {parameter.name: parameter for parameter in handle.wrapper.parameters()}
    for unit in handle.state.units.values():
        residuals = unit.residuals_on_the_wire()
        for name in sorted(residuals):
            mean = layouts.from_wire(residuals[name], parameters[name], world_size).contiguous()
            dist.all_reduce(mean)
            whole = model.get_parameter(name).grad.full_tensor() + mean / world_size
            torch.testing.assert_close(whole, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def accumulation(rank, world_size):
    import tagc.torch as tagc

    for sync_each in (True, False):
        model = sharded(Odd)
        with tagc.compress(model, sparsity=0, layers="all", verbose=False) as handle:
            for step in range(3):
                model.set_requires_gradient_sync(sync_each or step == 2)
                loss_of(model, batch_of(rank, step)).backward()
            assert handle.n_steps == (3 if sync_each else 1)
            check_equal(gradients(model), full_gradients(Odd, world_size, steps=(0, 1, 2)))


def nonfinite(rank, world_size):
    """A step that one rank spoils comes out spoilt on the owners, and leaves residuals alone."""
    import tagc.torch as tagc

    model = sharded(Odd)
    with tagc.compress(model, sparsity=0.9, layers="all", verbose=False) as handle:
        loss_of(model, batch_of(rank)).backward()
        before = {name: unit.residuals_on_the_wire() for name, unit in handle.state.units.items()}
        model.zero_grad()
        x, y = batch_of(rank)
        loss_of(model, (x * float("inf") if rank == 0 else x, y)).backward()
        for name, parameter in model.named_parameters():
            local = parameter.grad.to_local()
            assert not local.numel() or not local.isfinite().all(), name
        for name, unit in handle.state.units.items():
            for parameter, values in unit.residuals_on_the_wire().items():
                assert torch.equal(values, before[name][parameter]), parameter
        assert len(handle.stats()["nonfinite_units"]) == 3


class Twins(nn.Module):
    """Two layers, of which one at a time is used."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(7, 3), nn.Linear(7, 3)
        self.used = "one"

    def forward(self, x):
        return getattr(self, self.used)(x)


def parameters_that_differ(rank, world_size):
    """Frozen, tied and unused parameters."""
    import tagc.torch as tagc
    from tagc.torch.exchange import internals

    model = sharded(Tied)
    with tagc.compress(model, sparsity=0, layers="all", verbose=False):
        loss_of(model, batch_of(rank)).backward()
        check_equal(gradients(model), full_gradients(Tied, world_size))
    ask = internals.can_reduce_unused
    for can in sorted({ask(), False}):  # False: as before torch 2.13
        internals.can_reduce_unused = lambda can=can: can
        try:
            unused(rank, world_size, can)
        finally:
            internals.can_reduce_unused = ask


def unused(rank, world_size, can):
    """Where some parameters have no gradient, the exchange is dense, once or always, and residuals stay."""
    import tagc.torch as tagc

    model = sharded(Twins)
    expected = full_gradients(Twins, world_size)
    with tagc.compress(model, sparsity=0.5, values="fp32", layers="all", verbose=False) as handle:
        unit = next(iter(handle.state.units.values()))
        unit.set_residuals_on_the_wire({"one.weight": torch.ones(21)})
        before = unit.residuals_on_the_wire()
        said = []
        for step in range(2):
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                loss_of(model, batch_of(rank)).backward()
            said += [str(warning.message) for warning in heard if "got no gradient" in str(warning.message)]
            found, after = gradients(model), unit.residuals_on_the_wire()
            if can and step == 1:  # torch gives zeros, and everything is compressed
                assert not torch.equal(after["one.weight"], before["one.weight"])
                assert not found["other.weight"].any() and not found["other.bias"].any()
            else:
                check_equal({name: found[name] for name in expected}, expected)
                assert all(torch.equal(after[name], before[name]) for name in before)
            model.zero_grad()
        assert len(said) == (rank == 0), said
        # fully_shard() of what only some ranks use would hang
        words = "one.weight", "set_reduce_scatter_unused_params(True)", "in this" if can else "until they"
        assert all(word in text for text in said for word in words), said
    loss_of(model, batch_of(rank)).backward()
    assert model.other.weight.grad is None, "close() leaves torch as it was"


def train(rank, world_size, n_steps, options):
    import tagc.torch as tagc

    model = sharded(Even)
    handle = tagc.compress(model, verbose=False, **tagc.grouped(options)) if options is not None else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(n_steps):
        loss = loss_of(model, batch_of(rank, step % 8, n=16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stats = handle.stats() if handle else None
    if handle:
        handle.close()
    return sum(losses[-8:]) / 8, stats


def parameter_leg(rank, world_size):
    dense, _ = train(rank, world_size, 13, None)
    bits, losses = {}, {}
    for wire in ("fp32", "bf16", "lossless", "int8", "delta8", "delta4", "delta2"):
        loss, stats = train(rank, world_size, 13, dict(sparsity=0, layers="none", parameters=wire))
        losses[wire] = loss
        assert abs(loss - dense) < (1e-5 if wire == "fp32" else 0.05) * dense, (wire, loss, dense)
        bits[wire] = stats["bytes_by_leg"]["gather"] * 8 / stats["n_elems"] * world_size / (world_size - 1)
    assert 60 < bits["fp32"] < 66 and 30 < bits["bf16"] < 33 and 15 < bits["int8"] < 20, bits  # twice a step
    assert losses["lossless"] == losses["bf16"] and bits["lossless"] < 24, (losses, bits)  # 12 of 16, twice
    assert bits["delta8"] < 10 and bits["delta4"] < 6 and bits["delta2"] < 4, bits  # once a step


def replicas(rank, world_size):
    """All ranks compute with the same bits, also after parameters were changed from outside."""
    import tagc.torch as tagc

    model = sharded(Even)
    with tagc.compress(model, sparsity=0, parameters="delta2", verbose=False) as handle:
        seen = []
        model.layers[0].mlp.register_forward_hook(
            lambda module, *_: seen.append(module.weight.detach().clone())
        )
        for step in range(3):
            if step == 2:
                model.load_state_dict({name: torch.zeros_like(p) for name, p in model.state_dict().items()})
            loss_of(model, batch_of(rank, step)).backward()
            check_alike(seen[-1], "the weight")
            if step == 2:
                assert not seen[-1].any(), "a loaded checkpoint must come over whole"
            else:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.01)
        weight = model.layers[0].mlp.weight
        for is_told in (False, True):
            with torch.no_grad():
                weight.to_local().copy_(
                    torch.randn(weight.to_local().shape, generator=torch.Generator().manual_seed(rank))
                )
                if is_told and rank == 0:
                    handle.reset_parameters()
                weight.mul_(1.5 if is_told else 1)
                loss_of(model, batch_of(rank))
            error = (seen[-1] - weight.full_tensor()).abs().max()
            assert (error < 2**-7 * weight.full_tensor().abs().max()) == is_told, error
            check_alike(seen[-1], "the weight")


def evaluation_first(rank, world_size):
    """compress() after an evaluation, which leaves the root's parameters whole; and an evaluation before
    training, in inference mode: what the first gather keeps serves the passes after it, too."""
    from torch.distributed.tensor import DTensor

    import tagc.torch as tagc

    model = sharded(Even)
    with torch.no_grad():
        expected = loss_of(model, batch_of(rank))
    tagc.advise(model, seconds=0.5, verbose=False)
    with torch.no_grad():
        loss_of(model, batch_of(rank))
    for wire in ("int8", "delta4"):
        with tagc.compress(model, parameters=wire, verbose=False) as handle:
            assert all(isinstance(p, DTensor) for group in handle.param_groups() for p in group["params"])
            with torch.inference_mode():
                torch.testing.assert_close(loss_of(model, batch_of(rank)), expected, rtol=0.05, atol=0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.001)
            loss_of(model, batch_of(rank)).backward()


def gather_that_failed(rank, world_size):
    """A gather on which the ranks did not agree counts for nothing: what had changed by then comes with the
    next."""
    import tagc.torch as tagc

    model = sharded(Even)
    with tagc.compress(model, parameters="delta8", verbose=False):
        loss_of(model, batch_of(rank)).backward()
        group = model.layers[0]._get_fsdp_state()._fsdp_param_group
        weight = model.layers[0].mlp.weight
        with torch.no_grad():
            weight.to_local().add_(rank == 0)
        shard = torch.cat([p.to_local().flatten() for p in model.layers[0].parameters()])
        wrong = shard.double() if rank == 1 else shard
        check_error(
            lambda: group._all_gather_comm(
                torch.empty(shard.numel() * world_size, dtype=wrong.dtype),
                wrong,
                group._all_gather_process_group,
            ),
            "float64",
        )
        seen = []
        model.layers[0].mlp.register_forward_hook(
            lambda module, *_: seen.append(module.weight.detach().clone())
        )
        loss_of(model, batch_of(rank)).backward()
        check_alike(seen[0], "the weight")
        torch.testing.assert_close(seen[0], weight.full_tensor(), rtol=0, atol=0.05)


CHECKS = [
    sparsity_zero,
    conservation,
    sharded_along_columns,
    accumulation,
    nonfinite,
    parameters_that_differ,
    replicas,
    evaluation_first,
    gather_that_failed,
    parameter_leg,
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_fsdp2(world_size):
    ranks.run_each(CHECKS, world_size)


# ---- between sites: two hosts of two ranks ----


def between_sites(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    import tagc.torch as tagc

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))
    between, inside = mesh["host"].get_group(), mesh["local"]
    model = sharded(Odd, mesh=inside)
    with tagc.compress(model, sparsity=0, layers="all", between=between, verbose=False) as handle:
        loss_of(model, batch_of(rank)).backward()
        check_equal(gradients(model), full_gradients(Odd, world_size))
        assert handle.stats()["world_size"] == 2
    model = sharded(Odd, mesh=inside)
    with tagc.compress(model, sparsity=0.9, layers="all", between=between, verbose=False) as handle:
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            loss_of(model, batch_of(rank, step)).backward()
        assert handle.n_steps == 1
        handle.watch(1.0)
        for parameter in model.parameters():  # hosts must stay replicas of each other, bit for bit
            check_alike(parameter.grad.to_local(), "a shard", between)
    flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(Odd, mesh=flat)
    with pytest.raises(tagc.Error, match="one dimension"):
        tagc.compress(model, between=between, verbose=False)


@pytest.mark.slow  # four processes; test_fsdp_hosts and test_unit_gather run under the sanitizers
def test_between_sites():
    ranks.run(between_sites, 4)


def twice(rank, world_size):
    import tagc.torch as tagc

    model = sharded(Even)
    with tagc.compress(model, verbose=False), pytest.raises(tagc.Error, match="compressed already"):
        tagc.compress(model, verbose=False)
    loss_of(model, batch_of(rank)).backward()  # torch's own again
    check_equal(gradients(model), full_gradients(Even, world_size))
    with tagc.compress(model, sparsity=0, verbose=False):
        model.zero_grad()
        loss_of(model, batch_of(rank)).backward()
        check_equal(gradients(model), full_gradients(Even, world_size))


@pytest.mark.slow  # calls nothing of libtagc that the other tests do not call
def test_twice():
    ranks.run(twice, 2)
