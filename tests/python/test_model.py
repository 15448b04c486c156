"""Exchanges as libtagc runs them by itself (exchange/model.py) against what tests put together from reducers
(by_parts.py), on random parameters and options: sums, residuals and messages have the same bits, at all
levels of the schedule."""

import random

import pytest

torch = pytest.importorskip("torch")
import by_parts
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
    """Options, a schedule that goes on as fast as it may, and its wrapper."""
    from tagc.torch.schedule.options import Settings
    from tagc.torch.schedule.schedule import Schedule

    wrapper, settings = Wrapper(parameters, world_size), Settings(**options)
    schedule = Schedule(wrapper, settings, is_fresh)
    schedule.set_moments([], [p.name for p in parameters])
    return settings, schedule, wrapper


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


class New:
    """model.UnitModel with a schedule. held: as of a UnitModel."""

    def __init__(self, levels, parameters, lay_out, options, is_fresh, dtype, op, rests=False, held=None):
        from tagc.torch.exchange.model import Sum, UnitModel, kind_of

        self.settings, self.schedule, self.wrapper = side(parameters, levels.world_size, options, is_fresh)
        self._lay_out, self._seen = lay_out, self.wrapper.parameters()
        self.kind, self.factor = kind_of(op, levels.world_size)
        wanted = Sum(levels, lay_out(self._seen), dtype, self.kind)
        self._model = UnitModel("unit", wanted, self.schedule, rests, held)

    def parameters(self):
        """As they are exchanged next."""
        return self.wrapper.parameters()

    def reduce(self, source, target, step):
        """Returns how many sums were beyond fp16."""
        if self._seen != self.wrapper.parameters():
            self._seen = self.wrapper.parameters()
            self._model.follow(self._lay_out(self._seen))
        self._model.begin(source, target, step, self.factor)
        stats = self._model.end(self.schedule)
        return stats[0][1].n_saturated if stats else 0

    def residuals(self):
        return self._model.residuals_on_the_wire()

    def close(self):
        self._model.close()


def check_residuals(exchange, new, about):
    """Those of the oracle have padding behind them."""
    held, found = exchange.residuals(), new.residuals()
    assert {name for name, values in held.items() if values.any()} <= found.keys(), about
    for name, values in found.items():
        own = held[name][: values.numel()] if name in held else torch.zeros_like(values)
        assert torch.equal(own, values.float()), (about, name)


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

    from tagc.torch.exchange.model import Levels

    comm = Comm(dist.group.WORLD, 60)
    new = New(Levels(None, comm), parameters, lay_out, options, is_fresh, dtype, op, rests)
    exchange = by_parts.Exchange(comm, by_parts.fields_of(new.settings, new.schedule, dtype))
    about = seed, options, dtype, op, is_shard, rests
    for step in range(1, n_steps + 1):
        layout = lay_out(new.parameters())
        source = gradient(layout, 1000 * seed + 10 * step + rank, dtype)
        if rests and step % 3 == 0:  # one without a gradient
            piece = layout.pieces_of(step % len(parameters))[0]
            source[piece.start : piece.start + piece.length] = 0
        n_output = layout.n_elems if layout.all_reduce else layout.row
        outputs, bytes_sent, beyond = [], [], []
        for reduce in (
            lambda target: exchange.reduce(layout, source, target, new.kind, new.factor, step, rests),
            lambda target: new.reduce(source, target, step),
        ):
            before, target = sent(comm), torch.full((n_output,), 7, dtype=dtype)
            beyond.append(reduce(target))
            bytes_sent.append({leg: n - before[leg] for leg, n in sent(comm).items()})
            outputs.append(target)
        new.schedule.meet()
        new.schedule.step()
        assert torch.equal(*(each.view(torch.int8) for each in outputs)), (about, step)
        assert beyond[0] == beyond[1], (about, step, beyond)
        if "dense" not in (
            options.get("mild"),
            options.get("exchange"),
        ):  # a model makes one part of all that is
            assert bytes_sent[0] == bytes_sent[1], (about, step, bytes_sent)
        check_residuals(exchange, new, (about, step))
    if not options and any(p.kind == "compressed" and p.numel > 4096 for p in parameters):
        assert 3 in new.schedule.levels().values(), "it should have come to selection"
    exchange.close()
    new.close()
    comm.close()


# ---- hosts of several ranks ----


def levels_of(rank, world_size, per_host):
    """Returns (hosts, the group of this host, connections within it and between hosts)."""
    from tagc.torch.exchange.comm import Comm
    from tagc.torch.exchange.hosts import Hosts

    n_hosts = world_size // per_host
    withins = [[h * per_host + place for place in range(per_host)] for h in range(n_hosts)]
    betweens = [[h * per_host + place for h in range(n_hosts)] for place in range(per_host)]
    groups = [dist.new_group(one) for one in withins + betweens]
    within, between = groups[rank // per_host], groups[n_hosts + rank % per_host]
    hosts = Hosts(between, within, rank, n_hosts, per_host, is_on_one_host=False)
    comms = Comm(within, 60), Comm(between, 60)
    return hosts, within, *comms


def host_sum(within, source, factor):
    """The sum of the host's ranks times `factor`, rounded once."""
    everyone = [torch.empty_like(source) for _ in range(within.size())]
    dist.all_gather(everyone, source, group=within)
    return (sum(each.float() for each in everyone) * factor).to(source.dtype)


def slices_of(layout, parameters, n_hosts, per_host):
    """What one place exchanges of an all-reduce: (its layout, cut(whole, place), join(slices, target))."""
    from tagc.torch.exchange import layout as layouts

    sizes = [layouts.chunked_elems(p, per_host) // per_host for p in parameters]
    of_place = layouts.bucket(
        [p._replace(shape=(size,), dim=0) for p, size in zip(parameters, sizes)], n_hosts
    )

    def spans():
        at = 0
        for i, size in enumerate(sizes):
            piece = layout.pieces_of(i)[0]
            for place in range(per_host):
                n = max(0, min(size, piece.length - place * size))
                yield place, piece.start + place * size, at, n
            at += size

    def cut(whole, own):
        part = whole.new_zeros(of_place.n_elems)
        for place, start, at, n in spans():
            if place == own:
                part[at : at + n] = whole[start : start + n]
        return part

    def join(parts, target):
        for place, start, at, n in spans():
            target[start : start + n] = parts[place][at : at + n]

    return of_place, cut, join


class OldOfHosts:
    """Sums within the host, and then by_parts.Exchange of what a place exchanges."""

    def __init__(self, hosts, within, between, fields):
        self._hosts, self._within = hosts, within
        self._exchange = by_parts.Exchange(between, fields, hosts.place)
        self.residuals, self.close = self._exchange.residuals, self._exchange.close

    def reduce(self, parameters, layout, source, target, op, step):
        from tagc.torch.exchange import layout as layouts
        from tagc.torch.exchange.model import kind_of, scale_of

        hosts = self._hosts
        is_mean = op == dist.ReduceOp.AVG
        summed = host_sum(self._within, source, 1 / hosts.per_host if is_mean else scale_of(op, 1))
        op_between = op if is_mean else dist.ReduceOp.SUM
        kind, factor = kind_of(op_between, hosts.n_hosts)
        if not layout.all_reduce:
            rows = summed.view(hosts.n_hosts, hosts.per_host, -1)[:, hosts.place].flatten()
            size = [layouts.chunked_elems(p, layout.world_size) // layout.world_size for p in parameters]
            own = [p._replace(shape=(hosts.n_hosts * n,), dim=0) for p, n in zip(parameters, size)]
            of_place = layouts.chunked(own, hosts.n_hosts)
            self._exchange.reduce(of_place, rows, target, kind, factor, step)
            return
        of_place, cut, join = slices_of(layout, parameters, hosts.n_hosts, hosts.per_host)
        result = summed.new_empty(of_place.n_elems)
        self._exchange.reduce(of_place, cut(summed, hosts.place), result, kind, factor, step)
        parts = [torch.empty_like(result) for _ in range(hosts.per_host)]
        dist.all_gather(parts, result, group=self._within)
        target.zero_()
        join(parts, target)


def compare_of_hosts(levels, rank, world_size, seed):
    """Where ranks of a host add up two values, which has one order. In 16 bits their mean is rounded once."""
    from tagc.torch.exchange import layout as layouts
    from tagc.torch.exchange.model import Levels

    hosts, group, within, between = levels
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

    def lay_out(parameters):
        if is_shard:
            return layouts.chunked(parameters, world_size)
        return layouts.bucket(parameters, world_size)

    n_owners = world_size if is_shard else hosts.per_host
    held = range(hosts.place, n_owners, hosts.per_host)
    new = New(Levels(within, between), parameters, lay_out, options, False, dtype, op, held=held)
    old = OldOfHosts(hosts, group, between, by_parts.fields_of(new.settings, new.schedule, dtype))
    about = seed, options, dtype, op, is_shard
    for step in range(1, 7):
        layout = lay_out(parameters)
        source = gradient(layout, 1000 * seed + 10 * step + rank, dtype)
        n_output = layout.n_elems if layout.all_reduce else layout.row
        outputs, bytes_sent = [], []
        for reduce in (
            lambda target: old.reduce(new.parameters(), layout, source, target, op, step),
            lambda target: new.reduce(source.clone(), target, step),
        ):
            before, target = sent(between), torch.full((n_output,), 7, dtype=dtype)
            reduce(target)
            bytes_sent.append({leg: n - before[leg] for leg, n in sent(between).items()})
            outputs.append(target)
        assert torch.equal(*(each.view(torch.int8) for each in outputs)), (about, step)
        if options.get("mild") != "dense":  # a model makes one part of all that is
            assert bytes_sent[0] == bytes_sent[1], (about, step, bytes_sent)
        check_residuals(old, new, (about, step))
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
