"""Adapters on a frozen base, as LoRA and QLoRA have them: what is gathered is much more than what is
trained, and may have other dtypes."""

import contextlib
import io

import pytest

torch = pytest.importorskip("torch")
import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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


def test_units_of_several_dtypes():
    ranks.run_each([units_of_several_dtypes, who_gathers_what_is_said], 2)
