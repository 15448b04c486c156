"""Adapters on a frozen base, as LoRA and QLoRA have them: what is gathered is much more than what is
trained, and may have other dtypes."""

import contextlib
import dataclasses
import io

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from wrappers import HAS_FSDP1

N = 64


class Adapted(nn.Module):
    """A frozen base in some dtype, and trained adapters in fp32."""

    def __init__(self, base):
        super().__init__()
        values = torch.randn(N, N, generator=torch.Generator().manual_seed(1)) / 8
        values = values.to(base) if base.is_floating_point else (50 * values).round().to(base)
        self.base = nn.Parameter(values, requires_grad=False)
        self.lora_A, self.lora_B = nn.Linear(N, 8, bias=False), nn.Linear(8, N, bias=False)

    def forward(self, x):
        scale = 1 if self.base.is_floating_point() else 1 / 50
        return x + scale * (x @ self.base.to(x.dtype)) + self.lora_B(self.lora_A(x))


def sharded(*bases, plain=False, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(base) for base in bases), *([nn.Linear(N, N)] if plain else []))
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def backward(model, rank):
    x = torch.randn(4, N, generator=torch.Generator().manual_seed(rank))
    model.zero_grad()
    model(x).square().mean().backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.requires_grad}


def units_of_several_dtypes(rank, world_size):
    """Torch gathers them as bytes, in every format of the user's, and gradients are those without tagc."""
    import tagc.torch as tagc

    for bases in ([torch.int8, torch.uint8], [torch.bfloat16, torch.bool]):
        expected = backward(sharded(*bases), rank)
        for parameters in (None, "bf16", "int8", "delta4"):
            model = sharded(*bases)
            with tagc.compress(
                model, sparsity=0, values="fp32", layers="all", parameters=parameters, verbose=False
            ) as handle:
                for _ in range(2):
                    found = backward(model, rank)
                    assert found.keys() == expected.keys()
                    for name in found:
                        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-7)
                assert handle.stats()["n_gathered"] == 0
                handle.load_state_dict(handle.state_dict())


def who_gathers_what_is_said(rank, world_size):
    import tagc.torch as tagc

    def said(model, **options):
        with contextlib.redirect_stdout(io.StringIO()) as text, tagc.compress(model, **options) as handle:
            backward(model, rank)
            return text.getvalue(), handle.stats()["n_gathered"]

    text, n_gathered = said(sharded(torch.int8, torch.int8, plain=True), parameters="delta4")
    assert n_gathered == 2 * N * (N + 1), "the only unit of one dtype, in both passes"
    words = "gathers 2 of 3 units as it does without tagc, such as 0, which has torch.float32 and torch.int8"
    assert rank or words in text and "parameters='delta4' tagc gathers units of one dtype" in text, text
    for model, options in (
        (sharded(torch.float32), {"parameters": "delta4"}),
        (sharded(torch.int8), {}),
        # in bf16 all of it is gathered in that
        (sharded(torch.bfloat16, mp_policy=MixedPrecisionPolicy(torch.bfloat16)), {"parameters": "bf16"}),
    ):
        text, n_gathered = said(model, **options)
        assert "torch gathers" not in text and (n_gathered > 0) == bool(options), (text, n_gathered)
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
    for wire, how in (("lossless", {}), ("lossless", policy), ("bf16", {})):
        text, _ = said(sharded(torch.float32, **how), parameters=wire)
        rounds = not rank and wire == "lossless" and not how
        assert ("'lossless' rounds fp32 and fp16 to bf16" in text) == rounds, (wire, how, text)


def test_units_of_several_dtypes():
    ranks.run_each([units_of_several_dtypes, who_gathers_what_is_said], 2)


# ---- advise() ----


def what_is_counted(rank, world_size):
    """The shape that advise() forecasts from is what torch gathers and reduces in a step."""
    from tagc.torch.advise.shape import look

    sent = {"gathered": 0, "reduced": 0}

    def counted(newer, older, what):
        """Counts the whole tensor of each call of torch's collective, which has another name since 2.13."""
        name = newer if hasattr(dist, newer) else older
        real = getattr(dist, name)

        def spy(*arguments, **options):
            tensors = [one for one in (*arguments, *options.values()) if isinstance(one, torch.Tensor)]
            sent[what] += max(one.nbytes if what == "gathered" else one.numel() for one in tensors)
            return real(*arguments, **options)

        setattr(dist, name, spy)
        return lambda: setattr(dist, name, real)

    for bases, options in (
        ([torch.float32, torch.bfloat16, torch.int8], {}),
        (
            [torch.bfloat16, torch.bfloat16],
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        ),
    ):
        model = sharded(*bases, **options)
        backward(model, rank)  # and the first names the parameters of the root
        sent |= {"gathered": 0, "reduced": 0}
        undo = [
            counted("all_gather_single", "all_gather_into_tensor", "gathered"),
            counted("reduce_scatter_single", "reduce_scatter_tensor", "reduced"),
        ]
        backward(model, rank)
        for one in undo:
            one()
        shape, _ = look(model, "fsdp2")
        sizes = {"fp32": 4, "bf16": 2, "other": 1}
        assert sent["gathered"] == sum(
            times * n * sizes[dtype]
            for times, held in zip(shape.n_gathers, shape.held)
            for dtype, n in held.items()
        )
        assert sent["reduced"] == shape.n_elems == len(bases) * 2 * 8 * N
        assert shape.n_params == sum(p.numel() for p in model.parameters())
        assert (shape.reduce, shape.gather) == ("fp32", "bf16" if options else "fp32")


def each_wrap_is_measured(rank, world_size):
    from torch.distributed.fsdp import FullyShardedDataParallel

    import tagc.torch as tagc

    n_trained, n = 2 * 8 * N, N * N
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(Adapted(torch.bfloat16)))
    fsdp1 = FullyShardedDataParallel(
        nn.Sequential(Adapted(torch.float32)), use_orig_params=True, device_id=torch.device("cpu")
    )
    for model in (sharded(torch.int8, torch.float32), ddp, *([fsdp1] if HAS_FSDP1 else [])):
        found = tagc.advise(model, seconds=0.5, verbose=False)
        n_units = 2 if found["wrap"] == "fsdp2" else 1
        assert (found["n_elems"], found["n_params"]) == (n_units * n_trained, n_units * (n_trained + n))
        assert f"{found['n_elems'] / 1e6:.3g} M of them trained" in found["text"]
        assert all((row["parameters_s"] > 0) == (found["wrap"] != "ddp") for row in found["rows"])


def test_advice():
    ranks.run_each([what_is_counted, each_wrap_is_measured], 2)


def shape_of(held, n_gathers=2, units=None):
    from tagc.torch.advise.shape import Shape

    return Shape(
        "fsdp2", 2, units or [{"compressed": 20_000}] * len(held), [n_gathers] * len(held), held=held
    )


def test_a_frozen_base_decides_the_advice():
    """By hand, on a link of 100 MB/s: gathers of the base take most of a step, in bytes of its own dtype."""
    from test_advice import found_on

    from tagc.torch.advise import advice

    found = found_on(100e6, codec_s_per_elem=0, latency_s=0)
    n = 1_000_000

    def seconds_of(shape):
        return {row["name"]: row["parameters_s"] for row in advice.forecast(shape, found)}

    # half of what is gathered comes from the other rank
    whole = seconds_of(shape_of([{"fp32": n}] * 3))
    assert whole["FSDP2 in fp32, as it is"] == pytest.approx(3 * 2 * 4 * n / 2 / 100e6)
    assert whole["FSDP2 in bf16"] == pytest.approx(3 * 2 * 2 * n / 2 / 100e6)
    assert whole["tagc, 95 % zero, parameters bf16"] == pytest.approx(3 * 2 * 2 * n / 2 / 100e6, rel=1e-4)
    # a base in int8 with adapters in fp32 is torch's to gather, in any format
    mixed = seconds_of(shape_of([{"other": n, "fp32": 20_000}] * 3))
    as_it_is = 3 * 2 * (n + 80_000) / 2 / 100e6
    assert mixed["FSDP2 in fp32, as it is"] == pytest.approx(as_it_is)
    assert mixed["FSDP2 in bf16"] == pytest.approx(3 * 2 * (n + 40_000) / 2 / 100e6)
    assert not any("parameters" in name for name in mixed)
    # with one unit that tagc can gather, the others still take torch's time
    both = seconds_of(shape_of([{"other": n, "fp32": 20_000}, {"fp32": n}]))
    expected_s = as_it_is / 3 + 2 * 2 * n / 2 / 100e6
    assert both["tagc, 95 % zero, parameters bf16"] == pytest.approx(expected_s, rel=1e-4)
    # a unit without trained parameters sends no delta, and no gradient
    still = shape_of([{"fp32": n}] * 2, units=[{}, {"compressed": n}])
    rows = {row["name"]: row for row in advice.forecast(still, found)}
    moving = {
        row["name"]: row for row in advice.forecast(shape_of([{"fp32": n}], units=[{"compressed": n}]), found)
    }
    name = "tagc, 95 % zero, parameters delta4"
    assert rows[name]["parameters_s"] == pytest.approx(moving[name]["parameters_s"] + 2 * n * 1e-10)
    assert rows[name]["gradients_s"] == pytest.approx(moving[name]["gradients_s"])


def test_units_are_joined_by_what_is_gathered():
    """As buckets() counts, all parameters; DDP's buckets have those that are trained."""
    from test_advice import found_on

    from tagc.torch.advise import advice

    held, sizes = [{"fp32": 100, "other": 50}] * 8, (150, 151, 300, 400)
    for unit, expected in (({"compressed": 200}, [8, 4, 4, 2]), ({"compressed": 10}, [8, 4, 4, 2])):
        shape = shape_of(held, units=[unit] * 8)
        rows = [advice.forecast(shape, found_on(1e9), joined=n)[0] for n in sizes]
        assert [row["n_units"] for row in rows] == expected
        buckets = dataclasses.replace(shape, wrap="ddp", n_gathers=[0] * 8, all_reduce=True)
        rows = [advice.forecast(buckets, found_on(1e9), joined=n)[0] for n in (10, 11, 200, 201)]
        of_trained = [row["n_units"] for row in rows]
        assert of_trained == ([8, 8, 8, 4] if unit["compressed"] == 200 else [8, 4, 1, 1])


def alone(rank, world_size):
    import tagc.torch as tagc

    found = tagc.advise(sharded(torch.int8), verbose=False)
    assert found["choice"] == "off" and found["options"] == {} and "one rank" in found["text"]
    tagc.compress(sharded(torch.int8), verbose=False).close()


def test_one_rank_is_told_to_leave_it_off():
    ranks.run(alone, 1)
