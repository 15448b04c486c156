"""Two at once: handles, models, optimizers, groups, threads, and the user's own collectives in the middle of
a pass, in every wrapper. Each row of JOBS is such a training. It runs with tagc and by torch alone, which
must give the same gradients; or, with values that are chosen and rounded, both models beside each other and
each alone, which must give the same bits."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")
import matrix_cells as cells
import ranks
import torch.distributed as dist
from matrix_cells import DEFAULT, EXACT, KINDS, N_STEPS, SHAPES, batch, groups, loss_of, training

# ---- the jobs: (kind, options of compress() or None, the models to train) -> {model: its tensors} ----


def of(kind, options, seeds, group=lambda seed: None, **of_model):
    return [training(kind, options, seed, group(seed), **of_model) for seed in seeds]


def found_in(trained, seeds):
    for one in trained:
        one.close()
    return {seed: one.gradients for seed, one in zip(seeds, trained)}


def in_one_pass(kind, options, seeds):
    """One model trains on what the other gives."""
    trained = of(kind, options, seeds)
    for step in range(N_STEPS):
        y = batch(dist.get_rank(), step)
        for one in trained:
            y = one.model(y)
        loss_of(y).backward()
        for one in trained:
            one.step()
    return found_in(trained, seeds)


def in_one_backward(kind, options, seeds):
    """Two forward passes and losses, one backward pass."""
    trained = of(kind, options, seeds)
    for step in range(N_STEPS):
        sum(loss_of(one.model(batch(dist.get_rank(), step))) for one in trained).backward()
        for one in trained:
            one.step()
    return found_in(trained, seeds)


def forward_forward_backward_backward(kind, options, seeds):
    trained = of(kind, options, seeds)
    for step in range(N_STEPS):
        losses = [loss_of(one.model(batch(dist.get_rank(), step))) for one in trained]
        for loss in reversed(losses):
            loss.backward()
        for one in trained:
            one.step()
    return found_in(trained, seeds)


def one_accumulates(kind, options, seeds):
    """The first exchanges every second micro-step, the other one every one."""
    trained = of(kind, options, seeds)
    for step in range(2 * N_STEPS):
        for one, seed in zip(trained, seeds):
            exchanges = seed != 1 or step % 2 == 1
            with one.exchanges(exchanges):
                one.backward(step)
            if exchanges:
                one.step()
    return found_in(trained, seeds)


def closed_and_compressed_anew(kind, options, seeds):
    """The second has a handle for a while, then torch sums, then it has another one, in the middle of the
    first one's steps."""
    trained = of(kind, options, seeds)
    for step in range(2 * N_STEPS):
        for one, seed in zip(trained, seeds):
            if seed == 2 and one.handle is not None:
                if step == 2:
                    one.close()
                elif step == 4:
                    one.compress(one.optimizer, options)
            one.backward(step)
            one.step()
    return found_in(trained, seeds)


def two_groups(kind, options, seeds):
    """Each model has a process group of its own, of all ranks, and the user a third."""
    trained = of(kind, options, seeds, group=lambda seed: groups()[seed - 1])
    for step in range(N_STEPS):
        for one in trained:
            one.backward(step)
            dist.all_reduce(torch.ones(3), group=groups()[2])
        for one in trained:
            one.step()
    return found_in(trained, seeds)


def two_threads(kind, options, seeds):
    """Each trains in a thread of its own, over a group of its own."""
    trained = of(kind, options, seeds, group=lambda seed: groups()[seed - 1])

    def train(one):
        for step in range(N_STEPS):
            one.backward(step)
            one.step()

    threads = [threading.Thread(target=train, args=(one,)) for one in trained]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found_in(trained, seeds)


def a_thread_of_the_users(kind, options, seeds):
    """It uses a group of its own all the while."""
    trained, is_over, sums = of(kind, options, seeds), threading.Event(), []

    def add_up():
        while True:
            mine = torch.tensor([float(dist.get_rank()), float(is_over.is_set())])
            dist.all_reduce(mine, group=groups()[2])
            sums.append(mine[0].item())
            time.sleep(0.002)
            if mine[1] == dist.get_world_size():  # on all ranks in the same call
                return

    groups()
    thread = threading.Thread(target=add_up)
    thread.start()
    try:
        for step in range(N_STEPS):
            for one in trained:
                one.backward(step)
                one.step()
    finally:
        is_over.set()
        thread.join()
    assert set(sums) == {sum(range(dist.get_world_size()))}, set(sums)
    return found_in(trained, seeds)


def two_optimizers(kind, options, seeds):
    """Of one model, both of which compress() gets."""

    def made(model):
        parameters = list(model.parameters())
        return Both(
            torch.optim.SGD(parameters[::2], 0.1, momentum=0.9), torch.optim.AdamW(parameters[1::2], 1e-2)
        )

    trained = [training(kind, options, seed, made=made) for seed in seeds]
    for step in range(N_STEPS):
        for one in trained:
            one.backward(step)
            one.step()
    return found_in(trained, seeds)


class Both:
    def __init__(self, *each):
        self.each = [*each]

    def step(self):
        for one in self.each:
            one.step()

    def zero_grad(self):
        for one in self.each:
            one.zero_grad()


def one_optimizer(kind, options, seeds):
    """Of two models with a handle each, whose groups have parameters of both."""
    trained = of(kind, options, seeds, made=lambda model: None)
    parameters = [p for one in trained for _, p in one.parameters()]
    groups_of_both = [{"params": parameters[::2], "lr": 1e-2}, {"params": parameters[1::2], "lr": 2e-2}]
    shared = torch.optim.AdamW(groups_of_both)
    for one in trained:
        if one.handle is not None:
            one.handle.adapt(shared)
    for step in range(N_STEPS):
        for one in trained:
            one.backward(step)
            one.note()
        shared.step()
        shared.zero_grad()
    return found_in(trained, seeds)


class Sum(torch.autograd.Function):
    """A collective of the user's, in the middle of a backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()


def with_users_collectives(install):
    def job(kind, options, seeds):
        trained, sums = of(kind, options, seeds), []

        def add_up(tensor):
            mine = tensor.detach().clone().double()
            dist.all_reduce(mine)
            sums.append(mine)

        for one in trained:
            install(one, add_up)
        for step in range(N_STEPS):
            for one in trained:
                one.backward(step)
                one.step()
        found = found_in(trained, seeds)
        return found | {"sums": sums}

    job.__name__, job.__doc__ = install.__name__, install.__doc__
    return job


@with_users_collectives
def in_backward(one, add_up):
    """Of gradients, between layers."""
    one.plain.after = lambda i, x: Sum.apply(x)


@with_users_collectives
def in_forward(one, add_up):
    def after(i, x):
        add_up(x)
        return x

    one.plain.after = after


@with_users_collectives
def in_hooks_of_tensors(one, add_up):
    def after(i, x):
        x.register_hook(add_up)
        return x

    one.plain.after = after


@with_users_collectives
def in_hooks_of_modules(one, add_up):
    def hook(module, given, got):
        add_up(got[0])

    for layer in one.plain.layers[1:]:  # whose inputs have gradients
        layer.register_full_backward_hook(hook)


@with_users_collectives
def in_hooks_of_parameters(one, add_up):
    """What the gradient is then is the wrapper's affair, but not whether ranks meet there."""
    for _, parameter in one.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: add_up(torch.ones(())))


def under_way_meanwhile(kind, options, seeds):
    """A collective of the user's that begins before the pass and is waited for after it."""
    trained, sums = of(kind, options, seeds), []
    for step in range(N_STEPS):
        for one in trained:
            mine = torch.full((1000,), float(dist.get_rank() + step))
            work = dist.all_reduce(mine, async_op=True)
            one.backward(step)
            work.wait()
            sums.append(mine)
            one.step()
    return found_in(trained, seeds) | {"sums": sums}


def clipped(kind, options, seeds):
    """By the norm of all ranks, which is a collective under FSDP2."""
    trained, norms = of(kind, options, seeds), []
    for step in range(N_STEPS):
        for one in trained:
            one.backward(step)
            if kind == "fsdp1":
                norm = one.model.clip_grad_norm_(0.01)
            else:
                norm = torch.nn.utils.clip_grad_norm_(one.model.parameters(), 0.01)
            norms.append(cells.whole(norm))
            one.step()
    return found_in(trained, seeds) | {"norms": norms}


def evaluated_between(kind, options, seeds):
    """The other model's forward pass, between the forward and the backward pass of each."""
    trained = of(kind, options, seeds)
    for step in range(N_STEPS):
        for one in trained:
            loss = loss_of(one.model(batch(dist.get_rank(), step)))
            with torch.no_grad():
                for other in trained:
                    if other is not one:
                        other.model(batch(dist.get_rank(), step + 50))
            loss.backward()
            one.step()
    return found_in(trained, seeds)


class Within(torch.autograd.Function):
    """Does something else in the middle of a backward pass."""

    @staticmethod
    def forward(ctx, x, work):
        ctx.work = work
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.work()
        return gradient, None


def a_pass_within_a_pass(kind, options, seeds):
    """All of the second model's pass, in the middle of the first one's backward pass."""
    trained = of(kind, options, seeds)
    first, rest = trained[0], trained[1:]
    for step in range(N_STEPS):

        def work(step=step):
            for one in rest:
                one.backward(step)
                one.step()

        first.plain.after = lambda i, x, work=work: Within.apply(x, work) if i == 1 else x
        first.backward(step)
        first.step()
    return found_in(trained, seeds)


TAKE_A_GROUP = {"ddp", "ddp that finds unused", "fsdp2", "replicate", "fsdp1"}
DDP = {"ddp", "ddp that finds unused"}
# job -> (kinds that it is for, None: all; whether its models do not depend on each other)
JOBS = {
    in_one_pass: (None, False),
    in_one_backward: (None, True),
    forward_forward_backward_backward: (None, True),
    one_accumulates: (None, True),
    closed_and_compressed_anew: ({*KINDS} - {"between"}, True),  # over which torch alone sums nothing
    two_groups: (TAKE_A_GROUP, True),
    two_threads: (DDP, True),  # FSDP without tagc takes one thread
    a_thread_of_the_users: (None, True),
    two_optimizers: (None, True),
    one_optimizer: (None, False),
    in_backward: (None, False),
    in_forward: (None, True),
    in_hooks_of_tensors: (None, True),
    in_hooks_of_modules: (None, True),
    in_hooks_of_parameters: ({*KINDS} - {"fsdp1"}, True),  # FSDP1 takes parameters' hooks away
    under_way_meanwhile: (None, True),
    clipped: (None, True),
    evaluated_between: (None, True),
    a_pass_within_a_pass: (None, True),
}
BY_NAME = {job.__name__: job for job in JOBS}


def all_cells(shape):
    for name, (kinds, is_independent) in ((job.__name__, about) for job, about in JOBS.items()):
        for kind in KINDS:
            if kinds is None or kind in kinds:
                yield name, kind, "exact"
                if is_independent:
                    yield name, kind, "default"


# ---- what all ranks do ----


def run_cell(cell):
    name, kind, how = cell
    job = BY_NAME[name]
    if how == "exact":
        found, expected = job(kind, EXACT, (1, 2)), job(kind, None, (1, 2))
        assert found.keys() == expected.keys()
        for key in found:
            assert len(expected[key]) >= (key != "sums"), key
            cells.check_close(found[key], expected[key], key)
        return
    both, alone = job(kind, DEFAULT, (1, 2)), [job(kind, DEFAULT, (seed,)) for seed in (1, 2)]
    for seed, one in enumerate(alone, 1):
        assert one[seed], seed
        cells.check_same_bits(both[seed], one[seed], seed)


def run_cells(rank, world_size, chosen):
    cells.run_each(rank, run_cell, chosen)


# ---- tests ----


@pytest.mark.parametrize("shape", SHAPES)
def test_two_at_once(shape):
    """A sample, in which each job meets each wrapper: test_two_at_once_long.py has the rest."""
    ranks.run(run_cells, SHAPES[shape], sample(shape))


def sample(shape):
    """Each job once, in a wrapper and a way that go round."""
    return cells.sample(all_cells(shape), [*SHAPES].index(shape))
