"""Exchanges of FSDP2's gradients in CPU memory go on while the next module computes, one at a time, where
torch reads the sums only after the backward pass. The results are the same bits."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")
import ranks
from models import Even, EvenBlock, batch_of, loss_of
from test_state import wrapped

LONG_S = 20


class Deep(Even):
    """Of three layers: the first is gathered again in the backward pass while the last is exchanged."""

    def __init__(self):
        super().__init__()
        self.layers.append(EvenBlock(32))


def gradients(model):
    return {name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None}


def always_at_once(monkey):
    from tagc.torch.exchange import internals

    monkey.setattr(internals.FsdpGroup, "reads_sums_at_once", lambda *_: True)


def computing_goes_on(rank, world_size):
    """The exchange of each module ends only when the backward pass has come to the next one, and begins when
    that before it has ended."""
    import tagc.torch as tagc
    from tagc.torch.exchange import call, runner, unit

    model = wrapped("fsdp2", Deep)
    came, ended, after = threading.Semaphore(0), [], []
    reduce, run = unit.Unit.reduce, runner.Host.run

    def slow(self, *arguments, **options):
        is_last = self.name == "the root module"
        assert is_last or came.acquire(timeout=LONG_S), f"{self.name}: computing waits for its exchange"
        end = reduce(self, *arguments, **options)
        ended.append(self.name)
        return end

    def watched(self, this, *tensors):
        run(self, this, *tensors)
        if isinstance(this, call.Reduction):
            after.append(len(ended))

    with (
        tagc.compress(model, verbose=False, sparsity=0.9, parameters="delta4") as handle,
        pytest.MonkeyPatch.context() as monkey,
    ):
        loss_of(model, batch_of(rank)).backward()
        model.zero_grad()
        monkey.setattr(unit.Unit, "reduce", slow)
        monkey.setattr(runner.Host, "run", watched)
        # gradients come from the last module to the first
        for module in model.layers[1].norm, model.layers[0].norm, model.embed:
            module.register_full_backward_pre_hook(lambda *_: came.release())
        loss_of(model, batch_of(rank, 1)).backward()
        assert ended == ["layers.2", "layers.1", "layers.0", "the root module"]
        assert handle.stats()["n_units"] == 4
        # the hook has left the exchange before its own behind it, so that no more gradients wait
        assert after[0] == 0 and all(n >= i for i, n in enumerate(after)), after


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
                    states.append([p.detach().to_local().clone() for p in model.parameters()])
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
                    lambda p, seen=seen: seen.append(p.grad.to_local().clone())
                )
                with tagc.compress(model, verbose=False, sparsity=0.9):
                    loss_of(model, batch_of(rank)).backward()
                    loss_of(model, batch_of(rank, 1)).backward()
                results.append([*seen, *gradients(model).values()])
        assert len(results[0]) > 2 and all(map(torch.equal, *results)), fully


def fails(rank, world_size):
    """What goes wrong in an exchange that goes on is raised by that backward pass, on all ranks."""
    import tagc.torch as tagc
    from tagc.torch.exchange import unit

    reduce = unit.Unit.reduce
    for name in ("layers.1", "layers.0", "the root module"):

        def broken(self, *arguments, name=name, **options):
            if self.name == name:
                raise tagc.Error("memory", f"no memory for {name}")
            return reduce(self, *arguments, **options)

        model = wrapped("fsdp2")
        with tagc.compress(model, verbose=False, sparsity=0), pytest.MonkeyPatch.context() as monkey:
            monkey.setattr(unit.Unit, "reduce", broken)
            with pytest.raises(tagc.Error, match=f"no memory for {name}"):
                loss_of(model, batch_of(rank)).backward()


def closed_meanwhile(rank, world_size):
    """close() waits for the exchange that goes on, as where a hook of the user's ends the pass."""
    import tagc.torch as tagc
    from tagc.torch.exchange import unit

    model, seen, reduce = wrapped("fsdp2"), [], unit.Unit.reduce

    def slow(self, *arguments, **options):
        time.sleep(0.5)
        seen.append(self.name)
        return reduce(self, *arguments, **options)

    def stop(*_):
        raise KeyboardInterrupt

    handle = tagc.compress(model, verbose=False, sparsity=0.9)
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(unit.Unit, "reduce", slow)
        model.layers[0].register_full_backward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, batch_of(rank)).backward()
        handle.close()
    assert seen == ["layers.1"]


def test_overlap():
    ranks.run_each([computing_goes_on, same_bits, who_reads_at_once, fails, closed_meanwhile], 2)
