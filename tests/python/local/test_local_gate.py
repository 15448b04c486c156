"""LocalSteps that sends what changes weights in bf16, against the rule in plain torch."""

import io
import math

import pytest

torch = pytest.importorskip("torch")
import ranks
from models import Even, batch_of, loss_of
from oracles import check_alike
from test_local_steps import flat, seeded
from torch import nn

from tagc.local import LocalSteps

LR = 2e-4  # of which two steps change about half of the weights in bf16


def half_a_unit(weight):
    """By hand: a bf16 number of magnitude in [2^(e - 1), 2^e) is a multiple of 2^(e - 8)."""
    exponents = [math.frexp(value)[1] if value else -125 for value in weight.flatten().tolist()]
    return torch.tensor([2.0 ** max(e - 9, -134) for e in exponents], dtype=torch.float64).view(weight.shape)


def train(model, optimizer, steps, rank, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        dtype = next(model.parameters()).dtype
        batch = [values.to(dtype) for values in batch_of(rank, step)]
        loss_of(model, batch).backward()
        optimizer.step()


def simulate(world_size, dtype, steps, every, gated):
    """Returns models, residuals and the share of values that was held back, of all sites. gated: names of
    parameters; of the others all is sent."""
    models = [seeded(lambda: Even(32)).to(dtype) for _ in range(world_size)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=LR) for model in models]
    anchor = {name: p.detach().float().clone() for name, p in models[0].named_parameters()}
    residuals = [{name: torch.zeros_like(p) for name, p in anchor.items()} for _ in models]
    n_held = 0
    for first in range(0, steps, every):
        for site, (model, optimizer) in enumerate(zip(models, optimizers)):
            train(model, optimizer, every, site, first)
        n_held = 0
        for name, values in anchor.items():
            base, sent = values.to(dtype).float(), []
            least = half_a_unit(base.to(torch.bfloat16).float())
            for model, residual in zip(models, residuals):
                total = base - model.get_parameter(name).detach().float() + residual[name]
                is_held = (total.abs().double() < least) & (name in gated)
                n_held += int(is_held.sum())
                residual[name] = torch.where(is_held, total, torch.zeros(()))
                sent.append(torch.where(is_held, torch.zeros(()), total))
            values -= torch.stack(sent).double().mean(0).float()
            for model in models:
                model.get_parameter(name).data.copy_(values)
    return models, residuals, n_held / world_size


def against_the_rule(rank, world_size):
    """All values that change a weight arrive, in fp32; all others stay."""
    for dtype in torch.bfloat16, torch.float32:
        model = seeded(lambda: Even(32)).to(dtype)
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        with LocalSteps(model, optimizer, every=2, gate="bf16", values="fp32", verbose=False) as handle:
            train(model, optimizer, 8, rank)
            check_alike(flat(model), f"{dtype}")
            residual, stats = handle.state_dict()[f"rank{rank}"]["residual"], handle.stats()
        models, residuals, n_held = simulate(world_size, dtype, 8, 2, set(residual))
        n = sum(values.numel() for values in residual.values())
        assert 0.1 < n_held / n < 0.95, n_held / n
        for name, p in models[rank].named_parameters():
            torch.testing.assert_close(
                model.get_parameter(name).detach(),
                p.detach(),
                rtol=0,
                atol=1e-6 if p.dtype == torch.float32 else 0,
                msg=lambda text: f"{dtype} {name}: {text}",
            )
            if name in residual:
                expected = residuals[rank][name].flatten()
                torch.testing.assert_close(residual[name], expected, rtol=1e-4, atol=1e-8, msg=name)


def little_is_sent(rank, world_size):
    """The fewer weights change, the fewer bytes; nothing is lost."""
    n_bytes = {}
    for values in "fp32", "int4":
        for gate in None, "bf16":
            torch.manual_seed(0)
            model = nn.Linear(256, 256, bias=False)
            start = model.weight.detach().clone()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            moved = torch.zeros_like(start)
            with LocalSteps(
                model, optimizer, every=1, gate=gate, values=values, layers="all", verbose=False
            ) as handle:
                for step in range(3):
                    before = model.weight.detach().clone()
                    generator = torch.Generator().manual_seed(10 * step + rank)
                    few = torch.rand(256, 256, generator=generator) < 0.02
                    model.weight.grad = torch.where(few, 1e-2, 1e-7) * torch.randn(
                        256, 256, generator=generator
                    )
                    moved += before - (before - model.weight.grad)
                    optimizer.step()
                n_bytes[values, gate] = handle.stats()["bytes_sent"]
                kept = handle.state_dict()[f"rank{rank}"]["residual"]["weight"].view_as(start)
            mine = torch.stack([moved - kept, start - model.weight.detach()]).double()
            torch.distributed.all_reduce(mine)
            torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=1e-6)
    assert n_bytes["fp32", "bf16"] < n_bytes["fp32", None] / 10, n_bytes
    assert n_bytes["int4", "bf16"] < n_bytes["int4", None] / 5, n_bytes


def goes_on_bit_for_bit(rank, world_size):
    """With fragments under way when it was saved."""
    options = dict(every=4, fragments=2, delay=3, gate="bf16", values="int4", layers="all", verbose=False)

    def made():
        model = seeded(lambda: Even(32)).to(torch.bfloat16)
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        return model, optimizer, LocalSteps(model, optimizer, **options)

    model, optimizer, handle = made()
    train(model, optimizer, 6, rank)
    assert len(handle.flying) == 2
    # delta, mean, residuals before, and what is held back
    n = sum(values.numel() for values in handle.state_dict()[f"rank{rank}"]["residual"].values())
    assert handle.memory().host.transient >= 16 * n
    file = io.BytesIO()
    torch.save([one.state_dict() for one in (model, optimizer, handle)], file)
    train(model, optimizer, 8, rank, first=6)
    whole = handle.state_dict()[f"rank{rank}"]
    handle.close()
    other, other_optimizer, again = made()
    file.seek(0)
    for one, saved in zip((other, other_optimizer, again), torch.load(file, weights_only=True)):
        one.load_state_dict(saved)
    train(other, other_optimizer, 8, rank, first=6)
    resumed = again.state_dict()[f"rank{rank}"]
    again.close()
    assert torch.equal(flat(other), flat(model))
    for kind in "anchor", "residual", "delta":
        assert all(torch.equal(values, whole[kind][name]) for name, values in resumed[kind].items()), kind
    assert any(values.any() for values in whole["residual"].values())


def test_a_part_of_a_mean():
    """Where sites join and leave, deltas are divided by how many these are; what is held back is the same."""
    from types import SimpleNamespace

    from tagc.local.fragments import Flight, Fragment
    from tagc.local.options import Settings
    from tagc.local.sites import Trained

    options = dict(every=1, fragments=1, delay=0, outer_lr=1.0, outer_momentum=0.0, residual_decay=1.0)
    sent = dict(sparsity=0.0, values="fp32", gate="bf16", layers="all", rules=None)
    settings = Settings(**options, **sent, threads=1, timeout_s=1.0)
    weight = nn.Parameter(torch.ones(4))  # of which half a unit is 2^-8
    site = SimpleNamespace(n_slices=1, slice=0)
    fragment = Fragment(0, [Trained("weight", weight)], {"weight": "compressed"}, site, settings)
    fragment.take_anchor()
    moved = torch.tensor([2.0**-8, -(2.0**-8), 2.0**-9, -(2.0**-10)])
    with torch.no_grad():
        weight -= moved
    for n_sites in 1, 2:
        flight = Flight(4, True)
        flight.begin(fragment, 1)
        flight.divide(n_sites)
        flight.launch(1)
        assert torch.equal(flight.mean, torch.cat([moved[:2], torch.zeros(2)]) / n_sites), flight.mean


def test_two_sites():
    ranks.run_each([against_the_rule, little_is_sent, goes_on_bit_for_bit], 2)
