"""An engine's model on one rank, with loaders as those of vLLM 0.33 (linear.py, vocab_parallel_embedding.py,
routed_experts.py): they cut a checkpoint's tensors and copy what the rank has. SGLang's layers do the same.
Tests
compare what these load with what tagc writes."""

import types

import torch
from torch import nn

BLOCK = 4  # of rows and of columns that have one scale, where weights are in fp8


def parameter(*shape, dtype=torch.bfloat16):
    return nn.Parameter(torch.full(shape, -7.0).to(dtype), requires_grad=False)


def weights(layer, shape, is_fp8, name="weight"):
    """Gives a layer weights of this shape and, in fp8, the scales of their blocks."""
    setattr(layer, name, parameter(*shape, dtype=torch.float8_e4m3fn if is_fp8 else torch.bfloat16))
    if is_fp8:
        layer.weight_block_size = (BLOCK, BLOCK)
        blocks = [*shape[:-2], *(-(-n // BLOCK) for n in shape[-2:])]
        setattr(layer, f"{name}_scale_inv", parameter(*blocks, dtype=torch.float32))


def in_blocks(leaf, *rows):
    """Returns rows of weights as rows of this tensor of a layer."""
    return [-(-n // BLOCK) for n in rows] if leaf.endswith("_scale_inv") else list(rows)


def cut(tensor, dim, n, number):
    return tensor.narrow(dim, number * n, n)


def group(tp):
    """Returns what SGLang's layers have of their ranks, instead of tp_rank and tp_size as vLLM's."""
    return types.SimpleNamespace(rank_in_group=tp[0], world_size=tp[1]) if tp[1] > 1 else None


class Layer(nn.Module):
    def __init__(self, tp, in_group=False):
        super().__init__()
        self.tp = tp
        if in_group:
            self.tp_group = self.kv_tp_group = group(tp)
        else:
            self.tp_rank, self.tp_size = tp


class Linear(Layer):
    """Divided along dim, or not at all."""

    def __init__(self, shape, dim, tp, bias=False, is_fp8=False, in_group=False):
        super().__init__(tp if dim is not None else (0, 1), in_group)
        shape = list(shape)
        if dim is not None:
            shape[dim] //= self.tp[1]
        self.dim = dim
        weights(self, shape, is_fp8)
        self.bias = parameter(shape[0]) if bias else None

    def load(self, leaf, tensor, part):
        dim = None if leaf == "bias" and self.dim == 1 else self.dim
        n = getattr(self, leaf).shape[dim] if dim is not None else 0
        getattr(self, leaf).data.copy_(tensor if dim is None else cut(tensor, dim, n, self.tp[0]))


class QKVParallelLinear(Layer):
    def __init__(self, columns, head_size, v_head_size, n_heads, n_kv_heads, tp, bias, is_fp8, in_group):
        super().__init__(tp, in_group)
        self.head_size, self.v_head_size, self.num_heads = head_size, v_head_size, n_heads // tp[1]
        self.num_kv_heads = max(1, n_kv_heads // tp[1])
        self.num_kv_head_replicas = max(1, tp[1] // n_kv_heads)
        rows = (self.num_heads + self.num_kv_heads) * head_size + self.num_kv_heads * v_head_size
        weights(self, (rows, columns), is_fp8)
        self.bias = parameter(rows) if bias else None

    def load(self, leaf, tensor, part):
        q, k, v = in_blocks(
            leaf,
            self.num_heads * self.head_size,
            self.num_kv_heads * self.head_size,
            self.num_kv_heads * self.v_head_size,
        )
        offset, n = {"q_proj": (0, q), "k_proj": (q, k), "v_proj": (q + k, v)}[part]
        number = self.tp[0] if part == "q_proj" else self.tp[0] // self.num_kv_head_replicas
        getattr(self, leaf).data.narrow(0, offset, n).copy_(cut(tensor, 0, n, number))


class MergedColumnParallelLinear(Layer):
    def __init__(self, columns, output_sizes, tp, is_fp8):
        super().__init__(tp)
        self.output_sizes = output_sizes
        weights(self, (sum(output_sizes) // self.tp_size, columns), is_fp8)

    def load(self, leaf, tensor, part):
        number = ["gate_proj", "up_proj"].index(part)
        sizes = in_blocks(leaf, *(n // self.tp_size for n in self.output_sizes))
        to = getattr(self, leaf).data.narrow(0, sum(sizes[:number]), sizes[number])
        to.copy_(cut(tensor, 0, sizes[number], self.tp_rank))


class VocabParallelEmbedding(nn.Module):
    def __init__(self, n_tokens, columns, tp):
        super().__init__()
        rank, size = tp
        padded = -(-n_tokens // (4 * size)) * 4
        begin = min(rank * padded, n_tokens)
        self.shard_indices = types.SimpleNamespace(
            org_vocab_start_index=begin, org_vocab_end_index=min(begin + padded, n_tokens)
        )
        self.weight = parameter(padded, columns)
        self.weight.data.zero_()

    def load(self, leaf, tensor, part):
        begin, end = self.shard_indices.org_vocab_start_index, self.shard_indices.org_vocab_end_index
        self.weight.data[: end - begin].copy_(tensor[begin:end])


class RoutedExperts(nn.Module):
    """Of all ranks, each with some experts (ep) or with rows of all. has_config: it has its rank as vLLM's,
    whose ranks of data parallelism share rows, too."""

    def __init__(self, n_experts, columns, rows, tp, is_ep, is_fp8, has_config=False):
        super().__init__()
        rank, size = tp
        self.tp_rank, self.tp_size = (0, 1) if is_ep else tp
        if has_config:
            self.moe_config = types.SimpleNamespace(tp_rank=self.tp_rank)
        self.n_local = n_experts // size if is_ep else n_experts
        self.begin = rank * self.n_local if is_ep else 0
        rows //= self.tp_size
        weights(self, (self.n_local, 2 * rows, columns), is_fp8, "w13_weight")
        weights(self, (self.n_local, columns, rows), is_fp8, "w2_weight")

    def _map_global_expert_id_to_local_expert_id(self, number):
        return number - self.begin if self.begin <= number < self.begin + self.n_local else -1

    def load_expert(self, number, part, leaf, tensor):
        local = self._map_global_expert_id_to_local_expert_id(number)
        if local < 0:
            return
        (rows,) = in_blocks(leaf, self.w2_weight.shape[2])
        if part == "down_proj":
            getattr(self, f"w2_{leaf}").data[local].copy_(cut(tensor, 1, rows, self.tp_rank))
        else:
            to = getattr(self, f"w13_{leaf}").data[local].narrow(0, rows * (part == "up_proj"), rows)
            to.copy_(cut(tensor, 0, rows, self.tp_rank))


class Model(nn.Module):
    """Grouped heads, a dense layer and one of experts, over the ranks of tp = (rank, size). is_fp8: matrices
    of layers are in fp8 with scales of blocks, as DeepSeek's. attention: (rank, size) of its layers, in
    groups, and expert_tp: of the experts, where these are others."""

    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    COLUMNS, ROWS, HEAD, HEADS, KV_HEADS, TOKENS, EXPERTS = 24, 32, 4, 8, 2, 46, 4

    V_HEAD = HEAD

    def __init__(self, tp=(0, 1), is_ep=True, is_fp8=False, attention=None, expert_tp=None):
        super().__init__()
        in_group, of_attention = attention is not None, attention or tp
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(self.TOKENS, self.COLUMNS, tp)
        self.model.layers = nn.ModuleList()
        for number in range(2):
            layer = nn.Module()
            layer.self_attn, layer.mlp = nn.Module(), nn.Module()
            sizes = (self.COLUMNS, self.HEAD, self.V_HEAD, self.HEADS, self.KV_HEADS)
            layer.self_attn.qkv_proj = QKVParallelLinear(*sizes, of_attention, True, is_fp8, in_group)
            shape = (self.COLUMNS, self.HEADS * self.V_HEAD)
            layer.self_attn.o_proj = Linear(shape, 1, of_attention, True, is_fp8, in_group)
            layer.input_layernorm = Linear((self.COLUMNS,), None, tp)
            if number == 0:
                layer.mlp.gate_up_proj = MergedColumnParallelLinear(self.COLUMNS, [self.ROWS] * 2, tp, is_fp8)
                layer.mlp.down_proj = Linear((self.COLUMNS, self.ROWS), 1, tp, False, is_fp8)
            else:
                layer.mlp.gate = Linear((self.EXPERTS, self.COLUMNS), None, tp)
                layer.mlp.experts = nn.Module()
                layer.mlp.experts.routed_experts = RoutedExperts(
                    self.EXPERTS, self.COLUMNS, self.ROWS, expert_tp or tp, is_ep, is_fp8, bool(expert_tp)
                )
            self.model.layers.append(layer)
        self.lm_head = VocabParallelEmbedding(self.TOKENS, self.COLUMNS, tp)

    def load_weights(self, tensors):
        modules = dict(self.named_modules())
        for name, tensor in tensors:
            stem, leaf = name.rsplit(".", 1)
            above, last = stem.rsplit(".", 1) if "." in stem else ("", stem)
            whole = {part: key for key, parts in self.packed_modules_mapping.items() for part in parts}.get(
                last
            )
            if ".experts." in stem:
                layer, _, number = above.partition(".experts.")
                modules[f"{layer}.experts.routed_experts"].load_expert(int(number), last, leaf, tensor)
            elif whole and f"{above}.{whole}" in modules:
                modules[f"{above}.{whole}"].load(leaf, tensor, last)
            else:
                modules[stem].load(leaf, tensor, None)


class WideValues(Model):
    V_HEAD = 8


def checkpoint(seed=0, m=Model):
    """Returns tensors as a checkpoint has them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (m.TOKENS, m.COLUMNS), "lm_head.weight": (m.TOKENS, m.COLUMNS)}
    for number in range(2):
        layer = f"model.layers.{number}"
        shapes[f"{layer}.input_layernorm.weight"] = (m.COLUMNS,)
        n_rows = {"q": m.HEADS * m.HEAD, "k": m.KV_HEADS * m.HEAD, "v": m.KV_HEADS * m.V_HEAD}
        for which, n in n_rows.items():
            shapes[f"{layer}.self_attn.{which}_proj.weight"] = (n, m.COLUMNS)
            shapes[f"{layer}.self_attn.{which}_proj.bias"] = (n,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (m.COLUMNS, m.HEADS * m.V_HEAD)
        shapes[f"{layer}.self_attn.o_proj.bias"] = (m.COLUMNS,)
    stems = ["model.layers.0.mlp", *(f"model.layers.1.mlp.experts.{e}" for e in range(m.EXPERTS))]
    shapes["model.layers.1.mlp.gate.weight"] = (m.EXPERTS, m.COLUMNS)
    for stem in stems:
        shapes |= {f"{stem}.{part}_proj.weight": (m.ROWS, m.COLUMNS) for part in ("gate", "up")}
        shapes[f"{stem}.down_proj.weight"] = (m.COLUMNS, m.ROWS)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
