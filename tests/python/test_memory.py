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


# ---- levels that change ----

EVERY, LARGEST = dict(level=1, sparsity=0.0), dict(level=2, sparsity=0.75)
PLANS = [  # of each parameter, exchange after exchange; None: the same as before
    dict(a=EVERY, b=EVERY, c=EVERY),
    None,
    dict(a=LARGEST, b=LARGEST, c=LARGEST),  # all at once
    None,
    dict(a=LARGEST, b=EVERY, c=LARGEST),  # the part splits
    dict(a=EVERY, b=EVERY, c=LARGEST),  # and other parameters join
    dict(a=EVERY, b=EVERY, c=EVERY),
]


class Exchanged:
    """A unit that exchanges noise of three parameters by PLANS. makes_anew: without changes in place."""

    def __init__(self, rank, world_size, all_reduce, makes_anew):
        import torch.distributed as dist

        from tagc import _library as lib
        from tagc.torch.exchange import layout as layouts
        from tagc.torch.exchange.comm import Comm
        from tagc.torch.exchange.reducer import OwnWay
        from tagc.torch.exchange.unit import Unit
        from tagc.torch.exchange.work import Work

        def fields(part, dtype):
            if part.kind == "dense":
                return dict(exchange=lib.EXCHANGES["dense"])
            format = "int4" if part.level == 1 else "int2"
            return dict(
                exchange=lib.EXCHANGES["direct"],
                format=lib.FORMATS[format],
                sparsity=0.0 if part.level == 1 else 0.75,
                block=64 if part.level == 1 else 32,
            )

        self.results, self.reducers = [], []
        comm = Comm(dist.group.WORLD, 60.0)
        way, unit = OwnWay(comm, Work()), Unit("noise", fields)
        if makes_anew:
            unit._change = lambda way, layout, options: []
        torch.manual_seed(rank)
        self.given = self.received = 0
        for plan in PLANS:
            if plan is not None:
                named = [
                    layouts.Parameter(name, (60, 8), "compressed", 0, **plan[name]) for name in "abc"
                ] + [layouts.Parameter("d", (24,), "dense")]
                layout = (
                    layouts.bucket(named, world_size) if all_reduce else layouts.chunked(named, world_size)
                )
            source = torch.randn(layout.n_elems)
            target = torch.zeros(layout.n_elems if all_reduce else layout.row)
            unit.reduce(way, layout, source, target, dist.ReduceOp.SUM)()
            self.results.append(target)
            self.given, self.received = self.given + source.double(), self.received + target.double()
            self.reducers.append([each.reducer for each in unit._exchanges])
        self.layout, self.residuals = layout, unit.residuals_on_the_wire()
        self.world_size, self.all_reduce = world_size, all_reduce
        unit.close()
        comm.close()

    def lost(self):
        """The largest difference of what was given and what was received or is in a residual."""
        import torch.distributed as dist

        unsent = torch.zeros(self.layout.n_elems, dtype=torch.float64)
        for i, parameter in enumerate(self.layout.parameters):
            for piece in self.layout.pieces_of(i) if parameter.name in self.residuals else ():
                values = self.residuals[parameter.name][piece.offset : piece.offset + piece.length]
                unsent[piece.start : piece.start + piece.length] = values.double()
        difference = self.given - unsent
        dist.all_reduce(difference)
        if not self.all_reduce:
            difference = difference.view(self.world_size, -1)[dist.get_rank()]
        return (difference - self.received).abs().max().item()


def changed_in_place(rank, world_size):
    """A part whose parameters change together keeps its reducer and, in it, its residual; where parts split,
    residuals move. Either way the results have the bits that new reducers would give, and nothing is lost."""
    for all_reduce in (False, True):
        changed = Exchanged(rank, world_size, all_reduce, makes_anew=False)
        anew = Exchanged(rank, world_size, all_reduce, makes_anew=True)
        for i, (a, b) in enumerate(zip(changed.results, anew.results)):
            assert torch.equal(a, b), (all_reduce, i)
        for name, values in changed.residuals.items():
            assert values.any() and torch.equal(values, anew.residuals[name]), name
        assert changed.lost() < 1e-4, changed.lost()
        kept = [
            sum(any(each is one for one in before) for each in after)
            for before, after in zip(changed.reducers, changed.reducers[1:])
        ]
        assert kept == [2, 2, 2, 1, 1, 1], kept


# ---- what the handle says ----


def counted(rank, world_size):
    """handle.memory() is what was allocated: residuals as large as they are saved, and all of it within 3 %
    of what the planner forecasts for these exchanges."""
    import tagc.torch as tagc
    from tagc.commands import planner

    for kind in ("fsdp2", "ddp"):
        model = wrapped(kind)
        with tagc.compress(
            model, layers=mix_of_classes, values="int4", sparsity=0.5, verbose=False
        ) as handle:
            before = handle.memory()
            assert before.host.residual == before.host.buffers == 0 == before.device.total
            for step in range(3):  # DDP rebuilds its buckets
                loss_of(model, batch_of(rank, step)).backward()
            units = list(handle.state.units.values())
            units = units if kind == "fsdp2" else list(units[0]._units.values())
            parts = [[{**e.options, "n_elems": e.reducer.n_elems} for e in unit._exchanges] for unit in units]
            seeds = [part["rounding_seed"] for unit in parts for part in unit]
            assert len(set(seeds)) == len(seeds), "reducers of one step would round alike"
            expected, found = planner.needs(parts, world_size), handle.memory()
            n_values = sum(e.reducer.n_residual for unit in units for e in unit._exchanges)
            assert n_values and n_values <= found.host.residual <= 4 * n_values
            packing = sum(work.n_bytes(True) for work in handle.passes.runners.works())
            assert packing and found.host.replicas == found.host.pinned == found.device.total == 0
            for name, a, b in (
                ("residual", found.host.residual, expected.residual),
                ("buffers", found.host.buffers, expected.buffers),
                ("transient", found.host.transient, expected.transient + packing),
            ):
                assert abs(a - b) <= 0.03 * b, (kind, name, a, b)
            assert "residual" in str(found) and "device" not in str(found)
        assert handle.memory().total == 0


def replicas_counted(rank, world_size):
    import tagc.torch as tagc

    model = wrapped("fsdp2")
    with tagc.compress(model, layers="all", parameters="delta4", verbose=False) as handle:
        loss_of(model, batch_of(rank)).backward()
        n_elems = sum(p.numel() for p in model.parameters())
        assert 2 * n_elems <= handle.memory().host.replicas < 2.5 * n_elems, handle.memory()


def local_steps_counted(rank, world_size):
    """Anchors, momentum and the fragment under way are counted."""
    import tagc.torch as tagc

    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    n = sum(p.numel() for p in model.parameters())
    with tagc.LocalSteps(
        model, optimizer, every=2, outer_momentum=0.9, outer_lr=0.7, layers="all", verbose=False
    ) as handle:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch_of(rank, step)).backward()
            optimizer.step()
        found = handle.memory().host
        n_padded = handle.fragments[0].n_elems
        assert n <= n_padded < 1.5 * n and found.replicas == 2 * 4 * n_padded
        assert found.residual > 0 and found.transient >= 3 * 4 * n_padded, found
    assert handle.memory().total == 0


def test_memory():
    ranks.run_each([shared_by_units, changed_in_place, counted, replicas_counted, local_steps_counted], 3)
