"""Training by way of a device's streams (a fake one's: fake_device.py) against the same training in CPU
memory: the same bits. Failures reach all ranks at the same place, and hooks wait for nothing."""

import base64
import contextlib
import ctypes
import io
import itertools
import os
import re
import struct
import threading
import time
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import ranks
from models import Even, Odd, batch_of, loss_of
from oracles import check_error
from wrappers import present

STEPS = 6


def have_kernels():
    """(False,), and True where the kernels were built for the processor: that takes a C++ compiler."""
    from fake_device import KERNELS

    return (False, True) if KERNELS.exists() else (False,)


def fake(seed, **options):
    from fake_device import Installed

    return Installed(seed, **options)


class Skips(Odd):
    """Leaves one of its layers out, or none."""

    skipped = None

    def forward(self, x):
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            x = x if number == self.skipped else layer(x)
        return self.head(x) @ self.mix * self.scale


def wrapped(kind, **options):
    torch.manual_seed(0)
    if kind == "ddp":
        inner = Skips() if options.get("find_unused_parameters") else Odd()
        return torch.nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=0.002, **options)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(Odd(), use_orig_params=True, device_id=torch.device("cpu"), **options)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, sizes = Even(), {"hsdp": (2, 2), "replicas": (4, 1)}.get(kind)
    if sizes is not None:
        options = options | {"mesh": init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))}
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(kind, rank, options, model_options, n_steps=STEPS, n_micro=1, loops=contextlib.nullcontext):
    """Losses, parameters and residuals at the end."""
    import tagc.torch as tagc

    model = wrapped(kind, **model_options)
    handle = tagc.compress(model, verbose=False, **tagc.grouped(options))
    optimizer = torch.optim.AdamW(handle.param_groups(lr=1e-2))
    losses = []
    with loops():
        for step in range(n_steps):
            if model_options.get("find_unused_parameters"):
                model.module.skipped = (step + rank) % 3
            for micro in range(n_micro):
                loss = loss_of(model, batch_of(rank, step * n_micro + micro))
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    handle.synchronize()
    assert handle.n_steps == n_steps * n_micro
    parameters = [local(parameter.detach()).clone() for parameter in model.parameters()]
    residuals = next(iter(handle.state_dict().values()))["residuals"]
    stats = handle.stats()
    handle.close()
    seen = {key: stats[key] for key in ("n_elems", "n_compressed", "sparsity")}
    # in CPU memory ranks agree by no messages of their own
    seen["bytes"] = {leg: n for leg, n in stats["bytes_by_leg"].items() if leg != "control"}
    return losses, parameters, residuals, seen


def check_same(one, other):
    assert one[0] == other[0], f"losses {one[0]} and {other[0]}"
    for a, b in zip(one[1], other[1]):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    assert one[2].keys() == other[2].keys()
    for name, values in one[2].items():
        assert torch.equal(*(each.flatten().view(torch.uint8) for each in (values, other[2][name]))), name
    assert one[3] == other[3]


def bf16():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}


# ---- what all ranks do ----


def same_bits(rank, world_size):
    cases = [
        ("fsdp2", {"sparsity": 0.9, "layers": "all"}, {}, {"lazy": True}),
        ("fsdp2", {"sparsity": 0.9, "layers": "all"}, {}, {"n_micro": 2}),
        ("fsdp2", {"sparsity": 0.9, "parameters": "delta4"}, {}, {}),
        ("fsdp2", {"sparsity": 0.9, "parameters": "bf16"}, bf16(), {}),
        ("ddp", {"sparsity": 0.9, "layers": "all"}, {}, {}),
        (
            "ddp",
            {"sparsity": 0.9, "layers": "all"},
            {"gradient_as_bucket_view": True, "find_unused_parameters": True},
            {},
        ),
        ("ddp", {}, {}, {}),
        ("fsdp1", {"sparsity": 0.9, "layers": "all"}, {}, {}),
    ]
    for number, (kind, options, model_options, how) in enumerate(present(cases)):
        n_micro = how.get("n_micro", 1)
        plain = train(kind, rank, options, model_options, n_micro=n_micro)
        installed = fake(10 * number + rank, lazy=how.get("lazy", False))
        with installed as device:
            staged = train(kind, rank, options, model_options, n_micro=n_micro)
        assert device.n_current >= STEPS, "nothing was staged"
        assert len(device.tasks) >= STEPS // 2, "exchanges that need Python"
        assert (device.n_futures > 0) == (kind == "ddp")
        device.check()
        check_same(plain, staged)


def with_kernels(rank, world_size):
    """Gradients stay on the device, of all ranks or of one: the same bits as in CPU memory, and the same
    bytes."""
    import tagc.torch as tagc
    from tagc.torch.exchange import gatherer, staging

    cases = [
        ("fsdp2", {"sparsity": 0.9}, {}, (True, True), {"lazy": True}),
        ("fsdp2", {"sparsity": 0.9, "layers": "all"}, {}, (True, False), {"n_micro": 2}),
        ("fsdp2", {"parameters": "delta4"}, bf16(), (True, True), {"codec": ("device", None)}),
        ("fsdp2", {"sparsity": 0.8, "layers": "all", "residual": "int8"}, {}, (False, True), {}),
        ("ddp", {"sparsity": 0.9, "residual": "int4"}, {"find_unused_parameters": True}, (True, False), {}),
        ("ddp", {}, {}, (True, True), {}),
        ("fsdp1", {"sparsity": 0.9, "layers": "all"}, {}, (True, True), {}),
    ]
    for number, (kind, options, model_options, has, how) in enumerate(present(cases)):
        n_micro = how.get("n_micro", 1)
        plain = train(kind, rank, options, model_options, n_steps=3, n_micro=n_micro)
        found, gathers, compress, make = [], [], tagc.compress, gatherer.Gatherer.__init__
        with fake(100 + 10 * number + rank, lazy=how.get("lazy", False), kernels=has[rank]) as device:
            try:
                tagc.compress = lambda *args, **given: (
                    handle := compress(*args, **given),
                    found.append(handle.codec),
                )[0]
                gatherer.Gatherer.__init__ = lambda self, *given: (
                    gathers.append(any(isinstance(one, staging.Kernels) for one in given)),
                    make(self, *given),
                )[1]
                codec = {"codec": how["codec"][rank] if "codec" in how else None}
                on_device = train(kind, rank, options | codec, model_options, n_steps=3, n_micro=n_micro)
            finally:
                tagc.compress, gatherer.Gatherer.__init__ = compress, make
            assert device.fake.fake_n_device_blocks() == 0, "memory of the device stays"
            assert len(device.tasks) > 0
        assert found == ["device" if has[rank] else "host"]
        assert set(gathers) == ({how["codec"][rank] == "device"} if "codec" in how else set()), (
            "deltas on the device when asked for by name"
        )
        device.check()
        check_same(plain, on_device)


def windows_with_kernels(rank, world_size):
    """A window of the schedule wants the norms of residuals, which come by flags with the rest."""
    options = {"gentle": True, "layers": "all"}
    plain = train("fsdp2", rank, options, {}, n_steps=20)
    with fake(190 + rank, kernels=True) as device:
        on_device = train("fsdp2", rank, options, {}, n_steps=20)
        n_units = 3
        assert len(device.tasks) == n_units * 20
    device.check()
    check_same(plain, on_device)


def kernels_fail(rank, world_size):
    """A launch or a copy on one rank: the same error on both, NaN in what came of it, and residuals as
    before. The device counts as lost: the next pass says so on both."""
    import tagc.torch as tagc

    for kind in ("fsdp2", "ddp"):
        for call in ("LaunchKernel", "MemcpyAsync"):
            with fake(200 + rank, kernels=True) as device:
                model = wrapped(kind)
                handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.5)
                assert handle.codec == "device" and handle.memory().device.total > 0
                for step in range(3):  # DDP makes its buckets anew
                    loss_of(model, batch_of(rank, step)).backward()
                before = next(iter(handle.state_dict().values()))["residuals"]
                if rank == 1:
                    device.fail(call, 1, 719)
                for _ in range(2):
                    model.zero_grad()
                    with pytest.raises(tagc.Error, match="gradients of .*: rank 1: ") as failure:
                        loss_of(model, batch_of(rank)).backward()
                    assert failure.value.status == "device"
                    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
                    assert all(gradient.isnan().all() for gradient in gradients if gradient.numel())
                    after = next(iter(handle.state_dict().values()))["residuals"]
                    assert set(before) == set(after)
                    assert all(torch.equal(values, after[name]) for name, values in before.items())
                handle.close()
            device.check()


def residuals_fail(rank, world_size):
    """A copy fails on one rank where it is on its own, as residuals follow DDP's new buckets: the others do
    not wait for it."""
    import tagc.torch as tagc

    with fake(220 + rank, kernels=True) as device:
        model = wrapped("ddp")
        handle = tagc.compress(
            model, verbose=False, layers="all", sparsity=0.5, timeout_s=200, options=tagc.Options(codec=None)
        )
        loss_of(model, batch_of(rank)).backward()
        begin = time.monotonic()
        if rank == 1:
            device.fail("MemcpyAsync", 1, 719)
        with pytest.raises(tagc.Error, match="copying to the host failed on device 0"):
            loss_of(model, batch_of(rank)).backward()
        assert time.monotonic() - begin < 150
        handle.close()
    device.check()


def choice_of_codec(rank, world_size):
    """By name: kernels, or none; asking for what is not there is one error, on all ranks."""
    import tagc.torch as tagc

    model = wrapped("ddp")
    check_error(
        lambda: tagc.compress(model, verbose=False, options=tagc.Options(codec="gpu")),
        "codec is 'gpu', must be one of None, 'device', 'host'",
    )
    check_error(
        lambda: tagc.compress(model, verbose=False, options=tagc.Options(codec="device")),
        "codec is 'device', and the model is in CPU memory",
    )
    check_error(
        lambda: tagc.compress(model, verbose=False, options=tagc.Options(codec="device", exchange="dense")),
        "which is for exchange 'direct'",
    )
    with fake(210, kernels=True) as device:
        handle = tagc.compress(model, verbose=False)
        assert handle.codec == "device" and handle.memory().device.total > 0
        handle.close()
        handle = tagc.compress(model, verbose=False, options=tagc.Options(codec="host"))
        assert handle.codec == "host" and handle.memory().device.total == 0
        handle.close()
    with fake(211, kernels=rank == 0) as device:
        check_error(
            lambda: tagc.compress(model, verbose=False, options=tagc.Options(codec="device")),
            "rank 1: kernels for CUDA are missing: no-kernels.so",
        )
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            handle = tagc.compress(model, **tagc.grouped({} if rank == 0 else {"codec": "host"}))
        assert handle.codec == ("device", "host")[rank]
        assert "on the host" not in said.getvalue()
        handle.close()
        with contextlib.redirect_stdout(said):
            tagc.compress(model).close()
        wanted = "compressed on the host by rank 1: kernels for CUDA are missing: no-kernels.so"
        assert rank or wanted in said.getvalue(), said.getvalue()
        device.check()
    with fake(212) as device:
        said = io.StringIO()
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        with contextlib.redirect_stdout(said):
            handle = tagc.compress(model)
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
        assert rank or "CUDA_DEVICE_MAX_CONNECTIONS is 1" in said.getvalue()
        assert handle.codec == "host"
        assert (
            rank or "compressed on the host: kernels for CUDA are missing: no-kernels.so" in said.getvalue()
        )
        handle.close()


def hooks_do_not_wait(rank, world_size):
    """Once layouts are known, no exchange of a backward pass begins before all of its hooks have returned,
    also where it fills a window of the schedule; and nothing of tagc's keeps their gradients meanwhile."""
    import tagc.torch as tagc
    from tagc.torch.exchange.model_exchanges import ModelExchanges
    from tagc.torch.hooks import ddp

    for kind, kernels in itertools.product(("fsdp2", "ddp"), have_kernels()):
        fills = kind == "fsdp2" and kernels  # whose norms come by flags; without, the thread computes them
        may_begin = threading.Event()
        may_begin.set()

        def begins():
            assert may_begin.wait(60), "a hook waits for an exchange"

        with fake(rank, lazy=True, begins=begins, kernels=kernels) as device:
            model = wrapped(kind)
            options = {"gentle": True} if fills else {"sparsity": 0.5}
            # messages by gloo, which can be held up
            handle = tagc.compress(
                model, verbose=False, layers="all", **tagc.grouped(options | {"transport": "gloo"})
            )
            for step in range(19 if fills else 2):  # DDP makes its buckets anew
                loss_of(model, batch_of(rank, step)).backward()
            finish = ModelExchanges.finish
            schedule, noted = handle.passes.state.schedule, []
            keep = schedule.keep
            schedule.keep = lambda *given: (noted.append(given), keep(*given))
            counts, held = [], []
            device.tasks.clear()

            def finish_at_last(self, take_back):
                counts.append(len(self._waiting))
                sources = [source() for source in device.tasks]
                held.append(sum(source is not None for source in sources))
                del sources
                may_begin.set()
                finish(self, take_back)

            ModelExchanges.finish = finish_at_last
            send = ddp.State.send

            def send_all(self, bucket):  # DDP waits for its futures before the end
                is_last = bucket.is_last()
                future = send(self, bucket)
                counts.append(0)
                if is_last:
                    may_begin.set()
                return future

            ddp.State.send = send_all
            may_begin.clear()
            loss_of(model, batch_of(rank)).backward()
            ddp.State.send, ModelExchanges.finish = send, finish
            assert counts[0] == 3 if kind == "fsdp2" else len(counts) >= 2, counts
            # FSDP2 keeps one until its next reduce-scatter
            assert held[0] <= 1 or kind == "ddp", held
            assert len(noted) == (3 if fills else 0), "units whose window this pass fills"
            handle.close()
        device.check()


def failure_of_an_exchange(rank, world_size):
    """Ranks that disagree: the same error on all at the end of backward, NaN in what came of it, and on it
    goes."""
    import tagc.torch as tagc

    for kind in present(("fsdp2", "ddp", "fsdp1")):
        # the end of backward has to wait for the failure, or misses it
        with fake(20 + rank, lazy=kind == "fsdp2") as device:
            model = wrapped(kind)
            handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.5)
            loss_of(model, batch_of(rank)).backward()
            handle.loss_scale(2.0 if rank == 1 else 1.0)
            model.zero_grad()
            check_error(lambda: loss_of(model, batch_of(rank)).backward(), "ranks do not agree.*loss scale")
            assert handle.n_steps == 1
            gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
            assert all(gradient.isnan().any() for gradient in gradients if gradient.numel())
            model.zero_grad()
            handle.loss_scale(1.0)
            loss_of(model, batch_of(rank)).backward()
            assert handle.n_steps == 2
            assert all(local(p.grad).isfinite().all() for p in model.parameters() if p.grad is not None)
            handle.close()
        device.check()


def failure_of_one_unit(rank, world_size):
    """On one rank, in the first unit of a pass: the units after it only tell it, and are NaN on both
    ranks."""
    import tagc.torch as tagc

    with fake(25 + rank) as device:
        model = wrapped("fsdp2")
        handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.5)
        first = next(module for module in handle.wrapper.modules if module.name == "layers.1")

        def refuse(*_):
            raise tagc.Error("mismatch", "this layout is unknown")

        if rank == 1:
            first.layout = refuse
        check_error(
            lambda: loss_of(model, batch_of(rank)).backward(),
            "gradients of layers.1: rank 1: this layout is unknown",
        )
        assert all(local(p.grad).isnan().all() for p in model.parameters())
        handle.close()
    device.check()


def failure_of_a_gather(rank, world_size):
    """Parameters cannot be copied to the host on one rank: both ranks get its words at the end of the pass,
    and go on."""
    import tagc.torch as tagc

    with fake(27 + rank) as device:
        model = wrapped("fsdp2")
        handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.5, parameters="bf16")
        settle = device.settle

        def fail():
            device.settle = settle
            raise RuntimeError("CUDA error: an illegal memory access")

        for step in range(3):
            device.settle = fail if rank == 1 and step == 1 else settle
            model.zero_grad()
            if step == 1:
                check_error(
                    lambda: loss_of(model, batch_of(rank)).backward(),
                    "parameters of .*: rank 1: copying to the host failed: CUDA error",
                )
            else:
                loss_of(model, batch_of(rank)).backward()
                assert all(local(p.grad).isfinite().all() for p in model.parameters())
        handle.close()
    device.check()


def failure_of_a_device(rank, world_size):
    """On one rank: a call that fails, or all of it. Both ranks get the words at the end of the same backward
    pass."""
    import tagc.torch as tagc

    for kind in ("fsdp2", "ddp"):
        for way in ("copy", "launch", "memory", "broken"):
            with fake(30 + rank) as device:
                model = wrapped(kind)
                handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.5, timeout_s=60)
                loss_of(model, batch_of(rank)).backward()
                model.zero_grad()
                if rank == 1:
                    if way == "broken":
                        device.break_down(700)
                    elif way == "memory":
                        device.is_broken = True
                        device.fail("StreamIsCapturing", 2, 2)
                    else:
                        device.is_broken = True
                        device.fail({"copy": "MemcpyAsync", "launch": "StreamWaitValue32"}[way], 2, 719)
                words = {"broken": "(700)", "memory": "(2)"}.get(way, "(719)")
                check_error(
                    lambda: loss_of(model, batch_of(rank)).backward(),
                    rf"rank 1: cuda: .* failed on device 0: .* {re.escape(words)}",
                )
                assert handle.n_steps in (1, 2)
                handle.close()


def misuse(rank, world_size):
    """What cannot be staged says so at compress(), on all ranks."""
    import tagc.torch as tagc

    model = wrapped("ddp")
    with fake(40) as device:
        device.library = "libcudart-that-is-missing.so"
        check_error(lambda: tagc.compress(model, verbose=False), "there is no CUDA runtime")
        device.library = str(type(device).library)
        if rank == 1:
            device.ordinal = 3
        check_error(lambda: tagc.compress(model, verbose=False), r"rank 1: device is 3, must be in \[0, 1\)")
        device.ordinal = 0
        handle = tagc.compress(model, verbose=False)
        assert "cuda runtime 13.0" in handle.passes.runners.staging.text
        handle.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "tagc-jobs"]


def memory(rank, world_size):
    """Memory of the device and pinned memory is made in compress(), that of gathers, too. DDP makes its
    buckets anew in the second pass: they fit into the memory of the first one's. Everything goes with the
    handle."""
    import tagc.torch as tagc

    cases = [
        ("fsdp2", bf16(), {"parameters": "delta4"}),
        ("fsdp2", {}, {"parameters": "bf16"}),
        ("fsdp2", bf16(), {"parameters": "delta8", "codec": "device"}),
        ("fsdp1", {}, {}),
        ("ddp", {}, {}),
    ]
    for number, ((kind, model_options, options), kernels) in enumerate(
        itertools.product(present(cases), have_kernels())
    ):
        if not kernels and "codec" in options:
            continue
        with fake(50 + 10 * number + rank, kernels=kernels) as device:
            device.fake.fake_n_allocs.restype = device.fake.fake_n_live.restype = ctypes.c_uint64
            model = wrapped(kind, **model_options)
            handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.5, **tagc.grouped(options))
            found = [device.fake.fake_n_allocs()]
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for step in range(5):
                loss_of(model, batch_of(rank, step)).backward()
                optimizer.step()
                found.append(device.fake.fake_n_allocs())
            in_pass = [after - before for before, after in itertools.pairwise(found)]
            assert found[0] > 0 and in_pass == [0] * 5, (kind, options, kernels, found[0], in_pass)
            handle.close()
            assert device.fake.fake_n_live() == 1  # the current stream
        device.check()


class Wide(torch.nn.Module):
    """Of all classes, and so large that pages of memory do not count."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(256)
        self.attn, self.mlp = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def forward(self, x):
        return self.mlp(self.attn(self.norm(x)))


def planned(rank, world_size):
    """What `tagc plan` says of pinned memory and of memory on the device is what there is, within 3 %."""
    import plan_parts
    from oracles import mix_of_classes
    from test_memory import parts_of_models
    from torch.distributed.fsdp import fully_shard

    import tagc.torch as tagc

    n_sampled = 64 * 16  # of these kernels: TAGC_CUDA_LINES of tests/gpu/cuda
    every, largest = {"values": "int4", "sparsity": 0.0}, {"sparsity": 0.95}
    cases = [("fsdp2", 2, every, False), ("ddp", 4, largest, False)]
    cases += [("fsdp2", 4, every, True), ("fsdp2", 2, largest, True), ("ddp", 4, largest, True)]
    for number, (kind, n_bytes, options, kernels) in enumerate(cases):
        if kernels not in have_kernels():
            continue
        with fake(300 + 10 * number + rank, kernels=kernels) as device:
            torch.manual_seed(0)
            if kind == "ddp":  # one bucket, so that torch makes no other one
                model = torch.nn.parallel.DistributedDataParallel(Wide(), bucket_cap_mb=100)
            else:
                model = torch.nn.Sequential(Wide(), torch.nn.Linear(256, 4096, bias=False))
                for layer in model:
                    fully_shard(layer, **(bf16() if n_bytes == 2 else {}))
                fully_shard(model, **(bf16() if n_bytes == 2 else {}))
            layers = (
                (lambda name, p: "compressed") if kind == "fsdp2" and options["sparsity"] else mix_of_classes
            )
            handle = tagc.compress(model, verbose=False, layers=layers, **tagc.grouped(options))
            if kind == "ddp":
                model(torch.randn(2, 256)).square().mean().backward()
            parts, found = parts_of_models(handle), handle.memory()
            handle.close()
        device.check()
        if kernels:
            expected = plan_parts.device_memory(parts, world_size, n_bytes, n_sampled)
            pairs = [
                ("residual", found.device.residual, expected.residual),
                ("buffers", found.device.buffers + found.device.transient, expected.buffers),
                ("pinned", found.host.pinned, expected.pinned),
            ]
        else:
            assert found.device.total == 0
            pairs = [("pinned", found.host.pinned, plan_parts.pinned_bytes(parts, world_size, n_bytes))]
        for name, a, b in pairs:
            assert b and abs(a - b) <= 0.03 * b, (kind, n_bytes, options, name, a, b)


# Of parameters in turn, step by step: 0 FRESH to 3 LAST. Parts split, join and change, one way and back.
LEVELS = [(0,), (0,), (0, 1), (1,), (1, 2, 3), (3, 2), (3,), (3, 1), (0, 3)]


def put_levels(handle, levels):
    """As if the schedule had come to these levels: in its saved state the level follows the name."""
    schedule = handle.passes.state.schedule
    saved = bytearray(base64.b64decode(schedule.state()["schedule"]))
    for i, name in enumerate(schedule._names):
        named = struct.pack("<I", len(name)) + name.encode()
        at = saved.index(named) + len(named)
        saved[at : at + 4] = struct.pack("<I", levels[i % len(levels)])
    schedule.load({"schedule": base64.b64encode(saved).decode()}, True)
    wanted = {levels[i % len(levels)] for i in range(len(schedule._names))}
    assert set(schedule.levels().values()) <= wanted | {3} and min(wanted) in schedule.levels().values()


def levels_change(rank, world_size):
    """Whatever the schedule does: the bits of CPU memory, hooks hand every exchange to libtagc, and nothing
    is allocated after compress()."""
    import tagc.torch as tagc
    from tagc.torch.schedule.schedule import Schedule

    def run(kind, model_options, device=None):
        model = wrapped(kind, **model_options)
        with mock.patch.object(Schedule, "_is_fresh", mock.PropertyMock(return_value=True), create=True):
            handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.95, gentle=True)
        handle.passes.state.schedule._is_fresh = True
        gradients = []

        def counts():
            return device and device.fake.fake_n_allocs()

        for step, levels in enumerate(LEVELS):
            put_levels(handle, levels)
            before = counts()
            loss_of(model, batch_of(rank, step)).backward()
            assert counts() == before, (kind, step, levels, before, counts())
            gradients += [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        residuals = next(iter(handle.state_dict().values()))["residuals"]
        handle.close()
        return gradients, residuals

    cases = [("fsdp2", {}), ("fsdp2", bf16()), ("fsdp1", {}), ("ddp", {})]
    for number, (kind, model_options) in enumerate(present(cases)):
        plain = run(kind, model_options)
        with fake(230 + 10 * number + rank, kernels=True) as device:
            device.fake.fake_n_allocs.restype = ctypes.c_uint64
            there = run(kind, model_options, device)
            least = len(LEVELS) * (1 if kind == "fsdp1" else 3)
            assert len(device.tasks) >= least
        device.check()
        n = len(plain[0]) // len(LEVELS)
        different = [
            (i // n, i % n)
            for i, pair in enumerate(zip(plain[0], there[0], strict=True))
            if not torch.equal(*pair)
        ]
        assert not different, (kind, different)
        assert plain[1].keys() == there[1].keys()
        assert all(torch.equal(values, there[1][name]) for name, values in plain[1].items()), kind


def order_of_calls(rank, world_size):
    """Each hook asks for the current stream first, then enqueues. FSDP2's stream of reduce-scatters waits
    only until the gradient is read, and its stream of all-reduces for the result; only DDP gives a future,
    after that, of the stream in which results come back, and leaves its current stream alone."""
    import tagc.torch as tagc
    from tagc import _library as lib

    for kind in ("fsdp2", "ddp"):
        with fake(60 + rank) as device:
            calls = []
            current, future, library = device.current, device.future, lib.load()
            device.current = lambda: (calls.append("current"), current())[1]
            device.future = lambda value, stream: (calls.append(("future", stream)), future(value, stream))[1]

            follow = device.follow
            device.follow = lambda stream: (calls.append(("follow", stream)), follow(stream))[1]

            class Noting:
                def __getattr__(self, name):
                    return getattr(library, name)

                def tagc_model_begin_on(self, *arguments):
                    calls.append(("enqueue", *arguments[6:8]))
                    return library.tagc_model_begin_on(*arguments)

            model = wrapped(kind)
            handle = tagc.compress(model, verbose=False, layers="all")
            for step in range(2):
                loss_of(model, batch_of(rank, step)).backward()
            calls.clear()
            lib._loaded = Noting()
            try:
                loss_of(model, batch_of(rank)).backward()
            finally:
                lib._loaded = library
            one = (
                ["current", ("enqueue", device._stream, 2), ("follow", handle.passes.runners.staging.stream)]
                if kind == "fsdp2"
                else [
                    "current",
                    ("enqueue", device._stream, 0),
                    ("future", handle.passes.runners.staging.stream),
                ]
            )
            assert len(calls) % len(one) == 0 and calls == len(calls) // len(one) * one and calls, calls
            handle.close()
        device.check()


def between_hosts(rank, world_size):
    """FSDP2 over a mesh inside each host, and tagc between them: in place on the shard. FSDP2 over all ranks,
    whose sums within hosts go before the device's exchange; and DDP, whose slices come together after it.
    Nothing is allocated after compress()."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import tagc.torch as tagc

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "inside"))

    def run(has_mesh, options, counts=lambda: 0):
        torch.manual_seed(0)
        model, fully = Even(), {"mesh": mesh["inside"]} if has_mesh else {}
        if has_mesh is None:
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            for layer in model.layers:
                fully_shard(layer, **fully)
            fully_shard(model, **fully)
        handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.8, **tagc.grouped(options))
        n_allocs = counts()
        for step in range(3):
            loss_of(model, batch_of(rank, step)).backward()
        assert counts() == n_allocs, (has_mesh, options)
        gradients = [local(p.grad).clone() for p in model.parameters()]
        assert handle.stats()["ranks_per_host"] == (1 if has_mesh else 2)
        handle.close()
        return gradients

    cases = ((True, {"between": mesh["host"].get_group()}), (False, {"hosts": 2}), (None, {"hosts": 2}))
    for number, ((has_mesh, options), kernels) in enumerate(itertools.product(cases, have_kernels())):
        plain = run(has_mesh, options)
        with fake(70 + 10 * number + rank, kernels=kernels) as device:
            device.fake.fake_n_allocs.restype = ctypes.c_uint64
            staged = run(has_mesh, options, device.fake.fake_n_allocs)
        device.check()
        assert device.n_current > 0, "nothing was staged"
        assert all(torch.equal(a, b) for a, b in zip(plain, staged)), (number, options)


def on_hosts(rank, world_size):
    """Two hosts of two ranks: with either codec the bits of CPU memory, and their bytes. Where parameters
    rest, those of both codecs: on a device it counts whether the host's sum is zero."""
    every = {"sparsity": 0.9, "layers": "all"}
    cases = [
        ("fsdp2", every, {}, {}),
        ("fsdp2", {"sparsity": 0.8, "residual": "int8"}, bf16(), {"n_micro": 2}),
        ("fsdp2", {}, {}, {}),
        ("hsdp", every, {}, {}),
        ("replicas", every | {"residual": "int4"}, {}, {}),
        ("ddp", every, {}, {}),
        ("ddp", every | {"residual": "int8"}, {"find_unused_parameters": True}, {}),
        ("fsdp1", every, {}, {}),
    ]
    for number, (kind, options, model_options, how) in enumerate(present(cases)):
        given = kind, rank, options | {"hosts": 2}, model_options
        plain = None if "find_unused_parameters" in model_options else train(*given, **how)
        for kernels in have_kernels():
            with fake(400 + 10 * number + rank, kernels=kernels) as device:
                on_device = train(*given, **how)
                assert len(device.tasks) >= STEPS, "exchanges that need Python"
            device.check()
            plain = plain or on_device
            check_same(plain, on_device)


def one_rank_of_hosts_fails(rank, world_size):
    """In either place of either host, one after the other, in the first unit of a pass: the same error on all
    ranks, NaN in what came of it, in its place residuals as before; and on it goes."""
    import tagc.torch as tagc
    from tagc.torch.hooks import ddp

    fits = ddp._fitting

    def refuse(*_, **__):
        raise tagc.Error("mismatch", "this layout is unknown")

    cases = itertools.product(("fsdp2", "replicas", "ddp"), have_kernels())
    for number, (kind, kernels) in enumerate(cases):
        with fake(500 + 10 * number + rank, kernels=kernels) as device:
            model = wrapped(kind)
            handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.5, hosts=2)
            for step in range(3):  # DDP makes its buckets anew
                loss_of(model, batch_of(rank, step)).backward()
            for odd in range(world_size):
                before = next(iter(handle.state_dict().values()))["residuals"]
                if rank == odd and kind == "ddp":
                    ddp._fitting = refuse
                elif rank == odd:
                    module = next(module for module in handle.wrapper.modules if module.name == "layers.1")
                    module.layout = module.shard_layout = refuse
                model.zero_grad()
                check_error(
                    lambda: loss_of(model, batch_of(rank)).backward(),
                    f"gradients of .*: rank {odd}: this layout is unknown",
                )
                gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
                assert all(gradient.isnan().all() for gradient in gradients if gradient.numel())
                after = next(iter(handle.state_dict().values()))["residuals"]
                are_same = [torch.equal(values, after[name]) for name, values in before.items()]
                assert all(are_same) or rank % 2 != odd % 2
                ddp._fitting = fits
                if rank == odd and kind != "ddp":
                    del module.layout, module.shard_layout
                model.zero_grad()
                loss_of(model, batch_of(rank)).backward()
                assert all(local(p.grad).isfinite().all() for p in model.parameters() if p.grad is not None)
            handle.close()
        device.check()


def a_device_of_hosts_fails(rank, world_size):
    """On one rank: its error is that of all ranks of all hosts."""
    import tagc.torch as tagc

    cases = itertools.product(("fsdp2", "ddp"), have_kernels(), (1, 2))
    for number, (kind, kernels, odd) in enumerate(cases):
        with fake(800 + 10 * number + rank, kernels=kernels) as device:
            model = wrapped(kind)
            handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.5, hosts=2)
            for step in range(3):
                loss_of(model, batch_of(rank, step)).backward()
            if rank == odd:
                device.is_broken = True
                device.fail("MemcpyAsync", 2, 719)
            check_error(
                lambda: loss_of(model, batch_of(rank)).backward(),
                rf"gradients of .*: rank {odd}: cuda: .* failed on device 0: .* \(719\)",
            )
            gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
            if not device.is_broken:
                assert all(gradient.isnan().any() for gradient in gradients if gradient.numel())
            handle.close()


def hosts_hooks_do_not_wait(rank, world_size):
    """No exchange between hosts begins before all hooks of a backward pass have returned."""
    import tagc.torch as tagc
    from tagc.torch.exchange.model_exchanges import ModelExchanges

    for kernels in have_kernels():
        may_begin = threading.Event()
        may_begin.set()

        def begins():
            assert may_begin.wait(60), "a hook waits for an exchange"

        with fake(900 + rank, lazy=True, begins=begins, kernels=kernels) as device:
            model = wrapped("fsdp2")
            options = tagc.Options(transport="gloo")  # messages that can be held up
            handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.5, hosts=2, options=options)
            loss_of(model, batch_of(rank)).backward()
            counts, finish = [], ModelExchanges.finish

            def finish_at_last(self, take_back):
                counts.append(len(self._waiting))
                may_begin.set()
                finish(self, take_back)

            ModelExchanges.finish = finish_at_last
            may_begin.clear()
            loss_of(model, batch_of(rank, 1)).backward()
            ModelExchanges.finish = finish
            assert counts == [3], counts
            handle.close()
        device.check()


def advice(rank, world_size):
    """advise() measures the copies of a device, and torch's ways until the device is through."""
    import tagc.torch as tagc

    with fake(80 + rank) as device:
        model = wrapped("fsdp2")
        advised = tagc.advise(model, seconds=1, verbose=False)
    assert advised["link"]["copy_out_bytes_per_s"] == pytest.approx(1e9)
    assert advised["link"]["copy_back_bytes_per_s"] == pytest.approx(5e8)
    assert "copies to the host 1.0 GB/s, back 0.5" in advised["text"]
    device.check()
    with fake(82 + rank, kernels=True) as device:
        advised = tagc.advise(wrapped("ddp"), seconds=1, verbose=False)
    on_device = [row for row in advised["rows"] if "codec on the device" in row["name"]]
    assert on_device and all(row["gradients_s"] > 0 for row in on_device)
    device.check()


CHECKS = [
    same_bits,
    hooks_do_not_wait,
    failure_of_an_exchange,
    failure_of_one_unit,
    failure_of_a_gather,
    failure_of_a_device,
    misuse,
    memory,
    planned,
    order_of_calls,
    advice,
]


KERNEL_CHECKS = [
    levels_change,
    with_kernels,
    windows_with_kernels,
    kernels_fail,
    residuals_fail,
    choice_of_codec,
]


HOSTS_CHECKS = [on_hosts, one_rank_of_hosts_fails, a_device_of_hosts_fails, hosts_hooks_do_not_wait]


def under(rank, world_size, manners, names):
    """Runs these checks on a device with bad manners."""
    from fake_device import Installed

    os.environ["FAKE_MANNERS"] = manners  # a reset reads it
    for name in names:
        try:
            globals()[name](rank, world_size)
        except BaseException as failure:
            raise AssertionError(f"in {name}, manners {manners}: {failure}") from failure
    assert Installed.n_waited or not manners.startswith("all"), "no call waited: this shows nothing"


def run_under(manners, checks, world_size=2):
    ranks.run(under, world_size, manners, [check.__name__ for check in checks])


def need_kernels():
    if not have_kernels()[-1]:
        pytest.skip("no C++ compiler: the kernels were not built for the processor")


def test_staging():
    ranks.run_each(CHECKS, 2)


def test_kernels():
    """With all bad manners of a driver at once; test_staging_long has each of them, in all cases."""
    need_kernels()
    run_under("all,depth=128", KERNEL_CHECKS)


def test_hosts():
    ranks.run_each(HOSTS_CHECKS, 4)


@pytest.mark.slow
def test_between_hosts():
    ranks.run(between_hosts, 4)
