"""What holds in every kind of wrapper: gradients of one process over the whole batch, with what is held
back, and torch's own where tagc is closed. Tests of a kind run these on ranks, and what is its own beside
them; those of hosts of several ranks run them with hosts=."""

import functools

import torch
import torch.distributed as dist
from models import Odd, Tied, batch_of, loss_of
from oracles import (
    check_alike,
    check_conserved,
    check_equal,
    check_error,
    full_gradients,
    lose_a_rank,
    mix_of_classes,
)
from torch import nn
from wrappers import gradients, local, mean_residuals, residuals_of, wrapped

# The first is what more ranks could change.
MODES = {
    "fsdp2": ({}, {"reshard_after_forward": False}),
    "ddp": (
        {},
        {"bucket_cap_mb": 25},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True, "static_graph": True},
    ),
    "fsdp1": (
        {},
        {"use_orig_params": False},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"sharding_strategy": "NO_SHARD"},
        {"use_orig_params": False, "sharding_strategy": "NO_SHARD"},
        {"layers": ()},
        {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)},
        {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "device_mesh": (2, 2)},
    ),
    "hsdp": ({"mesh": (2, 2)},),
}


def some(kind, hosts, n=None):
    """More ranks take more time. On hosts of several ranks long tests go through all (test_legs.py)."""
    n_ranks = dist.get_world_size()
    cases = [mode for mode in MODES[kind] if n_ranks == 4 or "device_mesh" not in mode]
    return cases[:n] if n_ranks == 2 or hosts and kind != "fsdp2" else cases[:1]


@functools.cache
def mesh_of(n_replicas, n_shards, across=False):
    """Ranks of a host are next to each other: shards are inside a host, or with `across` replicas are."""
    from torch.distributed.device_mesh import DeviceMesh

    places = torch.arange(n_replicas * n_shards)
    places = places.view(n_shards, n_replicas).t() if across else places.view(n_replicas, n_shards)
    return DeviceMesh("cpu", places.contiguous(), mesh_dim_names=("replicate", "shard"))


def made(kind, make=Odd, **mode):
    for name in ("mesh", "device_mesh"):
        if isinstance(mode.get(name), tuple):
            mode |= {name: mesh_of(*mode[name])}
    if kind == "ddp":
        mode = {"bucket_cap_mb": 0.002} | mode
    return wrapped("fsdp2" if kind == "hsdp" else kind, make, **mode)


def compress(model, **options):
    """With a residual that is exact, because sums are compared."""
    import tagc.torch as tagc

    own = {"verbose": False, "layers": "all", "residual": "fp32"}
    return tagc.compress(model, **tagc.grouped(own | options))


def backward(model, rank, step=0, scale=1.0):
    (loss_of(model, batch_of(rank, step)) * scale).backward()


def held(handle, hosts, columns=False):
    """{name: what each host has not sent}: (hosts, shape of the parameter), where FSDP2 shards over all ranks
    or over those of a host. Hosts of one rank each: of each rank. Collective."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, residuals_of(handle))
    found = {}
    for parameter in handle.wrapper.parameters():
        if parameter.name in everyone[0]:
            of_ranks = torch.stack([one[parameter.name] for one in everyone])
            if hosts < len(everyone):  # (host, place, chunks of the place in all hosts)
                n_chunks = 1 if handle.wrapper.between else hosts
                wire = of_ranks.view(hosts, len(everyone) // hosts, n_chunks, -1).transpose(1, 2).flatten(1)
                n = torch.Size(parameter.shape).numel()
                rows = wire[:, :n]
                if columns and len(parameter.shape) == 2:
                    world_size = n_chunks * len(everyone) // hosts
                    rows = rows.view(hosts, world_size, parameter.shape[0], -1).transpose(1, 2)
                of_ranks = rows.reshape(hosts, *parameter.shape)
            found[parameter.name] = of_ranks
    return found


def mean_held(handle, kind, hosts, shapes):
    """{name: the mean of what hosts have not sent, fp64}. shapes: of parameters, by name. Collective."""
    if hosts is None:
        return mean_residuals(handle)
    if kind == "fsdp2":
        return {name: values.double().mean(0) for name, values in held(handle, hosts).items()}
    if kind == "fsdp1":  # a rank has its own of it, and zeros
        per_host = dist.get_world_size() // hosts
        return {name: per_host * values for name, values in mean_residuals(handle).items()}
    everyone = [None] * dist.get_world_size()  # a chunk on each place of a host
    dist.all_gather_object(everyone, residuals_of(handle))
    per_host, found = len(everyone) // hosts, {}
    for name in everyone[0]:
        of_hosts = [
            torch.cat([one[name].double() for one in everyone[h * per_host : (h + 1) * per_host]])
            for h in range(hosts)
        ]
        mean = torch.stack(of_hosts).mean(0)
        found[name] = mean[: shapes[name].numel()].view(shapes[name])
    return found


def add(sums, found):
    """Adds gradients to {name: sum, fp64}."""
    for name, gradient in found.items():
        sums[name] = sums.get(name, 0) + gradient.double()


# ---- what all ranks do ----


def every_value(rank, world_size, kind, hosts=None):
    for mode in some(kind, hosts):
        for layers in ("all", "none", "non-attention-linear") if not mode else ("all",):
            model = made(kind, **mode)
            with compress(model, sparsity=0, layers=layers, hosts=hosts) as handle:
                for step in range(3):  # DDP makes its buckets anew
                    model.zero_grad()
                    backward(model, rank, step)
                    check_equal(gradients(model), full_gradients(Odd, world_size, (step,)), mode)
                stats, n_units = handle.stats(), 1 if mode.get("layers") == () else 3
                assert handle.n_steps == stats["step"] == 3
                assert kind == "ddp" or stats["n_units"] == n_units, (mode, stats["n_units"])


OPTIONS = (
    dict(),
    dict(values="fp32"),
    dict(layers=mix_of_classes),
    dict(exchange="packed"),
    dict(exchange="sketch", sparsity=0.9875),
    dict(sparsity=0, values="int8"),
)


def nothing_is_lost(rank, world_size, kind, hosts=None):
    """What was received and the mean of what is held back is what was given."""
    given = full_gradients(Odd, world_size, range(3))
    first, *others = some(kind, hosts)
    shapes = {name: p.shape for name, p in Odd().named_parameters()}
    options = OPTIONS if world_size == (4 if hosts else 2) else OPTIONS[:2]
    for options, mode in [(one, first) for one in options] + [({}, mode) for mode in others]:
        model, received = made(kind, **mode), {}
        with compress(model, **{"sparsity": 0.9, "hosts": hosts} | options) as handle:
            for step in range(3):
                model.zero_grad()
                backward(model, rank, step)
                add(received, found := gradients(model))
                for name, gradient in found.items() if kind == "ddp" else ():
                    check_alike(gradient, name)
            left = mean_held(handle, kind, hosts, shapes)
            assert check_conserved(left, received, given) > 500, (options, mode)


def parameters_that_differ(rank, world_size, kind, hosts=None):
    """Tied, frozen and unused ones. Of what lacks a gradient FSDP2 exchanges all whole: test_fsdp2.py."""
    mode = {"find_unused_parameters": True} if kind == "ddp" else {}
    zeros = {name: torch.zeros(p.shape) for name, p in Tied().named_parameters()}
    for sparsity in (0, 0.9) if kind != "fsdp2" and hosts is None else (0,):
        model, received, given = made(kind, Tied, **mode), {}, {}
        with compress(model, sparsity=sparsity, hosts=hosts) as handle:
            for step in range(3):
                model.zero_grad()
                backward(model, rank, step)
                found, expected = gradients(model), full_gradients(Tied, world_size, (step,))
                assert expected.keys() <= {p.name for p in handle.wrapper.parameters()}
                assert not any(g.any() for name, g in found.items() if "frozen" in name or "unused" in name)
                add(received, found), add(given, expected)
                if not sparsity:
                    check_equal({name: found[name] for name in expected}, expected)
            assert not sparsity or check_conserved(handle, zeros | received, zeros | given) > 100


def micro_steps(rank, world_size, kind, hosts=None):
    given = full_gradients(Odd, world_size, range(3))
    shapes = {name: p.shape for name, p in Odd().named_parameters()}
    for mode in some(kind, hosts, 3 if kind == "ddp" else 4):  # torch: static graphs have none
        for sparsity, sync_each in ((0, True), (0, False), (0.9, True), (0.9, False)):
            model = made(kind, **mode)
            with compress(model, sparsity=sparsity, hosts=hosts) as handle:
                for step in range(3):
                    exchanges = sync_each or step == 2
                    if hasattr(model, "set_requires_gradient_sync"):
                        model.set_requires_gradient_sync(exchanges)
                    if exchanges or not hasattr(model, "no_sync"):
                        backward(model, rank, step)
                    else:
                        with model.no_sync():
                            backward(model, rank, step)
                assert handle.n_steps == (3 if sync_each else 1)
                if sparsity:
                    check_conserved(mean_held(handle, kind, hosts, shapes), gradients(model), given)
                else:
                    check_equal(gradients(model), given, (mode, sync_each))


def not_finite(rank, world_size, kind, hosts=None):
    """A step that one rank spoils comes out spoilt, and leaves residuals alone. They follow a loss scale."""
    for mode in some(kind, hosts, 2):
        model = made(kind, **mode)
        with compress(model, sparsity=0.9, hosts=hosts) as handle:
            for step in range(2):
                backward(model, rank, step)
            before = residuals_of(handle)
            model.zero_grad()
            x, y = batch_of(rank)
            loss_of(model, (x * float("inf") if rank == 0 else x, y)).backward()
            for name, p in model.named_parameters():  # on each owner
                own = torch.empty(0) if p.grad is None else local(p.grad)
                assert not own.numel() or not own.isfinite().all(), name
            after = residuals_of(handle)
            assert before and all(torch.equal(before[name], after[name]) for name in before)
            stats = handle.stats()
            assert len(stats["nonfinite_units"]) == stats["n_units"] > 0
            handle.loss_scale(2.0)
            assert all(torch.equal(2 * before[name], now) for name, now in residuals_of(handle).items())


def closed_and_again(rank, world_size, kind, hosts=None):
    """A handle at a time; torch's own exchange after it; and another handle."""
    expected = full_gradients(Odd, world_size)
    model = made(kind, **MODES[kind][0])
    text = r"sparsity is 0.5 on rank 0 and 0.6 on rank 1"
    check_error(lambda: compress(model, sparsity=0.5 + 0.1 * rank), text)
    handle = compress(model, sparsity=0.9, hosts=hosts)
    check_error(lambda: compress(model), "compressed already: close")
    backward(model, rank)
    handle.close()
    for again in (False, False, True):
        if again:
            handle = compress(model, sparsity=0, hosts=hosts)
        model.zero_grad()
        backward(model, rank)
        check_equal(gradients(model), expected)
    assert handle.n_steps == 1
    handle.close()


CHECKS = [every_value, nothing_is_lost, parameters_that_differ, micro_steps, not_finite, closed_and_again]


# ---- ranks that are gone ----


def loss_of_a_rank(rank, world_size, folder, kind, dies, options={}):
    # SHARD_GRAD_OP: no messages of torch's in backward
    model = made(kind, **({"sharding_strategy": "SHARD_GRAD_OP"} if kind == "fsdp1" else {}))
    compress(model, timeout_s=4, **options)
    for _ in range(2):
        backward(model, rank)
    loss = loss_of(model, batch_of(rank))
    lose_a_rank(rank, world_size, folder, dies, loss.backward)


# ---- passes within a pass ----


class Checkpointed(nn.Module):
    """Backward passes within the backward pass, of all layers but the first ones; is_reentrant: None for
    none."""

    def __init__(self, is_reentrant, n_outside=0):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])
        self.is_reentrant, self.n_outside = is_reentrant, n_outside

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        for i, layer in enumerate(self.layers):
            if self.is_reentrant is None or i < self.n_outside:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.is_reentrant)
        return x
