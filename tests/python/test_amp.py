"""Loss scaling, mixed precision, accumulation, checkpointed activations, and parameters that are frozen, tied
or unused, under FSDP2, against gradients of one process over the whole batch."""

import contextlib
import dataclasses
import io

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from models import Even, batch_of, loss_of
from oracles import check_conserved, check_error, full_gradients
from torch import nn
from wrapper_checks import add
from wrappers import gradients, heard, mean_residuals, residuals_of, wrap, wrapped

OPTIONS = dict(sparsity=0.9, layers="all", residual="fp32", verbose=False)  # sums are compared exactly


# ---- gradients that get no step ----


def norm_of(model):
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def discarded(rank, world_size):
    """A batch whose gradient is 10,000 times as large gets no step. Its rest does not come with the next."""
    import tagc.torch as tagc

    for kind in ("ddp", "fsdp2"):
        for sent in (dict(sparsity=0.95), dict(sparsity=0, values="int4")):
            for discards in (True, False):
                model = wrapped(kind)
                handle = tagc.compress(model, layers="all", verbose=False, **tagc.grouped(sent))
                norms = []
                for factor in (1, 1e4, 1, 1):
                    (factor * loss_of(model, batch_of(rank))).backward()
                    norms.append(norm_of(model))
                    if factor > 1 and discards:
                        handle.discard()
                        held = [u.residuals_on_the_wire() for u in handle.state.units.values()]
                        assert not any(v.any() for unit in held for v in unit.values())
                    model.zero_grad()
                assert norms[1] > 1000 * norms[0], (kind, sent, norms)
                if discards:
                    assert max(norms[2:]) < 3 * norms[0], (kind, sent, norms)
                else:
                    assert norms[2] > 10 * norms[0], (kind, sent, norms)
                handle.close()
                check_error(handle.discard, "closed")


def no_step_between(rank, world_size):
    """Rank 0 says it once. Neither a step after each pass nor one that is skipped for a NaN is meant."""
    import tagc.torch as tagc

    about = "made no step between"
    for kind in ("ddp", "fsdp2"):
        model = wrapped(kind)
        optimizer = torch.optim.AdamW(model.parameters())
        with contextlib.redirect_stdout(io.StringIO()) as output:
            handle = tagc.compress(model, optimizer, layers="all")

            def backward(factor=1.0):
                (factor * loss_of(model, batch_of(rank))).backward()
                model.zero_grad()

            for _ in range(3):
                backward()
                optimizer.step()
            backward(float("nan"))
            backward()
            optimizer.step()
            backward(1e4)
            handle.discard()
            backward()
            optimizer.step()
            assert about not in output.getvalue()
            for _ in range(4):
                backward()
            assert output.getvalue().count(about) == (rank == 0), output.getvalue()

    def closure():
        model.zero_grad()
        loss = loss_of(model, batch_of(rank))
        loss.backward()
        return loss

    model = wrapped("ddp")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        handle = tagc.compress(model, optimizer, layers="all")
        for _ in range(2):
            optimizer.step(closure)
    assert handle.n_steps > 4 and about not in output.getvalue()


# ---- loss scale ----


def grad_scaler(rank, world_size):
    """The scale doubles after every second good step; a step with inf on one rank halves it and is
    skipped."""
    import tagc.torch as tagc

    model = wrapped("fsdp2")
    with tagc.compress(model, **tagc.grouped(OPTIONS)) as handle:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        handle.follow(scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        received, scales = {}, []
        for step in range(8):
            optimizer.zero_grad()
            x, y = batch_of(rank, step)
            if step == 4 and rank == 1:
                x = x * float("inf")
            before = mean_residuals(handle)
            scaler.scale(loss_of(model, (x, y))).backward()
            scales.append(scaler.get_scale())
            if step == 4:
                assert len(handle.stats()["nonfinite_units"]) == 3
                # rescaled, and nothing else: exact, a power of two
                for name, values in mean_residuals(handle).items():
                    assert torch.equal(values, before[name] * (scales[-1] / scales[-2])), name
            scaler.unscale_(optimizer)
            found = gradients(model)
            assert all(bool(gradient.isfinite().all()) == (step != 4) for gradient in found.values())
            if step != 4:
                add(received, found)
            scaler.step(optimizer)
            scaler.update()
        assert scales == [256.0, 256.0, 512.0, 512.0, 1024.0, 512.0, 512.0, 1024.0], scales
        expected = full_gradients(Even, world_size, [step for step in range(8) if step != 4])
        held = {name: values / handle.state.loss_scale for name, values in mean_residuals(handle).items()}
        for name, values in expected.items():
            torch.testing.assert_close(
                received[name] + held[name], values.double(), rtol=1e-4, atol=1e-5, msg=name
            )


def loss_scale_by_hand(rank, world_size):
    import tagc.torch as tagc

    model = wrapped("fsdp2")
    with tagc.compress(model, **tagc.grouped(OPTIONS)) as handle:
        for bad in (0, -1.0, float("inf"), float("nan"), "2", None, True):
            with pytest.raises(tagc.Error, match="loss scale is"):
                handle.loss_scale(bad)
        with pytest.raises(tagc.Error, match="get_scale"):
            handle.follow(3)
        handle.loss_scale(128.0)  # before there is a reducer
        received, given = {}, full_gradients(Even, world_size, range(3))
        for step, scale in enumerate((128.0, 8.0, 8.0)):
            model.zero_grad()
            handle.loss_scale(scale)
            (scale * loss_of(model, batch_of(rank, step))).backward()
            add(received, {name: 8.0 / scale * gradient for name, gradient in gradients(model).items()})
        check_conserved(handle, received, {name: 8.0 * values for name, values in given.items()})
        before = handle.state_dict()
        handle.load_state_dict(before)  # kept until there are reducers, which there are
        handle.loss_scale(16.0)
        for name, values in residuals_of(handle).items():
            assert torch.equal(values, 2 * residuals_of(before)[name]), name
        model2 = wrapped("fsdp2")
    with tagc.compress(model2, **tagc.grouped(OPTIONS)) as handle:
        handle.load_state_dict(before)
        handle.loss_scale(4.0)  # of residuals that have no reducer yet
        for name, values in residuals_of(handle).items():
            assert torch.equal(values, residuals_of(before)[name] / 2), name
        handle.loss_scale(4.0 + rank)
        with pytest.raises(tagc.Error, match="loss scale 4.0.*loss scale 5.0"):
            loss_of(model2, batch_of(rank)).backward()


# ---- precision ----


def mixed_precision(rank, world_size):
    """dtypes of parameters, reduction, sums; what comes out is what dense in one process gives, to that
    precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import tagc.torch as tagc

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    # gradients, their parameter's dtype
    follows = fp32 if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15) else None
    for dtype, reduce_dtype, rtol in (
        (bf16, fp32, 0.05),
        (bf16, bf16, 0.05),
        (bf16, None, 0.05),
        (fp16, None, 0.02),
        (fp32, fp16, 0.02),
        (fp32, fp32, 1e-5),
    ):
        for sparsity in (0, 0.9):
            mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
            torch.manual_seed(0)
            model, sums = Even(), {}
            for layer in model.layers:
                fully_shard(layer, mp_policy=mixed)
            fully_shard(model, mp_policy=dataclasses.replace(mixed, output_dtype=fp32))
            with tagc.compress(model, **tagc.grouped(OPTIONS | dict(sparsity=sparsity))) as handle:
                for step in range(2):
                    model.zero_grad()
                    loss_of(model, batch_of(rank, step)).backward()
                    add(sums, gradients(model))
                # torch halves what could overflow, on two ranks
                factor = 2.0 if (reduce_dtype or follows or dtype) == fp16 else 1.0
                held = mean_residuals(handle) if sparsity else {}
                assert all(p.grad.dtype == fp32 for p in model.parameters())
                for name, values in full_gradients(Even, world_size, range(2)).items():
                    whole = sums[name] + factor * held.get(name, 0)
                    error = (whole - values).norm() / values.norm()
                    assert error < rtol, (dtype, reduce_dtype, sparsity, name, error)


def divide_factors(rank, world_size):
    """Sums, and factors of one's own: PREMUL_SUM, which gloo itself does not have."""
    import tagc.torch as tagc

    expected = full_gradients(Even, world_size)
    for sparsity in (0, 0.9):
        model = wrapped("fsdp2")
        with tagc.compress(model, **tagc.grouped(OPTIONS | dict(sparsity=sparsity))) as handle:
            for factor, forced in ((3.0, False), (3.0, True), (float(world_size), False), (None, True)):
                for module in [model, *model.layers]:
                    module.set_force_sum_reduction_for_comms(forced)
                    if factor is not None:
                        module.set_gradient_divide_factor(factor)
                    else:
                        module._get_fsdp_state()._fsdp_param_group.gradient_divide_factor = None
                model.zero_grad()
                handle.load_state_dict(zeros(handle))
                loss_of(model, batch_of(rank)).backward()
                times = world_size / factor if factor else 1.0
                held = mean_residuals(handle) if sparsity else {}
                for name, gradient in gradients(model).items():
                    whole = gradient.double() + times * held.get(name, 0)
                    torch.testing.assert_close(
                        whole,
                        times * expected[name].double(),
                        rtol=1e-5,
                        atol=1e-6,
                        msg=f"{name} {factor} {forced}",
                    )


def zeros(handle):
    ((rank, entry),) = handle.state_dict().items()
    entry["residuals"] = {name: torch.zeros_like(values) for name, values in entry["residuals"].items()}
    return {rank: entry}


# ---- ways to run a backward pass ----


def checkpointed_activations(rank, world_size):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    import tagc.torch as tagc

    torch.manual_seed(0)
    model = Even()
    model.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)
    wrap("fsdp2", model)
    with tagc.compress(model, **tagc.grouped(OPTIONS)) as handle:
        assert "layers.1.mlp.weight" in {parameter.name for parameter in handle.wrapper.parameters()}
        loss_of(model, batch_of(rank)).backward()
        assert handle.n_steps == 1 and handle.stats()["n_units"] == 3
        found = gradients(model).items()
        found = {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in found}
        assert check_conserved(handle, found, full_gradients(Even, world_size))


# ---- parameters that are not like others ----


class Uneven(nn.Module):
    """Tied weights, and parts that are used when asked for."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(7, 24)
        self.layers = nn.ModuleList([nn.Linear(24, 24)])
        self.tied = nn.Linear(24, 24)
        self.again = nn.Linear(24, 24)
        self.again.weight = self.tied.weight
        self.twins = nn.ModuleList([nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)])
        self.single = nn.Parameter(torch.randn(25))
        self.head = nn.Linear(24, 3)
        self.used = {"single", "twin 0", "twin 1"}

    def forward(self, x):
        x = torch.tanh(self.inner(x))
        x = self.layers[0](x) + self.again(torch.tanh(self.tied(x)))
        for i in range(2):
            if f"twin {i}" in self.used:
                x = x + torch.tanh(self.twins[i](x))
        y = self.head(x)
        return y + torch.tanh(self.single[:3] * y) if "single" in self.used else y


def unlike_others(rank, world_size):
    import tagc.torch as tagc
    from tagc.torch.exchange import internals

    def expected(used, frozen=()):
        def make():
            model = Uneven()
            model.used = used
            for name in frozen:
                model.get_parameter(name).requires_grad_(False)
            return model

        return full_gradients(make, world_size)

    def check(given):
        assert set(gradients(model)) == set(given)
        assert check_conserved(handle, gradients(model), given)

    model = wrapped("fsdp2", Uneven)
    with tagc.compress(model, **tagc.grouped(OPTIONS)) as handle, heard("tagc") as said:
        everything = {"single", "twin 0", "twin 1"}
        loss_of(model, batch_of(rank)).backward()
        check(expected(everything))
        # Torch leaves one out: this unit goes dense, and its residuals stay.
        model.zero_grad()
        before = handle.state_dict()
        model.used = everything - {"twin 0"}
        loss_of(model, batch_of(rank)).backward()
        assert model.twins[0].weight.grad is None
        given = expected(model.used)
        for name, gradient in gradients(model).items():
            if not name.startswith("layers."):
                torch.testing.assert_close(gradient, given[name], rtol=1e-5, atol=1e-6, msg=name)
        after = residuals_of(handle)
        for name, values in residuals_of(before).items():
            assert torch.equal(values, after[name]) or name.startswith("layers."), name
        # Torch 2.13 gives zeros in the next pass, and the unit is compressed.
        if internals.can_reduce_unused():
            model.zero_grad()
            handle.load_state_dict(zeros(handle))
            model.used = everything - {"twin 0", "single"}
            loss_of(model, batch_of(rank)).backward()
            nothing = {"twins.0.weight": torch.zeros(24, 24), "single": torch.zeros(25)}
            check(expected(model.used) | nothing)
        # Frozen from now on: not in the gradient at all.
        model.zero_grad()
        model.used = everything
        handle.load_state_dict(zeros(handle))
        model.twins[0].weight.requires_grad_(False)
        loss_of(model, batch_of(rank)).backward()
        check(expected(everything, ["twins.0.weight"]))
        handle.load_state_dict(handle.state_dict())
    assert len(said) == (rank == 0), said
    assert all("root module" in text and "twins.0.weight" in text for text in said)


def parameter_groups(rank, world_size):
    """Every trainable parameter once, and a short first moment for the compressed ones only."""
    import tagc.torch as tagc

    model = wrapped("fsdp2")
    model.layers[0].mlp.weight.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    options = OPTIONS | dict(
        layers=lambda name, p: {"mlp": "compressed", "out": "mild"}.get(name.split(".")[-2], "dense")
    )
    with tagc.compress(model, **tagc.grouped(options)) as handle:
        groups = handle.param_groups(betas=(0.8, 0.95), weight_decay=0.1)
        found = {
            tuple(group["betas"]): {names[id(parameter)] for parameter in group["params"]} for group in groups
        }
        assert found[0.5, 0.95] == {"layers.0.mlp.bias", "layers.1.mlp.weight", "layers.1.mlp.bias"}
        assert found[0.5, 0.95] | found[0.8, 0.95] == set(names.values()) - {"layers.0.mlp.weight"}
        assert len(found) == 2 and all(group["weight_decay"] == 0.1 for group in groups)
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        loss_of(model, batch_of(rank)).backward()
        optimizer.step()
        # Groups of one's own keep their options, and each is split.
        trained = [p for p in model.parameters() if p.requires_grad]
        own = [{"params": (p for p in trained if p.ndim == 2), "weight_decay": 0.1, "betas": (0.7, 0.95)},
               {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
        groups = handle.param_groups(groups=own, betas=(0.8, 0.95), weight_decay=9, eps=1e-6)
        assert [(g["weight_decay"], g["betas"], g["eps"]) for g in groups] == [
            (0.1, (0.5, 0.95), 1e-6), (0.1, (0.7, 0.95), 1e-6), (0.0, (0.5, 0.95), 1e-6), (0.0, (0.8, 0.95),
                1e-6)]  # fmt: skip
        assert sorted(id(p) for g in groups for p in g["params"]) == sorted(map(id, trained))
        assert all(
            (names[id(p)] in found[0.5, 0.95]) == (g["betas"][0] == 0.5) for g in groups for p in g["params"]
        )
        torch.optim.AdamW(groups, lr=1e-3)
        check_error(lambda: handle.param_groups(betas=0.9), "betas is 0.9, must be two numbers")
        check_error(
            lambda: handle.param_groups(groups=model.parameters()),
            "groups: one is .*, each must be a dict with 'params'",
        )
    handle.close()  # once more does no harm
    with tagc.compress(model, **tagc.grouped(OPTIONS | dict(layers="none"))) as handle:
        assert len(handle.param_groups()) == 1


def one_nan(rank, world_size):
    """In one element of one rank's gradient. Torch has it in that element; with tagc all that travels with it
    is NaN, on all ranks, and nothing else, residuals of it stay, and the next gradient is finite."""
    import tagc.torch as tagc

    for options, n_spoilt in ((None, 1), ({}, 64 * 64), ({"sparsity": 0.9}, 64 * 64)):
        torch.manual_seed(0)
        layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
        model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.001)  # a bucket each
        handle = None if options is None else tagc.compress(model, layers="all", verbose=False, **options)
        spoils = torch.zeros(64, 64)
        layers[1].weight.register_hook(lambda gradient, spoils=spoils: gradient + spoils)
        kept = []
        for step in range(4):
            spoils[3, 5] = float("nan") if step == 2 and rank == 1 else 0
            model.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            found = [int(layer.weight.grad.isnan().sum()) for layer in layers]
            assert found == [0, n_spoilt if step == 2 else 0, 0], (options, step, found)
            if handle is not None:
                kept.append(handle.state_dict()[f"rank{rank}"]["residuals"]["1.weight"].clone())
        if handle is not None:
            assert torch.equal(kept[1], kept[2]) and not torch.equal(kept[2], kept[3])
            handle.close()


CHECKS = [
    one_nan,
    discarded,
    no_step_between,
    grad_scaler,
    loss_scale_by_hand,
    mixed_precision,
    divide_factors,
    checkpointed_activations,
    unlike_others,
    parameter_groups,
]


def test_two_ranks():
    ranks.run_each(CHECKS, 2)


def near_the_top_of_fp16(rank, world_size):
    """Gradients of up to 60,000 on all ranks: every mean is finite, as torch's is, and what rounding puts
    beyond comes later: what has come and what waits are what was given."""
    import tagc.torch as tagc

    torch.manual_seed(rank)
    assert torch.finfo(torch.float16).max == 65504
    for options in ({}, {"sparsity": 0.9}, {"residual": "fp32", "values": "int2", "sparsity": 0.5}):
        model = nn.parallel.DistributedDataParallel(nn.Linear(128, 128, bias=False).half())
        handle = tagc.compress(model, verbose=False, **tagc.grouped(options))
        given, came = torch.zeros(128, 128), torch.zeros(128, 128)
        n_saturated = 0
        for _ in range(10):
            gradient = (torch.rand(128, 128) * 12000 + 48000).half()
            model.zero_grad()
            out = model(torch.eye(128).half())  # (128, 128): the gradient is that of the weight, transposed
            torch.autograd.backward(out, gradient.t().contiguous())
            own = model.module.weight.grad
            assert own.isfinite().all(), (options, own.isinf().sum())
            came += own.float()
            gradient = gradient.float()
            dist.all_reduce(gradient)
            given += gradient / world_size
            n_saturated += handle.stats()["n_saturated"]
        assert n_saturated > 0 and handle.stats()["n_nonfinite"] == 0
        (waiting,) = mean_residuals(handle).values()
        lost = given - came - waiting
        assert lost.abs().mean() < 0.02 * given.mean() and lost.mean().abs() < 1e-3 * given.mean(), options
        handle.close()


def test_near_the_top_of_fp16():
    ranks.run(near_the_top_of_fp16, 2)


def a_scaler_that_is_not_followed(rank, world_size):
    """Rank 0 warns once that residuals keep the scale of before, unless the handle knows a scaler or a
    scale."""
    import tagc.torch as tagc

    for how in ("unknown", "scaler", "scale"):
        model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
        handle = tagc.compress(model, verbose=False)
        if how == "scaler":
            handle.follow(torch.amp.GradScaler("cpu"))
        elif how == "scale":
            handle.loss_scale(2.0)
        with heard("handle.follow(scaler)") as said:
            for factor in (1.0, float("inf"), float("inf")):
                (factor * model(torch.ones(1, 64)).sum()).backward()
        assert len(said) == (how == "unknown" and rank == 0), (how, said)
        handle.close()


def test_a_scaler_that_is_not_followed():
    ranks.run(a_scaler_that_is_not_followed, 2)
