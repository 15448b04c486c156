"""FSDP2's gathers in two levels: compressed between hosts, whole within a host. `hosts=` makes hosts of the
processes of one machine. Whatever a module was given is compared, bit for bit, with what a plain coder in
torch makes of the parameters of all ranks."""

import pytest

torch = pytest.importorskip("torch")
import by_parts
import ranks
import torch.distributed as dist
from models import Even, Odd, batch_of, loss_of
from oracles import check_alike
from wrappers import heard, local, wrapped

BITS = {"int8": 8, "delta8": 8, "delta4": 4, "delta2": 2}
BLOCK = 256

# ---- the coder in plain torch ----


def rounded(x, bits):
    """What blocks of 256 values become in so many bits."""
    n = -len(x) % BLOCK
    blocks = torch.cat([x, x.new_zeros(n)]).view(-1, BLOCK)
    up, down = blocks.amax(1).clamp_min(0), (-blocks).amax(1).clamp_min(0)
    share = {8: 1 / 128, 4: torch.tensor(1.0) / 8.5, 2: 0.375}[bits]
    scale = (torch.maximum(up, down) * share).to(torch.bfloat16).float()
    scale = torch.where(up > down, -scale, scale)[:, None]
    half = 1 << (bits - 1)
    codes = torch.where(scale == 0, 0.0, (blocks * (1 / scale)).round()).clamp(-half, half - 1)
    return ((codes + 0.0) * scale).view(-1)[: len(x)]


class Follower:
    """What every rank must be given of one module."""

    def __init__(self, wire):
        self.wire, self.masters, self.replica = wire, None, None

    def follow(self, masters, is_reset):
        """masters: what all ranks gave, (W, n), fp32."""
        if self.wire == "fp32":
            return masters
        if self.wire == "int8":
            return torch.stack([rounded(row, 8) for row in masters])
        if self.wire in ("bf16", "lossless") or self.masters is None or is_reset:
            self.replica = masters.to(torch.bfloat16).float()
        elif not torch.equal(masters, self.masters):
            changes = [rounded(row, BITS[self.wire]) for row in masters - self.replica]
            self.replica = (self.replica + torch.stack(changes)).to(torch.bfloat16).float()
        self.masters = masters
        return self.replica


class Spy:
    """Stands before a module's all-gather."""

    def __init__(self, module):
        self.inner = module._get_fsdp_state()._fsdp_param_group._all_gather_comm
        self.calls, self.resets = [], set()
        module.set_custom_all_gather(self)

    def allocate(self, size, *, dtype, device):
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        given = input_tensor.clone()
        work = self.inner(output_tensor, input_tensor, group, async_op)
        if work is not None:
            work.wait()
        self.calls.append((given, output_tensor.clone(), dist.get_process_group_ranks(group)))

    def check(self, wire):
        """Collective. Returns how many calls sent something."""
        follower, n_sent = Follower(wire), 0
        for i, (given, received, of_ranks) in enumerate(self.calls):
            everyone = [torch.empty_like(given) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, given)
            masters = torch.stack(everyone).float()
            if len(of_ranks) < dist.get_world_size():  # what forward has left on a few ranks, as it is
                expected = masters[of_ranks]
            else:
                before = follower.masters
                expected = follower.follow(masters, i in self.resets)
                n_sent += before is None or not torch.equal(before, masters) or i in self.resets
            expected = expected.to(received.dtype).view(-1)
            same = torch.equal(expected.view(torch.uint8), received.view(torch.uint8))
            assert same, (i, wire, (expected.float() - received.float()).abs().max())
        return n_sent


def spies_of(model):
    from torch.distributed.fsdp import FSDPModule

    return [Spy(module) for module in model.modules() if isinstance(module, FSDPModule)]


def bf16():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}


def gathers_of(handle):
    return [gathers for gather in handle.state.wrapper._gathers for gathers in gather._gathers.values()]


# ---- what all ranks do ----


def train_and_evaluate(rank, world_size, wire, hosts, model_class=Even, prefetches=False, **options):
    """Steps, evaluations between them, and a reset; then looks at everything that modules were given."""
    import tagc.torch as tagc

    model = wrapped("fsdp2", model_class, **options)
    if prefetches:  # gathers come in another order
        first, second = model.layers
        model.set_modules_to_forward_prefetch([first, second])
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
    with tagc.compress(model, sparsity=0.9, hosts=hosts, parameters=wire, verbose=False) as handle:
        spies = spies_of(model)
        optimizer = torch.optim.AdamW(handle.param_groups(lr=1e-2))
        for step in range(4):
            if step == 2:
                with torch.no_grad():
                    loss_of(model, batch_of(rank, 90))
                with torch.inference_mode():
                    loss_of(model, batch_of(rank, 91))
            if step == 3:
                for spy in spies:
                    spy.resets.add(len(spy.calls))
                handle.reset_parameters()
            loss_of(model, batch_of(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        n_sent = sum(spy.check(wire) for spy in spies)
        for gathers in gathers_of(handle):
            replica = gathers._replica
            if not gathers.gatherer or not gathers.gatherer.is_delta:
                assert replica is None
            elif hosts > 1:
                assert replica.dtype == torch.bfloat16
                assert replica.numel() * (world_size // hosts) == spies_numel(spies, replica, hosts)
        for name, parameter in model.named_parameters():
            check_alike(parameter.full_tensor(), name)
        return n_sent


def spies_numel(spies, replica, hosts):
    """Elements of the module whose replica that is."""
    sizes = {call[0].numel() * dist.get_world_size() for spy in spies for call in spy.calls}
    n = replica.numel() // hosts * dist.get_world_size()
    assert n in sizes
    return n


def every_wire(rank, world_size):
    hosts = world_size // 2 if world_size < 8 else 2
    for wire in ("fp32", "bf16", "lossless", "int8", "delta8", "delta4"):
        model_class = Odd if wire in ("bf16", "lossless", "delta8") else Even
        n_sent = train_and_evaluate(rank, world_size, wire, hosts, model_class)
        assert n_sent == 4 * 3 or not wire.startswith("delta"), n_sent  # once for each value of three modules


def other_ways_to_shard(rank, world_size):
    train_and_evaluate(rank, world_size, "delta4", 2, **bf16())
    train_and_evaluate(rank, world_size, "lossless", 2, **bf16())
    train_and_evaluate(rank, world_size, "delta4", 2, reshard_after_forward=False)
    train_and_evaluate(rank, world_size, "delta4", 2, reshard_after_forward=2)
    train_and_evaluate(rank, world_size, "delta4", world_size)  # one rank on each host
    train_and_evaluate(rank, world_size, "delta4", world_size, reshard_after_forward=2)
    train_and_evaluate(rank, world_size, "delta2", 2, prefetches=True)


def bytes_between_hosts(rank, world_size):
    """A rank sends its row to the other hosts, once per change, and to no rank of its host through tagc."""
    import tagc.torch as tagc

    for hosts in (2, 4):
        model = wrapped("fsdp2")
        with tagc.compress(model, sparsity=0, hosts=hosts, parameters="delta4", verbose=False) as handle:
            spies, before, stats = spies_of(model), [], {}
            for step in range(3):
                loss_of(model, batch_of(rank, step)).backward()
                stats = handle.stats()
                before.append(stats["bytes_by_leg"]["gather"])
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.01)
            shards = [spy.calls[0][0].numel() for spy in spies]
            blocks = [-(-n // BLOCK) for n in shards]
            assert before[0] == (hosts - 1) * sum(64 + 2 * n for n in shards), (before, shards)
            assert before[1] == before[2] == (hosts - 1) * sum(64 + 130 * n for n in blocks), before
            # what came goes on to the others of the host, in fp32, with an agreement before and one after it
            n_elems, n_others = sum(shards) * world_size, world_size // hosts - 1
            given = [call[0].numel() for spy in spies for call in spy.calls[len(spy.calls) * 2 // 3 :]]
            assert stats["n_gathered"] == sum(given) * world_size > n_elems
            bits = 8 * before[2] * world_size / (hosts - 1) / stats["n_gathered"]
            assert stats["gather_bits"] == pytest.approx(bits)
            gathers = n_others * sum(4 * hosts * n + 2 * 64 for n in given)
            # each part's sum ends with a header, and each unit's with what the ranks of the host say of it
            models = [unit.model for unit in handle.state.units.values()]
            n_parts = sum(len(by_parts.parts_of(model.layout)) for model in models)
            sums = n_others * (4 * hosts * sum(shards) + 64 * n_parts + 8 * len(models))
            assert stats["bytes_within"] == gathers + sums, (stats["bytes_within"], gathers, sums)


def checkpoints_between_layouts(rank, world_size):
    """What was saved in two levels goes on in two levels or in one, and the other way round, with the same
    bits."""
    import tagc.torch as tagc

    def opened(hosts, parameters=None):
        model = wrapped("fsdp2")
        if parameters is not None:
            with torch.no_grad():
                for parameter, saved in zip(model.parameters(), parameters):
                    parameter.to_local().copy_(saved)
        handle = tagc.compress(model, sparsity=0, hosts=hosts, parameters="delta4", verbose=False)
        return model, handle, spies_of(model)

    for saved_hosts in (2, 4):
        model, handle, spies = opened(saved_hosts)
        for step in range(2):
            loss_of(model, batch_of(rank, step)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)
        state = [None] * world_size
        dist.all_gather_object(state, handle.state_dict())
        parameters = [local(parameter).clone() for parameter in model.parameters()]
        with torch.no_grad():
            loss_of(model, batch_of(rank, 5))
        expected = [spy.calls[-1][1] for spy in spies]
        handle.close()
        for hosts in (2, 4):
            model, handle, spies = opened(hosts, parameters)
            handle.load_state_dict(state)
            with torch.no_grad():
                loss_of(model, batch_of(rank, 5))
            for spy, output in zip(spies, expected):
                assert torch.equal(spy.calls[-1][1], output), (saved_hosts, hosts)
                masters = [torch.empty_like(output) for _ in range(world_size)]
                dist.all_gather(masters, output)
                assert all(torch.equal(one, output) for one in masters)
            handle.close()


def failures_reach_all_ranks(rank, world_size):
    """One rank cannot begin, and all ranks of one place get damaged rows: the same error on all ranks."""
    import tagc.torch as tagc
    from tagc.torch.hooks import replicas

    def broken(*_):
        raise RuntimeError("no fingers")

    def damaged(*_):
        raise tagc.Error("corrupt", "replicas differ")

    cases = [(replicas, "fingerprint", broken, {3}, "rank 3: no fingers")]
    cases += [(replicas.Gathers, "run", damaged, {1, 3}, "replicas differ")]
    for owner, name, function, culprits, text in cases:
        model = wrapped("fsdp2")
        with tagc.compress(model, sparsity=0, hosts=2, parameters="delta4", verbose=False):
            loss_of(model, batch_of(rank)).backward()
            original = getattr(owner, name)
            if rank in culprits:
                setattr(owner, name, function)
            try:
                loss_of(model, batch_of(rank))
            except tagc.Error as failure:
                assert text in str(failure), failure
            else:
                raise AssertionError(f"{name}: no error on rank {rank}")
            finally:
                setattr(owner, name, original)
            dist.barrier()


def nothing_within_one_host(rank, world_size):
    """With hosts=1 torch gathers."""
    import tagc.torch as tagc

    model = wrapped("fsdp2")
    with tagc.compress(model, hosts=1, parameters="delta4", verbose=False) as handle:
        spies = spies_of(model)
        loss_of(model, batch_of(rank)).backward()
        for spy in spies:
            assert spy.check("fp32") and not gathers_of(handle)


def staged(rank, world_size):
    """By way of a device's streams, with the codec in either place: the same bits."""
    from fake_device import Installed

    import tagc.torch as tagc

    def train(codec):
        model = wrapped("fsdp2")
        with tagc.compress(
            model,
            sparsity=0.9,
            layers="all",
            hosts=2,
            parameters="delta4",
            verbose=False,
            options=tagc.Options(codec=codec),
        ) as handle:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for step in range(4):
                loss = loss_of(model, batch_of(rank, step))
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            handle.synchronize()
            return losses, [local(parameter).clone() for parameter in model.parameters()]

    expected = train("host")
    for number, codec in enumerate(("host", "device")):
        with Installed(7 * number + rank, kernels=codec == "device") as device:
            found = train(codec)
            device.check()
        assert found[0] == expected[0], codec
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1])), codec


def rows_by_the_backend(rank, world_size):
    """As NCCL does it, all rows as one, one by one, and by gloo: each rank gets each row of all ranks."""
    from tagc.torch.exchange import internals, waits

    rows, own = torch.arange(6.0).view(3, 2) + 100 * rank, internals.backend_of
    expected = torch.stack(
        [torch.cat([row + 100 * (other - rank) for other in range(world_size)]) for row in rows]
    )
    for backend in ({"supports_coalescing": True}, {"supports_coalescing": False}, None):
        if backend is not None:
            internals.backend_of = lambda *_, made=type("Backend", (), backend)(): made
        try:
            whole = torch.empty(3, world_size * 2)
            waits.Collectives(dist.group.WORLD, "rows", 60).gather_rows(whole, rows)
        finally:
            internals.backend_of = own
        assert torch.equal(whole, expected), (backend, whole)


def others_that_change_parameters(rank, world_size):
    """What is not the optimizer's is said once."""
    import tagc.torch as tagc

    def said(change, make=lambda handle: [torch.optim.AdamW(handle.param_groups(lr=1e-2))], wire="delta4"):
        model = wrapped("fsdp2")
        with tagc.compress(model, sparsity=0.9, parameters=wire, verbose=False) as handle:
            optimizers = make(handle)
            with heard("something other than the optimizer") as texts:
                for step in range(4):
                    loss_of(model, batch_of(rank, step)).backward()
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                    if step % 2:
                        change(model, handle)
                        with torch.no_grad():
                            loss_of(model, batch_of(rank, 90))
            return len(texts)

    def shrink(model, handle):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    def shrink_one(model, handle):
        """The last parameter that is large enough for all ranks to have values of."""
        with torch.no_grad():
            [p for p in model.parameters() if p.numel() >= 64][-1].mul_(0.5)

    def shrink_a_part(model, handle):
        """A quarter of a rank's rows, of one matrix."""
        own = max(model.parameters(), key=lambda p: p.numel()).to_local()
        with torch.no_grad():
            own[len(own) // 2 : 3 * len(own) // 4].mul_(0.5)

    def shrink_data(model, handle):
        for parameter in model.parameters():
            parameter.data.mul_(0.5)

    def shrink_and_say(model, handle):
        shrink(model, handle)
        handle.reset_parameters()

    def load(model, handle):
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})

    def two(handle):
        groups = handle.param_groups(lr=1e-2)
        parameters = [parameter for group in groups for parameter in group["params"]]
        return [torch.optim.AdamW(parameters[::2], lr=1e-2), torch.optim.SGD(parameters[1::2], lr=1e-2)]

    def one_each(handle):
        parameters = [parameter for group in handle.param_groups(lr=1e-2) for parameter in group["params"]]
        assert len(parameters) > 8
        return [torch.optim.SGD([parameter], lr=1e-2) for parameter in parameters]

    once = 1 if rank == 0 else 0
    for change in (shrink, shrink_data, shrink_one, shrink_a_part):
        assert said(change) == once, change
    assert said(shrink, two) == once
    for change in (lambda *_: None, shrink_and_say, load):
        assert said(change) == 0, change
    assert said(lambda *_: None, two) == 0 and said(lambda *_: None, one_each) == 0
    assert said(shrink, wire="bf16") == 0


def test_others_that_change_parameters():
    ranks.run_each([others_that_change_parameters], 2)


def test_two_levels():
    ranks.run_each(
        [
            every_wire,
            other_ways_to_shard,
            bytes_between_hosts,
            rows_by_the_backend,
            checkpoints_between_layouts,
            nothing_within_one_host,
            staged,
            failures_reach_all_ranks,
        ],
        4,
    )


def eight(rank, world_size):
    train_and_evaluate(rank, world_size, "delta4", 2)


def test_eight_ranks():
    ranks.run_each([eight], 8)
