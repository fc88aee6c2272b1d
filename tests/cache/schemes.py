"""Precisions and contexts for tests of schemes."""

from __future__ import annotations

import torch

from kvstages.cache.offsets import Context, Contexts, Rotary

# Of each option one at least, for heads of any width; shared scales and windows are short, for short sequences.
ANY_WIDTH = (
    "int6", "int5-mse", "rise2", "rise4-mse", "lloyd3", "lloyd4-mse", "fp8_per_token_head", "fp4-mse", "int4-mse+zero",
    "rotated4", "int4-mean", "int3-bias", "centred4", "debiased3", "fp8_e4m3", "int4-e4m3", "int8_per_token_head",
    "int4-channel3+zero", "lloyd4-k.channel4+v.channel3+first2", "int2-recent2",
    "rise3-mean+v.channel2+first1+k.recent3",
)  # fmt: skip
# For multiples of 32 that are powers of two.
WIDE = ("q8_0", "q4_0-hadamard", "q4_1", "q5_0-k.bias+first1", "q5_1", "int4_per_token_head", "nvfp4", "kivi2",
        "int4-hadamard16+group8+zero", "rotated3")  # fmt: skip


def rotary(width: int, interleaved: bool = False) -> Rotary | None:
    """A rotary embedding of most of the channels; the last ones stay."""
    pairs = max(1, (width - 1) // 2)
    frequencies = 100.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    return Rotary(frequencies, interleaved) if width > 1 else None


def contexts(layers: int, heads: int, width: int, seed: int = 0, turned: bool = True) -> Contexts:
    """Random offsets and a static scale for every layer's keys and values."""
    generator = torch.Generator().manual_seed(seed)

    def context(side: str) -> Context:
        mean, bias = (torch.randn(heads, width, generator=generator) for _ in range(2))
        return Context(mean, bias, torch.full((heads,), 5.0), rotary(width) if turned and side == "k" else None)

    return {(layer, side): context(side) for layer in range(layers) for side in ("k", "v")}
