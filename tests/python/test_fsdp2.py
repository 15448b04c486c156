"""FSDP2 with tagc: what holds in every wrapper (wrapper_checks.py), and what is FSDP2's own."""

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
import wrapper_checks
from models import Even, Odd, batch_of, loss_of
from oracles import check_alike, check_conserved, check_equal, check_error, full_gradients
from torch import nn
from wrappers import gradients, heard, wrapped

# ---- oracles ----


class Spy:
    """Stands before a module's reduce-scatter, and keeps what it is given and where the sums come."""

    def __init__(self, module):
        self.inner = module._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm
        module.set_custom_reduce_scatter(self)

    def allocate(self, size, *, dtype, device):
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.given, self.received = input_tensor.clone(), output_tensor
        self.inner(output_tensor, input_tensor, group, op, async_op)


# ---- what all ranks do ----


def sums_in_rank_order(rank, world_size):
    """What an all-to-all and a loop over ranks would give: the same bits."""
    from torch.distributed.fsdp import FSDPModule

    import tagc.torch as tagc

    model = wrapped("fsdp2", Odd)
    with tagc.compress(model, sparsity=0, verbose=False):
        spies = [Spy(module) for module in model.modules() if isinstance(module, FSDPModule)]
        loss_of(model, batch_of(rank)).backward()
        assert len(spies) == 3
        for spy in spies:
            everyone = [torch.empty_like(spy.given) for _ in range(world_size)]
            dist.all_gather(everyone, spy.given)
            first, *others = (one.view(world_size, -1)[rank] for one in everyone)
            for row in others:
                first += row
            assert torch.equal(spy.received, first * torch.tensor(1 / world_size))


def sharded_along_columns(rank, world_size):
    import tagc.torch as tagc

    given = full_gradients(Even, world_size)
    exact = dict(values="fp32", residual="fp32", layers="all", verbose=False)
    for sparsity in (0, 0.8):
        model = wrapped("fsdp2", columns=True)
        with tagc.compress(model, sparsity=sparsity, **tagc.grouped(exact)) as handle:
            loss_of(model, batch_of(rank)).backward()
            assert check_conserved(handle, gradients(model), given) > 500 or not sparsity


class Twins(nn.Module):
    """Two layers, of which one at a time is used."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(7, 3), nn.Linear(7, 3)
        self.used = "one"

    def forward(self, x):
        return getattr(self, self.used)(x)


def parameters_without_a_gradient(rank, world_size):
    from tagc.torch.exchange import internals

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

    model = wrapped("fsdp2", Twins)
    expected = full_gradients(Twins, world_size)
    with tagc.compress(model, sparsity=0.5, values="fp32", layers="all", verbose=False) as handle:
        unit = next(iter(handle.state.units.values()))
        unit.set_residuals_on_the_wire({"one.weight": torch.ones(21)})
        before = unit.residuals_on_the_wire()
        said = []
        for step in range(2):
            with heard("got no gradient") as texts:
                loss_of(model, batch_of(rank)).backward()
            said += texts
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


def parameter_leg(rank, world_size):
    import tagc.torch as tagc

    def train(wire):
        model, losses = wrapped("fsdp2"), []
        options = {"layers": "none", "parameters": wire, "verbose": False}
        handle = tagc.compress(model, sparsity=0, **options) if wire else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(9):
            loss = loss_of(model, batch_of(rank, step % 8, n=16))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return sum(losses[-8:]) / 8, handle and handle.stats()

    dense, _ = train(None)
    bits, losses = {}, {}
    for wire in ("fp32", "bf16", "lossless", "int8", "delta8", "delta4", "delta2"):
        losses[wire], stats = train(wire)
        least = (1e-5 if wire == "fp32" else 0.05) * dense
        assert abs(losses[wire] - dense) < least, (wire, losses, dense)
        bits[wire] = stats["bytes_by_leg"]["gather"] * 8 / stats["n_elems"] * world_size / (world_size - 1)
    assert 60 < bits["fp32"] < 66 and 30 < bits["bf16"] < 33 and 15 < bits["int8"] < 20, bits  # twice a step
    assert losses["lossless"] == losses["bf16"] and bits["lossless"] < 24, (losses, bits)  # 12 of 16, twice
    assert bits["delta8"] < 10 and bits["delta4"] < 6 and bits["delta2"] < 4, bits  # once a step


def replicas(rank, world_size):
    """All ranks compute with the same bits, also after parameters were changed from outside."""
    import tagc.torch as tagc

    model = wrapped("fsdp2", Even)
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

    model = wrapped("fsdp2", Even)
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

    model = wrapped("fsdp2", Even)
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
    sums_in_rank_order,
    sharded_along_columns,
    parameters_without_a_gradient,
    replicas,
    gather_that_failed,
]
OF_TWO = [evaluation_first, parameter_leg]


@pytest.mark.parametrize("world_size", [2, 4])
def test_fsdp2(world_size):
    ranks.run_each(wrapper_checks.CHECKS, world_size, "fsdp2")


@pytest.mark.parametrize("world_size", [2, 4])
def test_its_own(world_size):
    ranks.run_each(CHECKS + OF_TWO if world_size == 2 else CHECKS, world_size)


# ---- between sites: two hosts of two ranks ----


def between_sites(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    import tagc.torch as tagc

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))
    between, inside = mesh["host"].get_group(), mesh["local"]
    model = wrapped("fsdp2", Odd, mesh=inside)
    with tagc.compress(model, sparsity=0, layers="all", between=between, verbose=False) as handle:
        loss_of(model, batch_of(rank)).backward()
        check_equal(gradients(model), full_gradients(Odd, world_size))
        assert handle.stats()["world_size"] == 2
    model = wrapped("fsdp2", Odd, mesh=inside)
    with tagc.compress(model, sparsity=0.9, layers="all", between=between, verbose=False) as handle:
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            loss_of(model, batch_of(rank, step)).backward()
        assert handle.n_steps == 1
        handle.watch(1.0)
        for parameter in model.parameters():  # hosts must stay replicas of each other, bit for bit
            check_alike(parameter.grad.to_local(), "a shard", between)
    flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = wrapped("fsdp2", Odd, mesh=flat)
    with pytest.raises(tagc.Error, match="one dimension"):
        tagc.compress(model, between=between, verbose=False)


@pytest.mark.slow  # four processes; test_fsdp_hosts and test_unit_gather run under the sanitizers
def test_between_sites():
    ranks.run(between_sites, 4)
