"""Names and layouts: what tagc writes into a model on one rank is what the engine's loaders make of the same
checkpoint; and what Megatron's ranks have comes out as a checkpoint."""

import copy

import pytest

torch = pytest.importorskip("torch")
import fake_engine
import ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from weight_checks import bits, refused, step

from tagc.weights import Follower, Publisher
from tagc.weights.layout import Rank, engine_layout
from tagc.weights.names import Megatron, experts, hugging_face, megatron


@pytest.mark.parametrize(
    "size, is_ep", [(1, True), (2, True), (2, False), (4, False)]
)  # 4: heads on two ranks
def test_a_rank_gets_what_its_loaders_would_load(size, is_ep, tmp_path):
    here, generator = fake_engine.checkpoint(), torch.Generator().manual_seed(3)
    sender = Publisher(here, tmp_path)
    sender.publish()
    engines = []
    for rank in range(size):
        model, oracle = (fake_engine.Model((rank, size), is_ep) for _ in range(2))
        layout = engine_layout(model, Rank(rank, size))
        engines.append((model, oracle, Follower(layout, tmp_path, loader=model.load_weights)))
    for version in range(1, 4):
        for model, oracle, receiver in engines:
            assert receiver.update() == version
            oracle.load_weights(here.items())
            assert bits(model) == bits(oracle)
        step(here, generator)
        sender.publish()


@pytest.mark.parametrize("attention, expert_tp", [((0, 1), (3, 4)), ((1, 2), (1, 2)), ((3, 4), (0, 2))])
def test_layers_have_ranks_of_their_own(attention, expert_tp, tmp_path):
    """Attention is replicated or divided among fewer ranks, as SGLang's under data parallelism, rows of
    experts among more, as vLLM's, and heads of values are wider."""
    here, generator = fake_engine.checkpoint(m=fake_engine.WideValues), torch.Generator().manual_seed(3)
    sender = Publisher(here, tmp_path)
    options = {"is_ep": False, "attention": attention, "expert_tp": expert_tp}
    model, oracle = (fake_engine.WideValues((1, 2), **options) for _ in range(2))
    receiver = Follower(engine_layout(model, Rank(1, 2)), tmp_path)
    for _ in range(2):
        sender.publish(), receiver.update()
        oracle.load_weights(here.items())
        assert bits(model) == bits(oracle)
        step(here, generator)


def test_what_does_not_fit_is_named(tmp_path):
    here = fake_engine.checkpoint()
    Publisher(here, tmp_path / "a").publish()

    def update(model, rank=(0, 1), names=None, store="a", **options):
        return lambda: Follower(
            engine_layout(model, Rank(*rank), names), tmp_path / store, **options
        ).update()

    model = fake_engine.Model()
    model.more = nn.Linear(2, 2).bfloat16()
    refused(update(model), "mismatch", "the store has 0 of the 4 elements that this rank has of more.weight")
    model = fake_engine.Model()
    del model.lm_head
    refused(update(model), "mismatch", "the store has lm_head.weight [46, 24], and the model has no such")
    update(model, names=lambda name: None if name == "lm_head.weight" else name)()
    model = fake_engine.Model()
    model.model.layers[0].mlp.down_proj.weight.data = torch.zeros(3, 3).bfloat16()
    refused(
        update(model), "mismatch", "down_proj.weight is [3, 3] on rank 0 of 1, which is no shard of [24, 32]"
    )
    model = fake_engine.Model()
    model.model.layers[1].mlp.experts.routed_experts.w2_weight.data = torch.zeros(4, 9, 9).bfloat16()
    refused(update(model), "mismatch", "w2_weight is [4, 9, 9] on this rank, and has no shard of [24, 32]")
    model = fake_engine.Model()
    model.model.layers[0].self_attn.qkv_proj.weight.data = torch.zeros(9, 24).bfloat16()
    refused(
        update(model), "mismatch", "qkv_proj.weight is [9, 24], and has no shard of [8, 24] as its part 1"
    )
    model = fake_engine.Model().half()
    refused(
        update(model), "mismatch", "torch.bfloat16 in the store, and lm_head.weight is [46, 24] torch.float16"
    )
    model = fake_engine.Model()

    def transposing(tensors):  # an engine that keeps the halves of experts the other way round
        model.load_weights(tensors)
        w13 = model.model.layers[1].mlp.experts.routed_experts.w13_weight.data
        w13.copy_(w13.roll(w13.shape[1] // 2, 1))

    refused(
        update(model, loader=transposing), "unsupported", "the engine keeps it in another form than a check"
    )


# ---- names ----


def test_names_of_wrappers():
    for name in (
        "model.layers.0.mlp.gate_proj.weight",
        "module.model.layers.0._checkpoint_wrapped_module.mlp.gate_proj.weight",
        "_orig_mod.model.layers.0._checkpoint_wrapped_module._orig_mod.mlp.gate_proj.weight",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.gate_proj.weight",
        "base_model.model.model.layers.0.mlp.gate_proj.base_layer.weight",
    ):
        assert hugging_face(name) == "model.layers.0.mlp.gate_proj.weight"


def test_a_wrapped_model_sends_by_the_names_of_its_checkpoint(tmp_path):
    class Compiled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self._orig_mod = inner

    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    there = copy.deepcopy(plain)
    model = Compiled(nn.Sequential(checkpoint_wrapper(plain[0]), Compiled(plain[1])))
    sender, receiver = Publisher(model, tmp_path), Follower(there, tmp_path)
    for _ in range(2):
        with torch.no_grad():
            plain[0].weight += 1
        assert sender.publish() == receiver.update()
        assert torch.equal(there[0].weight, plain[0].weight)


def megatron_of(tensors, tp, stage, ep):
    """Makes what one rank of Megatron Core has, by its loops over heads: stage 0 has the dense layer, stage 1
    the experts."""
    m = fake_engine.Model
    rank, size = tp
    queries = m.HEADS // m.KV_HEADS
    n_groups = m.KV_HEADS // size
    name, result = f"model.layers.{stage}", {}
    for leaf in ("weight", "bias"):
        rows = []
        for group in range(rank * n_groups, (rank + 1) * n_groups):
            q, k, v = (tensors[f"{name}.self_attn.{which}_proj.{leaf}"].split(m.HEAD) for which in "qkv")
            rows += [*q[group * queries : (group + 1) * queries], k[group], v[group]]
        result[f"decoder.layers.0.self_attention.linear_qkv.{leaf}"] = torch.cat(rows)
    result["decoder.layers.0.self_attention.linear_proj.weight"] = tensors[
        f"{name}.self_attn.o_proj.weight"
    ].chunk(size, 1)[rank]
    result["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"] = tensors[
        f"{name}.input_layernorm.weight"
    ]

    def both(stem, number=None):
        halves = [tensors[f"{stem}.{part}_proj.weight"] for part in ("gate", "up")]
        if number is None:
            halves = [half.chunk(size)[rank] for half in halves]
        return torch.cat(halves)

    if stage == 0:
        result["embedding.word_embeddings.weight"] = tensors["model.embed_tokens.weight"].chunk(size)[rank]
        result["decoder.layers.0.mlp.linear_fc1.weight"] = both(f"{name}.mlp")
        down = tensors[f"{name}.mlp.down_proj.weight"]
        result["decoder.layers.0.mlp.linear_fc2.weight"] = down.chunk(size, 1)[rank]
    else:
        result["output_layer.weight"] = tensors["lm_head.weight"].chunk(size)[rank]
        result["decoder.layers.0.mlp.router.weight"] = tensors[f"{name}.mlp.gate.weight"]
        for local in range(2):
            stem = f"{name}.mlp.experts.{2 * ep + local}"
            result[f"decoder.layers.0.mlp.experts.linear_fc1.weight{local}"] = both(stem, local)
            down = tensors[f"{stem}.down_proj.weight"]
            result[f"decoder.layers.0.mlp.experts.linear_fc2.weight{local}"] = down
    return {f"module.module.{name}": tensor.clone() for name, tensor in result.items()}


def megatron_ranks(rank, world_size, folder):
    """Two stages of two ranks: tensor parallelism 2, experts 2."""
    m, stage, tp = fake_engine.Model, rank // 2, (rank % 2, 2)
    whole = {k: v for k, v in fake_engine.checkpoint().items() if not k.endswith("o_proj.bias")}
    of = Megatron(m.HEADS, m.KV_HEADS, m.HEAD, tp, first_layer=stage, first_expert=2 * (rank % 2))
    here = megatron_of(whole, tp, stage, rank % 2)
    sender = Publisher(megatron(here, of), folder, torch.distributed.group.WORLD, timeout_s=60)
    there = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    receiver = Follower(there, folder)
    generator = torch.Generator().manual_seed(1)
    for version in range(1, 4):
        assert sender.publish() == version == receiver.update()
        assert [name for name in whole if not torch.equal(whole[name], there[name])] == []
        torch.distributed.barrier()
        step(whole, generator)
        for name, tensor in megatron_of(whole, tp, stage, rank % 2).items():
            here[name].copy_(tensor)


def test_ranks_of_megatron_send_a_checkpoint(tmp_path):
    ranks.run(megatron_ranks, 4, str(tmp_path), timeout_s=100)


# ---- experts, of which each of several ranks owns some ----


class Experts(nn.Module):
    """A layer's, as transformers has them."""

    def __init__(self, whole):
        super().__init__()
        for name, tensor in whole.items():
            setattr(self, name, nn.Parameter(tensor.clone(), requires_grad=False))


EXPERTS = "model.layers.1.mlp.experts"


def packed(tensors):
    """Makes the tensors of transformers' experts from those of a checkpoint."""
    numbers = range(fake_engine.Model.EXPERTS)
    parts = {
        part: torch.stack([tensors[f"{EXPERTS}.{e}.{part}_proj.weight"] for e in numbers])
        for part in ("gate", "up", "down")
    }
    return {"gate_up_proj": torch.cat([parts["gate"], parts["up"]], 1), "down_proj": parts["down"]}


PLACED = {  # by the mesh's shape: of experts alone, of rows within them, and of FSDP2 within those
    "experts": ((4,), ["experts"], (Shard(0),)),
    "rows and experts": ((2, 2), ["rows", "experts"], (Shard(1), Shard(0))),
    "FSDP2 within experts": ((2, 2), ["data", "experts"], None),
    "replicas": ((2, 2), ["data", "experts"], (Replicate(), Shard(0))),
}


def placed(whole, case):
    """Returns a layer's experts, of which this rank has a part."""
    shape, names, placements = PLACED[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    layer = Experts(whole)
    for name, p in list(layer.named_parameters()):
        at = mesh["experts"] if placements is None else mesh
        shard = distribute_tensor(p.detach(), at, placements or (Shard(0),))
        setattr(layer, name, nn.Parameter(shard, requires_grad=False))
    return layer if placements is not None else fully_shard(layer, mesh=mesh["data"])


def step_of_experts(trained, whole):
    """Moves small weights, of replicas alike, and makes a checkpoint of what torch gathers."""
    for name, p in trained.named_parameters():
        local = p.to_local()
        local[local.abs() < 0.1] += 0.5
        for e, full in enumerate(p.full_tensor()):
            parts = {"down": full} if name == "down_proj" else dict(zip(("gate", "up"), full.chunk(2)))
            for part, tensor in parts.items():
                whole[f"{EXPERTS}.{e}.{part}_proj.weight"].copy_(tensor)


def ranks_with_experts(rank, world_size, folder):
    """Each case has its own trainers, all write to one store, and each rank is a receiver, too: of two ranks
    with whole experts, and of two with rows of all."""
    torch.manual_seed(0)
    for case in PLACED:
        whole, generator = fake_engine.checkpoint(), torch.Generator().manual_seed(1)
        trained = placed(packed(whole), case)

        def tensors():
            model = {f"{EXPERTS}.{name}": p for name, p in trained.named_parameters()}
            return {k: v for k, v in whole.items() if ".experts." not in k} | experts(model)

        store = f"{folder}/{case}"
        sender = Publisher(tensors, store, torch.distributed.group.WORLD, timeout_s=60)
        tp, is_ep = (rank % 2, 2), rank < 2
        model, oracle = (fake_engine.Model(tp, is_ep) for _ in range(2))
        receiver = Follower(engine_layout(model, Rank(*tp)), store, loader=model.load_weights)
        for version in range(1, 4):
            assert sender.publish() == version == receiver.update()
            oracle.load_weights(whole.items())
            assert bits(model) == bits(oracle), case
            n_elems = sum(tensor.numel() for tensor in whole.values())
            assert sender.last.n_elems < n_elems / 2  # each writes what it owns
            torch.distributed.barrier()
            step({k: v for k, v in whole.items() if ".experts." not in k}, generator)
            step_of_experts(trained, whole)


def test_ranks_with_experts_of_their_own_send_a_checkpoint(tmp_path):
    ranks.run(ranks_with_experts, 4, str(tmp_path), timeout_s=100)


def test_experts_in_another_form_are_named():
    of_gpt_oss = {"a.experts.gate_up_proj": torch.ones(2, 8, 12), "a.experts.down_proj": torch.ones(2, 6, 8)}
    refused(lambda: experts(of_gpt_oss), "unsupported", "a.experts is of (2, 8, 12) and (2, 6, 8): no")
    refused(
        lambda: experts({"a.experts.down_proj": torch.ones(2, 6, 8)}), "unsupported", "a.experts is of ()"
    )


def test_what_megatron_has_not_is_named():
    of = Megatron(8, 2, 4)
    text = "decoder.layers.0.mamba.weight [3] is in no GPT of Megatron that tagc knows"
    refused(lambda: megatron({"decoder.layers.0.mamba.weight": torch.ones(3)}, of), "unsupported", text)
    qkv = {"decoder.layers.0.self_attention.linear_qkv.weight": torch.ones(40, 3)}
    refused(lambda: megatron(qkv, of), "argument", "qkv has 40 rows, and 48 by this Megatron()")
    refused(lambda: megatron(qkv, Megatron(8, 3, 4)), "argument", "8 heads in 3 groups cannot be divided")
