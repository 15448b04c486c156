"""Shares: units that select apart send what one selection over all of them would send."""

import copy

import pytest

torch = pytest.importorskip("torch")
import ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

LOUD = 4.0  # root mean square of the second unit's gradients; of the first: 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(96, 64))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, gradients):
        return sum(block(gradient) for block, gradient in zip(self.blocks, gradients))


def noise(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [scale * torch.randn(96, 64, generator=generator) for scale in (1, LOUD)]


def made(n_units):
    import tagc.torch as tagc

    model = Two()
    for block in model.blocks if n_units == 2 else ():
        fully_shard(block)
    handle = tagc.compress(fully_shard(model), verbose=False, rules={"*": "compressed"})
    handle.param_groups()
    return model, handle


def arrived(model, rank, step):
    """The share of values of each block, on this rank's shard, that arrive in a step."""
    model.zero_grad()
    model(noise(rank, step)).backward()
    return [
        parameter.grad.to_local().count_nonzero().item() / parameter.to_local().numel()
        for parameter in model.parameters()
    ]


def selected_as_one(n_steps, n_last):
    """The same of two ranks that each send the largest 5 % of both blocks: the mean of the last steps."""
    waiting, shares = [torch.zeros(2, 96 * 64) for _ in range(2)], []
    for step in range(n_steps):
        sent = torch.zeros(2, 96 * 64)
        for rank in range(2):
            waiting[rank] += torch.stack([gradient.flatten() for gradient in noise(rank, step)])
            largest = waiting[rank].flatten().abs().topk(round(0.05 * waiting[rank].numel())).indices
            values = (
                torch.zeros(waiting[rank].numel())
                .index_copy_(0, largest, waiting[rank].flatten()[largest])
                .view(2, -1)
            )
            waiting[rank] -= values
            sent += values
        shares.append((sent != 0).float().mean(1))
    return torch.stack(shares[-n_last:]).mean(0).tolist()


def selects_as_one(rank, world_size):
    """Two units, of which one has gradients four times as large, send what one unit would; resumed, they send
    the same bits."""
    from oracles import WINDOW

    n_steps, n_last = 9 * WINDOW, 2 * WINDOW
    wanted, found, sent = selected_as_one(n_steps, n_last), {}, {}
    for n_units in (1, 2):
        model, handle = made(n_units)
        history = []
        for step in range(n_steps):
            if step == 7 * WINDOW + 5:
                saved = copy.deepcopy(handle.state_dict())
            history.append(arrived(model, rank, step))
        last = [parameter.grad.to_local().clone() for parameter in model.parameters()]
        found[n_units] = torch.tensor(history[-n_last:]).mean(0).tolist()
        by_leg = handle.stats()["bytes_by_leg"]
        sent[n_units] = by_leg["index"] + by_leg["values"]
    assert wanted[0] < 0.35 * wanted[1] and all(
        0.7 * w < f < 1.3 * w for n in found for w, f in zip(wanted, found[n])
    ), (wanted, found)
    assert sent[2] < 1.1 * sent[1], sent
    other, resumed = made(2)
    resumed.load_state_dict(saved)
    for step in range(7 * WINDOW + 5, n_steps):
        again = arrived(other, rank, step)
    assert again == history[-1] and all(
        torch.equal(a, p.grad.to_local()) for a, p in zip(last, other.parameters())
    )


def test_units_select_as_one():
    ranks.run(selects_as_one, 2)
