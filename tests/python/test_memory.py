"""What tagc holds in memory: buffers that units share, and what handle.memory() says of it."""

import pytest

torch = pytest.importorskip("torch")
import ranks
from models import Odd, batch_of, loss_of
from oracles import mix_of_classes
from torch.nn.parallel import DistributedDataParallel


def wrapped(kind):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Odd()
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.005)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def local(gradient):
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def trained(kind, rank, after_step):
    """Gradients of three steps, and the handle's work memory."""
    import tagc.torch as tagc

    model = wrapped(kind)
    found = []
    with tagc.compress(model, layers=mix_of_classes, values="int4", sparsity=0.5, verbose=False) as handle:
        work = handle.passes.runners.host.work
        for step in range(3):
            model.zero_grad()
            loss_of(model, batch_of(rank, step)).backward()
            found += [local(p.grad).clone() for p in model.parameters()]
            after_step(work)
        units = [] if kind == "ddp" else list(handle.state.units.values())
        needed = [
            sum(-(-n // 16) * 64 for e in unit._exchanges for n in (e.reducer.n_elems, e.reducer.n_output))
            for unit in units
        ]
        assert work.n_bytes(False) == 0
        return found, work.n_bytes(True), needed


def shared_by_units(rank, world_size):
    """Units of several classes pack into one pair of arrays, as large as the largest unit needs; what another
    unit has left there changes nothing."""

    def poison(work):
        for pair in work._pairs.values():
            for array in pair:
                array.fill_(float("nan"))

    for kind in ("fsdp2", "ddp"):
        plain, n_bytes, needed = trained(kind, rank, lambda work: None)
        poisoned = trained(kind, rank, poison)[0]
        assert all(torch.equal(a, b) for a, b in zip(plain, poisoned)), "of another exchange"
        if kind == "fsdp2":
            assert len(needed) == 3 and len(set(needed)) > 1 and max(needed) == n_bytes, (needed, n_bytes)


def test_memory():
    ranks.run_each([shared_by_units], 3)
