"""A model of vLLM's own layers, on one rank of a processor: linear.py, vocab_parallel_embedding.py,
fused_moe/. Its weights are loaded by their own weight_loader, with names mapped as vLLM's models map them.
The names and sizes are those of fake_engine.Model."""

import fake_engine
import torch
from torch import nn
from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as kernels
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory, fused_moe_make_expert_params_mapping
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

STACKED = [  # as in vLLM's models: of the engine, of the checkpoint, and which part
    ("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "v_proj", "v"),
    ("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1),
]  # fmt: skip


# which kernel would compute, of which none is here, is of no matter to what loads
kernels.select_unquantized_moe_backend = lambda moe_config: (kernels.UnquantizedMoeBackend.TRITON, None)
kernels.UnquantizedFusedMoEMethod._setup_kernel = lambda *_, **__: None


def begin(rank, size, store):
    """Makes vLLM's groups of tensor parallelism, of all ranks. store: a path of a file that is not there."""
    with set_current_vllm_config(config_of(size, False)):
        init_distributed_environment(size, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(size)


def config_of(size, is_ep):
    parallel = ParallelConfig(tensor_parallel_size=size, enable_expert_parallel=is_ep)
    return VllmConfig(device_config=DeviceConfig(device="cpu"), parallel_config=parallel)


class Model(nn.Module):
    packed_modules_mapping = fake_engine.Model.packed_modules_mapping

    def __init__(self, size, of):
        super().__init__()
        self.of = of
        kept = {"params_dtype": torch.bfloat16}
        rows = kept | {"padding_size": 4 * size}
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(of.TOKENS, of.COLUMNS, **rows)
        self.model.layers = nn.ModuleList()
        for number in range(2):
            layer, name = nn.Module(), f"model.layers.{number}"
            layer.self_attn, layer.mlp, layer.input_layernorm = nn.Module(), nn.Module(), nn.Module()
            layer.self_attn.qkv_proj = QKVParallelLinear(
                of.COLUMNS, of.HEAD, of.HEADS, of.KV_HEADS, v_head_size=of.V_HEAD, bias=True, **kept
            )
            layer.self_attn.o_proj = RowParallelLinear(of.HEADS * of.V_HEAD, of.COLUMNS, bias=True, **kept)
            layer.input_layernorm.weight = fake_engine.parameter(of.COLUMNS)
            if number == 0:
                layer.mlp.gate_up_proj = MergedColumnParallelLinear(
                    of.COLUMNS, [of.ROWS] * 2, bias=False, **kept
                )
                layer.mlp.down_proj = RowParallelLinear(of.ROWS, of.COLUMNS, bias=False, **kept)
            else:
                layer.mlp.gate = ReplicatedLinear(of.COLUMNS, of.EXPERTS, bias=False, **kept)
                layer.mlp.experts = FusedMoEFactory(
                    of.EXPERTS, 2, of.COLUMNS, of.ROWS, prefix=f"{name}.mlp.experts", **kept
                )
            self.model.layers.append(layer)
        self.lm_head = ParallelLMHead(of.TOKENS, of.COLUMNS, **rows)
        for p in self.parameters():
            p.data.fill_(0)

    def load_weights(self, tensors):
        named, mapping = dict(self.named_parameters()), fused_moe_make_expert_params_mapping(
            self, "gate_proj", "down_proj", "up_proj", self.of.EXPERTS
        )  # fmt: skip
        for name, tensor in tensors:
            if ".experts." in name:
                for inside, outside, number, part in mapping:
                    if outside in name:
                        p = named[name.replace(outside, inside)]
                        p.weight_loader(p, tensor, name, shard_id=part, expert_id=number)
                continue
            for packed, part, which in STACKED:
                if f".{part}." in name and name.replace(part, packed) in named:
                    p = named[name.replace(part, packed)]
                    p.weight_loader(p, tensor, which)
                    break
            else:
                getattr(named[name], "weight_loader", default_weight_loader)(named[name], tensor)


def make(size, is_ep, of=fake_engine.Model):
    with set_current_vllm_config(config_of(size, is_ep)):
        model = Model(size, of)
        record_metadata_for_reloading(model)  # as vLLM's initialize_model() does
        return model
