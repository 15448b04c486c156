"""What tagc holds in memory: buffers that units share, and what handle.memory() says of it."""

import gc
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
import ranks
from models import Odd, batch_of, loss_of
from oracles import mix_of_classes
from torch.nn.parallel import DistributedDataParallel

from tagc import _library


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


def parts_of_models(handle, per_host=1):
    """Options of all parts of all units, between hosts."""
    units = handle.state.units.values()
    units = [unit for each in units for unit in getattr(each, "_units", {"": each}).values()]
    return [
        [
            {
                **handle.state.schedule.fields(part, unit.model.dtype),
                "output": _library.OUTPUTS["unit" if unit.model.layout.all_reduce else "shard"],
                "n_elems": part.n_elems // per_host,
            }
            for part in unit.model.layout.parts
        ]
        for unit in units
    ]


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
        from tagc.torch.exchange.reducer import Way
        from tagc.torch.exchange.unit import Unit
        from tagc.torch.exchange.work import Work

        def fields(part, dtype):
            if part.kind == "dense":
                return dict(exchange=lib.EXCHANGES["direct"], format=lib.FORMATS["fp32"], sparsity=0.0)
            format = "int4" if part.level == 1 else "int2"
            return dict(
                exchange=lib.EXCHANGES["direct"],
                format=lib.FORMATS[format],
                sparsity=0.0 if part.level == 1 else 0.75,
                block=64 if part.level == 1 else 32,
                residual=lib.FORMATS["fp32"],  # which keeps its bits in another part
            )

        self.results, self.reducers = [], []
        comm = Comm(dist.group.WORLD, 60.0)
        way, unit = Way(comm, Work()), Unit("noise", SimpleNamespace(fields=fields))
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
            self.given = self.given + source.double()
            unit.reduce(way, layout, source, target, dist.ReduceOp.SUM)()
            self.results.append(target)
            self.received = self.received + target.double()
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


# ---- in the place of the gradient ----


def fields_of(part, dtype):
    from tagc import _library as lib

    if part.kind == "dense":
        return dict(exchange=lib.EXCHANGES["direct"], format=lib.FORMATS["fp32"], sparsity=0.0)
    few = {"compressed": ("fp32", 0.0), "mild": ("int4", 0.75)}[part.kind]
    return dict(exchange=lib.EXCHANGES["direct"], format=lib.FORMATS[few[0]], sparsity=few[1])


def layouts_of(world_size):
    """Parts between each other, one that is whole, uneven rows, and gaps; all-reduces of the same."""
    from tagc.torch.exchange import layout as layouts

    shapes = dict(a=(60, 8), b=(24,), c=(7, 5), d=(120, 8), e=(3, 3), f=(61, 8))
    for kinds in ("compressed", "dense compressed", "compressed dense mild", "dense"):
        kinds = kinds.split()
        named = [
            layouts.Parameter(name, shape, kinds[i % len(kinds)])
            for i, (name, shape) in enumerate(shapes.items())
        ]
        starts = [0, 500, 524, 600, 1560, 1580]
        yield layouts.chunked(named, world_size)
        yield layouts.cut(named, starts, 700 * world_size, world_size)
        yield layouts.bucket(named, world_size)
        yield layouts.bucket(named, world_size, starts, 2100)


def reduced(way, layout, source, target, steps=2):
    """Exchanges the source some times. Returns (results, residuals, whether reducers read it as it is)."""
    import torch.distributed as dist

    from tagc.torch.exchange.unit import Unit

    unit, results = Unit("places", SimpleNamespace(fields=fields_of)), []
    for step in range(1, steps + 1):
        given = source.clone()
        into = given if target is None else target.fill_(float("nan"))
        unit.reduce(way, layout, given, into, dist.ReduceOp.AVG, step=step)()
        results.append(into.clone())
    residuals = list(unit.residuals_on_the_wire().values())
    # what travels whole is read as fp32
    dtypes = {exchange.reducer.dtype for exchange in unit._exchanges if exchange.part.kind == "mild"}
    unit.close()
    return results, residuals, dtypes


def in_place(rank, world_size):
    """Wherever parts are packed and sums come, what is sent whole arrives: the mean over ranks, and zeros
    between. Sums are the same bits with a gradient that is read as bf16 and with a copy in fp32."""
    import torch.distributed as dist

    from tagc.torch.exchange import reducer
    from tagc.torch.exchange.comm import Comm
    from tagc.torch.exchange.work import Work

    comm = Comm(dist.group.WORLD, 60.0)
    way, make = reducer.Way(comm, Work()), reducer.Way.reducer
    for number, layout in enumerate(layouts_of(world_size)):
        torch.manual_seed(10 * number + rank)
        source = torch.randn(layout.n_elems)
        wholes = [
            slice(piece.start, piece.start + piece.length)
            for i, parameter in enumerate(layout.parameters)
            for piece in layout.pieces_of(i)
            if parameter.kind != "mild"
        ]
        everyone = torch.zeros(world_size, layout.n_elems)
        for at in wholes:
            everyone[rank, at] = source[at]
        dist.all_reduce(everyone)
        expected = everyone.double().mean(0)
        mild = torch.zeros(layout.n_elems, dtype=torch.bool)
        for i, parameter in enumerate(layout.parameters):
            for piece in layout.pieces_of(i) if parameter.kind == "mild" else ():
                mild[piece.start : piece.start + piece.length] = True
        if not layout.all_reduce:
            expected, mild = (one.view(world_size, -1)[rank] for one in (expected, mild))
        n_target = expected.numel()
        for target in (torch.empty(n_target), *([None] if layout.all_reduce else [])):
            for result in reduced(way, layout, source, target)[0]:
                assert result.isfinite().all(), number
                torch.testing.assert_close(
                    result[~mild].double(), expected[~mild], rtol=1e-6, atol=1e-7, msg=f"layout {number}"
                )
                assert not result[~mild][expected[~mild] == 0].any(), number
        halves = source.bfloat16()
        for target in (halves.new_empty(n_target), *([None] if layout.all_reduce else [])):
            found = reduced(way, layout, halves, target)
            with pytest.MonkeyPatch.context() as monkey:
                monkey.setattr(reducer.Way, "reducer", lambda *given: make(*given[:3], torch.float32))
                copied = reduced(way, layout, halves, target)
            assert found[2] <= {torch.bfloat16} and copied[2] <= {torch.float32}, (number, found[2])
            for one, other in zip(found[0] + found[1], copied[0] + copied[1], strict=True):
                assert torch.equal(one, other), number
    comm.close()


# ---- what the handle says ----


def counted(rank, world_size):
    """handle.memory() is what was allocated: residuals as large as they are saved, and all of it within 3 %
    of what the planner forecasts for these exchanges."""
    import tagc.torch as tagc
    from tagc import _planner as planner

    for kind in ("fsdp2", "ddp"):
        model = wrapped(kind)
        with tagc.compress(
            model, layers=mix_of_classes, values="int4", sparsity=0.5, verbose=False
        ) as handle:
            before = handle.memory()
            assert before.host.residual == before.host.buffers == 0 == before.device.total
            for step in range(3):  # DDP rebuilds its buckets
                loss_of(model, batch_of(rank, step)).backward()
            parts, whole = parts_of_models(handle), _library.FORMATS["fp32"]
            n_values = sum(p["n_elems"] for unit in parts for p in unit if p["format"] != whole)
            expected, found = planner.host_memory(parts, world_size, 1), handle.memory()
            assert n_values and n_values <= found.host.residual <= 4 * n_values
            assert found.host.replicas == found.host.pinned == found.device.total == 0
            for name, a, b in (
                ("residual", found.host.residual, expected.residual),
                ("buffers", found.host.buffers, expected.buffers),
                ("transient", found.host.transient, expected.transient),
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


class WideBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(400)
        self.attn, self.mlp = torch.nn.Linear(400, 800), torch.nn.Linear(800, 400)

    def forward(self, x):
        return x + self.mlp(self.attn(self.norm(x)))


class Wide(torch.nn.Module):
    """Of all classes, and so small that no block is rounded up to huge pages."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([WideBlock(), WideBlock()])
        self.head = torch.nn.Linear(400, 4096, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def in_use():
    """Returns the bytes that this process has from the C library's allocator, which is torch's, too."""
    import ctypes

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    fields = type("Fields", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = fields
    while gc.collect():  # what ends makes garbage, too
        pass
    found = mallinfo2()
    return found.uordblks + found.hblkhd


def allocated(rank, world_size):
    """On two hosts of two ranks, in fp32 and in bf16, with residuals in int8: what the handle says it holds
    is what the process gives back when it is closed, and what the planner forecasts, within 3 %. An exchange
    takes at most 6 bytes per value of the largest unit for itself."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import tagc.torch as tagc
    from tagc import _planner as planner

    before = in_use()
    megabyte = torch.zeros(1 << 18)
    assert 1 << 20 <= in_use() - before < 1.1 * 2**20, "the allocator does not tell"
    del megabyte
    halves = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for kind, policy, n_bytes in (("fsdp2", None, 4), ("fsdp2", halves, 2), ("ddp", None, 4)):
        torch.manual_seed(0)
        model = Wide()
        if kind == "ddp":
            model = DistributedDataParallel(model, bucket_cap_mb=2)
        else:
            how = {} if policy is None else {"mp_policy": policy}
            for layer in model.layers:
                fully_shard(layer, **how)
            fully_shard(model, **how)
        handle = tagc.compress(
            model,
            hosts=2,
            layers=mix_of_classes,
            values="int4",
            sparsity=0,
            verbose=False,
            options=tagc.Options(residual="int8"),
        )
        for step in range(3):
            model(torch.randn(4, 400)).square().mean().backward()
            model.zero_grad()
        units = list(handle.state.units.values())
        units = units if kind == "fsdp2" else list(units[0]._units.values())
        parts = parts_of_models(handle, per_host=2)
        needs, found = planner.host_memory(parts, 2, 2, n_bytes), handle.memory()
        assert not any(work.n_bytes(True) for work in handle.passes.runners.works())
        expected = needs.residual + needs.buffers + needs.transient
        assert abs(found.total - expected) <= 0.03 * expected, (kind, n_bytes, found, expected)
        largest = max(parts, key=lambda unit: sum(part["n_elems"] for part in unit))
        of_it, n_largest = (
            planner.host_memory([largest], 2, 2, n_bytes).transient,
            2 * sum(part["n_elems"] for part in largest),
        )
        slices = 3 * 256 * 1024 if kind == "ddp" else 0  # that ranks of a host send each other
        assert of_it <= 6 * n_largest + slices, (kind, n_bytes, of_it, largest)
        held = in_use()
        for unit in units:  # without connections, which memory() leaves out
            unit.free()
        freed = held - in_use()
        assert handle.memory().total == 0
        handle.close()
        assert abs(freed - found.total) <= 0.03 * found.total, (kind, n_bytes, found.total, freed)
        del model, handle, unit, units


def test_memory():
    ranks.run_each([changed_in_place, in_place, counted, replicas_counted], 3)


def test_what_the_process_holds():
    ranks.run(allocated, 4)
