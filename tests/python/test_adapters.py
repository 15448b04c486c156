"""Models of which little is trained: adapters as PEFT names them, of attention alone; adapters that are too
small; nothing to compress; nothing trained at all."""

import pytest

torch = pytest.importorskip("torch")
import ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wrappers import heard, printed


class Lora(nn.Module):
    """A layer with an adapter, named as PEFT names them."""

    def __init__(self, n, r):
        super().__init__()
        self.base_layer = nn.Linear(n, n, bias=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(n, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, n, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Layer(nn.Module):
    def __init__(self, n, r, mlp):
        super().__init__()
        self.self_attn = nn.ModuleDict({"q_proj": Lora(n, r), "v_proj": Lora(n, r)})
        self.mlp = nn.ModuleDict({"up_proj": Lora(n, r) if mlp else nn.Linear(n, n)})

    def forward(self, x):
        return x + self.self_attn["q_proj"](x) + self.self_attn["v_proj"](x) + self.mlp["up_proj"](x)


def adapters(n=512, r=16, mlp=False):
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(n, r, mlp) for _ in range(2)])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    return DistributedDataParallel(model)


def of_attention_alone_are_selected(rank, world_size):
    """Selection begins, with the beta1 and a longer beta2; without an optimizer all values travel."""
    import tagc.torch as tagc

    for how in ("compress", "param_groups", "none"):
        model = adapters()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, 1e-3, (0.9, 0.9))
        handle, said = printed(tagc.compress, model, *[optimizer][: how == "compress"])
        if how == "param_groups":
            optimizer = torch.optim.AdamW(handle.param_groups(), 1e-3, (0.9, 0.9))
            assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.9)]
        assert ("until tagc knows the optimizer" in said) == (rank == 0 and how != "compress"), said
        betas = set()
        optimizer.register_step_pre_hook(
            lambda _, args, __, betas=betas: betas.update(group["betas"] for group in args[0].param_groups)
        )
        torch.manual_seed(rank)
        for _ in range(90):
            optimizer.zero_grad()
            model(torch.randn(4, 512)).square().mean().backward()
            optimizer.step()
        levels = {level for name, level in handle.state.schedule.levels().items() if "lora" in name}
        bits = handle.stats()["bits_per_param"]
        if how == "none":
            assert levels == {1} and bits > 6, (levels, bits)
            continue
        assert levels == {3} and bits < 4.5, (how, levels, bits)
        assert "(dense: 64)" in repr(handle), repr(handle)  # fp32, both halves of an all-reduce
        assert repr(handle).count("mild:") == 1 and " to " in repr(handle), repr(handle)
        assert handle.state.moments.memories
        if how == "compress":  # whose hook comes before this test's
            assert {beta1 for beta1, _ in betas} == {0.9} and max(beta2 for _, beta2 in betas) > 0.92, betas
        handle.close()


def test_adapters():
    ranks.run_each((of_attention_alone_are_selected,), 2)


def too_small_or_frozen(rank, world_size):
    """What there is to say is said once, and training works."""
    from torch.distributed.fsdp import fully_shard

    import tagc.torch as tagc

    small = adapters(n=64, r=4)
    handle, said = printed(tagc.compress, small)
    if rank == 0:
        assert (
            said.count("nothing of this model is compressed") == 1
            and "8 matrices, such as 0.self_attn" in said
        )
        assert "fewer than 4,096 elements" in said and "fresh" not in said and "mostly noise" not in said, (
            said
        )
    small(torch.randn(2, 64)).sum().backward()
    assert handle.stats()["n_elems"] == 8 * 64 * 4 and "zero" not in repr(handle)
    handle.close()
    norms = nn.Sequential(nn.LayerNorm(64), nn.LayerNorm(64))
    handle, said = printed(tagc.compress, DistributedDataParallel(norms))
    assert ("as without tagc\n" in said) == (rank == 0) and "fewer than" not in said, said
    handle.close()
    frozen = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    fully_shard(frozen)
    handle, said = printed(tagc.compress, frozen)
    assert ("no parameter of this model is trained" in said) == (rank == 0) and "noise" not in said, said
    frozen(torch.randn(2, 64))
    handle.close()


def a_newer_torch(rank, world_size):
    """One warning, on rank 0, of a torch that the tests have not seen."""
    import tagc.torch as tagc
    from tagc.torch.exchange import internals

    newest = internals.NEWEST
    for is_newer in (False, True):
        internals.NEWEST = (2, 9) if is_newer else newest
        model = DistributedDataParallel(nn.Linear(64, 64))
        with heard("was tested with") as said:
            tagc.compress(model, verbose=False).close()
        assert len(said) == (is_newer and rank == 0), said
    internals.NEWEST = newest


def test_little_to_compress():
    ranks.run_each((too_small_or_frozen, a_newer_torch), 2)


def test_a_hint_for_the_wrong_module():
    import tagc

    with pytest.raises(AttributeError, match="'compress'; .* import tagc.torch as tagc"):
        getattr(tagc, "compress")  # noqa: B009
    assert not hasattr(tagc, "__wrapped__")
