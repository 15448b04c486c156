"""DDP with tagc against gradients of one process over the whole batch."""

import contextlib
import copy
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
from models import Even, Odd, Tied, batch_of, loss_of
from oracles import (
    check_alike,
    check_conserved,
    check_equal,
    check_error,
    check_loss_of_a_rank,
    full_gradients,
    lose_a_rank,
    mix_of_classes,
    sum_over_ranks,
)
from torch import nn


def wrapped(make_model, small_buckets=True, **options):
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    if small_buckets:
        options = {"bucket_cap_mb": 0.002} | options
    return DistributedDataParallel(make_model(), **options)


def compress(model, **options):
    """With a residual that is exact, because sums are compared."""
    import tagc.torch as tagc

    return tagc.compress(
        model, **tagc.grouped({"verbose": False, "layers": "all", "residual": "fp32"} | options)
    )


def gradients(model):
    return {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}


def backward(model, rank, step=0, scale=1.0):
    (loss_of(model, batch_of(rank, step)) * scale).backward()


def buckets_of(handle):
    return list(handle.state.units["buckets"]._units)


MODES = (
    dict(),
    dict(small_buckets=False),
    dict(gradient_as_bucket_view=True),
    dict(static_graph=True),
    dict(find_unused_parameters=True),
    dict(gradient_as_bucket_view=True, static_graph=True),
)


def some(cases, world_size):
    """More ranks take more time, and the first cases are what more ranks could change."""
    return cases if world_size == 2 else cases[:2]


# ---- what all ranks do ----


def sparsity_zero(rank, world_size):
    for mode in some(MODES, world_size):
        for layers in ("all", "none") if not mode else ("all",):
            model = wrapped(Odd, **mode)
            with compress(model, sparsity=0, layers=layers) as handle:
                for step in range(3):
                    model.zero_grad()
                    backward(model, rank, step)
                    check_equal(gradients(model), full_gradients(Odd, world_size, (step,)), mode)
                assert handle.n_steps == handle.stats()["step"] == 3
                assert handle.stats()["n_units"] == len(buckets_of(handle))
                assert handle.stats()["n_elems"] == sum(p.numel() for p in model.parameters())


def conservation(rank, world_size):
    n_steps = 4
    given = full_gradients(Odd, world_size, range(n_steps))
    options = [
        dict(),
        dict(values="fp32"),
        dict(layers=mix_of_classes),
        dict(exchange="packed"),
        dict(exchange="sketch", sparsity=0.9875),
        dict(sparsity=0, values="int8"),
    ]
    for options, mode in some(
        [(one, {}) for one in options] + [(dict(), mode) for mode in MODES[1:]], world_size
    ):
        model = wrapped(Odd, **mode)
        with compress(model, **{"sparsity": 0.9} | options) as handle:
            received, seen = {}, []
            for step in range(n_steps):
                model.zero_grad()
                backward(model, rank, step)
                seen.append(buckets_of(handle))
                for name, gradient in gradients(model).items():
                    check_alike(gradient, name)
                    received[name] = received.get(name, 0) + gradient.double()
            assert check_conserved(handle, received, given) > 500, "nothing was held back"
            if not mode:  # or this would not show that residuals stay with their parameters
                assert seen[0] != seen[-1] and sorted(sum(seen[0], ())) == sorted(sum(seen[-1], ())), seen


def parameters_that_differ(rank, world_size):
    given = full_gradients(Tied, world_size, range(3))
    model = wrapped(Tied, find_unused_parameters=True)
    with compress(model, sparsity=0) as handle:
        assert [p.name for p in handle.wrapper.parameters()] == [
            "embed.weight",
            "embed.bias",
            "back.weight",
            "frozen.weight",
            "frozen.bias",
            "unused.weight",
            "unused.bias",
            "head.weight",
            "head.bias",
        ]
        backward(model, rank)
        check_equal(
            {name: g for name, g in gradients(model).items() if "unused" not in name},
            full_gradients(Tied, world_size),
        )
        assert model.module.unused.weight.grad is None
    model = wrapped(Tied, find_unused_parameters=True)
    with compress(model, sparsity=0.9) as handle:
        received = {
            name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.module.named_parameters()
        }
        for step in range(3):
            model.zero_grad()
            backward(model, rank, step)
            for name, gradient in gradients(model).items():
                received[name] += gradient
        zeros = {name: torch.zeros(p.shape) for name, p in model.module.named_parameters()}
        assert check_conserved(handle, received, zeros | given) > 100


def frozen_before_compress(rank, world_size):
    """What DDP has in its buckets and compress() found frozen is of its class when it is trained later."""
    model = wrapped(Sometimes, find_unused_parameters=True)
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
    model = wrapped(Odd)
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
    for small_buckets in (True, False):
        model = wrapped(Sometimes, small_buckets, find_unused_parameters=True)
        with compress(model, sparsity=0.9) as handle:
            received = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in one.named_parameters()}
            for step in range(n_steps):
                model.zero_grad()
                before = handle.state.units["buckets"].residuals_on_the_wire()
                model.module.loss(model, rank, step).backward()
                after = handle.state.units["buckets"].residuals_on_the_wire()
                for name, gradient in gradients(model).items():
                    received[name] += gradient
                is_used = step in (0, 1, 3)
                assert ("extra.weight" in gradients(model)) == is_used
                assert after["extra.weight"].any() and (
                    is_used or torch.equal(before["extra.weight"], after["extra.weight"])
                )
            assert (
                check_conserved(handle, received, {name: p.grad for name, p in one.named_parameters()}) > 100
            )


def accumulation(rank, world_size):
    given = full_gradients(Odd, world_size, range(3))
    for mode in some(MODES, world_size)[:3]:
        for sparsity in (0, 0.9):
            for sync_each in (True, False):
                model = wrapped(Odd, **mode)
                with compress(model, sparsity=sparsity) as handle:
                    for step in range(3):
                        if sync_each or step == 2:
                            backward(model, rank, step)
                        else:
                            with model.no_sync():
                                backward(model, rank, step)
                    assert handle.n_steps == (3 if sync_each else 1)
                    if sparsity:
                        check_conserved(handle, gradients(model), given)
                    else:
                        check_equal(gradients(model), given, mode)


def uneven_inputs(rank, world_size):
    """join(): ranks that have run out of data give zeros."""
    for sparsity in (0, 0.9):
        model = wrapped(Odd)
        with compress(model, sparsity=sparsity) as handle:
            received = {
                name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.module.named_parameters()
            }
            with model.join():
                for step in range(2 + rank):
                    model.zero_grad()
                    backward(model, rank, step)
                    if rank == world_size - 1:
                        for name, gradient in gradients(model).items():
                            received[name] += gradient
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
        model = wrapped(lambda: Odd().to(dtype), gradient_as_bucket_view=dtype == torch.float16)
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
    model = wrapped(Odd)
    with compress(model, sparsity=0.9) as handle:
        received = dict.fromkeys(given, 0)
        for step, scale in enumerate((1.0, 1024.0, 1024.0, 8.0)):
            handle.loss_scale(scale)
            model.zero_grad()
            backward(model, rank, step, scale)
            for name, gradient in gradients(model).items():
                received[name] = received[name] + gradient.double() / scale
        unit = handle.state.units["buckets"]
        unit.scale_residuals(1 / 8)
        check_conserved(handle, received, given)


def nonfinite(rank, world_size):
    """A step that one rank spoils comes out spoilt on all of them, and leaves residuals alone."""
    model = wrapped(Odd)
    with compress(model, sparsity=0.9) as handle:
        for step in range(2):
            backward(model, rank, step)
        before = handle.state.units["buckets"].residuals_on_the_wire()
        model.zero_grad()
        x, y = batch_of(rank)
        loss_of(model, (x * float("inf") if rank == 0 else x, y)).backward()
        for name, gradient in gradients(model).items():
            assert not gradient.isfinite().all(), name
        after = handle.state.units["buckets"].residuals_on_the_wire()
        assert before and all(torch.equal(before[name], after[name]) for name in before)
        assert len(handle.stats()["nonfinite_units"]) == len(buckets_of(handle))


def hooks_of_users(rank, world_size):
    """register_comm_hook() as torch's documentation has it, with torch's own wrappers around the hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    import tagc.torch as tagc

    expected = full_gradients(Odd, world_size)
    model = wrapped(Odd)
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
        model = wrapped(Odd)
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
    model = wrapped(Odd)
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
        model = wrapped(Odd)
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
        model = wrapped(Odd)
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


def training(rank, world_size):
    """Falls behind by the time that values are held back, and no further."""

    def train(options, n_steps=60):
        model = wrapped(Even, small_buckets=False)
        handle = compress(model, **options) if options is not None else None
        groups = (
            handle.param_groups(betas=(0.9, 0.99)) if handle and options["sparsity"] else model.parameters()
        )
        optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.99))
        losses = []
        for step in range(n_steps):
            loss = loss_of(model, batch_of(rank, step % 2))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        for name, parameter in model.named_parameters():
            check_alike(parameter, name)
        losses = sum_over_ranks(torch.stack(losses)) / world_size
        return losses[0].item(), losses[-4:].mean().item()

    first, dense = train(None)
    assert dense < 0.2 * first, (first, dense)
    for options in (
        dict(sparsity=0),
        dict(sparsity=0.9, layers="non-attention-linear" if world_size == 2 else "all"),
    ):
        _, loss = train(options)
        assert loss < dense + (0.25 if options["sparsity"] else 1e-4) * (first - dense), (
            options,
            first,
            dense,
            loss,
        )


# ---- errors ----


def misuse(rank, world_size):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel.distributed import _MixedPrecision

    import tagc.torch as tagc

    model = wrapped(Odd)
    check_error(
        lambda: compress(model, sparsity=0.5 + 0.1 * rank), r"sparsity is 0.5 on rank 0 and 0.6 on rank 1"
    )
    check_error(
        lambda: compress(model, sparsity=2 if rank == 1 else 0),
        r"rank 1: sparsity is 2, must be a number from 0 to 1",
    )
    check_error(
        lambda: compress(model, layers=lambda name, p: "dense" if rank else "compressed"),
        "do not agree on parameters",
    )
    handle = compress(model)
    check_error(lambda: compress(model), "compressed already: close")
    backward(model, rank)
    handle.close()
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)  # by torch's own all-reduce, whose hook DDP does not let go
        check_equal(gradients(model), full_gradients(Odd, world_size))
    model.zero_grad()
    with compress(model, sparsity=0):
        backward(model, rank)
        check_equal(gradients(model), full_gradients(Odd, world_size))
    model = wrapped(Odd)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    check_error(lambda: compress(model), r"has a communication hook already \(allreduce_hook\)")
    # DDP's own needs a driver in a build for CUDA
    if torch.version.cuda is None or torch.cuda.is_available():
        model = wrapped(Odd, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
        check_error(lambda: compress(model), "which its mixed_precision needs: use torch.autocast")
    model = wrapped(Odd)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    check_error(lambda: compress(model), "DDP does not take a communication hook")
    check_error(lambda: tagc.ddp_state(nn.Linear(3, 3)), "model is a Linear")
    model = wrapped(Odd)
    model.register_comm_hook(None, tagc.ddp_hook)
    check_error(lambda: backward(model, rank), "state is a NoneType, must be what ddp_state")


def failures_and_after(rank, world_size):
    """An exchange that cannot be is the same error everywhere; the next backward pass works."""
    import tagc.torch as tagc

    model, is_odd = wrapped(Odd), [True]
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
        model = wrapped(Unusual, small_buckets=False)
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
    other_buckets_stay,
    sparsity_zero,
    conservation,
    parameters_that_differ,
    unused_for_a_while,
    frozen_before_compress,
    accumulation,
    uneven_inputs,
    half_precision,
    loss_scale,
    nonfinite,
    hooks_of_users,
    overlap,
    misuse,
    failures_and_after,
    left_to_torch,
    copies,
    end_of_life,
    training,
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp(world_size):
    ranks.run_each(CHECKS, world_size)


def loss_of_a_rank(rank, world_size, folder, dies, transport):
    model = wrapped(Odd)
    compress(model, timeout_s=4, transport=transport)
    for step in range(2):
        backward(model, rank)
    loss = loss_of(model, batch_of(rank))
    lose_a_rank(rank, world_size, folder, dies, loss.backward)


@pytest.mark.slow  # the C tests of lost ranks run under the sanitizers
@pytest.mark.parametrize("transport", ["native", "gloo"])
@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_is_gone_is_an_error_on_the_others(tmp_path, dies, transport):
    ranks.attempt(loss_of_a_rank, 3, str(tmp_path), dies, transport)
    check_loss_of_a_rank(3, tmp_path)


class Checkpointed(nn.Module):
    """Backward passes within the backward pass, each of which has a bucket or two; or none."""

    def __init__(self, is_reentrant, n_outside=0):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])
        self.is_reentrant, self.n_outside = is_reentrant, n_outside

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if self.is_reentrant is None or i < self.n_outside:
                x = layer(x)
            else:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.is_reentrant)
        return x


def passes_within_a_pass(rank, world_size, how, static_graph):
    """Each pass ends its step, and a failure raises in backward(), before an optimizer would step."""
    import torch.utils.checkpoint

    import tagc.torch as tagc

    for n_outside, breaks in itertools.product((0, 2), (False, True)):
        model = wrapped(
            lambda n=n_outside: Checkpointed(how, n), bucket_cap_mb=0.02, static_graph=static_graph
        )
        steps = []
        handle = compress(model, sparsity=0, on_step=lambda stats, to=steps: to.append(stats["step"]))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def backward(step):
            x = torch.randn(3, 64, generator=torch.Generator().manual_seed(9 * step + rank))
            model(x.requires_grad_()).square().mean().backward()

        for step in range(4):
            backward(step)
            assert steps == [*range(1, step + 2)], (n_outside, steps)
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


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("how", [True, False, None], ids=["reentrant", "not reentrant", "none"])
def test_passes_within_a_pass(how, static_graph):
    ranks.run(passes_within_a_pass, 2, how, static_graph)
