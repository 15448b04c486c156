"""examples/pytorch/muon_loops.py: with every value in fp32 its losses are those with torch's calls, turned or
not; in 4 bits nearly. Steps go on behind the first bases."""

import sys

import pytest

torch = pytest.importorskip("torch")
import launch
import ranks
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def losses(rank, world_size, loop, runs):
    sys.path.insert(0, str(launch.EXAMPLES))
    import muon_loops

    dist.init_process_group = dist.destroy_process_group = lambda *_: None  # there is one already
    small = ["--loop", loop, "--n-embd", "64", "--steps", "26"]
    found = [muon_loops.main([*small, *arguments]) for arguments in runs]
    everyone = [None] * world_size
    dist.all_gather_object(everyone, found)
    assert all(theirs == found for theirs in everyone)
    return found


@pytest.mark.parametrize("loop, n_ranks", [("torch", 2), ("jordan", 2), ("dion", 3), ("nanochat", 2)])
def test_loop(loop, n_ranks):
    """Three ranks do not divide the matrices of a shape."""
    torchs, exact, four_bits = ranks.run(losses, n_ranks, loop, [["--torch"], ["--values", "fp32"], []])[0]
    assert torchs[-1] < torchs[0] - 1, torchs
    first, later = slice(0, 20), slice(20, None)
    assert exact[first] == pytest.approx(torchs[first], rel=2e-3)
    assert exact[later] == pytest.approx(torchs[later], rel=5e-3)
    assert four_bits != exact
    assert sum(four_bits[-6:]) == pytest.approx(sum(torchs[-6:]), rel=0.01)


def hosts_of_shards(rank, world_size):
    """FSDP2 shards within two hosts of two ranks; between them Turned adds up the shards. Gradients are the
    means over all ranks, past the first bases."""
    from tagc.collectives import Collectives, Turned

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def made():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(192, 128), nn.Linear(128, 192))

    model, plain = made(), made()
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    with Collectives(mesh["replicate"], names=model, timeout_s=60) as comm:
        turned, errors = Turned(comm), []
        for step in range(26):
            draws = [torch.Generator().manual_seed(9 * step + other) for other in range(world_size)]
            batches = [torch.randn(16, 192, generator=draw) for draw in draws]
            for p in (*model.parameters(), *plain.parameters()):
                p.grad = None
            model(batches[rank]).square().mean().backward()
            plain(torch.cat(batches)).square().mean().backward()
            works = [
                (turned if p.ndim == 2 else comm).all_reduce(
                    p.grad.to_local(), key=p, op=dist.ReduceOp.AVG, async_op=True
                )
                for p in model.parameters()
            ]
            for work in works:
                work.wait()
            for p, exact in zip(model.parameters(), plain.parameters()):
                difference = p.grad.full_tensor() - exact.grad
                errors.append((difference.norm() / exact.grad.norm()).item())
        assert len(turned._matrices) == 2 and all(one.bases is not None for one in turned._matrices.values())
    assert 0.01 < max(errors) < 0.2, errors


def test_shards_within_hosts():
    ranks.run(hosts_of_shards, 4)
