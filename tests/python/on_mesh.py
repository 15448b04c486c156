"""Questions to the planner about a mesh: a small model, and what a test asks otherwise."""

import math

import plan_parts

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = range(4)
FULL, GRAD, NONE, HYBRID = range(4)
TORCH, MEGATRON = 1, 2
BASE = dict(
    n_layer=8,
    n_embd=256,
    n_head=8,
    n_kv_head=8,
    n_ffn=1024,
    n_vocab=4096,
    n_positions=0,
    is_gated=0,
    has_bias=1,
    n_experts=1,
    n_active=1,
    world_size=1,
    ranks_per_host=1,
    n_tensor=1,
    n_context=1,
    n_pipeline=1,
    n_expert=1,
    sequence=0,
    sharding=FULL,
    n_sequences=2,
    n_tokens=128,
    n_micro_batches=1,
    schedule=ONE_F_ONE_B,
    n_stages_per_rank=1,
    recompute=0,
)


def ask(gather="bf16", values="bf16", forward="bf16", backward="bf16", **numbers):
    return plan_parts.ask_mesh(gather, values, forward, backward, **BASE | numbers)


def activations(**numbers):
    return ask(**numbers)["device"]["activations"]


def message(n, bits, block):
    """Returns the bytes of a message of blocks, as docs/reference/wire-format.md says."""
    return 64 + 2 * math.ceil(n / block) + math.ceil(n * bits / 8)
