"""What newer versions of torch brought to FSDP2, each with tagc; and models as their users leave them before
compress()."""

import json
import warnings

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from models import Even, EvenBlock, Odd, batch_of, loss_of
from oracles import check_alike, check_equal, check_error, full_gradients
from test_fsdp2 import Twins
from torch.distributed.device_mesh import DeviceMesh
from wrappers import gradients, heard, wrapped

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


def since(version, what):
    """For functions that need a newer torch: None and a reason where this one is older."""
    return (
        None
        if VERSION >= tuple(map(int, version.split(".")))
        else f"torch {torch.__version__}: {what} is of {version}"
    )


# ---- as users leave them ----


def unfrozen_after_an_evaluation(rank, world_size):
    """A forward pass alone leaves the root's parameters whole, and requires_grad is then set of those."""
    import tagc.torch as tagc

    for compress_last in (False, True):
        model = wrapped("fsdp2", Even)
        model.head.weight.requires_grad_(False)
        handle = None if compress_last else tagc.compress(model, sparsity=0, verbose=False)
        with torch.no_grad():
            loss_of(model, batch_of(rank))
        model.head.weight.requires_grad_(True)
        handle = handle or tagc.compress(model, sparsity=0, verbose=False)
        loss_of(model, batch_of(rank)).backward()
        check_equal(
            gradients(model),
            full_gradients(Even, world_size),
            f"compressed {'after' if compress_last else 'before'}",
        )
        handle.close()


def nothing_deprecated(rank, world_size):
    """torch 2.13 gave collectives other names, and warns of the old ones."""
    import tagc.torch as tagc

    with heard("deprecated") as said:
        model = wrapped("fsdp2")
        with tagc.compress(model, verbose=False):
            loss_of(model, batch_of(rank)).backward()
    assert not said


class Own:
    """A user's communication, which counts."""

    n_calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, *op, async_op=False, **named):
        self.n_calls += 1
        if output_tensor.numel() > input_tensor.numel():
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
        else:
            dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=named.get("op", *op))


def what_is_a_users_own(rank, world_size):
    """It is told where tagc replaces it, and back afterwards; a gather that tagc has no use for stays.
    Parameters whose gradients no rank sums are named, too."""
    from torch.distributed.fsdp import fully_shard

    import tagc.torch as tagc

    model = wrapped("fsdp2", Even)
    reduce, gather = Own(), Own()
    model.layers[0].set_custom_reduce_scatter(reduce)
    model.layers[0].set_custom_all_gather(gather)
    for options, gathers in (({}, True), ({"parameters": "int8"}, False)):
        reduce.n_calls = gather.n_calls = 0
        with heard("not called while tagc") as texts:
            handle = tagc.compress(model, sparsity=0, verbose=False, **tagc.grouped(options))
        whats = ["reduce-scatter"] + ([] if gathers else ["all-gather"])
        assert len(texts) == (len(whats) if rank == 0 else 0), texts
        assert all(f"layers.0 has a custom {what} (Own)" in text for what, text in zip(whats, texts)), texts
        loss_of(model, batch_of(rank)).backward()
        assert reduce.n_calls == 0 and (gather.n_calls > 0) == gathers
        handle.close()
        loss_of(model, batch_of(rank)).backward()
        assert reduce.n_calls == 1 and gather.n_calls > 0
    handle, later = tagc.compress(model, sparsity=0, verbose=False), Own()
    model.layers[0].set_custom_reduce_scatter(later)  # close() does not put back what is not its own
    handle.close()
    loss_of(model, batch_of(rank)).backward()
    assert later.n_calls == 1 and reduce.n_calls == 1

    torch.manual_seed(0)
    model = Even()
    for layer in model.layers:
        fully_shard(layer)
    with heard("in no fully_shard()") as texts:
        tagc.compress(model, verbose=False).close()
    assert len(texts) == (rank == 0) and all(
        "3 trained parameters" in text and "embed.weight" in text for text in texts
    ), texts


# ---- newer versions ----


def a_group_of_its_own(rank, world_size):
    """set_separate_reduce_scatter_group() hands the hook another group of the same ranks."""
    if why := since("2.13", "set_separate_reduce_scatter_group"):
        return why
    import tagc.torch as tagc

    model = wrapped("fsdp2", Odd)
    with tagc.compress(model, sparsity=0, layers="all", verbose=False) as handle:
        model.set_separate_reduce_scatter_group()
        seen, begin = [], handle.passes.begin
        handle.passes.begin = lambda gradient: (seen.append(gradient.group), begin(gradient))[1]
        loss_of(model, batch_of(rank)).backward()
        check_equal(gradients(model), full_gradients(Odd, world_size))
        assert len(seen) == 3 and all(
            group is not dist.group.WORLD and group.size() == world_size for group in seen
        )
        assert len(handle.passes._comms) == 1, "the same ranks need no other connection"


def unused_parameters_reduced(rank, world_size):
    """With set_reduce_scatter_unused_params() a parameter without a gradient is in what comes, and nothing
    goes dense."""
    if why := since("2.13", "set_reduce_scatter_unused_params"):
        return why
    import tagc.torch as tagc

    model = wrapped("fsdp2", Twins)
    model.set_reduce_scatter_unused_params(True)
    with tagc.compress(model, sparsity=0, layers="all", verbose=False):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="tagc")
            loss_of(model, batch_of(rank)).backward()
        expected = full_gradients(Twins, world_size)
        found = gradients(model)
        check_equal({name: found[name] for name in expected}, expected)
        assert not found["other.weight"].any() and not found["other.bias"].any()


def gradients_of_two_dtypes(rank, world_size):
    """Torch 2.15 sorts what it reduces by the gradients' dtypes. What is dense arrives whole, wherever it
    lies then."""
    if why := since("2.15", "grad_dtype in FSDP2"):
        return why
    from torch.distributed.fsdp import fully_shard

    import tagc.torch as tagc

    torch.manual_seed(0)
    model = Odd()
    for layer in model.layers:
        layer.mlp.weight.grad_dtype = torch.bfloat16  # not the last one: it comes behind the others
        fully_shard(layer)
    fully_shard(model)
    with tagc.compress(
        model,
        sparsity=0.9,
        values="fp32",
        layers=lambda name, _: "compressed" if "mlp.weight" in name else "dense",
        verbose=False,
    ) as handle:
        loss_of(model, batch_of(rank)).backward()
        order = model.layers[0]._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_param_indices
        assert order != sorted(order), "this test shows nothing where the order is the usual one"
        found, expected = gradients(model), full_gradients(Odd, world_size)
        for name in expected:
            if "mlp.weight" in name:
                assert 0 < found[name].count_nonzero() < 0.3 * found[name].numel()
            else:
                torch.testing.assert_close(found[name], expected[name], rtol=2e-6, atol=1e-7, msg=name)


def ended_by_hand(rank, world_size):
    """finalize_backward() reduces what the backward pass has left: it is of the same step."""
    if why := since("2.15", "finalize_backward"):
        return why
    import tagc.torch as tagc

    model, seen = wrapped("fsdp2", Odd), []
    with tagc.compress(
        model, sparsity=0, layers="all", verbose=False, on_step=lambda stats: seen.append(stats["n_units"])
    ) as handle:
        model.set_manual_backward_finalization(True)
        for step, steps in enumerate(((0,), (1,), (2, 3))):
            for each in steps:
                model.set_requires_gradient_sync(len(steps) == 1)
                loss_of(model, batch_of(rank, each)).backward()
            model.set_requires_gradient_sync(True)
            model.finalize_backward()
            check_equal(gradients(model), full_gradients(Odd, world_size, steps=steps))
            assert handle.n_steps == step + 1 and seen == [3] * (step + 1), (handle.n_steps, seen)
            model.zero_grad()
        model.set_manual_backward_finalization(False)
        loss_of(model, batch_of(rank)).backward()
        assert handle.n_steps == 4 and seen == [3] * 4


def parameters_of_two_dtypes(rank, world_size):
    """param_dtype_override_fn leaves some parameters in fp32: FSDP2 gathers bytes then, which is no matter
    for gradients."""
    if why := since("2.15", "param_dtype_override_fn"):
        return why
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import tagc.torch as tagc

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        param_dtype_override_fn=lambda p: torch.float32 if p.numel() == 1 else None,
    )
    found = []
    for compresses in (False, True):
        model = wrapped("fsdp2", Odd, mp_policy=policy)
        if compresses:
            tagc.compress(model, sparsity=0, layers="all", verbose=False)
        loss_of(model, batch_of(rank)).backward()
        found.append(gradients(model))
    check_equal(found[1], found[0])
    with tagc.compress(
        wrapped("fsdp2", Odd, mp_policy=policy), sparsity=0, parameters="int8", verbose=False
    ) as handle:
        check_error(lambda: loss_of(handle.model, batch_of(rank)), "uint8")


def after_a_failure(rank, world_size):
    """reset_iter_state() mends a pass in whose middle an exchange failed; before torch 2.15 some gradients
    outlive it."""
    if why := since("2.15", "reset_iter_state for gradients, too,"):
        return why
    import tagc.torch as tagc

    model = wrapped("fsdp2", Even)
    with tagc.compress(model, sparsity=0, layers="all", verbose=False, timeout_s=20) as handle:
        loss_of(model, batch_of(rank)).backward()
        if rank == 1:
            model.layers[0].mlp.bias.requires_grad_(False)
        with pytest.raises(tagc.Error, match="ranks do not agree"):
            loss_of(model, batch_of(rank)).backward()
        model.layers[0].mlp.bias.requires_grad_(True)
        model.reset_iter_state()
        model.zero_grad()
        loss_of(model, batch_of(rank)).backward()
        check_equal(gradients(model), full_gradients(Even, world_size))
        assert handle.stats()["n_units"] == 3


def replicas_on_fsdp2(rank, world_size):
    """replicate() on FSDP2's base: nothing is sharded, and gradients are averaged over all ranks."""
    import tagc.torch as tagc

    model = wrapped("replicate", Odd)
    with tagc.compress(model, sparsity=0, layers="all", verbose=False) as handle:
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            loss_of(model, batch_of(rank, step)).backward()
        check_equal(gradients(model), full_gradients(Odd, world_size, steps=(0, 1, 2)))
        assert (
            handle.n_steps == 1
            and handle.stats()["n_units"] == 3
            and handle.stats()["bytes_by_leg"]["gather"] == 0
        )
        model.zero_grad()
        for module in (*model.layers, model):
            module.set_gradient_divide_factor(3.0)
        loss_of(model, batch_of(rank)).backward()
        ours = gradients(model)
    model.zero_grad()
    loss_of(model, batch_of(rank)).backward()  # torch's own again
    check_equal(ours, gradients(model))
    model = wrapped("replicate", Odd)
    exact = dict(values="fp32", residual="fp32")
    with tagc.compress(model, sparsity=0.8, layers="all", verbose=False, **tagc.grouped(exact)) as handle:
        loss_of(model, batch_of(rank)).backward()
        expected, found = full_gradients(Odd, world_size), gradients(model)
        residuals = handle.state_dict()[f"rank{rank}"]["residuals"]
        for name, mean in residuals.items():
            dist.all_reduce(mean)
            torch.testing.assert_close(
                found[name] + mean / world_size, expected[name], rtol=1e-5, atol=1e-6, msg=name
            )
            check_alike(found[name], name)
        assert any(mean.any() for mean in residuals.values())
    check_error(
        lambda: tagc.compress(model, parameters="int8", verbose=False),
        "parameters is 'int8'.*this one has replicate",
    )
    check_error(lambda: tagc.compress(model, between=dist.group.WORLD, verbose=False), "leave between out")
    found = tagc.advise(model, seconds=0.5, verbose=False)
    assert found["n_units"] == 3 and not any("parameters" in row["options"] for row in found["rows"])


def accumulates_without_all_reduce(rank, world_size):
    """set_requires_all_reduce(False), as trainers set it in all micro-steps but the last: one exchange, of
    the sum, under replicate() and with `between`."""
    import tagc.torch as tagc

    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    mesh = DeviceMesh.from_group(alone, "cpu")
    for make, options in (
        (lambda: wrapped("replicate", Odd), {}),
        (lambda: wrapped("fsdp2", Odd, mesh=mesh), {"between": dist.group.WORLD}),
    ):
        model = make()
        with tagc.compress(model, sparsity=0, layers="all", verbose=False, **tagc.grouped(options)) as handle:
            for _ in range(2):
                model.zero_grad()
                for step in range(3):
                    model.set_requires_all_reduce(step == 2)
                    loss_of(model, batch_of(rank, step)).backward()
                check_equal(gradients(model), full_gradients(Odd, world_size, steps=(0, 1, 2)))
            assert handle.n_steps == 2, handle.n_steps


def closed_while_accumulating(rank, world_size):
    """replicate(): what set_requires_all_reduce(False) holds back when compress() or close() is called in the
    middle of an accumulation is summed with the rest, by whoever sums then."""
    import tagc.torch as tagc

    model, handle = wrapped("replicate", Odd), None
    for close_at in (None, 1, None, 2):  # compress() before the second micro-step, close() before that one
        model.zero_grad()
        for step in range(3):
            model.set_requires_all_reduce(step == 2)
            if step == 1 and handle is None:
                handle = tagc.compress(model, sparsity=0, layers="all", verbose=False)
            elif step == close_at:
                handle.close()
                handle = None
            loss_of(model, batch_of(rank, step)).backward()
        check_equal(gradients(model), full_gradients(Odd, world_size, steps=(0, 1, 2)), close_at)


def one_rank_per_host(rank, world_size):
    """Replicas of one shard each, as a script for several GPUs per host makes them where hosts have one:
    torch gathers the parameters, which travel nowhere, whatever `parameters` is."""
    from torch.distributed.device_mesh import init_device_mesh

    import tagc.torch as tagc

    expected = None
    for wire in (None, "delta4", "bf16", "lossless"):
        mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
        model = wrapped("fsdp2", Odd, mesh=mesh)
        with tagc.compress(model, sparsity=0.8, layers="all", parameters=wire, verbose=False) as handle:
            for step in range(2):
                model.zero_grad()
                loss_of(model, batch_of(rank, step)).backward()
            found, stats = gradients(model), handle.stats()
        assert stats["bytes_by_leg"]["values"] and not stats["bytes_by_leg"]["gather"]
        expected = expected or found
        check_equal(found, expected)


TWO = [
    one_rank_per_host,
    nothing_deprecated,
    unfrozen_after_an_evaluation,
    what_is_a_users_own,
    a_group_of_its_own,
    unused_parameters_reduced,
    gradients_of_two_dtypes,
    ended_by_hand,
    parameters_of_two_dtypes,
    after_a_failure,
    replicas_on_fsdp2,
    accumulates_without_all_reduce,
    closed_while_accumulating,
]


def each(rank, world_size, names):
    """Why some of these functions did not run."""
    return [f"{name}: {why}" for name in names if (why := globals()[name](rank, world_size))]


def test_on_two_ranks():
    if whys := ranks.run(each, 2, [check.__name__ for check in TWO])[0]:
        pytest.skip("; ".join(whys) + " (the others passed)")


class Experts(torch.nn.Module):
    """A block of which one half of the parameters, experts', is trained by pairs of ranks."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([EvenBlock(8), EvenBlock(8)])
        self.embed, self.head = torch.nn.Linear(7, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def gradients_of_pairs(pairs, rank):
    """Of one process that has the batches of this rank's pair."""
    torch.manual_seed(0)
    model = Experts()
    mine = next(pair for pair in pairs if rank in pair)
    sum(loss_of(model, batch_of(other)) for other in mine).div(len(mine)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def several_meshes(rank, world_size):
    """shard_placement_fn may put parameters of one module on other meshes; each is exchanged over its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    import tagc.torch as tagc
    from tagc.torch import checkpoint

    whole = init_device_mesh("cpu", (world_size,))
    pair = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("expert", "shard"))["shard"]
    infos = [FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in (whole, pair)]

    def make():
        torch.manual_seed(0)
        model = Experts()
        experts = {p for layer in model.layers for p in layer.mlp.parameters()}
        for layer in model.layers:
            fully_shard(
                layer,
                mesh=whole,
                shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), infos[p in experts]),
            )
        fully_shard(model, mesh=whole)
        return model

    def check(model, what):
        expected = full_gradients(Experts, world_size)
        of_pair = gradients_of_pairs([(0, 1), (2, 3)], rank)
        expected |= {name: of_pair[name] for name in expected if ".mlp." in name}
        check_equal(gradients(model), expected, what)

    model = make()
    loss_of(model, batch_of(rank)).backward()
    check(model, "of torch")
    for options in ({}, {"parameters": "fp32"}):
        model.zero_grad()
        with tagc.compress(model, sparsity=0, layers="all", verbose=False, **tagc.grouped(options)) as handle:
            loss_of(model, batch_of(rank)).backward()
            check(model, "of tagc")
            assert handle.stats()["n_units"] == 5 and {
                "layers.1, mesh 1 of 2",
                "layers.1, mesh 2 of 2",
            } <= set(handle.state.units)
    model.zero_grad()
    with tagc.compress(model, sparsity=0.9, layers="all", verbose=False) as handle:
        for step in range(3):
            loss_of(model, batch_of(rank, step)).backward()
        saved = handle.state_dict()
        handle.load_state_dict(saved)
        assert set(next(iter(saved.values()))["residuals"]) == {name for name, _ in model.named_parameters()}
        (entry,), fewer = saved.values(), []
        for other in range(2):
            about = json.loads(entry[checkpoint.ABOUT]) | {
                "rank": other,
                "replica": other,
                "world_size": 2,
                "replicas": 2,
            }
            fewer.append({f"rank{other}": entry | {checkpoint.ABOUT: json.dumps(about)}})
        check_error(
            lambda: handle.load_state_dict(fewer),
            "saved by 2 ranks, and there are 4 now; .* averaged over other ranks",
        )
    found = tagc.advise(model, seconds=0.5, verbose=False)
    assert found["n_units"] == 5 and found["world_size"] == 4
    model.zero_grad()
    loss_of(model, batch_of(rank)).backward()
    check(model, "of torch again")


@pytest.mark.slow
@pytest.mark.skipif(
    VERSION < (2, 12), reason=f"torch {torch.__version__}: modules of several meshes are of 2.12"
)
def test_several_meshes():
    ranks.run(several_meshes, 4)
