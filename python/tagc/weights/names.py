"""Trainers' tensors as checkpoints of Hugging Face name and shape them, which is how a store has them.

    wrappers    of torch.compile(), activation checkpoints, DDP, PEFT: names only. A Publisher drops most
                by itself
    experts     of transformers, which has those of a layer in one tensor: Parts
    Megatron    packed and interleaved weights on ranks of tensor, pipeline and expert parallelism: Parts

A mapping is a function or a dict; these are the common ones."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping

import torch

from tagc._library import Error
from tagc.weights.tensors import Box, Model, Part, Parts, boxes_of, memories, named_tensors, plain_name

_PEFT = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")


def without_wrappers(name: str) -> str:
    """Returns the name without what torch.compile(), activation checkpoints, DDP and FSDP put into it."""
    return plain_name(name).removeprefix("module.")


def hugging_face(name: str) -> str:
    """Returns the name in the checkpoint of a parameter of a model of transformers, however it is wrapped:
    by torch.compile(), activation checkpoints, DDP, FSDP or PEFT, of which this is the base's name."""
    return _PEFT.sub("", without_wrappers(name))


_PACKED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


def experts(
    model: Model, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, torch.Tensor | Parts]:
    """Returns a model's tensors with each expert's matrices under names of their own, as checkpoints have
    them: a model for a Publisher. transformers (5) has those of a layer in gate_up_proj (experts, 2 x rows,
    columns) and down_proj (experts, columns, rows), of which each rank may hold a shard. They are the model's
    own memory. names: those of the checkpoint. Error for experts in another form."""
    named, result = named_tensors(model, False), {}
    for name, tensor in named.items():
        match = _PACKED_EXPERTS.fullmatch(name)
        if not match:
            result[name] = tensor
            continue
        first, second = (named.get(f"{match[1]}.{which}") for which in ("gate_up_proj", "down_proj"))
        shapes = [() if one is None else tuple(one.shape) for one in (first, second)]
        if [len(shape) for shape in shapes] != [3, 3] or (2 * shapes[1][2], shapes[1][1]) != shapes[0][1:]:
            raise Error(
                "unsupported", f"{match[1]} is of {shapes[0]} and {shapes[1]}: no experts that tagc knows"
            )
        matrices = names[2:] if match[2] == "down_proj" else names[:2]
        n, rows, columns = tensor.shape[0], tensor.shape[1] // len(matrices), tensor.shape[2]
        held = list(zip(boxes_of(name, tensor), memories(tensor)))
        for number, (half, which) in itertools.product(range(n), enumerate(matrices)):
            box, parts = Box((number, half * rows, 0), (1, rows, columns)), []
            for here, memory in held:
                common = here.common(box)
                if common.numel():
                    offsets = (common.offsets[1] - half * rows, common.offsets[2])
                    parts.append(Part(memory[common.within(here)][0], offsets))
            result[f"{match[1]}.{number}.{which}.weight"] = Parts((rows, columns), tensor.dtype, tuple(parts))
    return result


@dataclasses.dataclass(frozen=True)
class Megatron:
    """The shape of a GPT of Megatron Core, and which part of it this rank has.

    first_layer: of this rank's pipeline stage. first_expert: of those that this rank has.
    tp, expert_tp: rank and size of tensor parallelism, and of that within experts."""

    n_heads: int
    n_kv_heads: int
    head_size: int
    tp: tuple[int, int] = (0, 1)
    first_layer: int = 0
    first_expert: int = 0
    expert_tp: tuple[int, int] = (0, 1)


# A pattern of Megatron's, the checkpoint's name, and the dimension that tensor parallelism divides.
_WHOLE = [
    (r"embedding\.word_embeddings\.weight", "model.embed_tokens.weight", 0),
    (r"output_layer\.weight", "lm_head.weight", 0),
    (r"decoder\.final_layernorm\.weight", "model.norm.weight", None),
    (r"self_attention\.linear_proj\.weight", "self_attn.o_proj.weight", 1),
    (r"self_attention\.linear_qkv\.layer_norm_weight", "input_layernorm.weight", None),
    (r"input_layernorm\.weight", "input_layernorm.weight", None),
    (r"self_attention\.(q|k)_layernorm\.weight", r"self_attn.\1_norm.weight", None),
    (r"mlp\.linear_fc1\.layer_norm_weight", "post_attention_layernorm.weight", None),
    (r"pre_mlp_layernorm\.weight", "post_attention_layernorm.weight", None),
    (r"mlp\.linear_fc2\.weight", "mlp.down_proj.weight", 1),
    (r"mlp\.router\.weight", "mlp.gate.weight", None),
]
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.linear_fc(1|2)\.weight(\d+)")


def megatron(
    tensors: Mapping[str, torch.Tensor] | torch.nn.Module, of: Megatron
) -> dict[str, torch.Tensor | Parts]:
    """Returns what this rank has of a GPT of Megatron Core (0.12 to 0.16, its names of Transformer Engine's
    and of local layers) by names of checkpoints: a model for a Publisher, whose group is the ranks that
    together have each element. Error for a tensor that has no place in a checkpoint of this kind."""
    if isinstance(tensors, torch.nn.Module):
        tensors = dict(tensors.named_parameters())
    result: dict[str, torch.Tensor | Parts] = {}
    for name, tensor in tensors.items():
        plain = hugging_face(name)
        for _ in range(2):  # of DDP and of a mixed-precision module
            plain = plain.removeprefix("module.")
        layer = _LAYER.fullmatch(plain)
        prefix, rest = (f"model.layers.{int(layer[1]) + of.first_layer}.", layer[2]) if layer else ("", plain)
        named = _of_layer(prefix, rest, tensor.detach(), of)
        if not named:
            raise Error(
                "unsupported", f"{name} {list(tensor.shape)} is in no GPT of Megatron that tagc knows"
            )
        result |= named
    return result


def _of_layer(prefix: str, rest: str, tensor: torch.Tensor, of: Megatron) -> dict[str, torch.Tensor | Parts]:
    for pattern, name, divided in _WHOLE:
        if match := re.fullmatch(pattern, rest):
            return {prefix + match.expand(name): _shard(tensor, divided, of.tp)}
    if match := re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", rest):
        return _of_heads(f"{prefix}self_attn.", match[1], tensor, of)
    if rest == "mlp.linear_fc1.weight":
        return _of_halves(f"{prefix}mlp.", tensor, of.tp)
    if match := _EXPERT.fullmatch(rest):
        stem = f"{prefix}mlp.experts.{int(match[2]) + of.first_expert}."
        if match[1] == "1":
            return _of_halves(stem, tensor, of.expert_tp)
        return {f"{stem}down_proj.weight": _shard(tensor, 1, of.expert_tp)}
    return {}


def _shard(tensor: torch.Tensor, divided: int | None, tp: tuple[int, int]) -> torch.Tensor | Parts:
    rank, size = tp
    if divided is None or size == 1:
        return tensor
    shape, offsets = list(tensor.shape), [0] * tensor.ndim
    offsets[divided] = rank * shape[divided]
    shape[divided] *= size
    return Parts(tuple(shape), tensor.dtype, (Part(tensor, tuple(offsets)),))


def _of_halves(stem: str, tensor: torch.Tensor, tp: tuple[int, int]) -> dict[str, torch.Tensor | Parts]:
    """Returns gate and up, which are the rows of one weight on each rank."""
    gate, up = tensor.chunk(2)
    return {f"{stem}gate_proj.weight": _shard(gate, 0, tp), f"{stem}up_proj.weight": _shard(up, 0, tp)}


def _of_heads(stem: str, leaf: str, tensor: torch.Tensor, of: Megatron) -> dict[str, torch.Tensor | Parts]:
    """Returns queries, keys and values. Their rows are in groups: the queries of a group, its key, its
    value."""
    rank, size = of.tp
    if of.n_heads % of.n_kv_heads or of.n_kv_heads % size:
        raise Error(
            "argument", f"{of.n_heads} heads in {of.n_kv_heads} groups cannot be divided among {size} ranks"
        )
    n_queries, n_groups, d = of.n_heads // of.n_kv_heads, of.n_kv_heads // size, of.head_size
    n_rows = (n_queries + 2) * d
    if tensor.shape[0] != n_groups * n_rows:
        raise Error(
            "argument", f"{stem}qkv has {tensor.shape[0]} rows, and {n_groups * n_rows} by this Megatron()"
        )
    rest = (0,) * (tensor.ndim - 1)
    parts: dict[str, list[Part]] = {"q": [], "k": [], "v": []}
    for group in range(n_groups):
        rows, number = tensor[group * n_rows : (group + 1) * n_rows], rank * n_groups + group
        parts["q"].append(Part(rows[: n_queries * d], (number * n_queries * d, *rest)))
        parts["k"].append(Part(rows[n_queries * d : -d], (number * d, *rest)))
        parts["v"].append(Part(rows[-d:], (number * d, *rest)))
    n = {"q": of.n_heads * d, "k": of.n_kv_heads * d, "v": of.n_kv_heads * d}
    return {
        f"{stem}{which}_proj.{leaf}": Parts((n[which], *tensor.shape[1:]), tensor.dtype, tuple(parts[which]))
        for which in parts
    }
