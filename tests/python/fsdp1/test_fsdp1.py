"""FSDP1 with tagc against gradients of one process over the whole batch."""

import warnings

import pytest

torch = pytest.importorskip("torch")

import ranks
import torch.distributed as dist
from models import Block, Even, EvenBlock, Odd, Tied, batch_of, loss_of
from oracles import (
    check_conserved,
    check_equal,
    check_error,
    check_loss_of_a_rank,
    full_gradients,
    lose_a_rank,
    mix_of_classes,
    sum_over_ranks,
)
from torch.utils.checkpoint import checkpoint


def wrapped(make_model, blocks=(Block, EvenBlock), **options):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(0)
    options = {"auto_wrap_policy": ModuleWrapPolicy(set(blocks)), "device_id": torch.device("cpu")} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(make_model(), **options)


def compress(model, **options):
    """With a residual that is exact, because sums are compared."""
    import tagc.torch as tagc

    return tagc.compress(
        model, **tagc.grouped({"verbose": False, "layers": "all", "residual": "fp32"} | options)
    )


def gradients(model):
    """All of them, whole, of all ranks' rows."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from tagc.torch.schedule.policy import clean_name

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {
                clean_name(name): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }


def flat_gradients(model, world_size):
    """Where parameters are not kept: the flat gradient of each instance, all ranks' rows, cut by torch's own
    metadata."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from tagc.torch.schedule.policy import clean_name

    found = {}
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            flat = module._handle.flat_param
            rows = [torch.empty_like(flat.grad) for _ in range(world_size)]
            torch.distributed.all_gather(rows, flat.grad)
            whole = rows[0] if module._handle._sharding_strategy.name == "NO_SHARD" else torch.cat(rows)
            whole = whole[: sum(flat._numels_with_padding)]
            for fqn, shape, values in zip(flat._fqns, flat._shapes, whole.split(flat._numels)):
                found[clean_name(f"{name}.{fqn}" if name else fqn)] = values.view(shape)
    return found


def backward(model, rank, step=0, scale=1.0):
    (loss_of(model, batch_of(rank, step)) * scale).backward()


def modes():
    from torch.distributed.fsdp import ShardingStrategy

    return (
        dict(use_orig_params=True),
        dict(use_orig_params=False),
        dict(use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        dict(use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD),
        dict(use_orig_params=False, sharding_strategy=ShardingStrategy.NO_SHARD),
        dict(use_orig_params=True, blocks=()),
    )


def gradients_of(model, mode, world_size):
    return gradients(model) if mode.get("use_orig_params") else flat_gradients(model, world_size)


def some(cases, world_size):
    """More ranks take more time, and the first cases are what more ranks could change."""
    return cases if world_size == 2 else cases[:2]


# ---- what all ranks do ----


def sparsity_zero(rank, world_size):
    for mode in some(modes(), world_size):
        for layers in ("all", "none", "non-attention-linear") if mode == modes()[0] else ("all",):
            model = wrapped(Odd, **mode)
            with compress(model, sparsity=0, layers=layers) as handle:
                for step in range(2):
                    model.zero_grad()
                    backward(model, rank, step)
                    check_equal(
                        gradients_of(model, mode, world_size), full_gradients(Odd, world_size, (step,)), mode
                    )
                assert handle.n_steps == handle.stats()["step"] == 2
                assert handle.stats()["n_units"] == (1 if mode.get("blocks") == () else 3)


def conservation(rank, world_size):
    n_steps = 3
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
        [(one, modes()[0]) for one in options] + [(dict(), mode) for mode in modes()[1:]], world_size
    ):
        model = wrapped(Odd, **mode)
        with compress(model, **{"sparsity": 0.9} | options) as handle:
            received = {}
            for step in range(n_steps):
                model.zero_grad()
                backward(model, rank, step)
                for name, gradient in gradients_of(model, mode, world_size).items():
                    received[name] = received.get(name, 0) + gradient.double()
            assert check_conserved(handle, received, given) > 500, "nothing was held back"


def parameters_that_differ(rank, world_size):
    """Tied, frozen and unused ones, in one flat parameter; then one that thaws."""
    given = full_gradients(Tied, world_size)
    zeros = {name: torch.zeros(p.shape) for name, p in Tied().named_parameters()}
    for sparsity in (0, 0.9):
        model = wrapped(Tied, use_orig_params=True, blocks=())
        with compress(model, sparsity=sparsity) as handle:
            backward(model, rank)
            found = gradients(model)
            assert not any(found[name].any() for name in zeros if "frozen" in name or "unused" in name)
            if sparsity:
                check_conserved(handle, zeros | found, zeros | given)
            else:
                check_equal({name: found[name] for name in given}, given)
                for parameter in model.module.frozen.parameters():
                    parameter.requires_grad_(True)
                model.zero_grad()
                backward(model, rank)
                assert gradients(model)["frozen.weight"].any()


def accumulation(rank, world_size):
    given = full_gradients(Odd, world_size, range(3))
    for mode in some(modes(), world_size)[:4]:
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
                    found = gradients_of(model, mode, world_size)
                    if sparsity:
                        check_conserved(handle, found, given)
                    else:
                        check_equal(found, given, (mode, sync_each))


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
            model = wrapped(
                Odd,
                use_orig_params=True,
                mixed_precision=MixedPrecision(param_dtype=param, reduce_dtype=reduce),
            )
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

    def look(unit, group, source, *rest):
        seen.append(source.dtype)
        exchange(unit, group, source, *rest)

    handle.passes.exchange = look
    return seen


def checkpointing(rank, world_size):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    for kind in (CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT):
        model = wrapped(Odd, use_orig_params=True)
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


def nonfinite(rank, world_size):
    """A step that one rank spoils comes out spoilt on the owners, and leaves residuals alone."""
    mode = modes()[1]
    model = wrapped(Odd, **mode)
    with compress(model, sparsity=0.9) as handle:
        backward(model, rank)
        before = {name: unit.residuals_on_the_wire() for name, unit in handle.state.units.items()}
        model.zero_grad()
        x, y = batch_of(rank)
        loss_of(model, (x * float("inf") if rank == 0 else x, y)).backward()
        for name, gradient in flat_gradients(model, world_size).items():
            assert not gradient.isfinite().all(), name
        for name, unit in handle.state.units.items():
            for parameter, values in unit.residuals_on_the_wire().items():
                assert torch.equal(values, before[name][parameter]), parameter
        assert len(handle.stats()["nonfinite_units"]) == 3


def misuse(rank, world_size):
    from torch.distributed.algorithms._comm_hooks import default_hooks

    import tagc.torch as tagc

    model = wrapped(Odd, use_orig_params=True)
    check_error(
        lambda: compress(model, sparsity=0.5 + 0.1 * rank), r"sparsity is 0.5 on rank 0 and 0.6 on rank 1"
    )
    check_error(lambda: compress(model, rules={"nothing": "dense"}), "matches no parameter")
    handle = compress(model, sparsity=0.9)
    check_error(lambda: compress(model), "compressed already: close")
    check_error(
        lambda: tagc.ddp_state(model), "ddp_state.. is for DistributedDataParallel; this model is fsdp1"
    )
    backward(model, rank)
    hook, state = model._comm_hook, model._comm_hook_state
    handle.close()
    check_error(
        lambda: hook(state, torch.zeros(8), torch.zeros(8 // world_size)), "this tagc handle is closed"
    )
    model.zero_grad()
    backward(model, rank)  # torch's own way again
    check_equal(gradients(model), full_gradients(Odd, world_size))
    with compress(model, sparsity=0):
        model.zero_grad()
        backward(model, rank)
        check_equal(gradients(model), full_gradients(Odd, world_size))
    model = wrapped(Odd)
    model.register_comm_hook(
        default_hooks.DefaultState(torch.distributed.group.WORLD), default_hooks.reduce_scatter_hook
    )
    check_error(lambda: compress(model), "the root module has a communication hook already")
    model = wrapped(Odd)
    with compress(model) as handle:
        check_error(lambda: handle.param_groups(), "use_orig_params=True")


def training(rank, world_size):
    """Falls behind by the time that values are held back, and no further."""

    def train(options, n_steps=60):
        model = wrapped(Even, use_orig_params=True)
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
        losses = sum_over_ranks(torch.stack(losses)) / world_size
        return losses[0].item(), losses[-4:].mean().item()

    first, dense = train(None)
    assert dense < 0.2 * first, (first, dense)
    for options in (
        dict(sparsity=0),
        dict(sparsity=0.9, layers="non-attention-linear" if world_size == 2 else "all"),
    ):
        _, loss = train(options)
        assert loss < dense + (0.25 if options["sparsity"] else 1e-3) * (first - dense), (
            options,
            first,
            dense,
            loss,
        )


def over_one_rank(rank, world_size):
    """FSDP1 makes hybrid sharding whose shard group has one rank into no sharding over that rank."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    import tagc.torch as tagc

    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = FullyShardedDataParallel(
            Even(),
            process_group=(alone, dist.group.WORLD),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_id=torch.device("cpu"),
        )
        tagc.compress(model, verbose=False).close()
    texts = [str(each.message) for each in said if "tagc: " in str(each.message)]
    assert len(texts) == (rank == 0), texts
    assert all(f"over 1 rank of {world_size}" in text and "HYBRID_SHARD" in text for text in texts), texts


CHECKS = [
    over_one_rank,
    sparsity_zero,
    conservation,
    parameters_that_differ,
    accumulation,
    mixed_precision,
    checkpointing,
    nonfinite,
    misuse,
    training,
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_fsdp1(world_size):
    ranks.run_each(CHECKS, world_size)


class Checkpointed(torch.nn.Module):
    """Backward passes within the backward pass, of all blocks but the first ones."""

    def __init__(self, n_outside):
        super().__init__()
        self.blocks, self.n_outside = torch.nn.ModuleList([Block(16) for _ in range(3)]), n_outside

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x) if i < self.n_outside else checkpoint(block, x, use_reentrant=True)
        return {"loss": x.square().mean()}


def passes_within_a_pass(rank, world_size):
    """Each pass ends its step."""
    for n_outside in (0, 2):
        model, steps = wrapped(lambda n=n_outside: Checkpointed(n), use_orig_params=True), []
        with compress(model, sparsity=0, on_step=lambda stats, to=steps: to.append(stats["step"])):
            for step in range(3):
                model(torch.randn(4, 16, requires_grad=True))["loss"].backward()
                assert steps == [*range(1, step + 2)], (n_outside, steps)


def test_passes_within_a_pass():
    ranks.run(passes_within_a_pass, 2)


def loss_of_a_rank(rank, world_size, folder, dies):
    from torch.distributed.fsdp import ShardingStrategy

    # no messages of torch's in backward
    model = wrapped(Odd, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    compress(model, timeout_s=4)
    backward(model, rank)
    loss = loss_of(model, batch_of(rank))
    lose_a_rank(rank, world_size, folder, dies, loss.backward)


@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_is_gone_is_an_error_on_the_others(tmp_path, dies):
    ranks.attempt(loss_of_a_rank, 3, str(tmp_path), dies)
    check_loss_of_a_rank(3, tmp_path)
