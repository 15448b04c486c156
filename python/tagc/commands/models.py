"""Models of a plan by name or size: the fields of tagc_mesh_model (planning/plan/mesh.h)."""

from __future__ import annotations

import argparse
import difflib
import math
from typing import NamedTuple

from tagc.commands import options
from tagc.report.parser import UsageError

N_VOCAB = 32_000
LEAST = 1e7  # parameters: the embedding and the head of a smaller model are most of it


class Model(NamedTuple):
    """A transformer by shape. n_active: experts that a token goes to."""

    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int
    n_ffn: int
    n_vocab: int
    n_positions: int = 0
    is_gated: int = 1
    has_bias: int = 0
    n_experts: int = 1
    n_active: int = 1


NAMED = {
    "gpt-3-175b": Model(96, 12288, 96, 96, 49152, 50257, 2048, 0, 1),
    "llama-3-8b": Model(32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": Model(80, 8192, 64, 8, 28672, 128256),
    "llama-3-405b": Model(126, 16384, 128, 8, 53248, 128256),
    "mixtral-8x7b": Model(32, 4096, 32, 8, 14336, 32000, n_experts=8, n_active=2),
    "mixtral-8x22b": Model(56, 6144, 48, 8, 16384, 32768, n_experts=8, n_active=2),
}


def shape_of(n_params: float) -> tuple[int, int]:
    """Returns layers and width of a GPT of about so many parameters, in usual proportions."""
    if n_params < LEAST:
        raise UsageError(f"--params is {n_params:g}, allowed: {LEAST:g} or more")
    best, least = (1, 64), math.inf
    for n_layer in range(1, 257):
        # 12 c^2 of a layer; the embedding and the head are c wide, too
        wide = (math.sqrt(N_VOCAB**2 + 12 * n_layer * n_params) - N_VOCAB) / (12 * n_layer)
        width = max(64, round(wide / 64) * 64)
        size = 12 * n_layer * width**2 + 2 * N_VOCAB * width
        off = abs(math.log(size / n_params)) + 0.1 * abs(math.log(width / n_layer / 110))
        if off < least:
            best, least = (n_layer, width), off
    return best


def gpt_of(n_params: float, n_positions: int) -> Model:
    """Returns a GPT of about so many parameters."""
    n_layer, width = shape_of(n_params)
    n_head = width // (128 if width % 128 == 0 else 64)
    return Model(n_layer, width, n_head, n_head, 4 * width, N_VOCAB, n_positions, 0, 1)


def size_or_name(text: str) -> float | str:
    """Returns a number of parameters, or the name of a model."""
    if text.lower() in NAMED:
        return text.lower()
    try:
        return options.size(text)
    except argparse.ArgumentTypeError:
        meant = difflib.get_close_matches(text.lower(), NAMED, n=1)
        hint = f'; did you mean "{meant[0]}"?' if meant else ""
        raise argparse.ArgumentTypeError(
            f'"{text[:40]}", allowed: a number above 0, as in 350m, 1b or 7e9, or one of {", ".join(NAMED)}'
            f"{hint}"
        ) from None
