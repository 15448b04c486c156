"""Exchanges of FSDP2's gradients in CPU memory go on while other modules compute, where torch reads the sums
only after the backward pass. The results are the same bits."""

import time

import pytest

torch = pytest.importorskip("torch")
import ranks
from models import Even, EvenBlock, batch_of, loss_of
from wrappers import local, wrapped


class Deep(Even):
    """Of three layers: the first is gathered again in the backward pass while the last is exchanged."""

    def __init__(self):
        super().__init__()
        self.layers.append(EvenBlock(32))


def always_at_once(monkey):
    from tagc.torch.exchange import internals

    monkey.setattr(internals.FsdpGroup, "reads_sums_at_once", lambda *_: True)


class Watched:
    """Notes which exchanges of a handle begin and end, and calls slow(name) before each end."""

    def __init__(self, handle, slow=lambda name: None):
        self.seen, passes = [], handle.passes
        begin = passes.begin

        def watched(gradient):
            end, unit = begin(gradient), gradient.unit
            self.seen.append(("begins", unit.name))

            def watched_end():
                slow(unit.name)
                end()
                self.seen.append(("ends", unit.name))

            return watched_end

        passes.begin = watched


NAMES = ["layers.2", "layers.1", "layers.0", "the root module"]


def computing_goes_on(rank, world_size):
    """All exchanges are under way at once, and end in the order in which they began; but gradients of at most
    so many bytes wait, beside one of any size."""
    import tagc.torch as tagc
    from tagc.torch.exchange import model_exchanges

    begins, ends = [("begins", name) for name in NAMES], [("ends", name) for name in NAMES]
    one_by_one = [event for pair in zip(begins, ends) for event in pair]
    for most, expected in ((model_exchanges.MOST_BYTES, begins + ends), (0, one_by_one)):
        model = wrapped("fsdp2", Deep)
        with (
            tagc.compress(model, verbose=False, sparsity=0.9, parameters="delta4") as handle,
            pytest.MonkeyPatch.context() as monkey,
        ):
            loss_of(model, batch_of(rank)).backward()
            model.zero_grad()
            monkey.setattr(model_exchanges, "MOST_BYTES", most)
            watched = Watched(handle)
            loss_of(model, batch_of(rank, 1)).backward()
            assert watched.seen == expected, (most, watched.seen)
            assert handle.stats()["n_units"] == 4
            del handle.passes.begin


def how_many_wait(rank, world_size):
    """As many gradients as fit wait, and the oldest ends first."""
    import tagc.torch as tagc
    from tagc.torch.exchange import model_exchanges

    model, sizes = wrapped("fsdp2", Deep), []
    with tagc.compress(model, verbose=False, sparsity=0.9) as handle, pytest.MonkeyPatch.context() as monkey:
        leave = model_exchanges.ModelExchanges.leave
        monkey.setattr(
            model_exchanges.ModelExchanges,
            "leave",
            lambda *given: (sizes.append(given[2].nbytes), leave(*given)),
        )
        loss_of(model, batch_of(rank)).backward()
        model.zero_grad()
        assert len(sizes) == 4 and sizes[0] == sizes[1] == sizes[2]
        monkey.setattr(model_exchanges, "MOST_BYTES", 2 * sizes[0])
        watched = Watched(handle)
        loss_of(model, batch_of(rank, 1)).backward()
        assert watched.seen[:5] == [
            ("begins", "layers.2"),
            ("begins", "layers.1"),
            ("ends", "layers.2"),
            ("begins", "layers.0"),
            ("ends", "layers.1"),
        ], watched.seen
        del handle.passes.begin


def same_bits(rank, world_size):
    """After some steps with every kind of gather, and while gradients are added up over two passes."""
    import tagc.torch as tagc

    for options in ({}, {"parameters": "bf16"}, {"parameters": "delta4", "sparsity": 0.9}):
        states = []
        for at_once in (False, True):
            with pytest.MonkeyPatch.context() as monkey:
                if at_once:
                    always_at_once(monkey)
                model = wrapped("fsdp2")
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                with tagc.compress(model, verbose=False, **options) as handle:
                    for step in range(6):
                        loss_of(model, batch_of(rank, step)).backward()
                        if step % 3 != 2:  # the third adds to the gradients of the second
                            loss_of(model, batch_of(rank, 100 + step)).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    states.append([local(p).clone() for p in model.parameters()])
                    states[-1] += handle.state.units["the root module"].residuals_on_the_wire().values()
        assert all(map(torch.equal, *states)), options


def who_reads_at_once(rank, world_size):
    """Hooks of a gradient, sums of another dtype, gradients that are there already: the values are whole."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    import tagc.torch as tagc

    both = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for fully in ({}, {"mp_policy": both}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        results = []
        for at_once in (False, True):
            with pytest.MonkeyPatch.context() as monkey:
                if at_once:
                    always_at_once(monkey)
                model, seen = wrapped("fsdp2", **fully), []
                weight = model.layers[1].mlp.weight
                weight.register_post_accumulate_grad_hook(
                    lambda p, seen=seen: seen.append(local(p.grad).clone())
                )
                with tagc.compress(model, verbose=False, sparsity=0.9):
                    loss_of(model, batch_of(rank)).backward()
                    loss_of(model, batch_of(rank, 1)).backward()
                results.append([*seen, *(local(p.grad).clone() for p in model.parameters())])
        assert len(results[0]) > 2 and all(map(torch.equal, *results)), fully


def on_gradient_of(module, hook):
    """Calls hook(gradient) of what the module returns: tagc does not see such hooks."""

    def forward_hook(_, inputs, output):
        output.register_hook(hook)

    module.register_forward_hook(forward_hook)


def who_reads_anothers(rank, world_size):
    """A hook of one module reads the gradients of those that the pass has been through, while another rank is
    late with them."""
    import tagc.torch as tagc

    def look(model, seen):
        return lambda *_: seen.append([local(p.grad).clone() for p in model.layers[1].parameters()])

    hooks = {
        "module": lambda model, seen: model.layers[0].register_full_backward_hook(look(model, seen)),
        "module, before": lambda model, seen: model.layers[0].register_full_backward_pre_hook(
            look(model, seen)
        ),
        "parameter": lambda model, seen: next(
            model.layers[0].parameters()
        ).register_post_accumulate_grad_hook(look(model, seen)),
    }
    for name, register in hooks.items():
        model, seen = wrapped("fsdp2", reshard_after_forward=False), []
        register(model, seen)
        if rank == 1:
            on_gradient_of(model.layers[1].mlp, lambda _: time.sleep(0.3))
        with tagc.compress(model, verbose=False, sparsity=0.9):
            for step in range(2):  # in the first one ranks wait for each other
                model.zero_grad()
                loss_of(model, batch_of(rank, step)).backward()
        after = [local(p.grad) for p in model.layers[1].parameters()]
        assert seen and all(map(torch.equal, seen[-1], after)), name


def fails(rank, world_size):
    """What goes wrong in an exchange that goes on is raised by that backward pass, on all ranks, and what one
    rank cannot begin fails on all."""
    import tagc.torch as tagc
    from tagc.torch.exchange import model as models

    begin = models.UnitModel.begin
    for name in ("layers.1", "layers.0", "the root module"):
        for at_once in (False, True):

            def broken(self, *arguments, name=name):
                if self.name == name and rank == 1:
                    self.begin_failed(MemoryError(f"no memory for {name}"))
                else:
                    begin(self, *arguments)

            model = wrapped("fsdp2")
            with tagc.compress(model, verbose=False, sparsity=0), pytest.MonkeyPatch.context() as monkey:
                loss_of(model, batch_of(rank)).backward()
                model.zero_grad()
                if at_once and rank == 0:  # only this rank waits in its hooks
                    always_at_once(monkey)
                monkey.setattr(models.UnitModel, "begin", broken)
                words = f"gradients of {name}: (rank 1 failed in this step|MemoryError: no memory)"
                with pytest.raises(tagc.Error, match=words) as it:
                    loss_of(model, batch_of(rank)).backward()
                assert it.value.status == "memory"


def closed_meanwhile(rank, world_size):
    """close() waits for the exchange that goes on, as where a hook of the user's ends the pass."""
    import tagc.torch as tagc

    model = wrapped("fsdp2")

    def stop(*_):
        raise KeyboardInterrupt

    handle = tagc.compress(model, verbose=False, sparsity=0.9)
    watched = Watched(handle, lambda name: time.sleep(0.1))
    on_gradient_of(model.layers[0], stop)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, batch_of(rank)).backward()
    assert watched.seen == [("begins", "layers.1")]
    handle.close()
    assert watched.seen[1:] == [("ends", "layers.1")]


def test_overlap():
    ranks.run_each(
        [
            computing_goes_on,
            how_many_wait,
            same_bits,
            who_reads_at_once,
            who_reads_anothers,
            fails,
            closed_meanwhile,
        ],
        2,
    )
