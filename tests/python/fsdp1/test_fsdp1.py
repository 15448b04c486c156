"""FSDP1 with tagc: what holds in every wrapper (wrapper_checks.py), and what is FSDP1's own."""

import pytest

torch = pytest.importorskip("torch")

import ranks
import torch.distributed as dist
import wrapper_checks
from models import Block, Even, Odd, Tied
from oracles import check_equal, check_error, check_loss_of_a_rank, full_gradients
from wrapper_checks import Checkpointed, backward, compress
from wrappers import gradients, heard, wrapped


def made(make, **options):
    return wrapped("fsdp1", make, **options)


# ---- what all ranks do ----


def thawed(rank, world_size):
    """A part of a flat parameter that is trained later."""
    model = made(Tied)
    with compress(model, sparsity=0):
        backward(model, rank)
        model.module.frozen.requires_grad_(True)
        model.zero_grad()
        backward(model, rank)
        assert gradients(model)["frozen.weight"].any()


def mixed_precision(rank, world_size):
    from torch.distributed.fsdp import MixedPrecision

    expected = full_gradients(Odd, world_size)
    for param, reduce in (
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
    ):
        found = []
        for is_compressed in (True, False):
            model = made(Odd, mixed_precision=MixedPrecision(param_dtype=param, reduce_dtype=reduce))
            handle = compress(model, sparsity=0) if is_compressed else None
            seen = spy(handle) if handle else []
            backward(model, rank)
            assert set(seen) <= {reduce} and len(seen) == (3 if handle else 0), seen
            found.append(gradients(model))
            if handle:
                handle.close()
        for name, gradient in found[0].items():
            assert gradient.dtype == torch.float32
            size = max(1e-3, expected[name].abs().max().item())
            assert (gradient - found[1][name]).abs().max() <= (
                1e-6 if reduce == torch.float32 else 2e-2
            ) * size, (name, reduce)
            assert (gradient - expected[name]).abs().max() <= 8e-2 * size, (name, param, reduce)


def spy(handle):
    """The dtype of each gradient that comes to the handle."""
    seen, exchange = [], handle.passes.exchange

    def look(gradient):
        seen.append(gradient.source.dtype)
        exchange(gradient)

    handle.passes.exchange = look
    return seen


def checkpointing(rank, world_size):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    for kind in (CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT):
        model = made(Odd)
        apply_activation_checkpointing(
            model,
            lambda module: checkpoint_wrapper(module, checkpoint_impl=kind),
            check_fn=lambda module: isinstance(module, Block),
        )
        with compress(model, sparsity=0) as handle:
            assert {p.name for p in handle.wrapper.parameters()} == {
                name for name, _ in Odd().named_parameters()
            }
            backward(model, rank)
            check_equal(gradients(model), full_gradients(Odd, world_size))
            assert handle.n_steps == 1 and handle.stats()["n_units"] == 3, (
                kind,
                handle.n_steps,
                handle.stats()["n_units"],
            )


def misuse(rank, world_size):
    from torch.distributed.algorithms._comm_hooks import default_hooks

    import tagc.torch as tagc

    model = made(Odd)
    check_error(lambda: compress(model, rules={"nothing": "dense"}), "matches no parameter")
    handle = compress(model, sparsity=0.9)
    check_error(
        lambda: tagc.ddp_state(model), "ddp_state.. is for DistributedDataParallel; this model is fsdp1"
    )
    backward(model, rank)
    hook, state = model._comm_hook, model._comm_hook_state
    handle.close()
    check_error(
        lambda: hook(state, torch.zeros(8), torch.zeros(8 // world_size)), "this tagc handle is closed"
    )
    model = made(Odd, use_orig_params=False)
    model.register_comm_hook(
        default_hooks.DefaultState(torch.distributed.group.WORLD), default_hooks.reduce_scatter_hook
    )
    check_error(lambda: compress(model), "the root module has a communication hook already")
    model = made(Odd, use_orig_params=False)
    with compress(model) as handle:
        check_error(lambda: handle.param_groups(), "use_orig_params=True")


def over_one_rank(rank, world_size):
    """FSDP1 makes hybrid sharding whose shard group has one rank into no sharding over that rank."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    import tagc.torch as tagc

    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    with heard() as texts:
        model = FullyShardedDataParallel(
            Even(),
            process_group=(alone, dist.group.WORLD),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_id=torch.device("cpu"),
        )
        tagc.compress(model, verbose=False).close()
    assert len(texts) == (rank == 0), texts
    assert all(f"over 1 rank of {world_size}" in text and "HYBRID_SHARD" in text for text in texts), texts


CHECKS = [over_one_rank, thawed, mixed_precision, checkpointing, misuse]


@pytest.mark.parametrize("world_size", [2, 4])
def test_fsdp1(world_size):
    ranks.run_each(wrapper_checks.CHECKS, world_size, "fsdp1")


def test_its_own():
    ranks.run_each(CHECKS, 2)


def passes_within_a_pass(rank, world_size):
    """Each pass ends its step."""
    for n_outside in (0, 2):
        model, steps = made(lambda n=n_outside: Checkpointed(True, n)), []
        with compress(model, sparsity=0, on_step=lambda stats, to=steps: to.append(stats["step"])):
            for step in range(3):
                model(torch.randn(4, 64, requires_grad=True)).square().mean().backward()
                assert steps == [*range(1, step + 2)], (n_outside, steps)


def test_passes_within_a_pass():
    ranks.run(passes_within_a_pass, 2)


def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path):
    ranks.attempt(wrapper_checks.loss_of_a_rank, 3, str(tmp_path), "fsdp1", True)
    check_loss_of_a_rank(3, tmp_path)
