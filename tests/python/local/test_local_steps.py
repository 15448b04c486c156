"""LocalSteps against a simulation in one process, in plain torch: every site's replica, the schedule,
torch.optim.SGD as the outer step, and top-k by sorting."""

import copy
import io
import pathlib
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import ranks
import torch.distributed as dist
from models import Even, Odd, Tied, batch_of, loss_of
from oracles import check_alike, check_error
from torch import nn

from tagc.local import LocalSteps
from tagc.torch.hooks import kinds

LR = 3e-2


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=LR)


def seeded(make_model, seed=0):
    torch.manual_seed(seed)
    return make_model()


def train(model, optimizer, steps, batch_rank, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(batch_rank, step)).backward()
        optimizer.step()


# ---- the simulation ----


class Mean:
    """Every value of every site arrives."""

    def kept(self, name, site, like):
        return torch.zeros_like(like)

    def __call__(self, name, deltas):
        return torch.stack(deltas).double().mean(0).float()


class TopK:
    """Of each tensor, padded and cut into a row for each site, the largest of each row go to the site that
    owns it. That adds them to its own row, and sends back the largest 2.4 times as many sums. What stays
    behind stays in the site's parameters, or, with a decay, comes with the next."""

    def __init__(self, sparsity, decay=1.0):
        self.sparsity, self.decay, self.residuals = sparsity, decay, {}

    def __call__(self, name, deltas):
        n_sites, n = len(deltas), deltas[0].numel()
        row = -(-n // (16 * n_sites)) * 16
        totals = torch.zeros(n_sites, n_sites, row)  # by site and row
        for site, delta in enumerate(deltas):
            totals[site].view(-1)[:n] = delta.flatten()
            if self.decay != 1:
                totals[site].view(-1)[:n] += self.residuals.get((name, site), 0)
        arrived = torch.zeros(n_sites, row)
        for owner in range(n_sites):
            for site in range(n_sites):
                if site != owner:
                    sent = largest(totals[site, owner], int(row * (1 - self.sparsity)))
                    totals[owner, owner] += sent
                    totals[site, owner] -= sent
            arrived[owner] = largest(totals[owner, owner], int(row * 2.4 * (1 - self.sparsity)))
            totals[owner, owner] -= arrived[owner]
        for site in range(n_sites):
            self.residuals[name, site] = totals[site].view(-1)[:n] * self.decay
        return (arrived.view(-1) / n_sites)[:n].view(deltas[0].shape)

    def kept(self, name, site, like):
        """Returns what the site's parameter has of what it did not send."""
        return self.residuals[name, site].view_as(like) * (self.decay == 1)


def largest(values, k):
    """Returns values with all but the k largest zeroed."""
    where = values.abs().sort(descending=True, stable=True).indices[:k]
    found = torch.zeros_like(values)
    found[where] = values[where]
    return found


def simulate(
    make_model,
    n_sites,
    steps,
    due,
    groups,
    delay=0,
    outer_lr=1.0,
    momentum=0.0,
    exchange=None,
    n_inner=1,
    make_optimizer=adamw,
):
    """Models of all sites. due: {step modulo every: index of a group}, with "every"; groups: names of the
    parameters that are exchanged together."""
    exchange = exchange or Mean()
    models = [seeded(make_model) for _ in range(n_sites)]
    optimizers = [make_optimizer(model.parameters()) for model in models]
    anchor = {
        name: p.detach().clone().requires_grad_()
        for name, p in models[0].named_parameters()
        if p.requires_grad
    }
    outer = {
        name: torch.optim.SGD([p], lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
        for name, p in anchor.items()
    }
    parameters = [dict(model.named_parameters()) for model in models]
    flying = []
    for step in range(1, steps + 1):
        for site, (model, optimizer) in enumerate(zip(models, optimizers)):
            optimizer.zero_grad()
            losses = [loss_of(model, batch_of(site * n_inner + rank, step - 1)) for rank in range(n_inner)]
            (sum(losses) / n_inner).backward()
            optimizer.step()
        if step % due["every"] in due:
            names = groups[due[step % due["every"]]]
            flying.append(
                (step, names, [{name: own[name].detach().clone() for name in names} for own in parameters])
            )
        for begun, names, then in [one for one in flying if one[0] + delay <= step]:
            flying = [one for one in flying if one[0] != begun]
            for name in names:
                anchor[name].grad = exchange(name, [anchor[name].detach() - one[name] for one in then])
                outer[name].step()
                for site, (own, one) in enumerate(zip(parameters, then)):
                    kept = exchange.kept(name, site, one[name])
                    with torch.no_grad():
                        own[name].copy_(anchor[name] + (own[name] - one[name]) - kept)
    return models


def check_close(model, expected, what=""):
    own = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    for name, p in expected.named_parameters():
        found = own[name].detach()
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(
            found, p.detach(), rtol=1e-4, atol=3e-6, msg=lambda text: f"{what} {name}: {text}"
        )


def names_of(handle):
    return [[place.trained.name for place in fragment.places] for fragment in handle.fragments]


def everything(**options):
    """Options with which every value arrives."""
    return {"sparsity": 0, "values": "fp32", "verbose": False, **options}


def flat(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


# ---- checks, each on all ranks of one spawn ----


def check_mean_and_nesterov(rank, world_size):
    """The plainest: all values, and the outer steps of torch's own SGD."""

    for outer in {}, {"outer_lr": 0.7, "outer_momentum": 0.9}:
        for layers in "all", "none":
            model = seeded(Odd)
            optimizer = adamw(model.parameters())
            with LocalSteps(model, optimizer, every=3, layers=layers, **everything(), **outer) as handle:
                train(model, optimizer, 9, rank)
                check_alike(flat(model), f"{outer} {layers}")
                assert handle.n_exchanges == 3 and handle.stats()["step"] == 9
                expected = simulate(
                    Odd,
                    world_size,
                    9,
                    {"every": 3, 0: 0},
                    names_of(handle),
                    outer_lr=outer.get("outer_lr", 1),
                    momentum=outer.get("outer_momentum", 0),
                )
            check_close(model, expected[rank], f"{outer} {layers}")


def check_top_k(rank, world_size):

    for decay in 1.0, 0.5:
        model = seeded(Odd)
        optimizer = adamw(model.parameters())
        with LocalSteps(
            model,
            optimizer,
            every=2,
            sparsity=0.75,
            values="fp32",
            layers="all",
            residual_decay=decay,
            verbose=False,
        ) as handle:
            exchange = TopK(0.75, decay)
            train(model, optimizer, 8, rank)
            check_close(
                model,
                simulate(Odd, world_size, 8, {"every": 2, 0: 0}, names_of(handle), exchange=exchange)[rank],
                f"decay {decay}",
            )
            residuals = handle.state_dict()[f"rank{rank}"]["residual"]
            for name, values in residuals.items():
                waits = exchange.residuals[name, rank].flatten() * (decay != 1)
                torch.testing.assert_close(values, waits, rtol=1e-4, atol=3e-6)
            # half of the rows are a site's own, of which 2.4 times as many sums travel
            assert 0.54 < handle.stats()["sparsity"] < 0.61, handle.stats()["sparsity"]


def check_bytes(rank, world_size):
    """What docs/guide/sites.md says that a site sends and receives, besides headers, of which each exchange
    has at most 4 and an agreement."""

    for values, bits, layers in ("int4", 4.5, "all"), ("fp32", 32, "none"), ("bf16", 16, "all"):
        model = nn.Linear(256, 256, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with LocalSteps(
            model, optimizer, every=1, sparsity=0, values=values, layers=layers, verbose=False
        ) as handle:
            for _ in range(2):
                model.weight.grad = torch.randn(256, 256)
                optimizer.step()
            stats = handle.stats()
        n, others = 256 * 256, world_size - 1
        both = 2 * n / world_size * others * bits / 8
        legs = stats["bytes_by_leg"]
        assert legs["values"] + legs["result"] == pytest.approx(both, abs=16 * world_size)
        assert stats["bytes_received"] - legs["control"] == pytest.approx(both, abs=16 * world_size)


def check_fragments_and_delay(rank, world_size):

    cases = [
        ({"every": 6, "fragments": 2, "delay": 2}, {"every": 6, 3: 0, 0: 1}),
        # several under way at once
        ({"every": 5, "fragments": 3, "delay": 4}, {"every": 5, 1: 0, 3: 1, 0: 2}),
        ({"every": 4, "delay": 1}, {"every": 4, 0: 0}),
    ]
    for options, due in cases:
        model = seeded(Odd)
        optimizer = adamw(model.parameters())
        with LocalSteps(
            model, optimizer, outer_lr=0.7, outer_momentum=0.6, **everything(**options)
        ) as handle:
            train(model, optimizer, 14, rank)
            groups = names_of(handle)
            assert sorted(sum(groups, [])) == sorted(name for name, _ in model.named_parameters())
            check_close(
                model,
                simulate(Odd, world_size, 14, due, groups, options["delay"], 0.7, 0.6)[rank],
                f"{options}",
            )
            assert (
                not options["delay"]
                or world_size == 1
                or handle.stats()["begun"] == handle.stats()["step"] - options["delay"]
            )
            handle.synchronize()
            check_alike(flat(model), f"{options} at the end")


def check_conservation(rank, world_size):
    """What arrived, times the sites, and what all of them kept are what all of them did, to the rounding of
    fp32. With 2-bit values and fragments in the air, too, and where parameters cannot hold all they keep."""

    for dtype, delay in (torch.float32, 1), (torch.bfloat16, 0):
        model = seeded(lambda: Even(64)).to(dtype)
        optimizer = adamw(model.parameters())
        start = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        # by this site's own optimizer
        moved = {name: torch.zeros_like(p) for name, p in start.items()}
        before = {}

        def note(*_):
            for name, p in model.named_parameters():
                moved[name] += p.detach().float() - before[name]

        optimizer.register_step_pre_hook(
            lambda *_: before.update(
                {name: p.detach().float().clone() for name, p in model.named_parameters()}
            )
        )
        optimizer.register_step_post_hook(note)  # before LocalSteps has its own
        with LocalSteps(
            model, optimizer, every=4, fragments=2, delay=delay, sparsity=0.95, values="int2", verbose=False
        ) as handle:
            for step in range(21):
                optimizer.zero_grad()
                loss_of(model, [tensor.to(dtype) for tensor in batch_of(rank, step)]).backward()
                optimizer.step()
            assert 0.9 < handle.stats()["sparsity"] < 0.93, handle.stats()["sparsity"]
            others = [torch.zeros_like(flat(model)) for _ in range(world_size)]
            dist.all_gather(others, flat(model))
            assert world_size == 1 or not torch.equal(*others[:2]), "sites kept nothing of their own"
            handle.synchronize()
            check_alike(flat(model), "after every value was sent")
            assert handle.stats()["sparsity"] < 0.5, handle.stats()["sparsity"]
            own = handle.state_dict()[f"rank{rank}"]
            residuals = own["residual"]
            assert {"layers.0.mlp.weight", "layers.1.out.weight"} <= set(residuals)
            assert sum(map(torch.count_nonzero, residuals.values())) > 0  # what 8 bits round off
        for name, p in start.items():
            kept = residuals.get(name, torch.zeros(p.numel())).view(p.shape)
            came = p - own["anchor"][name].view(p.shape)
            mine = torch.stack([-moved[name] - kept, came]).double()
            dist.all_reduce(mine)
            torch.testing.assert_close(
                mine[0], mine[1], rtol=0, atol=2e-5 * world_size, msg=lambda text: f"{dtype} {name}: {text}"
            )


def check_bf16(rank, world_size):
    """The anchor is fp32: what is too small for a bf16 parameter adds up in it. A parameter that no site
    changes stays what it is."""

    model = seeded(Odd).to(torch.bfloat16)
    optimizer = torch.optim.SGD([{"params": [model.scale], "lr": 0.0}, {"params": [model.mix]}], lr=1.0)
    with torch.no_grad():
        model.mix.fill_(1.0)
    with LocalSteps(model, optimizer, every=1, outer_lr=0.001, **everything()) as handle:
        for _ in range(40):
            model.mix.grad = torch.full_like(model.mix, 0.5 + rank)
            model.scale.grad = torch.ones_like(model.scale)
            optimizer.step()
        saved = handle.state_dict()[f"rank{rank}"]
        model.mix.grad.zero_()
        optimizer.step()
        assert torch.equal(handle.state_dict()[f"rank{rank}"]["anchor"]["mix"], saved["anchor"]["mix"]), (
            "moved by what bf16 rounds off"
        )
    mean = sum(0.5 + site for site in range(world_size)) / world_size
    torch.testing.assert_close(
        saved["anchor"]["mix"], torch.full((9,), 1 - 40 * 0.001 * mean), rtol=1e-3, atol=0
    )
    torch.testing.assert_close(model.mix.flatten(), saved["anchor"]["mix"].to(torch.bfloat16), rtol=0, atol=0)
    assert model.scale.item() == 1 and saved["anchor"]["scale"].item() == 1
    assert set(saved["anchor"]) == {"mix", "scale"}  # what no optimizer steps is left alone


def check_odd_parameters(rank, world_size):
    """Tied, frozen, unused; several groups and optimizers; a scheduler."""

    model = seeded(Tied)
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim == 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim != 2]
    sgd = torch.optim.SGD(others, lr=0.1)
    adam = torch.optim.AdamW([{"params": matrices[:1], "weight_decay": 0.0}, {"params": matrices[1:]}], lr=LR)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10)
    with LocalSteps(model, [sgd, adam], every=2, **everything()) as handle:
        assert not any("frozen" in name for name in sum(names_of(handle), []))
        for step in range(4):
            adam.zero_grad()
            sgd.zero_grad()
            loss_of(model, batch_of(rank, step)).backward()
            sgd.step()
            adam.step()
            scheduler.step()
        assert handle.n_steps == 4 and handle.n_exchanges == 2
        assert model.again.weight is model.back.weight
        check_alike(flat(model), "tied and frozen")
        assert adam.param_groups[0]["lr"] == pytest.approx(
            LR * (1 + torch.cos(torch.tensor(0.4 * torch.pi)).item()) / 2
        )
        model.frozen.requires_grad_(True)
        adam.add_param_group({"params": [model.frozen.weight]})
        train(model, adam, 1, rank)
        check_error(
            lambda: train(model, adam, 1, rank), "frozen.weight was not trained when LocalSteps was made"
        )


def check_resume(rank, world_size, decay=0.95):
    """Bit for bit, with fragments under way, and in either order of loading."""

    options = {
        "every": 4,
        "fragments": 2,
        "delay": 3,
        "outer_momentum": 0.5,
        "outer_lr": 0.8,
        "residual_decay": decay,
        "sparsity": 0.9,
        "layers": "all",
        "verbose": False,
    }

    def make():
        model = seeded(lambda: Even(32), seed=rank if made else 0)
        optimizer = adamw(model.parameters())
        made.append(model)
        return model, optimizer, LocalSteps(model, optimizer, **options)

    made = []
    model, optimizer, handle = make()
    train(model, optimizer, 6, rank)
    assert len(handle.flying) == 2
    file = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "tagc": handle.state_dict()}, file
    )
    train(model, optimizer, 8, rank, first=6)
    whole = handle.state_dict()[f"rank{rank}"]
    handle.close()
    for model_first in True, False:
        other, other_optimizer, again = make()
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        for what in (other, other_optimizer, again) if model_first else (again, other_optimizer, other):
            what.load_state_dict(
                saved["model" if what is other else "tagc" if what is again else "optimizer"]
            )
        reread = again.state_dict()[f"rank{rank}"]
        for kind in "anchor", "residual", "velocity":
            assert all(
                torch.equal(values, saved["tagc"][f"rank{rank}"][kind][name])
                for name, values in reread[kind].items()
            ), kind
        train(other, other_optimizer, 8, rank, first=6)
        resumed = again.state_dict()[f"rank{rank}"]
        odd = {
            f"{kind} of {name}": (values - whole[kind][name]).abs().max().item()
            for kind in ("anchor", "residual", "velocity", "delta")
            for name, values in resumed[kind].items()
            if not torch.equal(values, whole[kind][name])
        }
        assert torch.equal(flat(other), flat(model)) and not odd, (
            f"{model_first}, {(flat(other) - flat(model)).abs().max()}, {odd}"
        )
        assert resumed["about"] == whole["about"]
        again.close()


def check_bad_states(rank, world_size):
    import tagc.torch as tagc

    model = seeded(Odd)
    optimizer = adamw(model.parameters())
    with LocalSteps(model, optimizer, every=2, layers="all", verbose=False) as handle:
        train(model, optimizer, 3, rank)
        before = handle.state_dict()
        own = f"rank{rank}"

        def damaged(change):
            state = copy.deepcopy(before)
            change(state)
            return state

        for change, pattern in [
            (lambda s: s.clear(), "must be what state_dict"),
            (lambda s: s[own].update(about="{}"), "'about' is '{}'"),
            (
                lambda s: s[own].update(about=s[own]["about"].replace('"version": 1', '"version": 2')),
                "is of version 2, this tagc reads version 1",
            ),
            (lambda s: s[own]["anchor"].pop("mix"), "anchor is of other parameters .* such as mix"),
            (
                lambda s: s[own]["residual"].update(mix=torch.ones(8)),
                r"residual of mix is torch.float32 \(8,\), must be floating \(9,\)",
            ),
            (lambda s: s[own]["residual"]["mix"].fill_(float("nan")), "residual of mix is not finite"),
        ]:
            with pytest.raises(tagc.Error, match=pattern):
                handle.load_state_dict(damaged(change))
        assert str(handle.state_dict()) == str(before)
        # Of twice as many sites: each adds as much to the mean as it would have.
        about = before[own]["about"]
        before[own]["about"] = about.replace(f'"sites": {world_size}', f'"sites": {2 * world_size}')
        handle.load_state_dict(before)
        for name, values in handle.state_dict()[own]["residual"].items():
            torch.testing.assert_close(values, before[own]["residual"][name] / 2)
        handle.load_state_dict(before, residuals=False)
        assert not any(values.any() for values in handle.state_dict()[own]["residual"].values())


def check_not_finite(rank, world_size):
    """One site's parameters go bad: an Error on all, nothing changes, and the next exchange works."""

    model = seeded(lambda: Even(64))
    optimizer = adamw(model.parameters())
    with LocalSteps(model, optimizer, every=2, verbose=False) as handle:
        train(model, optimizer, 3, rank)
        before = handle.state_dict()[f"rank{rank}"]
        if rank == 1:
            with torch.no_grad():
                model.layers[0].mlp.weight[0, 0] = float("inf")
        optimizer.zero_grad()
        handle._see_gradient(None)  # a backward pass would find NaN, and the step would spread it
        check_error(optimizer.step, "rank 1: what this site adds to fragment 0 is not finite")
        after = handle.state_dict()[f"rank{rank}"]
        assert all(
            torch.equal(values, before[kind][name])
            for kind in ("anchor", "residual")
            for name, values in after[kind].items()
        )
        if rank == 1:  # as docs/guide/local.md says
            with torch.no_grad():
                for name, values in after["anchor"].items():
                    parameter = model.get_parameter(name)
                    parameter.copy_(values.view_as(parameter))
            optimizer.state.clear()
        for _ in range(2):
            handle._see_gradient(None)
            optimizer.step()
        check_alike(flat(model), "after the repair")
        assert flat(model).isfinite().all()


def check_options(rank, world_size):
    import tagc.torch as tagc

    model = seeded(Odd)
    optimizer = adamw(model.parameters())

    def make(*arguments, **options):
        return lambda: LocalSteps(*(arguments or (model, optimizer)), verbose=False, **options)

    with pytest.raises(TypeError, match=r"LocalSteps\(\) has no option 'evry': did you mean 'every'\?"):
        make(evry=30)()
    for options, pattern in [
        ({"every": 0}, "every is 0, must be a whole number from 1"),
        ({"every": 3, "fragments": 4}, "fragments is 4, must be a whole number from 1 to 3"),
        ({"every": 3, "delay": 3}, "delay is 3, must be a whole number from 0 to 2"),
        ({"fragments": 27}, "fragments is 27, and the model has 2. parameters"),
        ({"outer_momentum": 1.0}, "outer_momentum 1.0"),
        ({"residual_decay": 2}, "residual_decay is 2, must be a number from 0 to 1"),
        ({"values": "int3"}, "values is 'int3', must be one of 'fp32'"),
        ({"between": 3}, "between is 3, must be a process group"),
        ({"between": "site"}, "between is 'site', and this model has no mesh"),
        ({"on_exchange": 3}, "on_exchange is 3, must be a function"),
        ({"fragments": 2.0}, "fragments is 2.0, must be a whole number from 1 to 30"),
        ({"threads": 2.0 if rank else 2}, "rank 1: threads is 2.0, must be a whole number"),
        ({"every": 30 + rank}, "every is 30 on rank 0 and 31 on rank 1"),
    ]:
        check_error(make(**options), pattern)
    check_error(make(model, adamw(seeded(Odd).parameters())), "parameters that are not the model's")
    check_error(make(model, 3), "optimizer is a int")
    with pytest.MonkeyPatch.context() as patch:  # a kind that takes models with any `between`
        other = kinds.Kind("another kind", "wrapped", lambda _, between: between is not None, None)
        patch.setattr(kinds, "kinds", lambda: [other])
        check_error(make(between=dist.group.WORLD), "model or between is of another kind, which exchanges in")
    check_error(make(seeded(Odd).double(), adamw(seeded(Odd).double().parameters())), "not the model's")
    wrapped = nn.parallel.DistributedDataParallel(seeded(Odd))
    check_error(
        make(wrapped, adamw(wrapped.parameters())),
        f"this model is ddp over {world_size} ranks, and between is None",
    )
    check_error(
        make(wrapped, adamw(wrapped.parameters()), between=dist.group.WORLD), "are of two sites", same=False
    )
    # Sites that begin with other values are told at the first step, and nothing has changed.
    other = seeded(Odd, seed=rank)
    other_optimizer = adamw(other.parameters())
    with LocalSteps(other, other_optimizer, verbose=False):
        check_error(
            lambda: train(other, other_optimizer, 1, rank), "what sites begin with, which must be the same"
        )
        assert torch.equal(flat(other), flat(seeded(Odd, seed=rank)))
    # Closed: the loop goes on by itself.
    handle = LocalSteps(model, optimizer, every=1, verbose=False)
    check_error(make(), r"this model has LocalSteps already: close\(\) them first")
    assert "every 1 steps; direct, every value as int4; the mean of all sites; steps: 0" in repr(handle)
    handle.close()
    handle.close()
    assert "closed" in repr(handle)
    train(model, optimizer, 1, rank)
    with pytest.raises(tagc.Error, match="closed"):
        handle.synchronize()


def check_statistics(rank, world_size):
    import tagc.torch as tagc

    model, said = seeded(lambda: Even(64)), []
    optimizer = adamw(model.parameters())
    with LocalSteps(model, optimizer, every=5, fragments=2, verbose=False, on_exchange=said.append) as handle:
        counts = dict.fromkeys(("sent", "received"), 0)

        def count():
            for comm in handle._comms:
                counts["sent"] += sum(comm.bytes_sent().values())
                counts["received"] += sum(comm.bytes_received().values())

        train(model, optimizer, 1, rank)  # sites agree on what they begin with
        count()
        first = dict(counts)
        train(model, optimizer, 19, rank, first=1)
        count()
        n = sum(p.numel() for p in model.parameters())
        assert [one["fragment"] for one in said] == [0, 1] * 4 and [one["exchanges"] for one in said] == list(
            range(1, 9)
        )
        assert [one["step"] for one in said] == [2, 5, 7, 10, 12, 15, 17, 20]
        assert sum(one["n_elems"] for one in said[:2]) == n
        total = sum(one["bytes_sent"] for one in said)
        assert (
            total == counts["sent"] - 2 * first["sent"]
            and sum(one["bytes_received"] for one in said) == counts["received"] - 2 * first["received"]
        )
        assert all(one["bytes_sent"] == sum(one["bytes_by_leg"].values()) for one in said)
        assert handle.stats() == said[-1] and all(
            one["wait_s"] >= 0 and one["exchange_s"] > 0 for one in said
        )
        if world_size > 1:
            bits = 8 * total / n / 20 * world_size / (world_size - 1)
            assert said[-1]["bits_per_param_and_step"] == pytest.approx(bits)
            # both ways, 4 bits and a share of a scale, every 5 steps; the rest are headers
            assert 2 * 4.5 / 5 < bits < 2 * 4.5 / 5 * 1.2
        assert f"{said[-1]['bits_per_param_and_step']:.3g} bits per parameter and step" in repr(handle)
        assert set(tagc.flat(said[-1])) >= {"tagc/bits_per_param", "tagc/bytes_by_leg/values"}


def check_a_site_that_catches_up(rank, world_size):
    """Under torchft an exchange may give a site the number of steps of the others: then no other fragment is
    due in this step."""

    model, calls = seeded(lambda: Even(64)), []
    optimizer = adamw(model.parameters())
    with LocalSteps(model, optimizer, every=6, fragments=3, verbose=False) as handle:
        train(model, optimizer, 1, rank)

        class Managed:
            def run(self, fragment):
                calls.append(fragment.index)
                handle.n_steps += 10

        handle.managed = Managed()
        train(model, optimizer, 1, rank, first=1)
        handle.managed = None
    assert calls == [0]


def steps_that_are_none(rank, world_size):
    """torch's get_optimizer_state_dict() makes the optimizer's state by a step of its own: it counts nowhere,
    neither before training nor in a resume. Gradients that no backward pass made count."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    def made():
        model = seeded(Even)
        optimizer = adamw(model.parameters())
        return model, optimizer, LocalSteps(model, optimizer, every=5, verbose=False)

    model, optimizer, handle = made()
    get_optimizer_state_dict(model, optimizer)
    assert handle.n_steps == 0 and not handle.is_open
    train(model, optimizer, 7, rank)
    assert handle.n_steps == 7
    saved = {name: value.clone() for name, value in model.state_dict().items()}, handle.state_dict()
    handle.close()
    model, optimizer, handle = made()
    model.load_state_dict(saved[0])
    handle.load_state_dict(saved[1])
    get_optimizer_state_dict(model, optimizer)
    assert handle.n_steps == 7
    optimizer.zero_grad()
    named = list(model.parameters())
    for parameter, gradient in zip(named, torch.autograd.grad(loss_of(model, batch_of(rank, 7)), named)):
        parameter.grad = gradient
    optimizer.step()
    assert handle.n_steps == 8
    handle.close()


def residuals_are_the_ranks_own(rank, world_size):
    """Rank 0's state on all ranks: its residuals would count twice, and the others' be lost."""

    model = seeded(Even)
    optimizer = adamw(model.parameters())
    with LocalSteps(model, optimizer, every=2, verbose=False) as handle:
        train(model, optimizer, 2, rank)
        everyone = [None] * world_size
        dist.all_gather_object(everyone, handle.state_dict())
        if rank:
            check_error(
                lambda: handle.load_state_dict(everyone[0]), "has rank0, and this is rank1", same=False
            )
        handle.load_state_dict(everyone[0], residuals=False)
        handle.load_state_dict(everyone[0] | everyone[1])


def test_whose_state_and_which_steps():
    ranks.run_each((steps_that_are_none, residuals_are_the_ranks_own), 2)


def check_resume_of_kept(rank, world_size):
    check_resume(rank, world_size, decay=1.0)


TWO = [
    check_mean_and_nesterov,
    check_top_k,
    check_bytes,
    check_fragments_and_delay,
    check_conservation,
    check_bf16,
    check_odd_parameters,
    check_resume,
    check_resume_of_kept,
    check_bad_states,
    check_not_finite,
    check_options,
    check_statistics,
    check_a_site_that_catches_up,
]


def test_two_sites():
    ranks.run_each(TWO, 2)


# ---- sites of several ranks, and other numbers of them ----


def check_one_site(rank, world_size):
    """Alone: the outer step goes on, and compression keeps what it does not send."""

    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    model = seeded(Odd)
    optimizer = adamw(model.parameters())
    with LocalSteps(
        model, optimizer, every=2, fragments=2, delay=1, outer_lr=0.5, between=alone, **everything()
    ) as handle:
        train(model, optimizer, 5, 0)
        check_close(model, simulate(Odd, 1, 5, {"every": 2, 1: 0, 0: 1}, names_of(handle), 1, 0.5)[0])
        assert handle.stats()["bits_per_param"] == 0


def check_three_of_four(rank, world_size):

    three = dist.new_group([0, 1, 2])
    if rank < 3:
        model = seeded(Odd)
        optimizer = adamw(model.parameters())
        with LocalSteps(
            model,
            optimizer,
            every=2,
            sparsity=0.75,
            values="fp32",
            layers="all",
            between=three,
            verbose=False,
        ) as handle:
            train(model, optimizer, 6, rank)
            check_close(
                model, simulate(Odd, 3, 6, {"every": 2, 0: 0}, names_of(handle), exchange=TopK(0.75))[rank]
            )
            handle.synchronize()
            check_alike(flat(model), "three sites", group=three)
    dist.barrier()


def groups_of(rank):
    """(of this rank's site of two, of the ranks with its place)"""
    inner = [dist.new_group([2 * site, 2 * site + 1]) for site in range(2)][rank // 2]
    between = [dist.new_group([place, 2 + place]) for place in range(2)][rank % 2]
    return inner, between


def check_ddp_sites(rank, world_size):

    inner, between = groups_of(rank)
    for delay in 0, 2:
        model = nn.parallel.DistributedDataParallel(seeded(Odd), process_group=inner)
        optimizer = adamw(model.parameters())
        with LocalSteps(
            model,
            optimizer,
            every=3,
            delay=delay,
            outer_lr=0.7,
            outer_momentum=0.6,
            between=between,
            **everything(),
        ) as handle:
            train(model, optimizer, 8, rank)
            check_alike(flat(model), "a site", group=inner)
            expected = simulate(
                Odd, 2, 8, {"every": 3, 0: 0}, [sum(names_of(handle), [])], delay, 0.7, 0.6, n_inner=2
            )[rank // 2]
            check_close(model, expected, f"DDP, delay {delay}")
            n = sum(p.numel() for p in model.parameters())
            assert n / 2 - 30 < handle.stats()["n_elems"] < n / 2 + 30, "each rank of a site sends its half"
            handle.synchronize()
            check_alike(flat(model), "all ranks")


def check_fsdp2_sites(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "local"))
    for options, exchange in (
        ({"outer_lr": 0.7, "outer_momentum": 0.6, "delay": 1, **everything()}, None),
        ({"values": "int2", "verbose": False}, 3),
    ):
        model = seeded(Odd)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["local"])
        fully_shard(model, mesh=mesh["local"])
        optimizer = adamw(model.parameters())
        with LocalSteps(
            model,
            optimizer,
            every=3,
            fragments=2,
            between="site" if exchange is None else mesh["site"],
            **options,
        ) as handle:
            train(model, optimizer, 8, rank)
            if exchange is None:
                groups = names_of(handle)
                both = [None, None]
                dist.all_gather_object(both, groups, group=mesh["local"].get_group())
                # a rank without a shard has not the name
                groups = [list(dict.fromkeys(one + other)) for one, other in zip(*both)]
                expected = simulate(Odd, 2, 8, {"every": 3, 1: 0, 0: 1}, groups, 1, 0.7, 0.6, n_inner=2)[
                    rank // 2
                ]
                check_close(model, expected, "FSDP2")
            handle.synchronize()
            check_alike(
                torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()]), "all ranks"
            )
            assert set(handle.state_dict()) == {f"rank{rank}"}
    # One rank of one site fails, and all ranks of both raise.
    with LocalSteps(
        model, optimizer, every=1, between=mesh["site"].get_group(), layers="all", verbose=False
    ) as handle:
        handle._before_step()
        before = [p.detach().to_local().clone() for p in model.parameters()]
        if rank == 3:
            with torch.no_grad():
                next(p for p in model.parameters() if p.to_local().numel()).to_local().fill_(float("nan"))
                before = [p.detach().to_local().clone() for p in model.parameters()]
        optimizer.zero_grad()
        handle._see_gradient(None)  # as above
        check_error(optimizer.step, "not finite", same=False)
        assert all(torch.equal(p.to_local(), one) or rank == 3 for p, one in zip(model.parameters(), before))
    check_error(
        lambda: LocalSteps(model, optimizer, verbose=False),
        "this model is fsdp2 over 2 ranks, and between is None",
    )
    for wrong in "local", "host":
        check_error(
            lambda wrong=wrong: LocalSteps(model, optimizer, between=wrong, verbose=False),
            f"between is '{wrong}', must be a dimension .*: 'site'",
        )
    check_error(
        lambda: LocalSteps(model, optimizer, between=mesh, verbose=False), "between is a mesh of 2 dimensions"
    )


def check_three_levels(rank, world_size):
    """Sites of hosts of ranks, by the names of one mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("site", "host", "local"))
    model = seeded(Odd)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["host", "local"])
    fully_shard(model, mesh=mesh["host", "local"])
    optimizer = adamw(model.parameters())
    with LocalSteps(model, optimizer, every=3, between="site", **everything()) as handle:
        train(model, optimizer, 6, rank)
        assert handle.site.n_sites == 2 and handle.site.n_inner == 2
        check_close(
            model,
            simulate(Odd, 2, 6, {"every": 3, 0: 0}, names_of(handle), n_inner=2)[rank // 2],
            "three levels",
        )


@pytest.mark.slow
def test_sites_of_several_ranks():
    ranks.run_each(
        [
            check_one_site,
            check_three_of_four,
            check_bytes,
            check_ddp_sites,
            check_fsdp2_sites,
            check_three_levels,
        ],
        4,
    )


# ---- a site is lost in the middle of an exchange ----


def lose_a_site(rank, world_size, folder, dies):
    """The last site ends or falls silent when an exchange begins that the others apply two steps later."""
    import os

    import tagc.torch as tagc

    folder = pathlib.Path(folder)
    model = seeded(lambda: Even(64))
    optimizer = adamw(model.parameters())
    handle = LocalSteps(model, optimizer, every=4, delay=2, timeout_s=2, verbose=False)
    train(model, optimizer, 7, rank)
    before = handle.state_dict()[f"rank{rank}"]
    if rank == world_size - 1:
        end = time.monotonic() + 60
        while not dies and len(list(folder.iterdir())) < world_size - 1 and time.monotonic() < end:
            time.sleep(0.05)
        os._exit(7)
    begin = time.monotonic()
    said = []
    try:
        train(model, optimizer, 3, rank, first=7)
    except tagc.Error as error:
        said.append(f"{error.status}: {error}")
    said.append(f"{time.monotonic() - begin < 30}")
    after = handle.state_dict()[f"rank{rank}"]
    same = all(
        torch.equal(values, before[kind][name])
        for kind in ("anchor", "residual")
        for name, values in after[kind].items()
    )
    said.append(f"{same} {handle.n_steps} {handle.n_exchanges}")
    try:
        optimizer.step()
    except tagc.Error as error:
        said.append(f"{error.status}: {error}")
    (folder / f"{rank}.part").write_text("\n".join(said))
    (folder / f"{rank}.part").rename(folder / str(rank))
    os._exit(0)


@pytest.mark.parametrize("dies", [pytest.param(True, marks=pytest.mark.slow), False], ids=["dies", "silent"])
def test_a_lost_site(tmp_path, dies):
    ranks.attempt(lose_a_site, 3, str(tmp_path), dies)
    for rank in range(2):
        failure, in_time, kept, again = (tmp_path / str(rank)).read_text().split("\n")
        status = "transport" if dies else "timeout"
        assert failure.startswith(f"{status}: ") and "rank 2" in failure and in_time == "True", failure
        assert kept == "True 8 1"  # where they meet for the second exchange
        assert again.startswith("state: an exchange failed (") and "make LocalSteps anew" in again


# ---- pure ----


def test_fragments_are_cut_evenly():
    from tagc.local.fragments import cut

    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        sizes = torch.randint(
            1, 100, (int(torch.randint(1, 30, (), generator=generator)),), generator=generator
        ).tolist()
        n = int(torch.randint(1, len(sizes) + 1, (), generator=generator))
        ranges = cut(sizes, n)
        assert (
            [i for one in ranges for i in one] == list(range(len(sizes))) and len(ranges) == n and all(ranges)
        )
        if n <= len(sizes) // 4:
            assert max(sum(sizes[i] for i in one) for one in ranges) < sum(sizes) / n + 2 * max(sizes)


def defaults_of_torch_have_no_part(rank, world_size):
    """torch.set_default_dtype() and set_default_device(), which a user sets for the model: what tagc saves
    is fp32 in CPU memory all the same."""
    import tagc.torch as tagc

    torch.manual_seed(0)
    model = nn.Linear(96, 96)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(96, 96))
    compressed = tagc.compress(ddp, verbose=False)
    ddp(torch.ones(2, 96)).sum().backward()
    optimizer = adamw(model.parameters())
    try:
        torch.set_default_dtype(torch.bfloat16)
        handle = LocalSteps(model, optimizer, every=2, verbose=False)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 96, dtype=torch.float32) + rank).square().mean().backward()
            optimizer.step()
        torch.set_default_device("meta")
        for state in (handle.state_dict(), compressed.state_dict()):
            for named in state[f"rank{rank}"].values():
                for values in named.values() if isinstance(named, dict) else ():
                    assert values.device.type == "cpu" and not values.is_meta
        saved = handle.state_dict()
        residual = saved[f"rank{rank}"]["residual"]["weight"]
        assert residual.dtype == torch.float32 and residual.any()
        handle.load_state_dict(saved)
        compressed.load_state_dict(compressed.state_dict())
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    handle.close()
    compressed.close()


def test_defaults_of_torch():
    ranks.run(defaults_of_torch_have_no_part, 2)
