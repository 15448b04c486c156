"""FSDP2 with tagc against gradients of one process over the whole batch, and against sums made here, value by value."""

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist
from torch import nn

import ranks
from models import Odd, batch_of, loss_of


def full_gradients(model_class, world_size, seed=0):
    """Of the average loss over all ranks' batches, in one process."""
    torch.manual_seed(seed)
    model = model_class()
    loss = sum(loss_of(model, batch_of(rank)) for rank in range(world_size)) / world_size
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def sharded(model_class, seed=0, **options):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = model_class()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def exact_at_zero(rank, world_size):
    import tagc.torch as tagc

    model = sharded(Odd)
    with tagc.compress(model, sparsity=0, verbose=rank == 0) as handle:
        loss_of(model, batch_of(rank)).backward()
        stats = handle.stats()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    return grads, stats


@pytest.mark.parametrize("world_size", [2, 4])
def test_sparsity_zero_is_the_full_batch_gradient(world_size):
    expected = full_gradients(Odd, world_size)
    for grads, stats in ranks.run(exact_at_zero, world_size):
        assert set(grads) == set(expected)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=2e-6, atol=1e-7, msg=name)
        assert stats["n_units"] == 3 and stats["bytes_sent"] > 0
