"""Integer formats of engines, with the engines' own rounding.

llama.cpp (ggml/src/ggml-quants.c, ``quantize_row_*_ref``): blocks of 32 along D, codes from the *unrounded* FP32 step,
values from the step as stored in FP16. vLLM (vllm/v1/attention/ops, ``*_per_token_head``): one FP32 scale a vector.
Both multiply by the step's reciprocal. What exceeds FP16 saturates here, where llama.cpp stores infinity.

The interface is that of ``levels``.
"""

from __future__ import annotations

import torch
from torch import Tensor

Parameters = tuple[Tensor, ...]
# vLLM's least scale, and one whose product with a code is still finite.
LEAST_STEP, LARGEST_STEP = 1e-6, 2.0**100


class Q0:
    """q8_0: −127 ... 127 steps. q4_0, q5_0: the value of largest magnitude is −2^(b − 1) steps, whatever its sign."""

    def fit(self, x: Tensor, bits: int) -> Parameters:
        magnitudes = x.float().abs()
        if bits == 8:
            return (magnitudes.amax(dim=-1, keepdim=True) / 127,)
        return (x.float().gather(-1, magnitudes.argmax(dim=-1, keepdim=True)) / -(2 ** (bits - 1)),)

    def encode(self, x: Tensor, parameters: Parameters, bits: int) -> Tensor:
        steps = _times_inverse(x.float(), *self.fit(x, bits))
        if bits == 8:
            return half_away(steps).clamp_(-127, 127).to(torch.int8)
        top = 2**bits - 1
        return (steps + (2 ** (bits - 1) + 0.5)).trunc_().clamp_(0, top).to(torch.uint8).view(torch.int8)

    def decode(self, codes: Tensor, parameters: Parameters, bits: int) -> Tensor:
        if bits == 8:
            return codes.float() * parameters[0]
        return ((codes.int() & (2**bits - 1)) - 2 ** (bits - 1)).float() * parameters[0]


class Q1:
    """q4_1, q5_1: 0 ... 2^b − 1 steps above the block's least value, which is stored in FP16, too."""

    def fit(self, x: Tensor, bits: int) -> Parameters:
        low, high = x.float().aminmax(dim=-1, keepdim=True)
        return (high - low) / (2**bits - 1), low

    def encode(self, x: Tensor, parameters: Parameters, bits: int) -> Tensor:
        step, low = self.fit(x, bits)
        steps = _times_inverse(x.float() - low, step)
        return (steps + 0.5).trunc_().clamp_(0, 2**bits - 1).to(torch.uint8).view(torch.int8)

    def decode(self, codes: Tensor, parameters: Parameters, bits: int) -> Tensor:
        step, low = parameters
        return (codes.int() & (2**bits - 1)).float() * step + low


class PerTokenHead:
    """vLLM's int8_per_token_head (symmetric), and int4_per_token_head: 16 levels over the vector's range.

    The latter's zero point is a code, 0 to 15, and stands in the lowest four bits of the FP32 scale.
    """

    def fit(self, x: Tensor, bits: int) -> Parameters:
        if bits == 8:
            return ((x.float().abs().amax(dim=-1, keepdim=True) / 127).clamp_(LEAST_STEP, LARGEST_STEP),)
        low, high = x.float().aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / 15).clamp_(LEAST_STEP, LARGEST_STEP)
        zero = half_away(-low / scale).clamp_(0, 15)
        return ((scale.view(torch.int32) & -16 | zero.int()).view(torch.float32),)

    def encode(self, x: Tensor, parameters: Parameters, bits: int) -> Tensor:
        if bits == 8:
            return (x.float() * (1 / parameters[0])).round_().clamp_(-128, 127).to(torch.int8)
        low, high = x.float().aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / 15).clamp_(LEAST_STEP, LARGEST_STEP)
        steps = half_away(x.float() * (1 / scale) + self._zero(parameters))
        return steps.clamp_(0, 15).to(torch.uint8).view(torch.int8)

    def decode(self, codes: Tensor, parameters: Parameters, bits: int) -> Tensor:
        if bits == 8:
            return codes.float() * parameters[0]
        scale = (parameters[0].view(torch.int32) & -16).view(torch.float32)
        return ((codes.int() & 15).float() - self._zero(parameters)) * scale

    def _zero(self, parameters: Parameters) -> Tensor:
        return (parameters[0].view(torch.int32) & 15).float()


def half_away(x: Tensor) -> Tensor:
    """x rounded to the nearest whole number, ties away from zero (C's ``roundf``)."""
    whole = x.trunc()
    return torch.where((x - whole).abs() == 0.5, whole + x.sign(), x.round())


def _times_inverse(x: Tensor, step: Tensor) -> Tensor:
    """x times 1 / step; zero where the step is."""
    inverse = torch.where(step == 0, 0.0, 1 / step)
    # A step below FP32's normal numbers has an infinite inverse.
    return (x * inverse).nan_to_num_(0.0)
