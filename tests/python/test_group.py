"""transport="group": gradients in the caller's own process group (gloo's, with CPU tensors) against the same
training by tagc's own connection: the same bits. Whatever goes wrong on one rank is the same error on all, at
the end of the pass, and changes nothing."""

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from models import batch_of, loss_of
from oracles import check_error
from test_staging import bf16, fake, local, train, wrapped

CASES = [  # kind, options, options of the model, micro-steps
    ("fsdp2", {}, {}, 1),  # gently
    ("fsdp2", {"sparsity": 0.9, "layers": "all", "values": "int4"}, {}, 2),
    ("fsdp2", {"sparsity": 0.9, "parameters": "delta4"}, {}, 1),
    ("fsdp2", {"sparsity": 0.9, "mild": "dense"}, "bf16", 1),
    ("fsdp2", {"sparsity": 0.8, "layers": "all"}, {}, 1),
    ("fsdp2", {"sparsity": 0, "values": "int8", "layers": "all"}, {}, 1),
    ("ddp", {"sparsity": 0.9}, {}, 1),
    ("ddp", {"sparsity": 0.9, "layers": "none"}, {}, 1),
    ("ddp", {"sparsity": 0.9}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}, 1),
    ("ddp", {}, {}, 1),
    ("fsdp1", {"sparsity": 0.9, "layers": "all"}, {}, 1),
]
# And these by gloo.
GLOO = [
    ("fsdp2", {}),
    ("fsdp2", {"sparsity": 0.9, "parameters": "delta4"}),
    ("ddp", {"sparsity": 0.9}),
    ("fsdp1", {"sparsity": 0.9, "layers": "all"}),
]


def check_same(one, other):
    """Losses, parameters and residuals, bit for bit; and what was selected."""
    assert one[0] == other[0], f"losses {one[0]} and {other[0]}"
    for a, b in zip(one[1], other[1], strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    assert one[2].keys() == other[2].keys()
    for name, values in one[2].items():
        assert torch.equal(*(each.flatten().view(torch.uint8) for each in (values, other[2][name]))), name
    for key in ("n_elems", "n_compressed", "sparsity"):
        assert one[3][key] == other[3][key], key


class Counted:
    """with Counted() as found: the all-to-alls of this process and the bytes that each of them sent."""

    def __enter__(self):
        self.n_bytes, self._before = [], dist.all_to_all_single
        dist.all_to_all_single = lambda received, sent, **how: (
            self.n_bytes.append(sent.nbytes),
            self._before(received, sent, **how),
        )[1]
        return self.n_bytes

    def __exit__(self, *_):
        dist.all_to_all_single = self._before


# ---- what all ranks do ----


def same_bits(rank, world_size):
    for kind, options, model_options, n_micro in CASES if world_size == 2 else CASES[1:8:3]:
        model_options = bf16() if model_options == "bf16" else model_options
        plain = train(kind, rank, options, model_options, n_steps=4, n_micro=n_micro)
        with Counted() as sent:
            carried = train(
                kind, rank, options | {"transport": "group"}, model_options, n_steps=4, n_micro=n_micro
            )
        assert len(sent) >= 4 * n_micro, "nothing went through the group"
        check_same(plain, carried)
        if (kind, options) in GLOO:
            way = options | {"transport": "gloo"}
            check_same(plain, train(kind, rank, way, model_options, n_steps=4, n_micro=n_micro))


def with_kernels(rank, world_size):
    """The same on a device (a fake one, whose kernels the harness executes), of all ranks or of one."""
    cases = [
        ("fsdp2", {"sparsity": 0.9, "residual": "int8"}, bf16(), (True, True)),
        ("ddp", {"sparsity": 0.9, "residual": "bf16"}, {}, (True, False)),
        ("fsdp2", {}, {}, (False, True)),
    ]
    for number, (kind, options, model_options, has) in enumerate(cases):
        plain = train(kind, rank, options, model_options, n_steps=3)
        options = options | {"transport": "group"}
        if not has[rank]:
            check_same(plain, train(kind, rank, options, model_options, n_steps=3))
            continue
        with fake(300 + 10 * number + rank, kernels=True) as device:
            check_same(plain, train(kind, rank, options, model_options, n_steps=3))
            assert device.fake.fake_n_device_blocks() == 0, "memory of the device stays"
        assert device.n_current > 0 and (device.n_futures > 0) == (kind == "ddp")
        device.check()


def statistics(rank, world_size):
    """Bytes are those that the collectives took, all frames in whole: more than without, and no more than a
    little."""
    import tagc.torch as tagc

    bits = {}
    for transport in ("host", "group"):
        model = wrapped("fsdp2")
        handle = tagc.compress(
            model, verbose=False, layers="all", sparsity=0.9, values="int4", transport=transport
        )
        with Counted() as sent:
            loss_of(model, batch_of(rank)).backward()
        stats = handle.stats()
        bits[transport] = stats["bits_per_param"]
        if transport == "group":
            assert stats["bytes_by_leg"]["values"] == sum(sent) * (world_size - 1) // world_size
            assert stats["bytes_by_leg"]["index"] == 0 and stats["bytes_by_leg"]["result"] == 0
            assert stats["bytes_sent"] == sum(stats["bytes_by_leg"].values()) == stats["bytes_received"]
        handle.close()
    # of units as small as these, headers are much
    assert bits["host"] < bits["group"] < 1.5 * bits["host"] + 1, bits


def damages_are_errors(rank, world_size):
    """A byte of what rank 0 got, in a header or in a body: the same Error on all ranks at the end of the
    pass, NaN, and the state of before."""
    import tagc.torch as tagc
    from tagc.torch.exchange import waits

    for kind in ("fsdp2", "ddp"):
        model = wrapped(kind)
        handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.5, transport="group")
        for step in range(2):  # DDP makes its buckets anew
            loss_of(model, batch_of(rank, step)).backward()
        for where, words in ((8, "has a damaged header"), (64 + 9, "has a wrong checksum")):
            before = next(iter(handle.state_dict().values()))["residuals"]
            model.zero_grad()
            carry, n_left = waits.Collectives.all_to_all, [1]

            def damage(self, received, sent):
                carry(self, received, sent)
                if rank == 0 and n_left[0]:
                    n_left[0] = 0
                    received[received.numel() // world_size * (world_size - 1) + where] ^= 4

            waits.Collectives.all_to_all = damage
            try:
                check_error(
                    lambda: loss_of(model, batch_of(rank)).backward(),
                    f"the frame from rank {world_size - 1} that rank 0 got {words}",
                )
            finally:
                waits.Collectives.all_to_all = carry
            gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
            assert any(gradient.isnan().any() for gradient in gradients if gradient.numel())
            model.zero_grad()
            after = next(iter(handle.state_dict().values()))["residuals"]
            same = [torch.equal(values, after[name]) for name, values in before.items()]
            assert any(same) and set(before) == set(after)
            loss_of(model, batch_of(rank)).backward()
            assert all(local(p.grad).isfinite().all() for p in model.parameters() if p.grad is not None)
        handle.close()


def failures_are_errors(rank, world_size):
    """A call of the library fails on one rank, in each place of a step: all hear of it, and on it goes."""
    import tagc.torch as tagc
    from tagc import _library as lib

    real = lib.call
    for name in ("tagc_frames_encode", "tagc_frames_add", "tagc_frames_decode"):
        model = wrapped("ddp")
        handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.5, transport="group")
        for step in range(2):
            loss_of(model, batch_of(rank, step)).backward()
        left = [1]

        def fails_once(what, *arguments):
            real(what, *arguments)
            if rank == 1 and what == name and left[0]:
                left[0] = 0
                raise tagc.Error("device", "planted")

        lib.call = fails_once
        try:
            check_error(
                lambda: loss_of(model, batch_of(rank)).backward(),
                "planted" if rank == 1 else "rank 1 failed in this step: device failure",
                same=False,
            )
        finally:
            lib.call = real
        model.zero_grad()
        loss_of(model, batch_of(rank)).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        handle.close()


def nonfinite(rank, world_size):
    """NaN on one rank: NaN for the owner, nothing else changes."""
    import tagc.torch as tagc

    model = wrapped("fsdp2")
    handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.5, transport="group")
    loss_of(model, batch_of(rank)).backward()
    before = next(iter(handle.state_dict().values()))["residuals"]
    model.zero_grad()
    (loss_of(model, batch_of(rank)) * (float("nan") if rank == 1 else 1)).backward()
    assert handle.stats()["n_nonfinite"] == handle.stats()["n_units"]
    assert all(local(p.grad).isnan().all() for p in model.parameters() if local(p.grad).numel())
    after = next(iter(handle.state_dict().values()))["residuals"]
    assert all(torch.equal(values, after[name]) for name, values in before.items())
    handle.close()


def refusals(rank, world_size):
    import tagc.torch as tagc

    model = wrapped("ddp")
    check_error(
        lambda: tagc.compress(model, verbose=False, transport="nccl"),
        "transport is 'nccl', must be one of 'host', 'gloo', 'native', 'group'",
    )
    for exchange in ("packed", "sketch", "dense"):
        check_error(
            lambda: tagc.compress(model, verbose=False, transport="group", exchange=exchange),
            f"transport is 'group', which is for exchange 'direct'; this one is '{exchange}'",
        )
    check_error(lambda: tagc.compress(model, verbose=False, transport=("host", "group")[rank]), "transport")
    with fake(400 + rank):
        check_error(
            lambda: tagc.compress(model, verbose=False, transport="group"), "kernels for CUDA are missing"
        )


def a_rank_is_gone(rank, world_size):
    """A silent peer is an error within the time-out, not a wait for ever."""
    import time

    import tagc.torch as tagc
    from tagc.torch.exchange import internals

    model, store = wrapped("fsdp2"), internals.default_store()
    handle = tagc.compress(model, verbose=False, layers="all", sparsity=0.5, transport="group", timeout_s=3)
    loss_of(model, batch_of(rank)).backward()
    if rank == world_size - 1:
        store.wait([f"rank {r} has given up" for r in range(rank)])
        return
    begin = time.monotonic()
    with pytest.raises(tagc.Error) as failure:
        loss_of(model, batch_of(rank)).backward()
    store.set(f"rank {rank} has given up", "")
    status = "timeout" if "no answer" in str(failure.value) else "transport"
    assert failure.value.status == status and time.monotonic() - begin < 60


# ---- tests ----


@pytest.mark.parametrize("world_size", [2, 3])
def test_same_bits(world_size):
    ranks.run(same_bits, world_size)


def test_with_kernels():
    ranks.run(with_kernels, 2)


def test_what_goes_wrong():
    ranks.run_each([statistics, damages_are_errors, failures_are_errors, nonfinite, refusals], 2)


def test_a_rank_is_gone():
    outcomes = ranks.attempt(a_rank_is_gone, 2)
    trace = outcomes[0][1]
    # the one behind it, over connections that are closed
    assert trace is None or "dist.barrier()" in trace, trace
