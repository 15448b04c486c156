"""LocalSteps as all of tagc: names of parameters, memory, time-outs, errors, and with compress() inside a
site."""

import datetime

import pytest

torch = pytest.importorskip("torch")
import ranks
import test_names
import torch.distributed as dist
from models import Even, Odd, batch_of, loss_of
from oracles import check_error
from test_arrivals import one_does_not_call
from test_engines import deepspeed_engine
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from wrappers import wrapped

from tagc.local import LocalSteps


def local_steps_know_them_apart(rank, world_size):
    model = test_names.wrapped("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSteps(model, optimizer, every=2, verbose=False) as handle:
        test_names.steps(model, rank, 3, optimizer)
        saved = handle.state_dict()[f"rank{rank}"]
        assert set(saved["anchor"]) == test_names.NAMES
        assert not torch.equal(saved["anchor"]["weight"], saved["anchor"]["module.weight"])


def equal_names_are_refused(rank, world_size):
    plain = test_names.wrapped("plain", name="_orig_mod")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    check_error(lambda: LocalSteps(plain, optimizer, verbose=False), "two parameters are called weight")


def completion(rank, world_size):
    """What users call is offered, and not what tagc's own modules share."""
    model = Even()
    with LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False) as handle:
        offered = {name for name in dir(handle) if not name.startswith("_")}
    assert {"synchronize", "stats", "state_dict", "close", "n_steps"} <= offered
    assert not {"flying", "fragments", "lock", "site", "land"} & offered


def other_kinds_are_refused(rank, world_size):
    """Models that exchange in every backward pass."""
    for stage in (0, 3):
        for model in deepspeed_engine(stage):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            check_error(lambda: LocalSteps(model, optimizer), "in an engine of DeepSpeed")
    model = FullyShardedDataParallel(Even(), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    check_error(lambda: LocalSteps(model, optimizer), "model or between is of fsdp1.*LocalSteps takes")


def local_steps_counted(rank, world_size):
    """Anchors, momentum and the fragment under way, 12 bytes per value, are counted."""
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    n = sum(p.numel() for p in model.parameters())
    with LocalSteps(
        model, optimizer, every=2, outer_momentum=0.9, outer_lr=0.7, layers="all", verbose=False
    ) as handle:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch_of(rank, step)).backward()
            optimizer.step()
        found = handle.memory().host
        n_padded = handle.fragments[0].n_elems
        assert n <= n_padded < 1.5 * n and found.replicas == 2 * 4 * n_padded
        assert found.residual > 0 and found.transient >= 3 * 4 * n_padded, found
    assert handle.memory().total == 0


def timeouts(rank, world_size):
    """Unless it is given, the time-out is that of the group between sites."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=77))
    of_world_s = torch.distributed.default_pg_timeout.total_seconds()
    for options, given_s in (({}, None), ({"timeout_s": 5}, 5)):
        for between, wanted_s in ((None, of_world_s), (group, 77)):
            model = nn.Linear(8, 8)
            if between is not None:
                model = fully_shard(model, mesh=_alone())
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with LocalSteps(model, optimizer, between=between, verbose=False, **options) as steps:
                assert {comm._timeout_s for comm in steps._comms} == {given_s or wanted_s}


def _alone():
    """A mesh of this rank."""
    from torch.distributed.device_mesh import DeviceMesh

    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return DeviceMesh.from_group(groups[dist.get_rank()], "cpu")


def calls_of(_, options):
    model = Even()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"LocalSteps()": lambda: LocalSteps(model, optimizer, **options)}, None


def one_site_does_not_call(rank, world_size):
    one_does_not_call(rank, world_size, "plain", calls_of)


def test_two_ranks():
    ranks.run_each(
        [
            local_steps_know_them_apart,
            equal_names_are_refused,
            completion,
            other_kinds_are_refused,
            local_steps_counted,
            timeouts,
            one_site_does_not_call,
        ],
        2,
    )


def sites_of_hosts(rank, world_size):
    """Local steps between two sites of two hosts of two ranks each: within a site, gradients go in two
    levels."""
    from torch.distributed.device_mesh import init_device_mesh

    import tagc.torch as tagc

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("site", "local"))
    model = wrapped("fsdp2", Odd, mesh=mesh["local"])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    every = dict(sparsity=0, values="fp32", layers="all", verbose=False)
    with (
        tagc.compress(model, hosts=2, **every) as handle,
        LocalSteps(model, optimizer, every=2, between="site", **every) as local,
    ):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch_of(rank, step)).backward()
            optimizer.step()
        assert local.n_exchanges == 2 and handle.n_steps == 4 and handle.stats()["ranks_per_host"] == 2
        torch.manual_seed(0)
        sites = [Odd(), Odd()]
        sites[1].load_state_dict(sites[0].state_dict())
        for step in range(4):
            for site, one in enumerate(sites):
                losses = [loss_of(one, batch_of(4 * site + place, step)) for place in range(4)]
                parameters = list(one.parameters())
                for p, gradient in zip(parameters, torch.autograd.grad(sum(losses) / 4, parameters)):
                    p.data -= 0.05 * gradient
            if step % 2:
                for p, q in zip(sites[0].parameters(), sites[1].parameters()):
                    p.data = (p.data + q.data) / 2
                    q.data = p.data.clone()
        expected = dict(sites[0].named_parameters())
        for name, parameter in model.named_parameters():
            found = parameter.full_tensor().detach()
            torch.testing.assert_close(found, expected[name].detach(), rtol=1e-4, atol=1e-6, msg=name)


def test_sites_of_hosts():
    ranks.run(sites_of_hosts, 8)
