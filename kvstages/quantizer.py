"""The quantizer: choose a scale, quantize, dequantize, pack, unpack, and how many bytes that takes.

Symmetric, one FP16 scale for each token and head, keys and values apart (STUDY.md, "The quantizer"). The order of
operations is part of the definition: (x · m) / scale and (q · scale) / m, in FP32, with the *stored* scale both ways.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Largest integer code m of each quantized precision. BF16 heads are not quantized: they keep the cache's dense dtype.
LEVELS = {"int8": 127, "int4": 7}
BITS = {"bf16": 16, "int8": 8, "int4": 4}
SCALE_BYTES = 2
LARGEST_SCALE = 65504.0


def bytes_per_token(precision: str, head_dim: int) -> tuple[int, int]:
    """Payload and scale bytes of one token of one head, keys and values together (STUDY.md)."""
    payload = {"bf16": 2 * head_dim, "int8": head_dim, "int4": (head_dim + 1) // 2}[precision]
    return 2 * payload, 0 if precision == "bf16" else 2 * SCALE_BYTES


def choose_scale(x: Tensor) -> Tensor:
    """Scale of vectors x [..., D]: the largest magnitude, as stored, FP16 [...]; saturates at 65,504."""
    import torch

    # In FP32 first: as BF16 the limit itself would round up to 65,536, which FP16 does not hold.
    return x.abs().amax(dim=-1).float().clamp(max=LARGEST_SCALE).to(torch.float16)


def quantize(x: Tensor, scale: Tensor, levels: int | Tensor) -> Tensor:
    """Codes int8 [..., D] of x [..., D] under stored scales [...]: round((x · m) / scale) within ±m, half to even.

    ``levels`` is m, or a tensor of m that broadcasts against x (heads of mixed precision in one go). Where the
    stored scale is zero (zeros, or below FP16's smallest step) the codes are zero.
    """
    import torch

    wide = scale.float().unsqueeze(-1)
    steps = (x.float() * levels).div_(torch.where(wide == 0, torch.inf, wide)).round_()
    limit = torch.as_tensor(levels, dtype=torch.float32, device=x.device)
    return steps.clamp_(-limit, limit).to(torch.int8)


def dequantize(codes: Tensor, scale: Tensor, levels: int | Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., D] of codes int8 [..., D] under stored scales [...]: (q · scale) / m in FP32, then ``dtype``."""
    return (codes.float() * scale.float().unsqueeze(-1)).div_(levels).to(dtype)


def pack_int4(codes: Tensor) -> Tensor:
    """Two codes a byte, uint8 [..., ⌈D/2⌉]: low nibble first, two's complement; an odd width ends in a zero nibble."""
    import torch

    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    nibbles = codes.view(torch.uint8) & 0xF
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_int4(packed: Tensor, head_dim: int) -> Tensor:
    """Codes int8 [..., head_dim] of packed bytes [..., ⌈head_dim/2⌉]; the inverse of ``pack_int4``."""
    import torch

    # Shifting a nibble to the top of a signed byte and back down again extends its sign.
    signed = packed.view(torch.int8)
    pairs = torch.stack(((signed << 4) >> 4, signed >> 4), dim=-1)
    return pairs.flatten(-2)[..., :head_dim]


def reconstruct(x: Tensor, levels: int | Tensor) -> Tensor:
    """x [..., D] as a quantized cache gives it back, in x's dtype: quantize and dequantize in one go."""
    scale = choose_scale(x)
    return dequantize(quantize(x, scale, levels), scale, levels, x.dtype)
