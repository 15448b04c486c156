"""Two models, handles or threads at once, and the user's own collectives in a backward pass, over hosts of
several ranks: what tagc exchanges must not meet them. Every value travels as it is, so that gradients are
those of the same loop without a wrapper, whose gradients are averaged by hand."""

import contextlib
import random
import threading
import time

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from torch import nn

N, N_STEPS = 96, 4
LATE_S = 0.03


class Sum(torch.autograd.Function):
    """A collective of the user's, in the middle of a backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()


class Stack(nn.Module):
    def __init__(self, seed, sums=False, unused=False, sparse=False, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(N, N, sparse=True) if sparse else None
        self.layers = nn.ModuleList([nn.Linear(N, N, dtype=dtype) for _ in range(4)])
        self.unused = nn.Linear(N, N) if unused else None
        self.sums, self.dtype = sums, dtype

    def forward(self, x):
        if self.embed is not None:
            x = x + self.embed(torch.arange(x.shape[0]))
        for layer in self.layers:
            x = torch.tanh(layer(x.to(self.dtype)))
            x = Sum.apply(x) if self.sums else x
        return x.float()


def wrapped(kind, model, group=None):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if kind == "ddp":
        has_unused = model.unused is not None
        return DistributedDataParallel(
            model, bucket_cap_mb=0.05, process_group=group, find_unused_parameters=has_unused
        )
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = DeviceMesh.from_group(dist.group.WORLD if group is None else group, "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compress(model, **options):
    import tagc.torch as tagc

    return tagc.compress(
        model, **tagc.grouped({"verbose": False, "sparsity": 0, "timeout_s": 30, "hosts": 2} | options)
    )


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, N, generator=generator)


def whole(gradient):
    gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return gradient.to_dense() if gradient.is_sparse else gradient


class Run:
    """Models that are trained one after the other on what the one before gives. group: over which the plain
    ones' gradients are averaged."""

    def __init__(self, models, plain, group=None):
        self.models, self.plain, self.group = models, plain, group
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in [*models, *plain]]

    def step(self, x):
        """Returns the largest difference of a gradient, of the mean's norm."""
        for models in (self.models, self.plain):
            y = x
            for model in models:
                y = model(y)
            y.square().mean().backward()
        return self.compare()

    def compare(self):
        worst = 0.0
        for model, plain in zip(self.models, self.plain):
            parameters = dict(plain.named_parameters())
            for name, p in model.named_parameters():
                wanted = parameters[name.removeprefix("module.")].grad
                if wanted is None:
                    continue
                wanted = whole(wanted)
                dist.all_reduce(wanted, group=self.group)
                wanted /= dist.get_world_size()
                worst = max(worst, ((whole(p.grad) - wanted).norm() / wanted.norm()).item())
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return worst


@contextlib.contextmanager
def late(rank):
    """Rank 0 comes late to sums within its host, now and then."""
    from tagc.torch.exchange.rows import Rows

    add_up = Rows.add_up

    def add_up_late(self):
        time.sleep(LATE_S * random.random())
        add_up(self)

    if rank == 0:
        Rows.add_up = add_up_late
    try:
        yield
    finally:
        Rows.add_up = add_up


# ---- what all ranks do ----


def two_models(rank, world_size, kind, options):
    models, plain = ([wrapped(kind, Stack(seed)) for seed in (1, 2)], [Stack(seed) for seed in (1, 2)])
    handles, run = [compress(model, **options) for model in models], Run(models, plain)
    with late(rank):
        for step in range(N_STEPS):
            assert (worst := run.step(batch(rank, step))) < 1e-5, (step, worst)
    assert [handle.n_steps for handle in handles] == [N_STEPS] * 2
    for handle in handles:
        handle.close()


def two_threads(rank, world_size):
    """Each trains a model of its own. FSDP2 without tagc takes one thread."""
    groups = [(dist.new_group(), dist.new_group()) for _ in range(2)]
    runs = []
    for seed, (group, of_plain) in enumerate(groups):
        model = wrapped("ddp", Stack(seed), group)
        compress(model)
        runs.append(Run([model], [Stack(seed)], of_plain))
    worst = [[], []]

    def train(i):
        for step in range(N_STEPS):
            worst[i].append(runs[i].step(batch(rank, step)))

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(each) for each in worst] == [N_STEPS] * 2 and max(map(max, worst)) < 1e-5, worst


def users_collectives(rank, world_size, of_model, options):
    model = wrapped("ddp", Stack(1, **of_model))
    run = Run([model], [Stack(1, **of_model)])
    with compress(model, **options):
        for step in range(N_STEPS):
            assert (worst := run.step(batch(rank, step))) < 1e-5, (step, worst)


def closed_in_any_order(rank, world_size):
    """Handles have groups of their own, which end with them and leave the other's."""
    models, plain = ([wrapped("ddp", Stack(seed)) for seed in (1, 2)], [Stack(seed) for seed in (1, 2)])
    handles, run = [compress(model) for model in models], Run(models, plain)
    run.step(batch(rank, 0))
    handles.pop(0).close()
    again = wrapped("ddp", Stack(3))
    handles.append(compress(again))
    run = Run([models[1], again], [plain[1], Stack(3)])
    for step in range(2):
        assert run.step(batch(rank, step)) < 1e-5
    for handle in handles:
        handle.close()


# ---- tests ----


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp"])
def test_two_models_in_one_pass(kind):
    ranks.run(two_models, 4, kind, {})


@pytest.mark.parametrize("options", [{"hosts": None}, {"hosts": 2, "transport": "gloo"}])
def test_two_models_by_other_ways(options):
    ranks.run(two_models, 4, "ddp", options)


def test_two_threads():
    ranks.run(two_threads, 4)


SHAPES = [
    {"sums": True},
    {"unused": True},
    {"sums": True, "sparse": True},
    {"sums": True, "dtype": torch.float64},
]


@pytest.mark.parametrize("of_model", SHAPES, ids=lambda shape: "-".join(shape))
@pytest.mark.parametrize("hosts", [1, None])
def test_users_collectives_in_a_pass(hosts, of_model):
    ranks.run(users_collectives, 2, of_model, {"hosts": hosts})


def test_users_collectives_on_hosts_of_several_ranks():
    ranks.run(users_collectives, 4, {"sums": True, "sparse": True, "unused": True}, {"hosts": 2})


def test_handles_close_in_any_order():
    ranks.run(closed_in_any_order, 4)
