"""The quantizer: choose a scale, quantize, dequantize, pack, unpack, and how many bytes that takes.

Symmetric, one FP16 scale for each token and head, keys and values apart (docs/method.md, "Quantizer"). The order of
operations is part of the definition: (x · m) / scale and (q · scale) / m, in FP32, with the *stored* scale both ways.
Codes are packed as a little-endian stream of two's complement fields: one INT8, two INT4 or four INT2 values in a
byte, four 6-bit values or eight INT3 values in three bytes, eight 5-bit values in five; what is left of a last byte is
zero.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGEST_SCALE = 65504.0


def choose_scale(x: Tensor) -> Tensor:
    """Scale of vectors x [..., D]: the largest magnitude, as stored, FP16 [...]; saturates at 65,504."""
    import torch

    # In FP32 first: as BF16 the limit itself would round up to 65,536, which FP16 does not hold.
    return largest_magnitude(x).float().clamp(max=LARGEST_SCALE).to(torch.float16)


def largest_magnitude(x: Tensor) -> Tensor:
    """Largest magnitude of vectors x [..., D], in x's dtype: [...].

    Magnitudes are in the order of their bits, taken as integers. Of these PyTorch finds the largest in an eighth (BF16)
    to about all of the time that it takes for floating point.
    """
    return x.abs().view(integer_of(x.dtype)).amax(dim=-1).view(x.dtype)


def integer_of(dtype: torch.dtype) -> torch.dtype:
    """The integer with as many bits as a floating-point dtype."""
    import torch

    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def quantize(x: Tensor, scale: Tensor, levels: int | Tensor) -> Tensor:
    """Codes int8 [..., D] of x [..., D] under stored scales [...]: round((x · m) / scale) within ±m, half to even.

    ``levels`` is m, or a tensor of m that broadcasts against x (heads of mixed precision in one go). Where the
    stored scale is zero (zeros, or below FP16's smallest step) the codes are zero.
    """
    import torch

    wide = scale.float().unsqueeze(-1)
    steps = (x.float() * levels).div_(wide.masked_fill(wide == 0, torch.inf)).round_()
    if isinstance(levels, int):
        return steps.clamp_(-levels, levels).to(torch.int8)
    torch.minimum(steps, levels, out=steps)
    return torch.maximum(steps, -levels, out=steps).to(torch.int8)


def dequantize(codes: Tensor, scale: Tensor, levels: int | Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., D] of codes int8 [..., D] under stored scales [...]: (q · scale) / m in FP32, then ``dtype``."""
    return codes.float().mul_(scale.float().unsqueeze(-1)).div_(levels).to(dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes int8 [..., D] of 2 to 8 bits as a stream of bits, uint8 [..., ⌈D · bits / 8⌉]."""
    import torch

    width = math.ceil(codes.shape[-1] * bits / 8)
    per_word, word_bytes = _word(bits)
    missing = -codes.shape[-1] % per_word
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    fields = (codes.view(torch.uint8) & (2**bits - 1)).unflatten(-1, (-1, per_word))
    if word_bytes > 1:
        places = _places(bits, codes.device)
        words = (fields.to(places.dtype) << places).sum(dim=-1, dtype=places.dtype)
        return words.unsqueeze(-1).view(torch.uint8)[..., :word_bytes].flatten(-2)[..., :width]
    words = fields[..., 0]
    for index in range(1, per_word):
        words = words | (fields[..., index] << (bits * index))
    return words


def unpack(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Codes int8 [..., head_dim] of packed bytes [..., ⌈head_dim · bits / 8⌉]; the inverse of ``pack``."""
    import torch

    per_word, word_bytes = _word(bits)
    if per_word == 1:
        return packed.view(torch.int8)[..., :head_dim]
    if per_word == 2:
        # The second code to the byte above, and the signs extended in both bytes at once.
        words = packed.to(torch.int16)
        words.bitwise_or_(words << 4).bitwise_and_(0x0F0F).bitwise_xor_(0x0808)
        return words.view(torch.int8).sub_(8)[..., :head_dim]
    # Shifting a field to the top of a signed word and back down again extends its sign.
    if word_bytes == 1:
        words = packed.view(torch.int8)
        fields = [(words << (8 - bits * (index + 1))) >> (8 - bits) for index in range(per_word)]
        return torch.stack(fields, dim=-1).flatten(-2)[..., :head_dim]
    places = _places(bits, packed.device)
    top = 8 * places.itemsize
    whole = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % word_bytes)).unflatten(-1, (-1, word_bytes))
    words = torch.nn.functional.pad(whole, (0, places.itemsize - word_bytes)).view(places.dtype)
    fields = (words << (top - bits - places)) >> (top - bits)
    return fields.flatten(-2)[..., :head_dim].to(torch.int8)


def _word(bits: int) -> tuple[int, int]:
    """The fewest codes that fill whole bytes, and how many bytes that is."""
    shared = math.gcd(8, bits)
    return 8 // shared, bits // shared


@cache
def _places(bits: int, device: torch.device) -> Tensor:
    """Where in a word of several bytes each of its codes begins, in bits, as an integer that holds a word."""
    import torch

    per_word, word_bytes = _word(bits)
    dtype = torch.int32 if word_bytes <= 4 else torch.int64
    return bits * torch.arange(per_word, dtype=dtype, device=device)


def reconstruct(x: Tensor, levels: int | Tensor) -> Tensor:
    """x [..., D] as a quantized cache gives it back, in x's dtype: quantize and dequantize in one go."""
    scale = choose_scale(x)
    return dequantize(quantize(x, scale, levels), scale, levels, x.dtype)


def neighbour(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x moved to a neighbouring value of ``dtype``, in x's dtype: the smallest change that this dtype can hold.

    The last bit of the mantissa is flipped, so finite values stay finite.
    """
    return (x.to(dtype).view(integer_of(dtype)) ^ 1).view(dtype).to(x.dtype)
