"""The rows of the table in docs/guide/meshes.md. On each mesh a small transformer trains with torch alone,
with tagc at fp32 and sparsity 0, and with tagc's defaults. The second run must give the losses and weights of
the first, bit for bit where tagc adds two gradients, and the third must train with few bits."""

import functools
import math
import traceback
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn import functional as F
from wrappers import KINDS

WIDTH, VOCABULARY, LENGTH = 96, 64, 16
ROWS = {}


class Job(NamedTuple):
    models: list  # of this rank: one, or its stages of a pipeline
    step: object  # number of the step -> losses that this rank sees, after backward
    over: list  # meshes over which gradients are exchanged
    options: dict = {}  # of compress()
    n_more: int = 0  # exchanges in the first step


class Row(NamedTuple):
    make: object  # () -> Job
    n_ranks: int
    is_exact: bool  # two terms in each sum of tagc's, which no order changes
    is_quick: bool
    alone: str  # what torch runs alone: this row, or that where torch makes all the sums


def row(n_ranks, exact=False, quick=False, alone=None, kind=None):
    """Makes a function that makes a Job a row of the table. kind: of its model, where that is an annex's."""
    if kind is not None and kind not in KINDS:
        return lambda make: make
    return lambda make: (
        ROWS.setdefault(make.__name__, Row(make, n_ranks, exact, quick, alone or make.__name__)).make
    )


@functools.cache  # fully_shard(dp_mesh_dims=) wants the mesh itself, and DTensors keep the first of equals
def mesh_of(**sizes):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


# ---- the model, which knows nothing of meshes but where a function is given ----


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gather, self.first = (
            lambda x: x,
            0,
        )  # of keys and values along the sequence; this rank's first position

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, 16)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (part.transpose(1, 2) for part in (q, self.gather(k), self.gather(v)))
        mask = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None] + self.first
        y = F.softmax((q @ k.transpose(-1, -2) / 4).masked_fill(~mask, -math.inf), -1) @ v
        return self.wo(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, mlp=MLP):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, mlp=MLP):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.layers = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.ModuleList(Block(mlp) for _ in range(2)),
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x, target=None):
        """The loss where there is a target, else what the next stage or the loss gets."""
        x = self.tokens(x) if self.tokens is not None else x
        for layer in self.layers:
            x = layer(x)
        x = self.head(self.norm(x)) if self.head is not None else x
        return x if target is None else loss_of(x, target)


def loss_of(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step, place):
    """Sequences that count. place: among those that have data of their own."""
    generator = torch.Generator().manual_seed(100 * step + place)
    rows = (torch.randint(VOCABULARY, (4, 1), generator=generator) + torch.arange(LENGTH + 1)) % VOCABULARY
    return rows[:, :-1], rows[:, 1:]


def steps_of(model, place):
    """What a Job of one model does in a step."""

    def step(number):
        x, y = batch(number, place)
        loss = model(x, y)
        loss.backward()
        return [loss.item()]

    return step


def shard(model, **options):
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


# ---- tensor and sequence parallel ----


def tensor_parallel(mesh, sequence=False, mlp=MLP):
    """A Transformer whose matrices are cut over that mesh. sequence: norms work on parts of sequences."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model, plan = Transformer(mlp), {}
    parts = {"output_layouts": Shard(1)} if sequence else {}
    for i in range(len(model.layers)):
        plan |= {f"layers.{i}.attention.w{name}": ColwiseParallel() for name in "qkv"}
        plan[f"layers.{i}.attention.wo"] = RowwiseParallel(**parts)
        if mlp is MLP:
            plan[f"layers.{i}.mlp.w1"] = ColwiseParallel()
            plan[f"layers.{i}.mlp.w2"] = RowwiseParallel(**parts)
        if sequence:
            plan |= {f"layers.{i}.norm{n}": SequenceParallel() for n in (1, 2)}
            for name in ("attention", "mlp"):
                plan[f"layers.{i}.{name}"] = PrepareModuleInput(
                    input_layouts=Shard(1), desired_input_layouts=Replicate()
                )
    if sequence:
        plan |= {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    else:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)


@row(4, exact=True)
def fsdp2_tp():
    mesh = mesh_of(dp=2, tp=2)
    model = shard(tensor_parallel(mesh["tp"]), mesh=mesh["dp"])
    return Job([model], steps_of(model, mesh["dp"].get_local_rank()), [mesh["dp"]])


@row(4, exact=True, quick=True)
def fsdp2_tp_sequence():
    mesh = mesh_of(dp=2, tp=2)
    model = shard(tensor_parallel(mesh["tp"], sequence=True), mesh=mesh["dp"])
    return Job([model], steps_of(model, mesh["dp"].get_local_rank()), [mesh["dp"]])


@row(8)
def fsdp2_tp_on_two_hosts():
    mesh = mesh_of(dp=4, tp=2)
    model = shard(tensor_parallel(mesh["tp"], sequence=True), mesh=mesh["dp"])
    return Job([model], steps_of(model, mesh["dp"].get_local_rank()), [mesh["dp"]], {"hosts": 2})


@row(4, exact=True)
def hybrid_sharding():
    mesh = mesh_of(host=2, local=2)
    model = shard(Transformer(), mesh=mesh)
    return Job([model], steps_of(model, dist.get_rank()), [mesh["host"]])


@row(8, exact=True)
def hybrid_sharding_tp():
    mesh = mesh_of(host=2, local=2, tp=2)
    model = shard(tensor_parallel(mesh["tp"]), mesh=mesh["host", "local"])
    place = 2 * mesh["host"].get_local_rank() + mesh["local"].get_local_rank()
    return Job([model], steps_of(model, place), [mesh["host"]])


@row(8, exact=True, alone="hybrid_sharding_tp")
def between_hosts_tp():
    mesh = mesh_of(host=2, local=2, tp=2)
    model = shard(tensor_parallel(mesh["tp"]), mesh=mesh["local"])
    place = 2 * mesh["host"].get_local_rank() + mesh["local"].get_local_rank()
    return Job([model], steps_of(model, place), [mesh["host"]], {"between": mesh["host"]})


@row(4, exact=True, quick=True)
def replicate_tp():
    """The replicate() that FSDP2 brings, in DDP's place."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    mesh = mesh_of(dp=2, tp=2)
    model = tensor_parallel(mesh["tp"])
    for layer in model.layers:
        replicate(layer, mesh=mesh["dp"])
    replicate(model, mesh=mesh["dp"])
    return Job([model], steps_of(model, mesh["dp"].get_local_rank()), [mesh["dp"]])


@row(4, exact=True, kind="fsdp1")
def fsdp1_tp():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    mesh = mesh_of(dp=2, tp=2)
    model = FullyShardedDataParallel(
        tensor_parallel(mesh["tp"]),
        device_mesh=mesh["dp"],
        device_id=torch.device("cpu"),
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )
    return Job([model], steps_of(model, mesh["dp"].get_local_rank()), [mesh["dp"]])


@row(4, exact=True)
def ddp_tp():
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh = mesh_of(dp=2, tp=2)
    model = tensor_parallel(mesh["tp"])
    _pre_dp_module_transform(model)
    model = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["dp"])
    return Job([model], steps_of(model, mesh["dp"].get_local_rank()), [mesh["dp"]])


@row(4, exact=True, quick=True)
def dp_mesh_dims():
    """One mesh for all: parameters are DTensors on it, and fully_shard() is told its dimensions of data."""
    from torch.distributed.fsdp import DataParallelMeshDims
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    mesh, model = (
        mesh_of(data=2, tensor=2),
        Transformer(),
    )  # not the names of other rows, whose meshes DTensors keep
    for layer in model.layers[1:]:  # one attention is enough: torch places its operators for seconds
        layer.attention = MLP()
    columns = {"wo": 1, "w2": 1, "wq": 0, "wk": 0, "wv": 0, "w1": 0, "head": 0}
    for name, module in model.named_modules():
        for of, parameter in [*module.named_parameters(recurse=False)]:
            kind = name.rpartition(".")[2]
            place = Shard(columns[kind]) if kind in columns else Replicate()
            setattr(module, of, nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate(), place])))
    shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="data"))

    def step(number):
        x, y = (
            DTensor.from_local(part, mesh, [Shard(0), Replicate()])
            for part in batch(number, mesh["data"].get_local_rank())
        )
        with implicit_replication():  # of masks
            loss = model(x, y).full_tensor()
            loss.backward()
        return [loss.item()]

    return Job([model], step, [mesh["data"]])


# ---- context parallel ----


def context_parallel(model, mesh):
    """Each rank of the mesh has a part of every sequence, and gathers the keys and values of the others."""

    def gather(x):
        of_all = getattr(functional, "all_gather_single_autograd", None)  # torch 2.13's name
        of_all = of_all or functional.all_gather_tensor_autograd
        return torch.cat(of_all(x.contiguous(), 0, mesh.get_group()).chunk(mesh.size()), 1)

    for layer in model.layers:
        layer.attention.gather, layer.attention.first = gather, LENGTH // mesh.size() * mesh.get_local_rank()
    return model


def steps_on_parts(model, mesh, place):
    def step(number):
        x, y = (part.chunk(mesh.size(), 1)[mesh.get_local_rank()] for part in batch(number, place))
        loss = model(x, y)
        loss.backward()
        return [loss.item()]

    return step


@row(4, quick=True)
def fsdp2_cp():
    """Sharded over all ranks, as torchtitan shards over data and context."""
    mesh, whole = mesh_of(dp=2, cp=2), mesh_of(dp_cp=4)
    model = shard(context_parallel(Transformer(), mesh["cp"]), mesh=whole)
    return Job([model], steps_on_parts(model, mesh["cp"], mesh["dp"].get_local_rank()), [whole], {"hosts": 2})


@row(4)
def ddp_cp():
    mesh = mesh_of(dp=2, cp=2)
    model = nn.parallel.DistributedDataParallel(context_parallel(Transformer(), mesh["cp"]))
    everyone = mesh_of(dp_cp=4)
    return Job([model], steps_on_parts(model, mesh["cp"], mesh["dp"].get_local_rank()), [everyone])


@row(8)
def fsdp2_cp_tp():
    mesh, whole = mesh_of(dp=2, cp=2, tp=2), mesh_of(dp_cp=4, tp=2)
    model = shard(context_parallel(tensor_parallel(whole["tp"]), mesh["cp"]), mesh=whole["dp_cp"])
    step = steps_on_parts(model, mesh["cp"], mesh["dp"].get_local_rank())
    return Job([model], step, [whole["dp_cp"]], {"hosts": 2})


# ---- expert parallel ----


class Experts(nn.Module):
    """A router and 4 experts, of which each rank of a mesh has some: tokens travel to theirs and back."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4, bias=False), Weights()
        self.mesh = None

    def forward(self, x):
        tokens = x.flatten(0, 1)
        gates, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=4)
        y = self.send(tokens[order], counts)
        return (gates[:, None] * torch.zeros_like(tokens).index_copy(0, order, y)).view_as(x)

    def send(self, tokens, counts):
        """tokens: sorted by expert. Returns what the experts make of them, in the same order."""
        if self.mesh is None:
            return self.experts(tokens, counts.tolist())
        group, n = self.mesh.get_group(), self.mesh.size()
        theirs = functional.all_to_all_single(counts, None, None, group).view(n, -1)
        sent, got = counts.view(n, -1).sum(1).tolist(), theirs.sum(1).tolist()
        came = functional.all_to_all_single_autograd(tokens, got, sent, group)
        pieces = came.split(theirs.flatten().tolist())  # by sender, then by expert
        per = theirs.shape[1]
        mine = torch.cat([pieces[i * per + e] for e in range(per) for i in range(n)])
        made = self.experts(mine, theirs.sum(0).tolist()).split(theirs.T.flatten().tolist())
        back = torch.cat([made[e * n + i] for i in range(n) for e in range(per)])
        return functional.all_to_all_single_autograd(back, sent, got, group)


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 10) for _ in "ab")

    def forward(self, tokens, counts):
        w1, w2 = local_of(self.w1), local_of(self.w2)
        parts = tokens.split(counts)
        return torch.cat([F.gelu(part @ w1[i]) @ w2[i] for i, part in enumerate(parts)])


def local_of(parameter):
    """The part of this rank, with its gradient."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def expert_parallel(model, experts, whole):
    """As torchtitan does it: experts are cut over `ep` and sharded over `efsdp`, all else over `whole`."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    for layer in model.layers:
        weights, layer.mlp.mesh = layer.mlp.experts, experts["ep"]
        for name, parameter in [*weights.named_parameters()]:
            setattr(weights, name, nn.Parameter(distribute_tensor(parameter.data, experts["ep"], [Shard(0)])))
        fully_shard(weights, mesh=experts["efsdp"])
        weights.set_gradient_divide_factor(experts.size())
        weights.set_force_sum_reduction_for_comms(True)  # gloo has no such factor
    return shard(model, mesh=whole)


@row(4, quick=True)
def fsdp2_ep():
    experts, whole = mesh_of(efsdp=2, ep=2), mesh_of(dp=4)
    model = expert_parallel(Transformer(Experts), experts, whole)
    return Job([model], steps_of(model, dist.get_rank()), [experts["efsdp"], whole], {"hosts": 2})


@row(4)
def fsdp2_ep_of_all_ranks():
    """Each rank has an expert of its own, which it exchanges with nobody."""
    experts, whole = mesh_of(efsdp=1, ep=4), mesh_of(dp=4)
    model = expert_parallel(Transformer(Experts), experts, whole)
    return Job([model], steps_of(model, dist.get_rank()), [whole])


@row(8)
def fsdp2_ep_tp():
    """Attention is cut over `tp`, whose ranks have tokens and experts of their own."""
    mesh, experts = mesh_of(dp=4, tp=2), mesh_of(efsdp=2, ep=4)
    model = expert_parallel(tensor_parallel(mesh["tp"], mlp=Experts), experts, mesh["dp"])
    return Job([model], steps_of(model, mesh["dp"].get_local_rank()), [experts["efsdp"], mesh["dp"]])


# ---- pipelines ----


def pipeline(schedule, n_stages, mesh, wrap, cut=lambda model: model, **options):
    """A Job of stages over mesh["pp"], each of which wrap() gives to its data-parallel ranks."""
    from torch.distributed import pipelining

    pp, n = mesh["pp"].get_local_rank(), mesh["pp"].size()
    models, stages = [], []
    for i in range(pp, n_stages, n):
        model = cut(Transformer())
        if n_stages == 4:  # a layer or the ends alone
            model.layers = nn.ModuleList([*model.layers][i - 1 : i] if 0 < i < 3 else [])
        else:
            model.layers = model.layers[i : i + 1]
        if i > 0:
            model.tokens = None
        if i < n_stages - 1:
            model.norm = model.head = None
        models.append(wrap(model))
        stages.append(
            pipelining.PipelineStage(
                models[-1], i, n_stages, torch.device("cpu"), group=mesh["pp"].get_group()
            )
        )
    made = getattr(pipelining, schedule)(
        stages if len(stages) > 1 else stages[0], n_microbatches=4, loss_fn=loss_of
    )

    def step(number):
        x, y = batch(number, mesh["dp"].get_local_rank())
        losses = []
        made.step(*((x,) if pp == 0 else ()), **({"target": y, "losses": losses} if pp == n - 1 else {}))
        return [sum(loss.item() for loss in losses) / 4] if losses else []

    return Job(models, step, [mesh["dp"]], options)


def of_fsdp2(schedule, n_stages):
    mesh = mesh_of(pp=2, dp=2)
    return pipeline(
        schedule, n_stages, mesh, lambda model: shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    )


@row(4, exact=True)
def pp_fsdp2_gpipe():
    return of_fsdp2("ScheduleGPipe", 2)


@row(4, exact=True)
def pp_fsdp2_1f1b():
    return of_fsdp2("Schedule1F1B", 2)


@row(4, exact=True)
def pp_fsdp2_interleaved():
    return of_fsdp2("ScheduleInterleaved1F1B", 4)


@row(4, exact=True, quick=True)
def pp_fsdp2_zero_bubble():
    return of_fsdp2("ScheduleInterleavedZeroBubble", 4)


@row(4, exact=True, quick=True)
def pp_ddp():
    mesh = mesh_of(pp=2, dp=2)
    wrap = lambda model: nn.parallel.DistributedDataParallel(model, device_mesh=mesh["dp"])
    # in its first step torch also exchanges the gradients of the first micro-batch
    return pipeline("Schedule1F1B", 2, mesh, wrap)._replace(n_more=1)


@row(8, exact=True)
def pp_fsdp2_tp():
    mesh = mesh_of(pp=2, dp=2, tp=2)
    return pipeline(
        "Schedule1F1B",
        2,
        mesh,
        lambda model: shard(model, mesh=mesh["dp"], reshard_after_forward=False),
        cut=lambda model: tensor_parallel(mesh["tp"]),
    )


# ---- the three runs ----


def local(parameter):
    values = parameter.detach()
    return values.to_local() if hasattr(values, "to_local") else values


def exchanging(handle):
    """The groups over which tagc sums gradients."""
    wrapper = handle.wrapper
    return wrapper.groups() if getattr(wrapper, "between", None) is None else [wrapper.between]


def run(name, options, with_adam=False):
    """(losses, local parameters, handles) of a row; options: of compress(), None without tagc. An Adam would
    hide gradients that are wrong by a factor."""
    import tagc.torch as tagc

    job, losses, handles = ROWS[name].make(), [], []
    Adam, SGD = torch.optim.AdamW, torch.optim.SGD
    optimizers = [
        Adam(model.parameters(), lr=3e-3, foreach=False)
        if with_adam
        else SGD(model.parameters(), lr=0.3, momentum=0.5, foreach=False)
        for model in job.models
    ]
    if options is not None:
        options = options | job.options
        for model, optimizer in zip(job.models, optimizers):
            handles.append(tagc.compress(model, optimizer if with_adam else None, verbose=False, **options))
        groups = [group for handle in handles for group in exchanging(handle) if group.size() > 1]
        groups = {tuple(dist.get_process_group_ranks(group)) for group in groups}
        assert groups == {tuple(dist.get_process_group_ranks(m.get_group())) for m in job.over}, groups
    for step in range(4 if with_adam else 3):  # DDP makes its buckets in the first, momentum needs two
        losses += job.step(step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert all(handle.n_steps == step + 1 + job.n_more for handle in handles), [
            h.n_steps for h in handles
        ]
    parameters = {f"{i}.{n}": local(p) for i, m in enumerate(job.models) for n, p in m.named_parameters()}
    return losses, parameters, handles


def check_row(name):
    is_exact = ROWS[name].is_exact
    tolerance = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-5, "atol": 1e-6}
    losses, weights, _ = run(ROWS[name].alone, None)
    found, found_weights, handles = run(name, {"sparsity": 0, "values": "fp32"})
    torch.testing.assert_close(found, losses, **tolerance)
    for parameter, values in weights.items():
        torch.testing.assert_close(
            found_weights[parameter], values, msg=lambda text: f"{parameter}: {text}", **tolerance
        )
    for handle in handles:
        handle.close()
    trained, _, handles = run(name, {}, with_adam=True)
    assert not trained or sum(trained[-1:]) < 0.97 * sum(trained[:1]), trained
    for handle in handles:
        stats = handle.stats()
        assert stats["n_compressed"] > 0 and 0 < stats["bits_per_param"] < 24, (
            stats
        )  # an all-reduce sends everything twice
        handle.close()


def check_rows(rank, world_size, names):
    """The failure of each, or None."""
    failures = []
    for name in names:
        try:
            check_row(name)
            failures.append(None)
        except Exception:
            failures.append(traceback.format_exc())
        dist.barrier()
    return failures
