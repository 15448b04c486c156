"""Exchanges as libtagc runs them by itself (exchange/model.py) against those that Python puts together
(exchange/unit.py), on random parameters and options: sums, residuals and messages have the same bits, at all
levels of the schedule."""

import random

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist

KINDS = ("compressed", "compressed", "mild", "dense")


class Wrapper:
    """What a schedule asks of one: parameters that all ranks exchange."""

    def __init__(self, parameters, world_size):
        self._parameters, self._world_size = parameters, world_size

    def parameters(self):
        return self._parameters

    def named_parameters(self):
        return [(p.name, torch.empty(p.shape)) for p in self._parameters]

    def set_kinds(self, kinds):
        self._parameters = [p._replace(**kinds[p.name]) for p in self._parameters]

    def n_ranks(self):
        return self._world_size

    n_batches = n_ranks

    def deciders(self):
        return []


def side(parameters, world_size, options, is_fresh):
    """A schedule that goes on as fast as it may, and its wrapper."""
    from tagc.torch.schedule.options import Settings
    from tagc.torch.schedule.schedule import Schedule

    wrapper = Wrapper(parameters, world_size)
    schedule = Schedule(wrapper, Settings(**options), is_fresh)
    schedule.set_moments([], [p.name for p in parameters])
    return schedule, wrapper


def some_parameters(draw, world_size):
    """Of tensors that are sharded along the first dimension, or evenly along another, some of them pieces of
    tensor parallelism."""
    from tagc.torch.exchange.layout import Parameter

    found = []
    for i in range(draw.randint(1, 9)):
        shape = [draw.randint(1, 40) for _ in range(draw.randint(0, 3))]
        dim = draw.choice((0, 0, len(shape) - 1)) if shape else 0
        if dim:
            shape[dim] *= world_size
        split = draw.choice(((), (), (), ("tp",)))
        found.append(
            Parameter(f"layer.{i}.{draw.choice('abc')}", tuple(shape), draw.choice(KINDS), dim, split=split)
        )
    return found


def gradient(layout, seed, dtype):
    """(n_elems,): as a hook gives it, with zeros for padding. In fp16, near the largest."""
    values = torch.zeros(layout.n_elems)
    made = torch.Generator().manual_seed(seed)
    for i, parameter in enumerate(layout.parameters):
        for piece in layout.pieces_of(i):
            n = min(piece.length, parameter.numel - piece.offset)
            if n > 0 and dtype == torch.float16:
                values[piece.start : piece.start + n] = 40000 + 25000 * torch.rand(n, generator=made)
            elif n > 0:
                values[piece.start : piece.start + n] = torch.randn(n, generator=made) * 2.0 ** (i % 5)
    return values.to(dtype)


def sent(comm):
    return {leg: n for leg, n in comm.bytes_sent().items() if leg != "control"}


class Old:
    """unit.Unit with a schedule's layouts."""

    def __init__(self, comm, parameters, lay_out, options, is_fresh):
        from tagc.torch.exchange.reducer import Way
        from tagc.torch.exchange.unit import Unit
        from tagc.torch.exchange.work import Work

        self.schedule, self.wrapper = side(parameters, comm.world_size, options, is_fresh)
        self.comm, self._way, self._lay_out, self._layout = comm, Way(comm, Work()), lay_out, None
        self._unit = Unit("unit", self.schedule)

    def reduce(self, source, target, op, step, rests):
        """Returns how many sums were beyond fp16."""
        parameters = self.wrapper.parameters()
        if self._layout is None or self._layout.parameters != tuple(parameters):
            self._layout = self._lay_out(parameters)
        self.schedule.look(self.comm, self._layout, source, self._unit)
        args = self._way, self._layout, source.clone(), target, op
        return sum(stats.n_saturated for _, stats in self._unit.reduce(*args, step=step, rests=rests)())

    def residuals(self):
        return self._unit.residuals_on_the_wire()

    def close(self):
        self._unit.free()


class New:
    """model.UnitModel with a schedule."""

    def __init__(self, comm, parameters, lay_out, options, is_fresh, dtype, op, rests):
        from tagc.torch.exchange.model import Levels, UnitModel
        from tagc.torch.exchange.unit import kind_of

        self.schedule, self.wrapper = side(parameters, comm.world_size, options, is_fresh)
        self.comm, self._lay_out, self._seen = comm, lay_out, self.wrapper.parameters()
        kind, self._factor = kind_of(op, comm.world_size)
        levels, layout = Levels(None, comm), lay_out(self._seen)
        self._model = UnitModel("unit", levels, layout, dtype, kind, self.schedule, rests)

    def reduce(self, source, target, _op, step, _rests):
        if self._seen != self.wrapper.parameters():
            self._seen = self.wrapper.parameters()
            self._model.follow(self._lay_out(self._seen))
        self._model.begin(source, target, step, self._factor)
        self._model.model.end()
        if (full := self._model.model.take_full()) is not None:
            self.schedule.keep(self.comm, dict(zip(*full)))
        return self._model.model.n_saturated

    def residuals(self):
        return self._model.residuals_on_the_wire()

    def close(self):
        self._model.close()


def compare(rank, world_size, seed):
    from tagc.torch.exchange import layout as layouts
    from tagc.torch.exchange.comm import Comm

    draw = random.Random(seed)
    parameters = some_parameters(draw, world_size)
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    is_shard = draw.random() < 0.6
    op = draw.choice(
        (dist.ReduceOp.AVG, dist.ReduceOp.AVG, dist.ReduceOp.SUM, dist._make_nccl_premul_sum(0.3))
    )
    options = draw.choice(
        (
            {},
            {"residual": "int4"},
            {"sparsity": draw.choice((0, 0.5, 0.97))},
            {"sparsity": 0, "values": draw.choice(("int8", "int4", "bf16"))},
            {"sparsity": 0.9, "mild": "dense", "residual": "fp32"},
            {"exchange": draw.choice(("packed", "sketch", "dense"))},
        )
    )
    n_steps, is_fresh = (110 if not options else 30 if "residual" in options else 6), draw.random() < 0.5
    rests = not is_shard and draw.random() < 0.3

    def lay_out(parameters):
        if is_shard:
            return layouts.chunked(parameters, world_size)
        return layouts.bucket(parameters, world_size)

    comm = Comm(dist.group.WORLD, 60)
    old = Old(comm, parameters, lay_out, options, is_fresh)
    new = New(comm, parameters, lay_out, options, is_fresh, dtype, op, rests)
    about = seed, options, dtype, op, is_shard, rests
    for step in range(1, n_steps + 1):
        layout = lay_out(parameters)
        source = gradient(layout, 1000 * seed + 10 * step + rank, dtype)
        if rests and step % 3 == 0:  # one without a gradient
            piece = layout.pieces_of(step % len(parameters))[0]
            source[piece.start : piece.start + piece.length] = 0
        n_output = layout.n_elems if layout.all_reduce else layout.row
        outputs, bytes_sent, beyond = [], [], []
        for one in (old, new):
            before, target = sent(comm), torch.full((n_output,), 7, dtype=dtype)
            beyond.append(one.reduce(source, target, op, step, rests))
            bytes_sent.append({leg: n - before[leg] for leg, n in sent(comm).items()})
            outputs.append(target)
            one.schedule.meet()
            one.schedule.step()
        assert torch.equal(*(each.view(torch.int8) for each in outputs)), (about, step)
        assert beyond[0] == beyond[1], (about, step, beyond)
        if "dense" not in (
            options.get("mild"),
            options.get("exchange"),
        ):  # a model makes one part of all that is
            assert bytes_sent[0] == bytes_sent[1], (about, step, bytes_sent)
        assert old.schedule.levels() == new.schedule.levels(), (about, step)
        held, found = old.residuals(), new.residuals()
        assert {name for name, values in held.items() if values.any()} <= found.keys(), about
        for name, values in found.items():
            own = held[name].float() if name in held else torch.zeros(0)
            assert torch.equal(own, values.float()), (about, step, name)
    if not options and any(p.kind == "compressed" and p.numel > 4096 for p in parameters):
        assert 3 in old.schedule.levels().values(), "it should have come to selection"
    old.close()
    new.close()
    comm.close()


# ---- hosts of several ranks ----


def levels_of(rank, world_size, per_host):
    """Returns (hosts, connections within this host and between hosts)."""
    from tagc.torch.exchange.comm import Comm
    from tagc.torch.exchange.hosts import Hosts

    n_hosts = world_size // per_host
    withins = [[h * per_host + place for place in range(per_host)] for h in range(n_hosts)]
    betweens = [[h * per_host + place for h in range(n_hosts)] for place in range(per_host)]
    groups = [dist.new_group(one) for one in withins + betweens]
    within, between = groups[rank // per_host], groups[n_hosts + rank % per_host]
    hosts = Hosts(between, within, rank, n_hosts, per_host, is_on_one_host=False)
    comms = Comm(within, 60), Comm(between, 60)
    comms[1].place = hosts.place
    return hosts, *comms


class OldOfHosts(Old):
    """A sum within the host in Python (exchange/rows.py), and a Unit of what a place exchanges."""

    def __init__(self, hosts, within, between, *others):
        super().__init__(between, *others)
        self._hosts, self._within = hosts, within

    def reduce(self, source, target, op, step, rests):
        from tagc.torch.exchange.rows import Rows
        from tagc.torch.exchange.slices import Slice

        layout, about = self._lay_out(self.wrapper.parameters()), (self._hosts, self._within, source.clone())
        if target.numel() < source.numel():
            rows = Rows(*about, op, "unit", 60)
            rows.add_up()
            return super().reduce(rows.sums, target, rows.op_between, step, rests)
        slices = Slice(*about, target, op, layout, "unit", 60)
        slices.add_up()
        found = super().reduce(slices.sums, slices.result, slices.op_between, step, rests)
        slices.spread()
        return found


class NewOfHosts(New):
    def __init__(self, hosts, within, between, parameters, lay_out, options, is_fresh, dtype, op):
        from tagc.torch.exchange.model import Levels, UnitModel
        from tagc.torch.exchange.unit import kind_of

        levels = Levels(within, between)
        self.schedule, self.wrapper = side(parameters, levels.world_size, options, is_fresh)
        self.comm, self._lay_out, self._seen = between, lay_out, self.wrapper.parameters()
        kind, self._factor = kind_of(op, levels.world_size)
        layout = lay_out(self._seen)
        n_owners = hosts.per_host if layout.all_reduce else levels.world_size
        held = range(hosts.place, n_owners, hosts.per_host)
        self._model = UnitModel("unit", levels, layout, dtype, kind, self.schedule, False, held)


def compare_of_hosts(levels, rank, world_size, seed):
    """Where ranks of a host add up two values, which has one order. In 16 bits their mean is rounded once."""
    from tagc.torch.exchange import layout as layouts

    hosts, within, between = levels
    draw = random.Random(seed)
    parameters = some_parameters(draw, world_size)
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    is_shard = draw.random() < 0.6
    ops = [dist.ReduceOp.AVG, dist.ReduceOp.AVG, dist.ReduceOp.SUM]
    op = draw.choice([*ops, dist._make_nccl_premul_sum(0.3)] if dtype == torch.float32 else ops[:2])
    options = draw.choice(
        (
            {"sparsity": 0.9, "residual": "int4"},
            {"sparsity": draw.choice((0, 0.5, 0.97))},
            {"sparsity": 0, "values": draw.choice(("int8", "int4", "bf16"))},
            {"sparsity": 0.9, "mild": "dense", "residual": "fp32"},
        )
    )

    def lay_out(parameters, n_rows=0):
        if is_shard:
            return layouts.chunked(parameters, world_size, n_rows)
        if n_rows:
            return layouts.sliced(parameters, hosts.n_hosts, hosts.per_host)
        return layouts.bucket(parameters, world_size)

    about = parameters, lambda found: lay_out(found, hosts.n_hosts), options, False
    old = OldOfHosts(hosts, within, between, *about)
    new = NewOfHosts(hosts, within, between, parameters, lay_out, options, False, dtype, op)
    about = seed, options, dtype, op, is_shard
    for step in range(1, 7):
        layout = lay_out(parameters)
        source = gradient(layout, 1000 * seed + 10 * step + rank, dtype)
        n_output = layout.n_elems if layout.all_reduce else layout.row
        outputs, bytes_sent = [], []
        for one in (old, new):
            before, target = sent(between), torch.full((n_output,), 7, dtype=dtype)
            one.reduce(source.clone(), target, op, step, False)
            bytes_sent.append({leg: n - before[leg] for leg, n in sent(between).items()})
            outputs.append(target)
        assert torch.equal(*(each.view(torch.int8) for each in outputs)), (about, step)
        if options.get("mild") != "dense":  # a model makes one part of all that is
            assert bytes_sent[0] == bytes_sent[1], (about, step, bytes_sent)
        held, found = old.residuals(), new.residuals()
        assert {name for name, values in held.items() if values.any()} <= found.keys(), about
        for name, values in found.items():
            own = held[name].float() if name in held else torch.zeros(0)
            assert torch.equal(own, values.float()), (about, step, name)
    old.close()
    new.close()


def random_cases_of_hosts(rank, world_size):
    levels = levels_of(rank, world_size, 2)
    for seed in range(24):
        compare_of_hosts(levels, rank, world_size, 1000 + seed)


def random_cases(rank, world_size):
    for seed in range(16):
        compare(rank, world_size, 100 * world_size + seed)


def test_same_bits_of_hosts():
    ranks.run_each([random_cases_of_hosts], 4)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_same_bits(world_size):
    ranks.run_each([random_cases], world_size)
