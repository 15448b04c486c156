"""Models on meshes of several dimensions: tensor parallel, expert parallel, replicated over hosts. What
several ranks hold stays equal on them bit by bit, and all ranks decide alike, whatever each of them sees."""

import copy

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from oracles import check_alike, check_error
from torch import nn
from wrappers import local, residuals_of


def mesh_of(*names, sizes=(2, 2)):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


class Matrix(nn.Module):
    """One matrix, whose gradient is what forward() gets."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))

    def forward(self, gradient):
        weight = self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight
        return (weight * gradient).sum()


class Given(nn.Module):
    """Matrices whose gradients are given, by name; a missing one is not used."""

    def __init__(self, **shapes):
        super().__init__()
        torch.manual_seed(4)
        self.of = nn.ModuleDict({name: Matrix(*shape) for name, shape in shapes.items()})

    def forward(self, gradients):
        return sum(self.of[name](gradient) for name, gradient in gradients.items())


def noise(*key, shape):
    """Another gradient for each key."""
    seed = sum(number * 1009**i for i, number in enumerate(key))
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def split_over(matrix, mesh):
    """Cuts it along its rows over that mesh, as tensor and expert parallelism do."""
    from torch.distributed.tensor import Shard, distribute_tensor

    matrix.weight = nn.Parameter(distribute_tensor(matrix.weight.data, mesh, [Shard(0)]))


def train(model, optimizer, gradients_at, n_steps):
    for step in range(n_steps):
        optimizer.zero_grad()
        model(gradients_at(step)).backward()
        optimizer.step()


def levels_alike(handle):
    """The levels, which must be those of all ranks."""
    levels, everyone = handle.state.schedule.levels(), [None] * dist.get_world_size()
    dist.all_gather_object(everyone, levels)
    assert all(other == levels for other in everyone), everyone
    return levels


# ---- tensor parallel x FSDP2 ----


def tensor_parallel(mesh):
    from torch.distributed.fsdp import fully_shard

    model = Given(split=(96, 64), whole=(80, 64), other=(64, 80))
    split_over(model.of["split"], mesh["tp"])
    return fully_shard(model, mesh=mesh["dp"])


def tensor_parallel_gradients(mesh):
    """Of `split`, the first half is noise and the second one points one way. What is whole has the same
    gradient on both ranks that have it."""
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()

    def at(step):
        split = noise(0, shape=(48, 64)) if tp else 0.01 * noise(step, dp, 1, shape=(48, 64))
        return {
            "split": split,
            "whole": noise(step, dp, 2, shape=(80, 64)),
            "other": 3 * noise(step, dp, 3, shape=(64, 80)),
        }

    return at


def replicas_stay_equal(rank, world_size):
    """Of what is whole on both tensor-parallel ranks, these select the same values, and as many of them,
    though the halves of another matrix of their unit have other gradients."""
    import tagc.torch as tagc

    mesh = mesh_of("dp", "tp")
    for options in (dict(sparsity=0.9), dict(sparsity=0.9, gentle=True)):
        model = tensor_parallel(mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with tagc.compress(model, optimizer, verbose=False, **tagc.grouped(options)) as handle:
            n_steps = 45 if "gentle" in options else 3
            train(model, optimizer, tensor_parallel_gradients(mesh), n_steps)
            for name in ("whole", "other"):
                check_alike(local(model.of[name].weight), name, mesh["tp"].get_group())
            if "gentle" in options:
                found = levels_alike(handle)
                assert found == {"of.split.weight": 1, "of.whole.weight": 3, "of.other.weight": 3}, found
                shares = [handle.state.schedule.plan({name: 1}).sparsity for name in found]
                assert len(set(shares)) == 3, f"{shares}: this test shows nothing if shares are equal"
            assert handle.stats()["n_units"] == 1 and handle.stats()["world_size"] == 2


def classes_are_of_whole_matrices(rank, world_size):
    """A half of `split` would be below the least size of a matrix that is compressed."""
    import tagc.torch as tagc

    seen = {}
    with tagc.compress(
        tensor_parallel(mesh_of("dp", "tp")),
        layers=lambda name, p: (seen.setdefault(name, tuple(p.shape)), "dense")[1],
        verbose=False,
    ):
        assert seen["of.split.weight"] == (96, 64), seen
    with tagc.compress(tensor_parallel(mesh_of("dp", "tp")), verbose=False) as handle:
        assert "16,384 of 16,384 elements compressed" in handle.table(), handle.table()
        assert "(fsdp2, 4 ranks)" in repr(handle)


def equal_to_dense(make, gradients_at, n_steps=3):
    """With every value as it is, tagc changes nothing but the order of sums."""
    import tagc.torch as tagc

    found = []
    for compresses in (False, True):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
        handle = (
            tagc.compress(model, optimizer, sparsity=0, values="fp32", verbose=False) if compresses else None
        )
        train(model, optimizer, gradients_at, n_steps)
        found.append({name: local(p).clone() for name, p in model.named_parameters()})
        if handle is not None:
            handle.close()
    for name, dense in found[0].items():
        torch.testing.assert_close(found[1][name], dense, rtol=1e-5, atol=1e-6, msg=name)


def tensor_parallel_oracle(rank, world_size):
    mesh = mesh_of("dp", "tp")
    equal_to_dense(lambda: tensor_parallel(mesh), tensor_parallel_gradients(mesh))


def losses_count_once(rank, world_size):
    """Both tensor-parallel ranks see the same loss: together they count as one."""
    import tagc.torch as tagc
    from tagc import _library as lib

    mesh, seen = mesh_of("dp", "tp"), []
    model = tensor_parallel(mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    call = lib.call

    def spy(name, *arguments):
        if name == "tagc_schedule_see_losses":
            seen.append(arguments[1]._obj.n)
        return call(name, *arguments)

    gradients_at = tensor_parallel_gradients(mesh)
    with tagc.compress(model, optimizer, verbose=False) as handle:
        lib.call = spy
        try:
            for step in range(20):
                handle.watch(1.0 + mesh["dp"].get_local_rank())
                train(model, optimizer, lambda _: gradients_at(step), 1)
        finally:
            lib.call = call
    assert seen == [40.0], seen  # 20 steps of two data-parallel ranks


def resume_is_exact(rank, world_size, folder):
    """Saved while a window of the schedule is taken and not pooled: that of a matrix which was frozen for the
    first steps. The resumed run pools it, decides by it and ends with the same bits."""
    import tagc.torch as tagc

    mesh = mesh_of("dp", "tp")
    gradients_at = tensor_parallel_gradients(mesh)

    def make():
        model = tensor_parallel(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
        return model, optimizer, tagc.compress(model, optimizer, verbose=False)

    def steps(first, last):
        for step in range(first, last):
            model.of["other"].weight.requires_grad_(step >= 5)
            train(model, optimizer, lambda _: gradients_at(step), 1)

    def state():
        schedule = handle.state.schedule
        residuals = {name: values.clone() for name, values in residuals_of(handle).items()}
        own = {name: local(p).clone() for name, p in model.named_parameters()}
        return own, residuals, str(schedule.state()), schedule.levels(), handle.stats()["bytes_sent"]

    model, optimizer, handle = make()
    steps(0, 27)
    handle.save(folder)
    assert handle.state.schedule.state()["pending"].keys() == {"of.other.weight"}
    weights = {name: p.detach().clone() for name, p in model.state_dict().items()}
    moments = copy.deepcopy(optimizer.state_dict())
    steps(27, 47)
    whole = state()
    handle.close()
    model, optimizer, handle = make()
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    handle.load(folder)
    steps(27, 47)
    resumed = state()
    handle.close()
    assert any(values.any() for values in whole[1].values())
    for one, other in zip(whole[:2], resumed[:2], strict=True):
        assert one.keys() == other.keys()
        for name, values in one.items():
            assert torch.equal(values, other[name]), name
    assert whole[2:] == resumed[2:], (whole[2:], resumed[2:])


# ---- replicas that torch adds up, or tagc by `between` ----


def replicated_over_hosts(rank, world_size):
    """Where torch averages over replicas of the shards, or tagc does, all ranks change an Adam's beta1 at the
    same steps, though what they exchange differs."""
    from torch.distributed.fsdp import fully_shard

    import tagc.torch as tagc

    mesh = mesh_of("host", "local")
    host, place = mesh["host"].get_local_rank(), mesh["local"].get_local_rank()

    def gradients_at(step):
        steady = noise(7, shape=(80, 64))
        return {
            "one": steady if host else noise(step, place, 1, shape=(80, 64)),
            "two": noise(step, rank, 2, shape=(64, 96)),
        }

    for of_torch in (True, False):

        def make():
            model = Given(one=(80, 64), two=(64, 96))
            return fully_shard(model, mesh=mesh if of_torch else mesh["local"])

        options = {} if of_torch else {"between": mesh["host"]}
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), 0.001, foreach=False)
        with tagc.compress(model, optimizer, verbose=False, **tagc.grouped(options)) as handle:
            train(model, optimizer, gradients_at, 65)
            found = levels_alike(handle)
            assert found["of.one.weight"] == 1 < found["of.two.weight"], found
            memories = [str(sorted(handle.state.schedule.memories().items()))]
            everyone = [None] * world_size
            dist.all_gather_object(everyone, memories)
            assert all(other == memories for other in everyone) and "two" in memories[0], everyone
            for name, parameter in model.named_parameters():
                check_alike(local(parameter), name, mesh["host"].get_group())
            handle.watch(1.0)
        if of_torch:
            equal_to_dense(make, gradients_at)


def between_another_part(rank, world_size):
    """Ranks of other hosts that hold another part of the matrices."""
    from torch.distributed.fsdp import fully_shard

    import tagc.torch as tagc

    mesh = mesh_of("host", "local", "tp", sizes=(2, 1, 2))
    model = Given(split=(96, 64))
    split_over(model.of["split"], mesh["tp"])
    fully_shard(model, mesh=mesh["local"])
    wrong = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])][rank in (1, 2)]
    check_error(
        lambda: tagc.compress(model, between=wrong, verbose=False), "place in the model's mesh", same=False
    )
    right = mesh["host"].get_group()
    assert tagc.compress(model, between=right, verbose=False).wrapper.n_ranks() == 4


# ---- expert parallel ----


def expert_parallel(meshes):
    from torch.distributed.fsdp import fully_shard

    dense, experts = meshes
    model = Given(experts=(96, 64), whole=(80, 64), other=(64, 80))
    split_over(model.of["experts"], experts["ep"])
    fully_shard(model.of["experts"], mesh=experts["efsdp"])
    return fully_shard(model, mesh=dense)


def expert_parallel_gradients(rank):
    """The second half of the experts points one way, and is not used at all now and then."""
    second = rank % 2

    def at(step):
        found = {"whole": noise(step, rank, 2, shape=(80, 64)), "other": noise(step, rank, 3, shape=(64, 80))}
        if not (second and step % 3 == 1):
            found["experts"] = noise(0, shape=(48, 64)) if second else noise(step, rank, 1, shape=(48, 64))
        return found

    return at


def experts_of_other_ranks(rank, world_size):
    """Ranks that exchange what all of them have decide alike on it, whatever happens to experts that only
    some of them have; and these are exchanged over their own ranks."""
    import tagc.torch as tagc

    meshes = mesh_of("dp", sizes=(4,)), mesh_of("efsdp", "ep")
    model = expert_parallel(meshes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    with tagc.compress(
        model, optimizer, verbose=False, on_step=lambda stats: seen.append(stats["n_units"])
    ) as handle:
        train(model, optimizer, expert_parallel_gradients(rank), 65)
        found = levels_alike(handle)
        assert found["of.experts.weight"] == 1 and found["of.whole.weight"] == 3, found
        assert handle.n_steps == 65 == len(seen) and set(seen) <= {1, 2}, seen
        assert "(fsdp2, 4 ranks)" in repr(handle)
    equal_to_dense(lambda: expert_parallel(meshes), expert_parallel_gradients(rank))


class OwnExpert(nn.Module):
    """Each rank has an expert of its own name."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(64, 80)
        setattr(self, f"expert{rank}", nn.Linear(80, 64))
        self.rank = rank

    def forward(self, x):
        return getattr(self, f"expert{self.rank}")(self.shared(x))


def experts_of_one_rank(rank, world_size):
    """What only one rank has is exchanged with nobody, and the others need not have it."""
    from torch.distributed.fsdp import fully_shard

    import tagc.torch as tagc

    mesh, alone = mesh_of("dp", sizes=(2,)), mesh_of("ep", "one", sizes=(2, 1))["one"]
    found = []
    for compresses in (False, True):
        model = OwnExpert(rank)
        fully_shard(getattr(model, f"expert{rank}"), mesh=alone)
        fully_shard(model, mesh=mesh)
        if compresses:
            handle = tagc.compress(model, sparsity=0, layers="all", verbose=False)
            assert f"expert{rank}.weight" in handle.table() and "on one rank only" in handle.table()
            assert "5,200 of 10,384 elements compressed" in handle.table(), handle.table()
        for step in range(2):
            model.zero_grad()
            model(noise(step, rank, shape=(4, 64))).square().mean().backward()
        found.append({name: local(p.grad) for name, p in model.named_parameters()})
    assert handle.n_steps == 2 and handle.stats()["n_elems"] == 5200
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    handle.load_state_dict(handle.state_dict())


# ---- pipelines ----


class Stage(nn.Module):
    def __init__(self, n):
        super().__init__()
        torch.manual_seed(n)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in "ab"
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def pipeline(rank, n_stages, compresses, n_steps=3):
    """Trains stages on two pipeline ranks, each of two data-parallel ones. Returns (parameters of this rank,
    what on_step got of each of its stages, and their n_steps)."""
    from torch.distributed import pipelining
    from torch.distributed.fsdp import fully_shard

    import tagc.torch as tagc

    mesh = mesh_of("pp", "dp")
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    stages, models, optimizers, seen, handles = [], [], [], [], []
    for i in range(pp, n_stages, 2):
        model = Stage(i)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
        models.append(model)
        optimizers.append(torch.optim.SGD(model.parameters(), 0.1))
        if compresses:
            seen.append([])
            handles.append(
                tagc.compress(
                    model, sparsity=0, values="fp32", layers="all", verbose=False, on_step=seen[-1].append
                )
            )
        stages.append(
            pipelining.PipelineStage(model, i, n_stages, torch.device("cpu"), group=mesh["pp"].get_group())
        )
    schedule = pipelining.ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    for step in range(n_steps):
        x = noise(step, dp, shape=(8, 8))
        arguments, target = (x,) if pp == 0 else (), {"target": x.flip(1)} if pp == 1 else {}
        schedule.step(*arguments, **target)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    parameters = [local(p).clone() for model in models for p in model.parameters()]
    numbers = [handle.n_steps for handle in handles]
    for handle in handles:
        handle.close()
    return parameters, seen, numbers


def steps_of_a_pipeline(rank, world_size):
    """One step of the schedule is one step of each stage, with all units of the stage in it."""
    dense = pipeline(rank, 4, False)[0]
    found, seen, numbers = pipeline(rank, 4, True)
    for ours, theirs in zip(found, dense):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert numbers == [3, 3], numbers
    for stage in seen:
        assert [stats["step"] for stats in stage] == [1, 2, 3], stage
        assert {stats["n_units"] for stats in stage} == {2}, stage
        assert {stats["n_elems"] for stats in stage} == {2 * (8 * 64 * 2 + 64 + 8)}, stage


# ---- checkpoints ----


def stage_of(pp, mesh, wrap):
    """A stage whose names are those of all stages, with a residual that tells the ranks apart."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(pp)
    model = Given(one=(80, 64), two=(64, 96))
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
    if wrap == "ddp on a mesh":
        return nn.parallel.DistributedDataParallel(model, device_mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPS = ("fsdp2", "ddp", "ddp on a mesh")


def save_stages(rank, world_size, folder):
    """On 2 x 2 ranks. Returns the residuals of this one."""
    import tagc.torch as tagc

    mesh, found = mesh_of("pp", "dp"), []
    for wrap in WRAPS:
        model = stage_of(mesh["pp"].get_local_rank(), mesh["dp"], wrap)
        handle = tagc.compress(model, sparsity=0.9, verbose=False, options=tagc.Options(residual="fp32"))
        model({"one": noise(rank, 1, shape=(80, 64)), "two": noise(rank, 2, shape=(64, 96))}).backward()
        handle.save(f"{folder}/{wrap}")
        found.append(residuals_of(handle))
        handle.close()
    return found


def load_stages(rank, world_size, folder, saved):
    """Another number of data-parallel ranks gets the residuals of its own stage; other stages are refused."""
    import tagc.torch as tagc

    for sizes in ((2, 1), (2, 2), (1, 2), (1, 4), (4, 1)):
        if sizes[0] * sizes[1] != world_size:
            continue
        mesh = mesh_of("pp", "dp", sizes=sizes)
        pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        for wrap in ("fsdp2", "ddp on a mesh"):
            model = stage_of(pp, mesh["dp"], wrap)
            with tagc.compress(
                model, sparsity=0.9, verbose=False, options=tagc.Options(residual="fp32")
            ) as handle:
                if sizes[0] != 2:
                    check_error(
                        lambda: handle.load(f"{folder}/{wrap}"),
                        "of which rank 0 had place 0 of 2 of 'pp'.*no saved rank had the same",
                        same=False,
                    )
                    continue
                handle.load(f"{folder}/{wrap}")
                found = residuals_of(handle)
                # FSDP2 does not exchange over one rank: there it has no residual
                assert len(found) == (0 if wrap == "fsdp2" and sizes[1] == 1 else 2)
                for name, values in found.items():
                    own = [saved[2 * pp + other][WRAPS.index(wrap)][name] for other in range(2)]
                    expected = own[dp] if sizes[1] == 2 else sum(own) / 2
                    assert own[0].any()
                    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-7)
    mesh = mesh_of("pp", "dp", sizes=(2, world_size // 2))
    if world_size == 4:  # a process group without a mesh: the same ranks get their own again
        model = stage_of(mesh["pp"].get_local_rank(), mesh["dp"], "ddp")
        with tagc.compress(
            model, sparsity=0.9, verbose=False, options=tagc.Options(residual="fp32")
        ) as handle:
            handle.load(f"{folder}/ddp")
            for name, values in residuals_of(handle).items():
                assert torch.equal(values, saved[rank][1][name])
        mesh = mesh_of("dp", "pp")
        model = stage_of(mesh["pp"].get_local_rank(), mesh["dp"], "ddp")
        with tagc.compress(
            model, sparsity=0.9, verbose=False, options=tagc.Options(residual="fp32")
        ) as handle:
            check_error(
                lambda: handle.load(f"{folder}/ddp"),
                r"of the process group \[0, 1\], which has no mesh.*no saved rank had the same",
                same=False,
            )


def two_handles_one_folder(rank, world_size, folder):
    """Stages of one rank would overwrite each other."""
    import tagc.torch as tagc

    mesh = mesh_of("pp", "dp", sizes=(2, 1))["dp"]
    handles = [tagc.compress(stage_of(i, mesh, "fsdp2"), sparsity=0.9, verbose=False) for i in range(2)]
    for _ in range(2):
        handles[0].save(folder)
    check_error(lambda: handles[1].save(folder), "another open handle.*a folder of its own", same=False)
    handles[0].close()
    handles[1].save(folder)


CHECKS = [
    replicas_stay_equal,
    classes_are_of_whole_matrices,
    tensor_parallel_oracle,
    losses_count_once,
    replicated_over_hosts,
    between_another_part,
    experts_of_other_ranks,
    steps_of_a_pipeline,
]


@pytest.mark.slow
def test_four_ranks():
    ranks.run_each(CHECKS, 4)


@pytest.mark.slow
def test_tensor_parallel_resumes(tmp_path):
    ranks.run(resume_is_exact, 4, str(tmp_path))


@pytest.mark.slow
def test_checkpoints_of_stages(tmp_path):
    saved = ranks.run(save_stages, 4, str(tmp_path))
    ranks.run(load_stages, 4, str(tmp_path), saved)
    ranks.run(load_stages, 2, str(tmp_path), saved)


def test_experts_of_one_rank():
    ranks.run(experts_of_one_rank, 2)


def test_a_folder_for_each_handle(tmp_path):
    ranks.run(two_handles_one_folder, 2, str(tmp_path))
