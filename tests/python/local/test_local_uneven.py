"""Local steps on sites that do not take the same number of steps: fewer batches, or steps that a loss scaler
skips. Exchanges are paired by what each site has come for."""

import pytest

torch = pytest.importorskip("torch")
import ranks
from models import Even, batch_of, loss_of
from test_local_steps import adamw, check_alike, flat, groups_of, seeded
from torch import nn

from tagc.local import LocalSteps

EVERYTHING = dict(sparsity=0, values="fp32", verbose=False, timeout_s=60)


def train(model, optimizer, steps, site, skipped=()):
    """Each step on a batch of its own; `skipped` as a GradScaler does."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch_of(site, step)).backward()
        if step not in skipped:
            optimizer.step()


def made(rank, **options):

    model = seeded(lambda: Even(16))
    optimizer = adamw(model.parameters())
    said = []
    handle = LocalSteps(model, optimizer, on_exchange=said.append, **{"every": 5, **EVERYTHING, **options})
    return model, optimizer, handle, said


def a_site_with_fewer_batches(rank, world_size):
    """It takes part in what is due elsewhere until the others have no more batches, too. What each site did
    is in the mean: a site that has stopped adds nothing, and takes what the others do."""
    for options, n, others in (
        ({}, 25, 23),  # the case of the last exchange, at 25, and synchronize() at 23
        ({}, 31, 12),
        ({"fragments": 2}, 25, 21),
        ({"fragments": 2, "delay": 3}, 27, 19),
        ({"delay": 4}, 24, 24),
    ):
        model, optimizer, handle, said = made(rank, **options)
        mine = n if rank == 0 else others
        train(model, optimizer, range(mine), rank)
        handle.synchronize()
        check_alike(flat(model), f"{options} after {n} and {others} batches")
        assert handle.n_steps == n, handle.n_steps
        due = {0} if len(handle.fragments) == 1 else {0, 2}
        assert len(said) == sum(step % 5 in due for step in range(1, n + 1)) + len(handle.fragments)
        # and they go on together from there
        train(model, optimizer, range(n, n + 10), rank)
        handle.synchronize()
        check_alike(flat(model), f"{options} later")
        assert handle.n_steps == n + 10
        handle.close()


def what_all_did_is_in_the_mean(rank, world_size):
    """By hand, with plain SGD: the parameters at the end are the mean of what each site would have alone
    after the last common exchange."""

    model = nn.Linear(3, 3, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = LocalSteps(model, optimizer, every=4, layers="all", **EVERYTHING)
    for _ in range(7 if rank == 0 else 2):  # each step adds rank + 1
        model.weight.grad = torch.full_like(model.weight, -(rank + 1.0))
        optimizer.step()
    handle.synchronize()
    # at site 0's fourth step: (4 + 4) / 2; then 3 more steps there: (7 + 4) / 2
    assert torch.equal(model.weight.detach(), torch.full((3, 3), 5.5)), model.weight
    handle.close()


def a_skipped_step(rank, world_size):
    """A site whose scaler skips a step takes one more batch before the exchange: each exchange is of as many
    steps on all sites."""
    for options in ({}, {"fragments": 2, "delay": 1}):
        model, optimizer, handle, said = made(rank, **options)
        train(model, optimizer, range(13), rank, skipped=(3, 11) if rank else ())
        assert handle.n_steps == (11 if rank else 13)
        handle.synchronize()
        check_alike(flat(model), f"{options}")
        assert handle.n_steps == 13
        handle.close()


def wrong_pairs_are_named(rank, world_size):
    """Sites at different steps, as by a checkpoint of another moment, and the handle still works."""
    import tagc.torch as tagc

    model, optimizer, handle, _ = made(rank)
    handle._before_step()
    handle.n_steps = 5 * rank
    words = "site 0 begins fragment 0 of step 5, and site 1 begins fragment 0 of step 10: load one checkpoint"
    with pytest.raises(tagc.Error, match=f"exchange 1 between sites: {words}") as raised:
        train(model, optimizer, range(5), rank)
    assert raised.value.status == "mismatch"
    handle.synchronize()
    check_alike(flat(model), "after a mismatch")
    handle.close()


def test_two_sites():
    ranks.run_each(
        [a_site_with_fewer_batches, what_all_did_is_in_the_mean, a_skipped_step, wrong_pairs_are_named], 2
    )


def sites_of_two(rank, world_size):
    """Ranks of a site come together; one that does not is an error on all."""

    inner, between = groups_of(rank)
    model = nn.parallel.DistributedDataParallel(seeded(lambda: Even(16)), process_group=inner)
    optimizer = adamw(model.parameters())
    with LocalSteps(model, optimizer, every=3, between=between, **EVERYTHING) as handle:
        train(model, optimizer, range(7 if rank < 2 else 4), rank)
        handle.synchronize()
        check_alike(flat(model), "all ranks")
        assert handle.n_steps == 7


@pytest.mark.slow
def test_sites_of_two():
    ranks.run(sites_of_two, 4)
