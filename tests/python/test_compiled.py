"""Models that are compiled whole, with tagc's operators in the graph: they train as under FSDP2, and ranks
whose compilers order operators differently end right, or all get one error."""

import copy
import functools
import tempfile

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from models import Even, Odd, Tied, batch_of, loss_of
from oracles import check_alike, check_error
from torch import nn
from torch.utils import checkpoint

# AOTAutograd with the partitioner of inductor, without its decompositions and its C++
BACKEND = "aot_eager"
SELECTED = dict(sparsity=0.9, layers="all", values="int4")


def save_products(ctx, op, *_, **__):
    is_saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return checkpoint.CheckpointPolicy.MUST_SAVE if is_saved else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(Odd):
    """With selective activation checkpointing."""

    def forward(self, x):
        contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, save_products)
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return self.head(x) @ self.mix * self.scale


def made(make, wrap="data_parallel", **options):
    """(the model, what wrap() got)."""
    import tagc.torch as tagc

    torch.manual_seed(0)
    model = make()
    if wrap == "data_parallel":
        return tagc.data_parallel(model, **options)
    from torch.distributed.fsdp import fully_shard

    for layer in getattr(model, "layers", []):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


class Run:
    """A training run."""

    def __init__(self, model, backend=None, n_micro=1, **options):
        import tagc.torch as tagc

        self.model, self.n_micro, self.n_steps = model, n_micro, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        self.handle = tagc.compress(model, self.optimizer, verbose=False, **options) if options else None
        self.call = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)

    def steps(self, n):
        """The mean losses of n steps."""
        losses = []
        for _ in range(n):
            self.optimizer.zero_grad()
            for micro in range(self.n_micro):
                batch = batch_of(dist.get_rank(), self.n_micro * self.n_steps + micro)
                (loss := loss_of(self.call, batch)).backward()
            self.optimizer.step()
            self.n_steps += 1
            dist.all_reduce(mean := loss.detach().clone())
            losses.append(mean.item())
        return losses

    def parameters(self):
        return [p.detach().full_tensor() for p in self.model.parameters()]


def check_same(one, other, n_steps=3):
    """Both train alike, bit by bit."""
    assert (found := one.steps(n_steps)) == (expected := other.steps(n_steps)), (found, expected)
    for mine, theirs in zip(one.parameters(), other.parameters()):
        assert torch.equal(mine, theirs), (mine - theirs).abs().max()
    return found


def closed(*runs):
    for run in runs:
        if run.handle is not None:
            run.handle.close()


class Count:
    """Calls of the operators, as ranks run them."""

    def __enter__(self):
        from tagc.torch.compiled.wrapper import Sharded

        self.calls, self._own, self._kind = [], {}, Sharded
        for name in ("all_gather", "reduce_scatter"):
            self._own[name] = getattr(Sharded, name)
            setattr(Sharded, name, self._counted(name, self._own[name]))
        return self

    def _counted(self, name, own):
        def call(sharded, *arguments):
            self.calls.append((name, sharded.parameter.name))
            return own(sharded, *arguments)

        return call

    def __exit__(self, *_):
        for name, own in self._own.items():
            setattr(self._kind, name, own)

    def n(self, name):
        return sum(called == name for called, _ in self.calls)


# ---- eager ----


class Matrix(nn.Module):
    """Without biases, to be cut along columns."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return self.two(torch.tanh(self.one(nn.functional.pad(x, (0, 1)))))[:, :3]


def eager_is_fsdp2(rank, world_size):
    for options in ({}, dict(sparsity=0), dict(sparsity=0, parameters="bf16")):
        runs = [Run(made(Odd, wrap), **options) for wrap in ("data_parallel", "fsdp2")]
        check_same(*runs)
        # a tied matrix is reduced once for each place, and added up afterwards
        tied = [Run(made(Tied, wrap), **options) for wrap in ("data_parallel", "fsdp2")]
        torch.testing.assert_close(tied[0].steps(3), tied[1].steps(3), rtol=1e-6, atol=0)
        assert len(list(tied[0].model.parameters())) == len(list(tied[1].model.parameters()))
        closed(*runs, *tied)
    for dim in (0, 1):
        check_same(Run(made(Matrix, shard_dim=dim), sparsity=0), Run(made(Matrix, "fsdp2"), sparsity=0))


def precision(rank, world_size):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for reduce in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce, cast_forward_inputs=True)

        class Cast(Odd):
            def forward(self, x):
                return super().forward(x.bfloat16()).float()

        theirs = Run(made(Cast, "fsdp2", mp_policy=policy), sparsity=0)
        check_same(Run(made(Cast, mp_policy=policy), sparsity=0), theirs)


def accumulation(rank, world_size):
    for options in (dict(sparsity=0), SELECTED):
        mine, theirs = (Run(made(Even, wrap), n_micro=3, **options) for wrap in ("data_parallel", "fsdp2"))
        if options is SELECTED:
            torch.testing.assert_close(mine.steps(4), theirs.steps(4), rtol=0.05, atol=0)
        else:
            check_same(mine, theirs)
        assert mine.handle.n_steps == theirs.handle.n_steps == 3 * mine.n_steps
        closed(mine, theirs)


def evaluation(rank, world_size):
    """It exchanges no gradient, changes nothing, and with deltas sends nothing that has not changed."""
    run = Run(made(Even), parameters="delta4", **SELECTED)
    run.steps(2)
    batch = batch_of(0)  # what comes next
    with torch.no_grad():
        first = loss_of(run.model, batch)
    with torch.inference_mode():
        assert loss_of(run.model, batch) == first
    check_alike(first.view(1), "the loss")
    n_bytes = run.handle.passes.comms()[0].bytes_sent()["gather"]
    with torch.no_grad():
        loss_of(run.model, batch)
    assert run.handle.passes.comms()[0].bytes_sent()["gather"] == n_bytes
    assert run.handle.n_steps == 2
    other = Run(made(Even), parameters="delta4", **SELECTED)
    other.steps(2)
    check_same(run, other)
    closed(run, other)


def handles(rank, world_size):
    """What the handle says, closing it, a second one, and copies of the model."""
    import tagc.torch as tagc

    run = Run(made(Odd), **SELECTED)
    names = dict(made(Odd).named_parameters())
    assert dict(run.model.named_parameters()).keys() == names.keys() == run.model.state_dict().keys()
    run.steps(2)
    stats = run.handle.stats()
    assert (stats["step"], stats["n_units"], stats["world_size"]) == (2, len(names), world_size)
    assert 0.85 < stats["sparsity"] < 0.95 and "(simple_fsdp, 2 ranks)" in repr(run.handle)
    assert run.handle.memory().host.residual > 0
    other = copy.deepcopy(run.model)
    assert torch.equal(loss_of(other, batch_of(0)), loss_of(run.model, batch_of(0)))
    assert type(other.head) is not type(run.model.head)  # it exchanges by torch
    check_error(lambda: tagc.compress(run.model, verbose=False), "has a tagc handle: close\\(\\) it first")
    closed(run)
    check_same(Run(run.model), Run(other))
    closed(Run(run.model, **SELECTED))


def checkpoints(rank, world_size):
    """By torch.distributed.checkpoint, with the handle's state beside that of the model and optimizer."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    options = SELECTED | {"parameters": "delta4"}
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    run = Run(made(Odd), **options)
    run.steps(3)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer, "tagc": run.handle}, checkpoint_id=folder[0])
    again = Run(made(Odd), **options)
    model, optimizer = get_state_dict(again.model, again.optimizer)
    dcp.load({"model": model, "optimizer": optimizer, "tagc": again.handle}, checkpoint_id=folder[0])
    set_state_dict(again.model, again.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    again.n_steps = 3
    check_same(run, again)
    closed(run, again)


def errors(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import tagc.torch as tagc

    two = init_device_mesh("cpu", (1, world_size))
    for options, text in (
        (dict(mesh=two), "mesh is DeviceMesh.*must be a DeviceMesh of one dimension"),
        (dict(mesh=3), "mesh is 3, must be"),
        (dict(shard_dim=1), "norm.weight has 1 dimensions, and shard_dim is 1"),
        (dict(shard_dim=-1), "shard_dim is -1, must be an integer from 0"),
        (dict(reshard_after_forward=2), "reshard_after_forward is 2, must be True or False"),
    ):
        check_error(functools.partial(tagc.data_parallel, Even(), **options), text)

    class Policy:
        param_dtype, reduce_dtype = torch.int8, None

    check_error(lambda: tagc.data_parallel(Even(), mp_policy=Policy()), "param_dtype.*int8, must be a dtype")
    check_error(lambda: tagc.data_parallel(nn.Tanh()), "no parameters")
    check_error(lambda: tagc.data_parallel(3), "model is a int, must be a torch.nn.Module")
    model = made(Even)
    check_error(lambda: tagc.data_parallel(model), "data_parallel\\(\\) was called")
    check_error(lambda: tagc.advise(model), "advise\\(\\) does not know models of data_parallel")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    check_error(lambda: tagc.LocalSteps(model, optimizer), "model is of data_parallel.*LocalSteps takes")

    class Stranger(nn.Linear):
        weight = property(lambda self: self._parameters["weight"])

    def strange(placement):
        module, mesh = nn.Linear(4, 4, bias=False), init_device_mesh("cpu", (world_size,))
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [placement]))
        module.__class__ = Stranger
        return nn.Sequential(module)

    check_error(lambda: tagc.compress(strange(Replicate())), "0.weight is placed as .*Replicate.*replicas")
    check_error(lambda: tagc.compress(strange(Shard(0))), "0.weight is a property.*does not know")


def titan(rank, world_size):
    """A parametrization like torchtitan's, which sums gradients: tagc sums them, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    import tagc.torch as tagc

    class Computation(nn.Module):
        param_dtype = reduce_dtype = None
        full_dtensor = False
        grad_placements = [Partial("sum")]

        def forward(self, x):
            return x.redistribute(placements=[Replicate()]).to_local(grad_placements=self.grad_placements)

    def parallel():
        torch.manual_seed(0)
        model, mesh, computation = Even(), init_device_mesh("cpu", (world_size,)), Computation()
        for module in list(model.modules()):
            own = dict(module.named_parameters(recurse=False))
            for name, p in own.items():
                module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
            found = {n: property(lambda self, n=n: computation(self._parameters[n])) for n in own}
            module.__class__ = type("SimpleFSDP", (type(module),), found)
        return model

    mine, theirs = Run(parallel(), sparsity=0), Run(parallel())
    check_same(mine, theirs)
    tagc_gradient = next(iter(mine.model.parameters())).grad.full_tensor()
    average = Run(made(Even), sparsity=0)
    average.steps(3)
    assert not torch.equal(tagc_gradient, next(iter(average.model.parameters())).grad.full_tensor())
    closed(mine, average)
    Computation.grad_placements = [Partial("max")]
    check_error(lambda: tagc.compress(parallel()), "with gradients of .*max.*use tagc.data_parallel")


class Two(nn.Module):
    """What it reads first is this rank's own choice."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(64, 7)), nn.Parameter(torch.randn(64, 7))
        self.is_turned = False

    def forward(self, x):
        if self.is_turned:
            b, a = self.b, self.a
        else:
            a, b = self.a, self.b
        return (x @ a.t() + torch.tanh(x @ b.t()))[:, :3]


def order(rank, world_size):
    """Gathers that ranks come to in different orders end right. Gradients do not: all ranks say so."""
    expected = Run(made(Two), sparsity=0)
    run = Run(made(Two), sparsity=0)
    run.model.is_turned = rank == 1
    with torch.no_grad():
        for step in range(3):
            batch = batch_of(0, step)
            assert loss_of(run.model, batch) == loss_of(expected.model, batch)
    text = "rank 0 comes with gradients of [ab], and rank 1 with gradients of [ab]"
    check_error(lambda: run.steps(1), text)
    run.model.is_turned = False  # and goes on
    check_same(run, expected)
    closed(run, expected)


CHECKS = [eager_is_fsdp2, precision, accumulation, evaluation, handles, checkpoints, errors, titan, order]


# ---- compiled ----


def compiled_is_fsdp2(rank, world_size):
    """One graph without breaks, which gathers again in the backward pass, and serves other handles, too."""
    from torch._dynamo.utils import counters

    for options in (dict(sparsity=0), SELECTED | {"parameters": "delta4"}):
        with Count() as count:
            mine = Run(made(Checkpointed), BACKEND, **options)
            losses = check_same(mine, Run(made(Checkpointed), **options), 1)
            n = len(list(mine.model.parameters()))
            assert count.n("reduce_scatter") == 2 * n, count.calls
            # eager autograd keeps what is not checkpointed
            assert count.n("all_gather") > 2 * n + 2 * sum(1 for _ in mine.model.layers.parameters()) - 8
        if options == dict(sparsity=0):
            assert losses == Run(made(Checkpointed, "fsdp2"), sparsity=0).steps(1)
        mine.steps(2)
        with torch.no_grad():
            batch = batch_of(rank)
            torch.testing.assert_close(loss_of(mine.call, batch), loss_of(mine.model, batch))
        closed(mine)
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2, counters["stats"]  # with gradients, and without


def other_order(gm, inputs):
    """Moves all gathers to the front of rank 1's graphs, the last one first: a compiler that orders by a rule
    of its own."""
    from torch._functorch.aot_autograd import make_boxed_func

    operators = torch.ops.tagc.all_gather.default, torch.ops.tagc.reduce_scatter.default
    at, found = {name: [] for name in operators}, list(gm.graph.nodes)
    for node in found:
        name = (
            node.target if node.target in operators else next((a for a in node.args if a in operators), None)
        )
        if name is not None:
            at[name].append(node)
    gathers, sums = at[operators[0]], at[operators[1]]
    last = [node for node in found if node.op == "placeholder"][-1]
    moved = set()

    def move(node, last):
        for before in node.all_input_nodes:
            last = move(before, last)
        if node.op != "call_function" or node in moved:
            return last
        moved.add(node)
        last.append(node)
        return node

    for node in reversed(gathers) if dist.get_rank() == 1 else ():
        last = move(node, last)
    gm.graph.lint()
    gm.recompile()
    # each reduce-scatter needs the value that the one before gives
    for before, node in zip(sums, sums[1:]):
        token = node.args[0]
        assert token.all_input_nodes == [before] and "with_effects" in str(node.target), node
    _SEEN.append((len(gathers), len(sums)))
    return make_boxed_func(gm.forward)


_SEEN = []


def orders(rank, world_size):
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    backend = aot_autograd(
        fw_compiler=other_order, bw_compiler=other_order, partition_fn=min_cut_rematerialization_partition
    )
    run = Run(made(Even), backend, sparsity=0)
    with Count() as count:
        check_same(run, Run(made(Even), sparsity=0), 2)
    calls = [None] * world_size
    dist.all_gather_object(calls, count.calls)
    assert calls[0] != calls[1]
    n = len(list(run.model.parameters()))
    assert _SEEN[0] == (n, 0) and _SEEN[1][0] > 1 and _SEEN[1][1] == n, (_SEEN, n)
    closed(run)


def test_eager():
    ranks.run_each(CHECKS, 2)


def test_compiled():
    ranks.run_each([compiled_is_fsdp2, orders], 2, timeout_s=400)


def hosts(rank, world_size):
    """Of two ranks each: gradients and parameters are those of four hosts."""
    runs = [Run(made(Odd), sparsity=0, hosts=n, parameters="bf16") for n in (2, 4)]
    torch.testing.assert_close(runs[0].steps(3), runs[1].steps(3), rtol=1e-6, atol=0)
    assert runs[0].handle.stats()["ranks_per_host"] == 2
    selected = Run(made(Odd), hosts=2, parameters="delta4", **SELECTED)
    selected.steps(2)
    whole = torch.cat([p.flatten() for p in selected.parameters()])
    check_alike(whole, "the parameters")
    one = Run(made(Odd), sparsity=0, hosts=1)
    torch.testing.assert_close(one.steps(3), Run(made(Odd)).steps(3), rtol=1e-6, atol=0)
    closed(*runs, selected, one)


@pytest.mark.slow
def test_hosts():
    ranks.run_each([hosts], 4)
