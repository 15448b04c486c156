"""Models that are compiled whole, with tagc's operators in the graph: they train as under FSDP2, and ranks
whose compilers order operators differently end right, or all get one error."""

import copy
import functools
import tempfile
import time
import types

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from compiled_runs import (
    SELECTED,
    Checkpointed,
    Chosen,
    Matrix,
    Reused,
    Run,
    Two,
    Watched,
    check_overlap,
    check_same,
    closed,
    made,
    parallel_as_torchtitan,
)
from models import Even, Odd, Tied, batch_of, loss_of
from oracles import check_alike, check_equal, check_error, full_gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tagc.compiled import data_parallel
from tagc.torch.exchange import internals

# torch 2.10: values in graphs hold the order of reduce-scatters, and .to() takes what operators have seen
IS_ORDERED = CAN_MOVE = internals.version() >= (2, 10)

# ---- eager ----


def eager_is_fsdp2(rank, world_size):
    for options in ({}, dict(sparsity=0, parameters="bf16"), SELECTED | {"parameters": "delta4"}):
        runs = [Run(made(Odd, wrap), **options) for wrap in ("data_parallel", "fsdp2")]
        check_same(*runs)
        if options:
            sent = [run.handle.passes.comms()[0].bytes_sent() for run in runs]
            assert [sent[0][leg] for leg in ("index", "values")] == [
                sent[1][leg] for leg in ("index", "values")
            ]
        closed(*runs)
    # a tied matrix has two gradients, which are exchanged together from the second pass on
    tied = [Run(made(Tied, wrap), sparsity=0) for wrap in ("data_parallel", "fsdp2")]
    torch.testing.assert_close(tied[0].steps(1), tied[1].steps(1), rtol=1e-6, atol=0)
    with Watched() as watched:
        torch.testing.assert_close(tied[0].steps(2), tied[1].steps(2), rtol=1e-6, atol=0)
    assert watched.begun == 2 * ["the root module"] and watched.n("reduce_scatter") == 2 * 8, watched.log
    assert len(list(tied[0].model.parameters())) == len(list(tied[1].model.parameters()))
    closed(*tied)
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
    # what writes into a checkpoint's tensors is seen, also after a pass that has read some of a module
    run, other = (Run(made(Even), sparsity=0) for _ in range(2))
    with torch.no_grad():
        before = loss_of(run.model, batch)
        assert run.model.embed.weight.numel() and loss_of(other.model, batch) == before
        for each in (run, other):
            each.model.state_dict()["head.bias"].to_local().add_(1)
        assert loss_of(run.model, batch) == loss_of(other.model, batch) != before
    closed(run, other)


def changed(rank, world_size):
    """What one rank alone changes, of a module that was read in part or is gathered ahead, all ranks see, or
    all raise one Error."""
    text = "have changed on rank 0 since they were gathered, and rank 1, which comes with"
    batch, run = batch_of(0), Run(made(Even), sparsity=0, timeout_s=60)
    model = run.model

    def change(module, changing=(0,)):
        if rank in changing:
            module._parameters["weight"].to_local().detach()[0] += 1

    def check(loss):
        check_alike(loss.detach().view(1), "the loss")
        assert torch.equal(loss, loss_of(copy.deepcopy(model), batch))  # for which torch gathers
        return loss

    with torch.no_grad():
        loss_of(model, batch)
        for module in (model.head, model.embed):
            model.embed(torch.ones(1, 8))  # the root's, whose head stays unread
            change(module)
            check(loss_of(model, batch))
        model.embed(torch.ones(1, 8))
        change(model.head)
    check(loss_of(model, batch)).backward()
    # what a pass reads first may be what was left unread
    for changing in ((0, 1), (0,)):
        assert model.head.bias.numel()
        change(model.embed, changing)
        if len(changing) == 2:
            check(loss_of(model, batch)).backward()
    check_error(lambda: loss_of(model, batch), f"parameters of the root module {text} parameters of layers.0")
    # the next block is there already when it changes
    for changing in ((0, 1), (0,)):
        run.steps(1)
        hook = model.layers[1].register_forward_pre_hook(lambda *_: change(model.layers[1].out, changing))
        if len(changing) == 2:
            loss = loss_of(model, batch)
            hook.remove()
            check(loss).backward()
    check_error(lambda: run.steps(1), f"parameters of layers.1 {text} gradients of")
    hook.remove()
    closed(run)


def handles(rank, world_size):
    """What the handle says, closing it, a second one, and copies of the model."""
    import tagc.torch as tagc

    run = Run(made(Odd), **SELECTED)
    names = dict(made(Odd).named_parameters())
    assert dict(run.model.named_parameters()).keys() == names.keys() == run.model.state_dict().keys()
    run.steps(2)
    stats = run.handle.stats()
    assert (stats["step"], stats["n_units"], stats["world_size"]) == (2, 3, world_size)
    assert 0.85 < stats["sparsity"] < 0.95 and "(simple_fsdp, 2 ranks)" in repr(run.handle)
    assert run.handle.memory().host.residual > 0
    other = copy.deepcopy(run.model)
    assert torch.equal(loss_of(other, batch_of(0)), loss_of(run.model, batch_of(0)))
    assert type(other.head) is not type(run.model.head)  # it exchanges by torch
    check_error(lambda: tagc.compress(run.model, verbose=False), "has a tagc handle: close\\(\\) it first")
    run.model.load_state_dict({name: p.clone() for name, p in run.model.state_dict().items()})
    assert torch.equal(loss_of(other, batch_of(0)), loss_of(run.model, batch_of(0)))
    own, run.model._parameters["scale"] = run.model._parameters["scale"], other._parameters["scale"]
    check_error(
        lambda: loss_of(run.model, batch_of(0)),
        "scale is not the parameter that compress\\(\\) saw.*assign=True",
    )
    run.model._parameters["scale"] = own
    closed(run)
    check_same(Run(run.model), Run(other))
    closed(Run(run.model, **SELECTED))


def moved(rank, world_size):
    """A model is cast and moved where that changes nothing. What changes it must come before compress()."""
    run, other = (Run(made(Tied), sparsity=0) for _ in range(2))
    for move in (lambda model: model.to("cpu"), nn.Module.float, lambda model: model.again.to(torch.float32)):
        move(run.model)
        check_same(run, other, 1)
    in_graph = [Run(made(Matrix), backend, sparsity=0) for backend in ("aot_eager", None)]
    check_same(*in_graph, 1)
    in_graph[0].model.to("cpu")  # which gives the graph other inputs
    check_same(*in_graph, 1)
    closed(*in_graph)
    run.model.bfloat16()
    text = r"weight is torch.bfloat16 on cpu, and compress\(\) saw torch.float32 on cpu: cast or move"
    check_error(lambda: loss_of(run.model, batch_of(0)), text)
    run.model.float()
    run.optimizer.zero_grad()
    loss_of(run.model, batch_of(rank)).backward()
    closed(run, other)
    cast = Run(run.model.bfloat16(), sparsity=0)
    assert cast.model(batch_of(rank)[0].bfloat16()).dtype == torch.bfloat16
    closed(cast)


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
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import tagc.torch as tagc

    two = init_device_mesh("cpu", (1, world_size))
    with pytest.raises(TypeError, match="'reshard_after': did you mean 'reshard_after_forward'"):
        data_parallel(Even(), reshard_after=True)
    for options, text in (
        (dict(mesh=two), "mesh is DeviceMesh.*must be a DeviceMesh of one dimension"),
        (dict(mesh=3), "mesh is 3, must be"),
        (dict(shard_dim=1), "norm.weight has 1 dimensions, and shard_dim is 1"),
        (dict(shard_dim=-1), "shard_dim is -1, must be an integer from 0"),
        (dict(reshard_after_forward=2), "reshard_after_forward is 2, must be True or False"),
        (dict(modules=3), "modules is 3, must be modules of the model, or None"),
        (dict(modules=["head"]), "modules has 'head' at 0, must have modules, and lists of modules"),
        (dict(modules=[nn.Tanh()]), "modules has a Tanh at 0, which is not in the model"),
    ):
        check_error(functools.partial(data_parallel, Even(), **options), text)

    class Policy:
        param_dtype, reduce_dtype = torch.int8, None

    check_error(lambda: data_parallel(Even(), mp_policy=Policy()), "param_dtype.*int8, must be a dtype")
    text = "mp_policy is torch.bfloat16, must have param_dtype, reduce_dtype, or both"
    check_error(lambda: data_parallel(Even(), mp_policy=torch.bfloat16), text)
    check_error(lambda: data_parallel(nn.Tanh()), "no parameters")
    check_error(lambda: data_parallel(3), "model is a int, must be a torch.nn.Module")
    model = made(Even)
    check_error(lambda: data_parallel(model), "data_parallel\\(\\) was called")
    check_error(lambda: tagc.advise(model), "advise\\(\\) does not know models of simple_fsdp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

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
    import tagc.torch as tagc

    def parallel(reduce_op="sum"):
        torch.manual_seed(0)
        return parallel_as_torchtitan(Even(), init_device_mesh("cpu", (world_size,)), reduce_op=reduce_op)

    mine, theirs = Run(parallel(), sparsity=0), Run(parallel())
    check_same(mine, theirs)
    tagc_gradient = next(iter(mine.model.parameters())).grad.full_tensor()
    average = Run(made(Even), sparsity=0)
    average.steps(3)
    assert not torch.equal(tagc_gradient, next(iter(average.model.parameters())).grad.full_tensor())
    closed(mine, average)
    check_error(lambda: tagc.compress(parallel("max")), "with gradients of .*max.*use .*data_parallel")


def order(rank, world_size):
    """Gathers that ranks come to in different orders end right. Gradients do not: all ranks say so."""
    expected = Run(made(Two, "each"), sparsity=0)
    run = Run(made(Two, "each"), sparsity=0)
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


def strays(rank, world_size):
    """What one rank alone reads, or alone expects next, is gathered by all at the end of the pass."""
    runs = [Run(made(Chosen, "each"), sparsity=0, timeout_s=60) for _ in range(2)]
    for again in ("ab" if rank == 0 else "a", "a"):
        runs[0].model.again = again
        with Watched() as watched:
            check_same(*runs, 1)
        assert (("all_gather", "b.weight") in watched.log) == (again == "ab")
    closed(*runs)


def overlap(rank, world_size):
    run = Run(made(Even), sparsity=0)
    run.steps(1)
    check_overlap(run)
    closed(run)


def readers(rank, world_size):
    """Whoever reads a gradient during the pass gets all of it: autograd, which adds up, and hooks."""
    run = Run(made(Reused), sparsity=0)
    named, seen = dict(run.model.named_parameters()), {}
    for name, parameter in named.items():
        parameter.register_hook(lambda gradient, name=name: seen.update({name: gradient.to_local().clone()}))
    for steps in ((0,), (0, 1)):
        loss_of(run.model, batch_of(rank, steps[-1])).backward()
        found = {name: parameter.grad.full_tensor() for name, parameter in named.items()}
        check_equal(found, full_gradients(Reused, world_size, steps), f"steps {steps}")
        if len(steps) == 1:
            assert all(torch.equal(seen[name], p.grad.to_local()) for name, p in named.items())
    for is_trained in (False, True):
        run.model.zero_grad()
        run.model.first.requires_grad_(is_trained)
        with Watched() as watched:
            loss_of(run.model, batch_of(rank)).backward()
        assert watched.n("reduce_scatter") == 6 + 2 * is_trained
        assert (run.model.first._parameters["weight"].grad is not None) == is_trained
    closed(run)


def aborted(rank, world_size):
    """A pass that an exception ends leaves nothing to the next one."""

    class Stop(Exception):
        pass

    def stop(_):
        raise Stop

    def attach(module, given, out):
        out.register_hook(stop)

    run, expected = Run(made(Even), sparsity=0), Run(made(Even), sparsity=0)
    hook = run.model.layers[0].register_forward_hook(attach)
    with Watched() as watched, pytest.raises(Stop):
        loss_of(run.model, batch_of(rank, 7)).backward()
    assert watched.n("reduce_scatter") > 3 and not watched.n("wait")
    hook.remove()
    check_same(run, expected)
    closed(run, expected)


CHECKS = [
    eager_is_fsdp2,
    precision,
    accumulation,
    evaluation,
    changed,
    handles,
    *[moved] * CAN_MOVE,
    checkpoints,
    errors,
    titan,
    order,
    strays,
    overlap,
    readers,
    aborted,
]


# ---- compiled ----


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
    for before, node in zip(sums, sums[1:]) if IS_ORDERED else ():
        token = node.args[0]
        assert token.all_input_nodes == [before] and "with_effects" in str(node.target), node
    _SEEN.append((len(gathers), len(sums)))
    return make_boxed_func(gm.forward)


_SEEN = []


def compiled_is_fsdp2(rank, world_size):
    """One graph without breaks, which gathers again in the backward pass, and serves other handles, too. Each
    rank gathers in an order of its own."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.utils import counters
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    # as aot_eager, with the partitioner of inductor
    backend = aot_autograd(
        fw_compiler=other_order, bw_compiler=other_order, partition_fn=min_cut_rematerialization_partition
    )
    for options in (dict(sparsity=0), SELECTED | {"parameters": "delta4"}):
        mine, eager = Run(made(Checkpointed), backend, **options), Run(made(Checkpointed), **options)
        n, n_layer = (len(list(one.parameters())) for one in (mine.model, mine.model.layers))
        with Watched() as watched:
            losses = mine.steps(1)
        assert watched.n("reduce_scatter") == n, watched.log
        # eager autograd keeps what is not checkpointed
        assert n + n_layer < watched.n("all_gather") < 2 * n, watched.log
        dist.all_gather_object(logs := [None] * world_size, watched.log)
        assert logs[0] != logs[1]
        assert losses == eager.steps(1)
        if options == dict(sparsity=0):
            assert losses == Run(made(Checkpointed, "fsdp2"), sparsity=0).steps(1)
            check_overlap(mine)
            eager.steps(1)
        check_same(mine, eager, 1)
        with torch.no_grad():
            batch = batch_of(rank)
            torch.testing.assert_close(loss_of(mine.call, batch), loss_of(mine.model, batch))
        closed(mine, eager)
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2, counters["stats"]  # with gradients, and without
    assert _SEEN[0] == (n, 0) and _SEEN[1][0] > n_layer and _SEEN[1][1] == n, (_SEEN, n)


# ---- alone ----


class Patient:
    """In the place of a runner: it does a job when somebody waits for that."""

    def __init__(self):
        self.jobs = []

    def future(self, job):
        self.jobs.append(job)
        return types.SimpleNamespace(done=lambda: job not in self.jobs, wait=lambda: self.do(job))

    def do(self, last):
        while last in self.jobs:
            self.jobs.pop(0)()


def a_rank_outside(rank, world_size):
    """It learns that at once, and the others do not wait for it."""
    mesh, begin = DeviceMesh("cpu", [0]), time.monotonic()
    if rank == 0:
        data_parallel(nn.Linear(70, 70), mesh)
    else:
        check_error(
            lambda: data_parallel(nn.Linear(70, 70), mesh), "this rank is not in the mesh", same=False
        )
        assert time.monotonic() - begin < 15


def test_a_rank_outside():
    ranks.run(a_rank_outside, 2)


def test_units():
    """What is exchanged together: what the user has said, or blocks, and the rest as the root's."""
    from tagc.compiled.units import mark, units_of

    def found(model, modules=None):
        mark(model, modules)
        names = {module: name for name, module in model.named_modules()}
        return {name: [names[module] for module in own] for name, own in units_of(model)}

    model = nn.ModuleDict(
        dict(
            embed=nn.Linear(1, 1),
            h=nn.ModuleDict(
                {str(i): nn.Sequential(nn.Linear(1, 1), nn.ModuleList([nn.Tanh()])) for i in (0, 1)}
            ),
            norm=nn.LayerNorm(1),
            head=nn.Linear(1, 1),
        )
    )
    blocks = {f"h.{i}": [f"h.{i}.0", f"h.{i}.1.0", f"h.{i}.1", f"h.{i}"] for i in (0, 1)}
    assert found(copy.deepcopy(model)) == blocks | {"the root module": ["embed", "h", "norm", "head", ""]}
    model = copy.deepcopy(model)
    together = found(model, [model["h"]["1"][0], [model["norm"], model["head"]]])
    assert together.pop("the root module") == ["embed", *blocks["h.0"], *blocks["h.1"][1:], "h", ""]
    assert together == {"h.1.0": ["h.1.0"], "norm-head": ["norm", "head"]}
    assert {name: len(own) for name, own in units_of(copy.deepcopy(model))}["norm-head"] == 2
    with pytest.raises(Exception, match="modules has a LayerNorm at 1.*come before"):
        mark(model, [model["norm"], [model["norm"]]])


def test_starts():
    """They wait for each other only where too much is under way; one that fails stops those behind it."""
    from tagc.compiled.starts import Starts

    done, starts = [], Starts(Patient(), 10)

    def start(name, n_elems):
        return starts.start(lambda: done.append(name) or torch.tensor(n_elems), n_elems)

    def fail():
        raise ValueError("it fails")

    for name, n_elems, expected in zip("abcde", (6, 4, 1, 20, 0), ("", "", "a", "abc", "abc")):
        last = start(name, n_elems)
        assert "".join(done) == expected, name
    assert starts.wait(last) == 0 and "".join(done) == "abcde"
    starts.start(fail)
    behind = start("f", 1)
    with pytest.raises(ValueError, match="it fails"):
        starts.wait(behind)
    assert starts.wait(start("g", 7)) == 7 and "".join(done) == "abcdeg"
    starts.start(fail)
    starts.drop()
    starts.drain()


def test_ahead():
    """What comes next is gathered ahead as far as the last passes agree on it."""
    from tagc.compiled.ahead import Ahead
    from tagc.compiled.starts import Started

    log, versions = [], dict.fromkeys("abcd", 0)

    class Starts:
        def start(self, exchange):
            exchange()
            return Started(0)

        def wait(self, started):
            return started

    class Parameter:
        n_elems = 4

        def __init__(self, name):
            self.name = name

        def version(self):
            return versions[self.name]

        def gathered(self, have_changed):
            log.append("!" * have_changed + self.name)

    parameters, ahead = {name: Parameter(name) for name in "abcd"}, Ahead(Starts(), 8)

    def takes(names, ends=True, n_forward=9):
        """What was gathered, behind the capital of what was asked for."""
        log.clear()
        for i, name in enumerate(names):
            log.append(name.upper())
            ahead.take(parameters[name], i < n_forward)
        if ends:
            ahead.end()
        return "".join(log)

    assert takes("abccb") == "AaBbCcCcBb"
    assert takes("abccb") == "AabcBCcbCB"
    assert takes("abc", ends=False) == "AabcBCcb"  # it goes on otherwise than all passes before
    assert takes("abc", ends=False) == "AaBC"  # what came too early is there still
    assert takes("abccb") == "AabcBCCcbB"
    assert takes("abdc") == "AabcBDdC"
    assert takes("ab", ends=False) == "AabB"
    ahead = Ahead(Starts(), 8)
    takes("abc")
    assert takes("a", ends=False) == "Aabc"
    versions["b"] += 1  # an optimizer's step
    assert takes("bc", ends=False) == "B!bC"  # which all ranks must know
    ahead = Ahead(Starts(), 8)
    takes("abba", n_forward=2)
    assert takes("abba", n_forward=2) == "AabBbaBA"


def test_eager():
    ranks.run_each(CHECKS, 2)


def test_compiled():
    ranks.run_each([compiled_is_fsdp2], 2, timeout_s=400)


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
