"""buckets(): lists of neighbouring modules for fully_shard(), and that compress() takes such lists as one
unit."""

import math
import random

import pytest

torch = pytest.importorskip("torch")
import ranks
from models import Odd, batch_of, loss_of
from oracles import check_equal, full_gradients
from torch import nn

from tagc.torch import Error, buckets


def count(modules):
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def test_every_module_once_and_in_order():
    draw = random.Random(5)
    for _ in range(200):
        modules = [nn.Linear(draw.randint(1, 20), draw.randint(1, 20)) for _ in range(draw.randint(1, 12))]
        elems = draw.randint(1, 1500)
        found = buckets(modules, elems)
        assert [module for bucket in found for module in bucket] == modules
        assert len(found) == 1 or all(count(bucket) >= elems for bucket in found)
        assert all(count(bucket[:-1]) < elems for bucket in found[:-1]), "no larger than it must be"


def test_shared_parameters_count_once():
    modules = [nn.Linear(10, 10, bias=False) for _ in range(4)]
    modules[1].weight = modules[0].weight
    assert buckets(modules, 150) == [modules]  # 100 + 0, 100 + 100 would be two
    assert [len(bucket) for bucket in buckets(modules, 100)] == [1, 2, 1]
    assert buckets([], 5) == []


@pytest.mark.parametrize(
    "modules, elems, text",
    [
        ([nn.Linear(2, 2)], 0, "elems is 0"),
        ([nn.Linear(2, 2)], 1.5, "elems is 1.5"),
        ([nn.Linear(2, 2)], True, "elems is True"),
        ([nn.Linear(2, 2), "h.1"], 5, r"modules\[1\] is str"),
    ],
)
def test_bad_arguments(modules, elems, text):
    with pytest.raises(Error, match=text):
        buckets(modules, elems)


class Deep(Odd):
    def __init__(self):
        super().__init__()
        from models import Block

        self.layers = nn.ModuleList([Block(33) for _ in range(5)])


def sharded(elems):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Deep()
    for bucket in buckets(model.layers, elems):
        fully_shard(bucket)
    fully_shard(model)
    return model


def lists_are_units(rank, world_size):
    import tagc.torch as tagc

    n_params = sum(parameter.numel() for parameter in Deep().parameters())
    block = count([Deep().layers[0]])
    for elems, names in (
        (1, [f"layers.{i}" for i in range(5)]),
        (2 * block, ["layers.0-layers.1", "layers.2-layers.4"]),
        (1 << 30, ["layers.0-layers.4"]),
    ):
        for options in ({}, {"parameters": "delta4"}):
            model = sharded(elems)
            with tagc.compress(model, sparsity=0, layers="all", verbose=False, **options) as handle:
                loss_of(model, batch_of(rank)).backward()
                assert [name for name in handle.state.units if name.startswith("layers")] == names
                assert sum(math.prod(p.shape) for p in handle.wrapper.parameters()) == n_params, (
                    "no parameter twice"
                )
                stats = handle.stats()
                assert stats["n_units"] == 1 + len(names)
                if not options:
                    gradients = {
                        name: p.grad.full_tensor()
                        for name, p in model.named_parameters()
                        if p.grad is not None
                    }
                    check_equal(gradients, full_gradients(Deep, world_size))


def residuals_are_kept_over_other_lists(rank, world_size):
    """Saved under one wrap, loaded under another: they belong to parameters."""
    import tagc.torch as tagc

    model = sharded(1)
    with tagc.compress(model, sparsity=0.9, layers="all", verbose=False) as handle:
        loss_of(model, batch_of(rank)).backward()
        saved = handle.state_dict()
    other = sharded(1 << 30)
    with tagc.compress(other, sparsity=0.9, layers="all", verbose=False) as handle:
        handle.load_state_dict(saved)
        before, after = (state[f"rank{rank}"]["residuals"] for state in (saved, handle.state_dict()))
        assert before.keys() == after.keys() and any(residual.abs().sum() > 0 for residual in before.values())
        for name, residual in before.items():
            assert torch.equal(residual, after[name]), name
        loss_of(other, batch_of(rank)).backward()


def advice_knows_them(rank, world_size):
    import tagc.torch as tagc

    for elems, n_units in ((1, 6), (1 << 30, 2)):
        found = tagc.advise(sharded(elems), seconds=1, verbose=False)
        assert found["n_units"] == n_units
        assert found["n_elems"] == sum(parameter.numel() for parameter in Deep().parameters())
        assert found["bucket"] is None or found["bucket"]["n_units"] < n_units
        assert ("units are small" in found["text"]) == (found["bucket"] is not None)


@pytest.mark.parametrize("world_size", [2])
def test_lists_with_ranks(world_size):
    ranks.run_each((lists_are_units, residuals_are_kept_over_other_lists, advice_knows_them), world_size)
