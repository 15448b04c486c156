"""compress() between any two backward passes: before the first, after steps without tagc, and in the middle
of an accumulation. At sparsity 0 in fp32 it trains as torch alone does."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
import ranks
from models import batch_of, loss_of
from wrappers import present, wrapped


def trained(kind, rank, compress_at):
    """Four steps of two micro-steps, of which the last is exchanged. compress_at: (step, micro-step), before
    which compress() is called; None: never."""
    import tagc.torch as tagc

    model = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = None
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            if (step, micro) == compress_at:
                handle = tagc.compress(model, sparsity=0, values="fp32", verbose=False)
            if kind == "fsdp2":
                model.set_requires_gradient_sync(micro == 1)
            with contextlib.nullcontext() if micro == 1 or kind == "fsdp2" else model.no_sync():
                loss_of(model, batch_of(rank, 10 * step + micro)).backward()
        optimizer.step()
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    if handle is not None:
        assert handle.n_steps == 4 - compress_at[0]
        handle.close()
    return [p.detach().clone() for p in found]


def at_any_moment(rank, world_size):
    for kind in present(("fsdp2", "ddp", "fsdp1")):
        expected = trained(kind, rank, None)
        for compress_at in ((0, 0), (2, 0), (1, 1)):
            for one, other in zip(trained(kind, rank, compress_at), expected):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_at_any_moment():
    ranks.run(at_any_moment, 2)
