"""Training runs of models that are compiled whole, for test_compiled.py and test_compiled_long.py, and what
their operators do meanwhile."""

import functools
import threading

import torch
import torch.distributed as dist
from models import Odd, batch_of, loss_of
from torch import nn
from torch.utils import checkpoint

SELECTED = dict(sparsity=0.9, layers="all", values="int4")


def save_products(ctx, op, *_, **__):
    is_saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return checkpoint.CheckpointPolicy.MUST_SAVE if is_saved else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(Odd):
    """One layer, with selective activation checkpointing."""

    def __init__(self):
        super().__init__()
        del self.layers[1:]

    def forward(self, x):
        contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, save_products)
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return self.head(x) @ self.mix * self.scale


def made(make, wrap="data_parallel", **options):
    """(the model, what wrap() got)."""
    from tagc.compiled import data_parallel

    torch.manual_seed(0)
    model = make()
    if wrap == "data_parallel":
        return data_parallel(model, **options)
    if wrap == "each":  # of its modules by itself
        return data_parallel(model, modules=list(model.modules())[1:], **options)
    from torch.distributed.fsdp import fully_shard

    for layer in getattr(model, "layers", []):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


class Matrix(nn.Module):
    """Without biases, to be cut along columns."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return self.two(torch.tanh(self.one(nn.functional.pad(x, (0, 1)))))[:, :3]


class Two(nn.Module):
    """What it reads first is this rank's own choice."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 64, bias=False), nn.Linear(7, 64, bias=False)
        self.is_turned = False

    def forward(self, x):
        if self.is_turned:
            b, a = self.b.weight, self.a.weight
        else:
            a, b = self.a.weight, self.b.weight
        return (x @ a.t() + torch.tanh(x @ b.t()))[:, :3]


class Chosen(nn.Module):
    """Its first layer is not trained, and computed again in the backward pass: what is read then, last of
    all, is this rank's own choice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(n, 32, bias=False) for n in (7, 7, 32))
        self.again, self._is_again = "a", False

    def forward(self, x):
        x = checkpoint.checkpoint(self._first, x.detach().requires_grad_(), use_reentrant=False)
        return self.c(x)[:, :3]

    def _first(self, x):
        with torch.no_grad():
            read = {name: getattr(self, name).weight for name in (self.again if self._is_again else "a")}
        self._is_again = not self._is_again
        return torch.tanh(x @ read["a"].t())


class Reused(nn.Module):
    """It reads one module three times."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(7, 9), nn.Linear(9, 9)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.inner(torch.tanh(x))
        return x[:, :3]


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


class Watched:
    """Logs what operators do as (name of the method, of the parameter); and of modules the gathers, those
    that had not been started before, and the exchanges of gradients. holds: such an exchange waits until the
    model has come two operators further, or asks for something: it never ends if its operator waits for
    it."""

    def __init__(self, holds=False):
        self.holds, self.n_at_once = holds, 0
        self.log, self.taken, self.not_ahead, self.begun = [], [], [], []
        self._news, self._begun, self._n_ended, self._own = threading.Condition(), {}, 0, []

    def __enter__(self):
        from tagc.compiled.ahead import Ahead
        from tagc.compiled.modules import Module
        from tagc.compiled.sharded import Sharded
        from tagc.compiled.starts import Starts
        from tagc.torch.passes import Passes

        for name in ("all_gather", "reduce_scatter", "wait"):
            self._replace(Sharded, name, functools.partial(self._operator, name))
        self._replace(Ahead, "take", self._take)
        self._replace(Module, "begin", self._begin)
        if self.holds:
            self._replace(Passes, "exchange", self._exchange)
            self._replace(Starts, "_make_room", lambda *_: None)  # test_starts() looks at that
        return self

    def _replace(self, kind, name, other):
        own = getattr(kind, name)
        self._own.append((kind, name, own))
        setattr(kind, name, lambda *arguments, **options: other(own, *arguments, **options))

    def __exit__(self, *_):
        for kind, name, own in self._own:
            setattr(kind, name, own)

    def _operator(self, name, own, sharded, *arguments):
        with self._news:
            self.log.append((name, sharded.parameter.name))
            self._news.notify_all()
        return own(sharded, *arguments)

    def _begin(self, own, module):
        with self._news:
            self._begun[module.name] = len(self.log) - 1
            self.begun.append(module.name)
        own(module)
        self.n_at_once = max(self.n_at_once, len(self.begun) - self._n_ended)

    def _take(self, own, ahead, one, *how):
        self.taken.append(one.name)
        if one not in ahead._started:
            self.not_ahead.append(one.name)
        return own(ahead, one, *how)

    def _exchange(self, own, passes, gradient):
        since = self._begun[gradient.unit.name] + 1
        with self._news:
            goes_on = self._news.wait_for(
                lambda: (
                    {name for name, _ in self.log[since:]} - {"reduce_scatter"} or len(self.log) > since + 1
                ),
                30,
            )
        assert goes_on, f"an operator waits for the exchange of {gradient.unit.name}"
        own(passes, gradient)
        self._n_ended += 1

    def n(self, name):
        return sum(called == name for called, _ in self.log)


def check_overlap(run):
    """Exchanges go on while the model computes: several of gradients at once, which are waited for when all
    have begun; and all parameters but the first are gathered ahead."""
    with Watched(holds=True) as watched:
        run.steps(1)
    names = [name for name, _ in watched.log]
    last = len(names) - names[::-1].index("reduce_scatter")
    n = len(list(run.model.parameters()))
    assert names[last:] == ["wait"] * n and watched.n("wait") == watched.n("reduce_scatter") == n, watched.log
    assert sorted(watched.begun) == sorted(run.handle.state.units), (watched.begun, watched.log)
    assert watched.n_at_once > 1, watched.log
    assert watched.not_ahead == watched.taken[:1], (watched.not_ahead, watched.log)


def parallel_as_torchtitan(model, mesh, mode="fully_shard", reduce_op="sum"):
    """What compress() sees of the model that data_parallel() of torchtitan 0.3's graph trainer returns. No
    test installs that package."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    class Computation(nn.Module):
        param_dtype = reduce_dtype = None
        full_dtensor = False
        grad_placements = [Partial(reduce_op)]

        def forward(self, x):
            return x.redistribute(placements=[Replicate()]).to_local(grad_placements=self.grad_placements)

    computation = Computation()
    for module in list(model.modules()):
        own = dict(module.named_parameters(recurse=False))
        for name, p in own.items():
            module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
        found = {n: property(lambda self, n=n: computation(self._parameters[n])) for n in own}
        module.__class__ = type("SimpleFSDP", (type(module),), found)
    return model
