"""DDP with tagc: what holds in every wrapper (wrapper_checks.py), and what is DDP's own."""

import contextlib
import copy
import functools
import gc
import itertools
import pickle
import sys
import threading
import time
import weakref

import pytest

torch = pytest.importorskip("torch")
import by_parts
import ranks
import torch.distributed as dist
import wrapper_checks
from models import Odd, batch_of, loss_of
from oracles import (
    check_alike,
    check_conserved,
    check_equal,
    check_error,
    check_loss_of_a_rank,
    full_gradients,
)
from torch import nn
from wrapper_checks import Checkpointed, add, backward, compress
from wrappers import gradients, wrapped


def made(make, **options):
    return wrapper_checks.made("ddp", make, **options)


def buckets_of(handle):
    return list(handle.state.units["buckets"]._units)


# ---- what all ranks do ----


def frozen_before_compress(rank, world_size):
    """What DDP has in its buckets and compress() found frozen is of its class when it is trained later."""
    model = made(Sometimes, find_unused_parameters=True)
    for is_frozen in (True, False):
        model.module.extra.requires_grad_(not is_frozen)
        if is_frozen:
            handle = compress(model, sparsity=0)
        model.zero_grad()
        backward(model, rank)
        expected = full_gradients(Sometimes, world_size)
        check_equal(
            gradients(model), {name: g for name, g in expected.items() if not (is_frozen and "extra" in name)}
        )
    assert {p.kind for p in handle.wrapper.parameters() if p.name == "extra.weight"} == {"compressed"}
    handle.close()


def other_buckets_stay(rank, world_size):
    """A parameter that changes its level changes the reducers of its own bucket."""
    model = made(Odd)
    with compress(model, sparsity=0.5) as handle:
        for step in range(2):  # then DDP has rebuilt its buckets
            backward(model, rank, step)
        state, (first, *others) = handle.wrapper.hooked(), buckets_of(handle)
        before = dict(state._layouts)
        assert others and first[0] in {p.name for p in handle.wrapper.parameters()}
        handle.wrapper.set_kinds(
            {p.name: {"level": 2} if p.name == first[0] else {} for p in handle.wrapper.parameters()}
        )
        assert first not in state._layouts
        assert all(state._layouts[key] is before[key] for key in others)
        backward(model, rank, 2)
        assert len(by_parts.parts_of(state._layouts[first])) == 2


def buckets_come_anew(rank, world_size):
    """After the first pass, in another order: else wrapper_checks would not show that residuals stay with
    their parameters."""
    with compress(made(Odd), sparsity=0.9) as handle:
        seen = []
        for step in range(3):
            backward(handle.model, rank, step)
            seen.append(buckets_of(handle))
        assert seen[0] != seen[-1] and sorted(sum(seen[0], ())) == sorted(sum(seen[-1], ())), seen
        assert handle.stats()["n_units"] == len(seen[-1])
        assert handle.stats()["n_elems"] == sum(p.numel() for p in handle.model.parameters())


class Sometimes(nn.Module):
    """A layer that some passes leave out, on some ranks or all."""

    def __init__(self):
        super().__init__()
        self.embed, self.extra, self.head = nn.Linear(7, 33), nn.Linear(33, 33), nn.Linear(33, 3)
        self.is_whole = True

    def forward(self, x):
        x = torch.tanh(self.embed(x))
        return self.head(x + self.extra(x) if self.is_whole else x)

    def loss(self, wrapper, rank, step):
        self.is_whole = step in (0, 1) or step == 3 and rank == 0
        return loss_of(wrapper, batch_of(rank, step))


def unused_for_a_while(rank, world_size):
    """DDP drops what is sent for parameters that no rank used: nothing of their residuals may go there."""
    torch.manual_seed(0)
    one, n_steps = Sometimes(), 6
    sum(one.loss(one, r, step) for r in range(world_size) for step in range(n_steps)).div(
        world_size
    ).backward()
    for cap_mb in (0.002, 25):
        model = made(Sometimes, bucket_cap_mb=cap_mb, find_unused_parameters=True)
        with compress(model, sparsity=0.9) as handle:
            received = {}
            for step in range(n_steps):
                model.zero_grad()
                before = handle.state.units["buckets"].residuals_on_the_wire()
                model.module.loss(model, rank, step).backward()
                after = handle.state.units["buckets"].residuals_on_the_wire()
                add(received, gradients(model))
                is_used = step in (0, 1, 3)
                assert ("extra.weight" in gradients(model)) == is_used
                assert after["extra.weight"].any() and (
                    is_used or torch.equal(before["extra.weight"], after["extra.weight"])
                )
            assert (
                check_conserved(handle, received, {name: p.grad for name, p in one.named_parameters()}) > 100
            )


def uneven_inputs(rank, world_size):
    """join(): ranks that have run out of data give zeros."""
    for sparsity in (0, 0.9):
        model = made(Odd)
        with compress(model, sparsity=sparsity) as handle:
            received = {
                name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.module.named_parameters()
            }
            with model.join():
                for step in range(2 + rank):
                    model.zero_grad()
                    backward(model, rank, step)
                    if rank == world_size - 1:
                        add(received, gradients(model))
            assert handle.n_steps == 1 + world_size
            for tensor in received.values():
                dist.broadcast(tensor, world_size - 1)
            torch.manual_seed(0)
            one = Odd()
            sum(loss_of(one, batch_of(r, step)) for r in range(world_size) for step in range(2 + r)).div(
                world_size
            ).backward()
            check_conserved(handle, received, {name: p.grad for name, p in one.named_parameters()})


def half_precision(rank, world_size):
    expected = full_gradients(Odd, world_size)
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        model = made(lambda: Odd().to(dtype), gradient_as_bucket_view=dtype == torch.float16)
        with compress(model, sparsity=0):
            x, y = batch_of(rank)
            loss_of(model, (x.to(dtype), y.to(dtype))).backward()
            for name, gradient in gradients(model).items():
                assert gradient.dtype == dtype
                check_alike(gradient, name)
                assert (gradient - expected[name]).abs().max() < tolerance * max(
                    1, expected[name].abs().max()
                ), (dtype, name)


def loss_scale(rank, world_size):
    """Residuals follow it: in units of the gradient, nothing is lost or doubled."""
    given = full_gradients(Odd, world_size, range(4))
    model = made(Odd)
    with compress(model, sparsity=0.9) as handle:
        received = {}
        for step, scale in enumerate((1.0, 1024.0, 1024.0, 8.0)):
            handle.loss_scale(scale)
            model.zero_grad()
            backward(model, rank, step, scale)
            add(received, {name: gradient / scale for name, gradient in gradients(model).items()})
        unit = handle.state.units["buckets"]
        unit.scale_residuals(1 / 8)
        check_conserved(handle, received, given)


def hooks_of_users(rank, world_size):
    """register_comm_hook() as torch's documentation has it, with torch's own wrappers around the hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    import tagc.torch as tagc

    expected = full_gradients(Odd, world_size)
    model = made(Odd)
    state = tagc.ddp_state(model, sparsity=0, layers="all", verbose=False)
    model.register_comm_hook(state, tagc.ddp_hook)
    backward(model, rank)
    check_equal(gradients(model), expected)
    assert state.handle.stats()["step"] == 1
    check_error(lambda: tagc.compress(model, verbose=False), "compressed already: close")

    def doubling_hook(state, bucket):
        return tagc.ddp_hook(state, bucket).then(lambda future: future.value() * 2)

    for wrap, tolerance in (
        (lambda hook: doubling_hook, 1e-6),
        (default_hooks.fp16_compress_wrapper, 1e-3),
        (default_hooks.bf16_compress_wrapper, 1e-2),
    ):
        model = made(Odd)
        state = tagc.ddp_state(model, sparsity=0, layers="all", verbose=False)
        factor = 2 if wrap(None) is doubling_hook else 1
        try:
            model.register_comm_hook(state, wrap(tagc.ddp_hook))
        except TypeError as failure:  # torch takes its bf16 hooks with NCCL only
            assert "BF16" in str(failure)
            continue
        for step in range(2):
            model.zero_grad()
            backward(model, rank, step)
            for name, gradient in full_gradients(Odd, world_size, (step,)).items():
                found = gradients(model)[name]
                assert found.dtype == torch.float32
                assert (found - factor * gradient).abs().max() <= tolerance * max(1, gradient.abs().max()), (
                    name
                )
        state.handle.close()


def overlap(rank, world_size):
    """The first bucket is under way while gradients of the last are not there yet."""
    model = made(Odd)
    with compress(model, sparsity=0) as handle:
        for _ in range(2):  # then DDP has rebuilt its buckets
            backward(model, rank)
        model.zero_grad()
        is_late, begin, waited = threading.Event(), handle.passes.begin, []

        def held_up(*arguments):
            end = begin(*arguments)

            def end_late():
                waited.append(is_late.wait(30))
                end()

            return end_late

        handle.passes.begin = held_up
        model.module.embed.weight.register_hook(lambda gradient: is_late.set())
        backward(model, rank)
        assert len(waited) > 1 and all(waited), waited
        check_equal(gradients(model), full_gradients(Odd, world_size))
        del handle.passes.begin


def copies(rank, world_size):
    """A compressed model can be copied and pickled. The copy is a DDP model without hooks, which can be
    compressed, too."""

    for make_copy in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        model = made(Odd)
        handle = compress(model, sparsity=0.9)
        backward(model, rank)
        model.zero_grad()
        another = make_copy(model)
        backward(another, rank)
        check_equal(gradients(another), full_gradients(Odd, world_size))
        assert handle.n_steps == 1 and not gradients(model)
        another.zero_grad()
        with compress(another, sparsity=0) as second:
            backward(another, rank)
            check_equal(gradients(another), full_gradients(Odd, world_size))
            assert second.n_steps == 1 and handle.n_steps == 1
        backward(model, rank)
        assert handle.n_steps == 2
        model.module.handle = handle  # as users keep it
        with pytest.warns(
            UserWarning, match="exchanges nothing and has no residuals: save handle.state_dict"
        ):
            copied = make_copy(model).module.handle
        assert copied.is_closed and not handle.is_closed
        check_error(lambda: copied.stats(), "stats: this copy of a tagc handle.*call compress")
        copied.close()
        handle.close()
        model.zero_grad()
        backward(model, rank)
        check_equal(gradients(model), full_gradients(Odd, world_size))


def end_of_life(rank, world_size):
    """A model goes with its handle and its thread, closed or not, though DDP's reducer keeps the hook's
    state. Where the garbage collector finds them while torch traces, tensors cannot be made."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    unraised = []
    sys.unraisablehook = lambda failure: unraised.append(str(failure.exc_value))
    for is_closed, is_tracing in ((True, False), (False, False), (False, True)):
        model = made(Odd)
        handle = compress(model)
        backward(model, rank)
        assert [thread.name for thread in threading.enumerate()].count("tagc-host") >= 1
        if is_closed:
            handle.close()
        gone = weakref.ref(model)
        del model, handle
        end = time.monotonic() + 30
        with FakeTensorMode() if is_tracing else contextlib.nullcontext():
            # the thread may still be putting its last bucket away
            while gone() is not None and time.monotonic() < end:
                gc.collect()
                time.sleep(0.01)
        assert gone() is None and not unraised, unraised
    sys.unraisablehook = sys.__unraisablehook__
    for thread in threading.enumerate():
        if thread.name == "tagc-host":
            thread.join(30)
            assert not thread.is_alive()


# ---- errors ----


def misuse(rank, world_size):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel.distributed import _MixedPrecision

    import tagc.torch as tagc

    model = made(Odd)
    for options, text in (
        (dict(sparsity=2 if rank == 1 else 0), r"rank 1: sparsity is 2, must be a number from 0 to 1"),
        (dict(layers=lambda name, p: "dense" if rank else "compressed"), "do not agree on parameters"),
    ):
        check_error(lambda options=options: compress(model, **options), text)
    model = made(Odd)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    check_error(lambda: compress(model), r"has a communication hook already \(allreduce_hook\)")
    # DDP's own needs a driver in a build for CUDA
    if torch.version.cuda is None or torch.cuda.is_available():
        model = made(Odd, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
        check_error(lambda: compress(model), "which its mixed_precision needs: use torch.autocast")
    model = made(Odd)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    for _ in range(2):  # nothing of the first time stays
        check_error(lambda: compress(model), "DDP does not take a communication hook")
    check_error(lambda: tagc.ddp_state(nn.Linear(3, 3)), "model is a Linear")
    model = made(Odd)
    model.register_comm_hook(None, tagc.ddp_hook)
    check_error(lambda: backward(model, rank), "state is a NoneType, must be what ddp_state")


def failures_and_after(rank, world_size):
    """An exchange that cannot be is the same error everywhere; the next backward pass works."""
    import tagc.torch as tagc

    model, is_odd = made(Odd), [True]
    state = tagc.ddp_state(model, sparsity=0, layers="all", verbose=False)

    def hook(state, bucket):
        if is_odd[0] and rank == 1 and bucket.index() == 1:
            bucket.set_buffer(bucket.buffer().half())
        return tagc.ddp_hook(state, bucket)

    model.register_comm_hook(state, hook)
    backward(model, rank)
    is_odd[0] = False
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
        check_equal(gradients(model), full_gradients(Odd, world_size))
    is_odd[0] = True
    check_error(
        lambda: backward(model, rank),
        r"bucket 1 \(.*do not agree: rank 0 has .*dtype torch.float32.*rank 1 has .*torch.float16",
    )
    is_odd[0] = False
    model.zero_grad()
    backward(model, rank)
    check_equal(gradients(model), full_gradients(Odd, world_size))

    def complain(stats):
        raise tagc.Error("state", "logger is full")

    state.handle.passes.on_step = complain
    model.zero_grad()
    check_error(lambda: backward(model, rank), "logger is full")
    check_equal(gradients(model), full_gradients(Odd, world_size))


class Unusual(nn.Module):
    """An embedding with sparse gradients, a matrix of doubles, complex numbers, and an ordinary matrix."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(9, 64, mode="sum", sparse=True)
        self.wide = nn.Parameter(torch.randn(64, 64, dtype=torch.float64))
        self.turn = nn.Parameter(torch.randn(64, dtype=torch.complex64))
        self.usual = nn.Linear(64, 64)

    def forward(self, words):
        x = self.usual(self.table(words))
        return (x.double() @ self.wide).float() * self.turn.abs()


def left_to_torch(rank, world_size):
    """compress() says what tagc does not exchange, and torch does that as without tagc."""
    words = torch.tensor([[1, 2 + rank], [3, 4]])
    found = []
    for compresses in (False, True):
        model = wrapped("ddp", Unusual)
        seen = []
        if compresses:
            handle = compress(
                model, sparsity=0, on_step=lambda stats: seen.append((stats["step"], stats["n_units"]))
            )
            rows = handle.table()
            for name, why in (
                ("table.weight", "sparse gradient"),
                ("wide", "float64"),
                ("turn", "complex64"),
            ):
                assert any(name in line and why in line for line in rows.splitlines()), rows
        for _ in range(2):
            model.zero_grad()
            model(words).square().mean().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
        if compresses:
            assert [step for step, _ in seen] == [1, 2] and seen[1][1] >= 4, seen
            assert handle.stats()["bytes_sent"] > 64 * 64 * 8
            handle.close()
    for name, gradient in found[0].items():
        assert gradient.is_sparse == found[1][name].is_sparse == ("table" in name)
        torch.testing.assert_close(
            found[1][name].to_dense() if gradient.is_sparse else found[1][name],
            gradient.to_dense() if gradient.is_sparse else gradient,
            rtol=1e-5,
            atol=1e-6,
        )


CHECKS = [
    buckets_come_anew,
    other_buckets_stay,
    unused_for_a_while,
    frozen_before_compress,
    uneven_inputs,
    half_precision,
    loss_scale,
    hooks_of_users,
    overlap,
    misuse,
    failures_and_after,
    left_to_torch,
    copies,
    end_of_life,
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_wrappers(world_size):
    ranks.run_each(wrapper_checks.CHECKS, world_size, "ddp")


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp(world_size):
    ranks.run_each(CHECKS if world_size == 2 else [uneven_inputs, unused_for_a_while, copies], world_size)


@pytest.mark.slow  # the C tests of lost ranks run under the sanitizers
@pytest.mark.parametrize("dies, transport", [(True, "native"), (True, "gloo"), (False, "native")])
def test_a_rank_that_is_gone_is_an_error_on_the_others(tmp_path, dies, transport):
    check = wrapper_checks.loss_of_a_rank
    ranks.attempt(check, 3, str(tmp_path), "ddp", dies, {"transport": transport})
    check_loss_of_a_rank(3, tmp_path)


def passes_within_a_pass(rank, world_size):
    """Each pass ends its step, and a failure raises in backward(), before an optimizer would step."""
    import tagc.torch as tagc

    for static_graph, (how, n_outside), breaks in itertools.product(
        (False, True), ((True, 0), (True, 2), (False, 0), (False, 2), (None, 0)), (False, True)
    ):
        make = functools.partial(Checkpointed, how, n_outside)
        model = made(make, bucket_cap_mb=0.02, static_graph=static_graph)
        steps = []
        handle = compress(model, sparsity=0, on_step=lambda stats, to=steps: to.append(stats["step"]))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def backward(step):
            x = torch.randn(3, 64, generator=torch.Generator().manual_seed(9 * step + rank))
            model(x.requires_grad_()).square().mean().backward()

        for step in range(4):
            backward(step)
            assert steps == [*range(1, step + 2)], (how, n_outside, steps)
            optimizer.step()
            optimizer.zero_grad()
        if breaks and rank == 1:
            handle.loss_scale(2.0)
        if breaks:
            with pytest.raises(tagc.Error, match="loss scale"):
                backward(5)
            handle.loss_scale(1.0)
            optimizer.zero_grad()
            backward(6)
            assert steps[-1] == 5 and all(p.grad.isfinite().all() for p in model.parameters()), steps
        handle.close()


def test_passes_within_a_pass():
    ranks.run(passes_within_a_pass, 2)


class TwoHeads(nn.Module):
    """Of which each has its gradients by a backward() of its own."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(7, 300), nn.Linear(7, 300)

    def losses(self, run, rank, step):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(9 * step + rank))
        return [output.square().mean() for output in run(x)]

    def forward(self, x):
        return self.right(x), self.left(x)


def a_pass_in_two_calls(rank, world_size):
    """The step ends with the call that gives DDP the last gradient."""
    model, steps = made(TwoHeads, bucket_cap_mb=0.002), []
    with compress(model, sparsity=0, on_step=lambda stats: steps.append(stats["step"])) as handle:
        for step in range(1, 5):
            model.zero_grad()
            for is_last, loss in enumerate(model.module.losses(model, rank, step)):
                loss.backward()
                assert steps == [*range(1, step + is_last)], (step, is_last, steps)
            one = copy.deepcopy(model.module)
            one.zero_grad()
            sum(sum(one.losses(one, r, step)) for r in range(world_size)).div(world_size).backward()
            check_equal(gradients(model), {name: p.grad for name, p in one.named_parameters()})
        assert len(buckets_of(handle)) > 1


def test_a_pass_in_two_calls():
    ranks.run(a_pass_in_two_calls, 2)
