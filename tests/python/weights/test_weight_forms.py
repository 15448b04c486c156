"""What travels instead of whole weights: adapters alone, which a receiver adds to what it has, and weights
that are quantised already. Both arrive bit for bit, as oracles without tagc make them."""

import math

import pytest

torch = pytest.importorskip("torch")
import fake_engine
import ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, distribute_tensor
from weight_checks import bits, refused

from tagc.weights import Follower, Merged, Publisher
from tagc.weights.layout import Copies, Rank, engine_layout
from tagc.weights.lora import adapter_name, adapters
from tagc.weights.quantize import fp8_in_blocks, fp8_per_tensor, int8_per_channel

# ---- adapters ----

SCALE = 0.5


class Lora(nn.Module):
    """As PEFT's layers name their tensors, with two adapters."""

    def __init__(self, columns, rows, generator, r=4):
        super().__init__()
        self.base_layer = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
        # eighths: products and sums of few of them are exact in fp32, in any order
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        for adapter in ("default", "other"):
            self.lora_A[adapter] = nn.Linear(columns, r, bias=False)
            self.lora_B[adapter] = nn.Linear(r, rows, bias=False)
        for p in self.parameters():
            p.data = eighths(p.shape, generator).to(p.dtype)


def eighths(shape, generator):
    return torch.randint(-8, 9, shape, generator=generator) / 8


LAYERS = {
    "model.layers.0.self_attn.q_proj": (32, 24), "model.layers.0.self_attn.v_proj": (8, 24),
    "model.layers.0.self_attn.o_proj": (24, 32), "model.layers.0.mlp.up_proj": (32, 24),
    "model.layers.1.mlp.experts.2.down_proj": (24, 32),
}  # fmt: skip


def peft_model(layers=LAYERS, seed=1):
    generator, top = torch.Generator().manual_seed(seed), nn.Module()
    for name, (rows, columns) in layers.items():
        module, parts = top, ["base_model", "model", *name.split(".")]
        for part in parts[:-1]:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.add_module(parts[-1], Lora(columns, rows, generator))
    return top


def step(model, generator):
    for name, p in model.named_parameters():
        if "default" in name:
            p.data += eighths(p.shape, generator) * (torch.rand(p.shape, generator=generator) < 0.1)


def merged(checkpoint, model):
    """Returns the checkpoint with the adapter added: the oracle."""
    named, result = dict(model.named_parameters()), dict(checkpoint)
    for name in LAYERS:
        a, b = (named[f"base_model.model.{name}.lora_{which}.default.weight"] for which in "AB")
        weight = checkpoint[f"{name}.weight"]
        result[f"{name}.weight"] = (weight.double() + SCALE * b.double() @ a.double()).to(weight.dtype)
    return result


def test_adapters_alone_travel(tmp_path):
    model, generator, copies = peft_model(), torch.Generator().manual_seed(2), Copies()
    sender, receiver = Publisher(adapters(model), tmp_path), Follower(copies, tmp_path)
    for version in range(1, 5):
        assert sender.publish() == receiver.update() == version
        assert sender.last.is_whole == (version == 1)
        named = {  # as in adapter_model.safetensors
            name.replace(".default", ""): p.detach()
            for name, p in model.named_parameters()
            if ".default." in name
        }
        assert len(named) == 2 * len(LAYERS) and bits(copies.tensors) == bits(named)
        assert sender.last.n_elems == sum(p.numel() for p in named.values())
        assert "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight" in named
        step(model, generator)
    assert sender.last.n_changes < sender.last.n_elems / 5


def test_names_of_adapters():
    for name, saved in (
        ("a.lora_A.default.weight", "a.lora_A.weight"),
        ("module.a._orig_mod.lora_B.default.weight", "a.lora_B.weight"),
        ("a.lora_embedding_A.default", "a.lora_embedding_A"),
        ("a.modules_to_save.default.weight", "a.weight"),
        ("a.lora_A.other.weight", None),
        ("a.base_layer.weight", None),
        ("a.default.weight", None),
    ):
        assert adapter_name(name) == saved
    text = "the model has no adapter 'best': none of its names has it"
    refused(lambda: adapters(peft_model(), "best"), "argument", text)


@pytest.mark.parametrize("size", [1, 2])
def test_a_receiver_adds_the_adapter(size, tmp_path):
    """To packed weights, shards and an expert's, as if a checkpoint with it had been loaded; and a receiver
    that comes late has the same bits, since nothing adds up."""
    model, generator = peft_model(), torch.Generator().manual_seed(2)
    checkpoint, sender = fake_engine.checkpoint(), Publisher(adapters(model), tmp_path)

    def engine(rank):
        made = fake_engine.Model((rank, size), size > 1)
        made.load_weights(checkpoint.items())
        return made, Merged(engine_layout(made, Rank(rank, size)), tmp_path, SCALE)

    engines = [engine(rank) for rank in range(size)]
    for version in range(1, 4):
        sender.publish()
        right = merged(checkpoint, model)
        for rank in range(size):
            oracle = fake_engine.Model((rank, size), size > 1)
            oracle.load_weights(right.items())
            for made, receiver in (engines[rank], engine(rank)):
                assert receiver.update() == receiver.version == version
                assert bits(made) == bits(oracle)
        step(model, generator)


def test_an_adapter_that_was_replaced_leaves_nothing(tmp_path):
    """Another run has another adapter: of one layer, and with a tensor of its own."""
    checkpoint = fake_engine.checkpoint()
    made = fake_engine.Model()
    made.load_weights(checkpoint.items())
    before = bits(made)
    Publisher(adapters(peft_model()), tmp_path / "a").publish()
    receiver = Merged(engine_layout(made, Rank(0, 1)), tmp_path / "a", lambda name: SCALE)
    receiver.update()
    assert bits(made) != before
    for file in (tmp_path / "a").iterdir():
        file.unlink()
    head = torch.ones(46, 24).bfloat16()
    name = "model.layers.0.self_attn.q_proj"
    other = {
        f"base_model.model.{name}.lora_A.weight": torch.zeros(2, 24),
        f"base_model.model.{name}.lora_B.weight": torch.ones(32, 2),
        "base_model.model.lm_head.weight": head,
    }
    Publisher(other, tmp_path / "a").publish()
    receiver.update()
    after = bits(made)
    after.pop("lm_head.weight"), before.pop("lm_head.weight")
    assert after == before and torch.equal(made.lm_head.weight[:46], head)


def test_an_adapter_is_added_in_inference_mode(tmp_path):
    factors = {"a.lora_A.weight": torch.ones(2, 5), "a.lora_B.weight": torch.ones(3, 2)}
    sender = Publisher(factors, tmp_path)
    with torch.inference_mode():
        there = {"a.weight": torch.ones(3, 5)}
    receiver = Merged(there, tmp_path, 0.5)
    for version in (1, 2):
        sender.publish(), receiver.update()
        assert there["a.weight"].tolist() == [[1.0 + version] * 5] * 3
        factors["a.lora_A.weight"] += 1


def test_what_cannot_be_added_is_named(tmp_path):
    def update(tensors, model=None):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        Publisher(tensors, folder).publish()
        return Merged(model or {"a.weight": torch.zeros(3, 5)}, folder, 1.0).update

    factors = {"a.lora_A.weight": torch.ones(2, 5), "a.lora_B.weight": torch.ones(3, 2)}
    assert update(factors)() == 1
    embedding = {"b.lora_embedding_A": torch.ones(2)}
    refused(update(factors | embedding), "unsupported", "b.lora_embedding_A is no")
    alone = {"a.lora_A.weight": torch.ones(2, 5)}
    refused(update(alone), "mismatch", "the factors for a.weight make no matrix: {'A': [2, 5]}")
    refused(update(factors, {"b.weight": torch.ones(3, 5)}), "mismatch", "the store has a.weight [3, 5], and")
    wide = {"a.weight": torch.zeros(3, 6)}
    refused(update(factors, wide), "mismatch", "a.weight is [3, 5] torch.float32 in the store, and a.weight")


# ---- quantised weights ----

RECIPES = {
    "fp8 per tensor": (fp8_per_tensor(), "_scale"),
    "int8 per channel": (int8_per_channel(), "_scale"),
    "fp8 in blocks": (fp8_in_blocks(), "_scale_inv"),
    "fp8 in small blocks": (fp8_in_blocks(5, 3), "_scale_inv"),
}
FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def nearest(value, dtype):
    """Returns the code of fp8 or int8 nearest to a number, of two the even one."""
    if dtype == torch.int8:
        return round(value)  # Python rounds to even
    magnitudes = FP8[:127].tolist()  # 127 is NaN
    distance = [abs(abs(value) - m) for m in magnitudes]
    code = min(range(127), key=lambda c: (distance[c], c % 2))
    return code + 128 * (math.copysign(1, value) < 0)


def oracle(weight, name):
    """Quantises by loops, as docs/guide/weights.md says it: (weights, scales)."""
    recipe, most = RECIPES[name][0], 127 if "int8" in name else 448
    rows, columns = weight.shape
    r, c = (size or n for size, n in zip(recipe.block, weight.shape))
    scales = torch.zeros(-(-rows // r), -(-columns // c))
    codes = torch.zeros(rows, columns, dtype=torch.int64)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = weight[i * r : (i + 1) * r, j * c : (j + 1) * c].float()
            largest = max(float(block.abs().max()), 1e-4 if "blocks" in name else 1e-12)
            largest = torch.tensor(largest, dtype=torch.float32)
            scales[i, j] = largest / most
            made = [[nearest(float(x * (most / largest)), recipe.dtype) for x in row] for row in block]
            codes[i * r : (i + 1) * r, j * c : (j + 1) * c] = torch.tensor(made)
    quantised = codes.to(torch.int8) if most == 127 else codes.to(torch.uint8).view(torch.float8_e4m3fn)
    return quantised, scales.view(()) if recipe.block == (0, 0) else scales


def layer(seed=3):
    generator = torch.Generator().manual_seed(seed)
    named = {
        "model.embed_tokens.weight": torch.randn(7, 5, generator=generator),
        "model.layers.0.mlp.up_proj.weight": torch.randn(13, 10, generator=generator),
        "model.layers.0.mlp.gate.weight": torch.randn(2, 5, generator=generator),
        "model.layers.0.input_layernorm.weight": torch.randn(5, generator=generator),
        "model.layers.0.mlp.up_proj.bias": torch.zeros(13),
    }
    named["model.layers.0.mlp.up_proj.weight"][5:10, 3:6] = 0  # a block of zeros
    return named


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_weights_are_exact(name, dtype, tmp_path):
    recipe, ending = RECIPES[name]
    weights = {key: tensor.to(dtype) for key, tensor in layer().items()}
    copies, which = Copies(), "model.layers.0.mlp.up_proj.weight"
    sender = Publisher(weights, tmp_path, quantize=recipe, dtype=torch.bfloat16)
    receiver = Follower(copies, tmp_path)
    generator = torch.Generator().manual_seed(4)
    for version in range(1, 5):
        before = bits(weights)
        assert sender.publish() == receiver.update() == version
        assert bits(weights) == before  # the trainer's are not touched
        right = {key: tensor.bfloat16() for key, tensor in weights.items() if key != which}
        right[which], right[which + ending] = oracle(weights[which], name)
        assert bits(copies.tensors) == bits(right)
        for tensor in weights.values():
            tensor += 0.02 * torch.randn(tensor.shape, generator=generator).to(dtype)
    assert not sender.last.is_whole


def sharded(rank, world_size, folder):
    """Rows of a block are on two ranks, and one scale is of all ranks."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(150, 300, bias=False), nn.Linear(300, 40)).bfloat16()
    model = nn.Sequential(nn.Linear(150, 300, bias=False), nn.Linear(300, 40)).bfloat16()
    model.load_state_dict(whole.state_dict())
    fully_shard(model, mesh=DeviceMesh("cpu", list(range(world_size))))
    group = torch.distributed.group.WORLD
    for kind, (recipe, _) in RECIPES.items():
        here, alone, there = f"{folder}/{kind}", f"{folder}/{kind}-{rank}", Copies()
        sender = Publisher(model, here, group, quantize=recipe, timeout_s=60)
        oracles, receiver = Publisher(whole, alone, quantize=recipe), Follower(there, here)
        right = Copies()
        for version in (1, 2, 3):
            with torch.no_grad():
                for p, q in zip(model.parameters(), whole.parameters()):
                    q += 0.01 * torch.randn(q.shape, generator=torch.Generator().manual_seed(version)).to(q)
                    p.to_local().copy_(distribute_tensor(q.detach(), p.device_mesh, p.placements).to_local())
            assert sender.publish() == version == receiver.update()
            oracles.publish()
            Follower(right, alone).update()
            assert bits(there.tensors) == bits(right.tensors), kind
            assert sender.last.n_elems < oracles.last.n_elems
            torch.distributed.barrier()
    if rank == 1:
        with torch.no_grad():
            model[0].weight.to_local()[0, 0] = math.inf
    refused(sender.publish, "argument", "rank 1: 0.weight has values that are not finite")


def test_ranks_quantise_what_they_own(tmp_path):
    ranks.run(sharded, 3, str(tmp_path), timeout_s=100)


@pytest.mark.parametrize("size, is_ep", [(1, True), (2, True), (2, False)])
def test_an_engine_of_fp8_gets_what_its_loaders_would_load(size, is_ep, tmp_path):
    weights, generator = fake_engine.checkpoint(), torch.Generator().manual_seed(5)
    recipe = fp8_in_blocks(fake_engine.BLOCK, fake_engine.BLOCK)
    sender, copies = Publisher(weights, tmp_path, quantize=recipe), Copies()
    sender.publish()
    engines = []
    for rank in range(size):
        made, right = (fake_engine.Model((rank, size), is_ep, True) for _ in range(2))
        receiver = Follower(engine_layout(made, Rank(rank, size)), tmp_path, loader=made.load_weights)
        engines.append((made, right, receiver))
    for version in (1, 2, 3):
        Follower(copies, tmp_path).update()
        assert copies.tensors["model.layers.0.mlp.gate_proj.weight"].dtype == torch.float8_e4m3fn
        for made, right, receiver in engines:
            assert receiver.update() == version
            right.load_weights(copies.tensors.items())
            assert bits(made) == bits(right)
        for tensor in weights.values():
            tensor += 0.05 * (torch.rand(tensor.shape, generator=generator) < 0.05)
        sender.publish()


def test_a_function_quantises(tmp_path):
    def halves(name, tensor):
        return {name + ".low": tensor.to(torch.int8), name + ".high": tensor[0]} if tensor.ndim == 2 else None

    weights, copies = {"a": 9 * torch.randn(4, 3), "b": torch.randn(3)}, Copies()
    sender, receiver = Publisher(weights, tmp_path, quantize=halves), Follower(copies, tmp_path)
    for version in (1, 2):
        assert sender.publish() == receiver.update() == version
        right = {"a.low": weights["a"].to(torch.int8), "a.high": weights["a"][0], "b": weights["b"]}
        assert bits(copies.tensors) == bits(right)
        weights["a"] += 1
    weights["a"] = torch.randn(5, 3)
    refused(sender.publish, "state", "quantize made other tensors of a than before, such as a.low")


def test_recipes_that_cannot_be_are_named(tmp_path):
    def make(quantize, **tensors):
        return lambda: Publisher(tensors or {"a": torch.ones(2)}, tmp_path / "x", quantize=quantize).publish()

    refused(make("fp8"), "argument", "quantize is 'fp8', must be a Recipe or a function")
    both = {"a.weight": torch.ones(2, 2), "a.weight_scale": torch.ones(2)}
    refused(make(fp8_per_tensor(), **both), "argument", "two tensors are a.weight_scale when the model")
    nan = {"a.weight": torch.full((2, 2), math.nan)}
    refused(make(int8_per_channel(), **nan), "argument", "a.weight has values that are not finite")
