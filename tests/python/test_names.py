"""A parameter has its name in the model itself, whatever wraps the model, and no two have one name:
residuals and checkpoints know parameters by it."""

import pytest

torch = pytest.importorskip("torch")
import ranks
from torch import nn
from wrappers import present

N = 64


class Gated(nn.Module):
    """Has a module of the user's that is called `module`, next to a matrix of its own that is called like one
    in there."""

    def __init__(self, name="module", n_out=N):
        super().__init__()
        self.inner_name = name
        setattr(self, name, nn.Linear(n_out, N))
        self.middle = nn.Linear(N, N)
        self.weight = nn.Parameter(0.05 * torch.randn(N, n_out))

    def forward(self, x):
        x = self.middle(x)
        return getattr(self, self.inner_name)(x @ self.weight)


def wrapped(kind, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.manual_seed(0)
    model = Gated(**options)
    if kind == "ddp":  # small buckets, which DDP makes anew after the first step
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    return fully_shard(model) if kind == "fsdp2" else model


NAMES = {"module.weight", "module.bias", "middle.weight", "middle.bias", "weight"}


def steps(model, rank, n, optimizer=None):
    for step in range(n):
        x = torch.randn(8, N, generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        (model(x) - x.flip(1)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()


def matrices_keep_their_own_residuals(rank, world_size):
    import tagc.torch as tagc

    for kind in present(("ddp", "fsdp2", "fsdp1")):
        for n_out in (N, 2 * N):
            model = wrapped(kind, n_out=n_out)
            with tagc.compress(model, sparsity=0.9, values="fp32", verbose=False) as handle:
                steps(model, rank, 3)
                saved = handle.state_dict()[f"rank{rank}"]["residuals"]
                assert set(saved) == {name for name in NAMES if name.endswith("weight")}, saved.keys()
                assert saved["weight"].shape == (N, n_out) and saved["module.weight"].shape == (N, n_out)
                assert saved["weight"].any() and saved["module.weight"].any()
                assert not torch.equal(saved["weight"], saved["module.weight"])
                handle.load_state_dict(handle.state_dict())
                again = handle.state_dict()[f"rank{rank}"]["residuals"]
                assert all(torch.equal(saved[name], again[name]) for name in saved)


def equal_names_are_refused(rank, world_size):
    import tagc.torch as tagc

    for kind in present(("ddp", "fsdp2", "fsdp1")):
        model = wrapped(kind, name="_checkpoint_wrapped_module")
        for call in (lambda: tagc.compress(model, verbose=False), lambda: tagc.param_groups(model)):
            with pytest.raises(tagc.Error, match="two parameters are called weight once .*_orig_mod"):
                call()


def test_two_ranks():
    ranks.run_each([matrices_keep_their_own_residuals, equal_names_are_refused], 2)


def with_every_wrapper(rank, world_size):
    """What torch itself inserts is left out, and only that."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import FullyShardedDataParallel

    import tagc.torch as tagc
    from tagc.torch.schedule.policy import named_parameters

    def names(model):
        return {name for name, _ in named_parameters(model)}

    ddp, on_cpu = (
        nn.parallel.DistributedDataParallel,
        {"device_id": torch.device("cpu"), "use_orig_params": True},
    )
    assert names(Gated()) == NAMES
    assert names(ddp(Gated())) == NAMES
    assert names(ddp(torch.compile(Gated()))) == NAMES
    assert names(ddp(checkpoint_wrapper(Gated()))) == NAMES
    groups = tagc.param_groups(torch.compile(ddp(Gated())), layers="all")
    assert [group["betas"][0] for group in groups] == [0.5] and len(groups[0]["params"]) == len(NAMES)
    gated = Gated()
    gated.module = FullyShardedDataParallel(checkpoint_wrapper(gated.module), **on_cpu)
    assert names(FullyShardedDataParallel(gated, **on_cpu)) == NAMES
    within = nn.Sequential()
    within.module = Gated()
    assert names(ddp(within)) == names(within) == {f"module.{name}" for name in NAMES}


def test_wrappers():
    ranks.run(with_every_wrapper, 1)
