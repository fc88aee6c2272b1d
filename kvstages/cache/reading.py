"""Reading back: stored codes and scales of the published precisions, as the values that attention sees.

By the definition a value is (q · scale) / m in FP32, rounded to the arithmetic dtype (``quantizer.dequantize``). Where
that dtype is BF16, on a CPU, the same bits are had in two passes over the values instead of five: each byte is looked
up in a table of the codes in it, which BF16 holds exactly, and each vector is multiplied by one FP32 number. That is
scale / m but for a few scales (see ``multipliers``).

Axes: B sequences, R tensors of one precision, T tokens, D head width, W bytes of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvstages.cache.precisions import BITS, MAX_CODES
from kvstages.cache.quantizer import dequantize, unpack

# Values that are handled at once, so that what is between stays in a processor's cache: of FP32 and of BF16.
SLICE_VALUES, SLICE_HALVES = 1 << 18, 3 << 17


def slices(tokens: int, values: int, most: int = SLICE_VALUES) -> list[slice]:
    """A text in slices of about one length and of ``most`` values at most, where each token has so many values."""
    count = max(1, -(-tokens * values // most))
    step = max(1, -(-tokens // count))
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def all_rows(out: Tensor, rows: Sequence[int]) -> bool:
    """Whether ``rows`` are those of ``out`` [B, 2H, T, D], in their order."""
    return list(rows) == list(range(out.shape[1]))


def put(out: Tensor, rows: Sequence[int], values: Tensor) -> None:
    """Write ``values`` [B, R, T, D], rounded to the dtype of ``out`` [B, 2H, T, D], to some of its rows."""
    if all_rows(out, rows):
        out.copy_(values)
        return
    for index, row in enumerate(rows):
        out[:, row] = values[:, index]


def read_into(out: Tensor, rows: Sequence[int], name: str, packed: Tensor, scales: Tensor) -> None:
    """Write tensors of a precision, ``packed`` uint8 [B, R, T, W] with ``scales`` FP16 [B, R, T], to their rows of
    ``out`` [B, 2H, T, D]. A slice of the text at a time."""
    batch, count, tokens, width = *packed.shape[:3], out.shape[3]
    if out.dtype != torch.bfloat16 or out.device.type != "cpu":
        for part in slices(tokens, batch * count * width):
            codes = unpack(packed[:, :, part], BITS[name], width)
            put(out[:, :, part], rows, dequantize(codes, scales[:, :, part], MAX_CODES[name], torch.float32))
        return
    index = scales.flatten().view(torch.int16).int()
    steps = multipliers(MAX_CODES[name]).index_select(0, index).view(-1, tokens)
    fit = SLICE_HALVES // max(1, tokens * width)
    direct, values = all_rows(out, rows), out
    if direct or fit > 3:
        # Short texts: several tensors at once, and a copy, cost less than an operation for each tensor.
        values = out if direct else out.new_empty((batch, count, tokens, width))
        blocks: Sequence[Tensor] = values.flatten(0, 1).split(max(1, fit))
    else:
        blocks = [out[sequence, row].unsqueeze(0) for sequence in range(batch) for row in rows]
    sizes = [len(block) for block in blocks]
    for block, codes, own in zip(blocks, packed.flatten(0, 1).split(sizes), steps.split(sizes), strict=True):
        for part in slices(tokens, len(block) * width, SLICE_HALVES):
            expand(block[:, part], codes[:, part], own[:, part], BITS[name])
    if values is not out:
        put(out, rows, values)


def expand(out: Tensor, packed: Tensor, steps: Tensor, bits: int) -> None:
    """Write packed vectors [..., W], each multiplied by its step [...], to ``out`` BF16 [..., D], contiguous."""
    width = out.shape[-1]
    if bits in (2, 4) and width * bits % 8 == 0:
        table = codes_of_bytes(bits)
        index = packed.to(torch.int32, memory_format=torch.contiguous_format).view(-1)
        torch.index_select(table, 0, index, out=out.view(table.dtype).view(-1))
    else:
        out.copy_(unpack(packed, bits, width))
    # Of all operations this one alone takes BF16 values with FP32 factors, and rounds once: x · factor + 0.
    vectors, steps, nothing = out.view(1, -1, width), steps.reshape(-1), out.new_empty(0, dtype=torch.float32)
    mean, variance, saved = torch.zeros_like(steps), torch.ones_like(steps), (nothing, nothing.clone())
    torch.native_batch_norm(vectors, steps, None, mean, variance, False, 0.0, 0.0, out=(vectors, *saved))


@cache
def codes_of_bytes(bits: int) -> Tensor:
    """The codes of 2 or 4 bits in each byte, in BF16, seen as one integer of as many bytes: int64 or int32 [256]."""
    with torch.inference_mode(False):
        codes = unpack(torch.arange(256, dtype=torch.uint8, device="cpu").unsqueeze(1), bits, 8 // bits)
        return codes.to(torch.bfloat16).view({2: torch.int64, 4: torch.int32}[bits]).flatten()


@cache
def multipliers(levels: int) -> Tensor:
    """By the bits of an FP16 scale: the FP32 number whose products with the codes, rounded to BF16, are those of the
    definition, FP32 [31,744].

    It is scale / m, or a neighbour of it. Rounding twice, the definition's (q · scale) / m errs far less than the
    distance to the middle between two BF16 numbers, unless it lies in the middle. It then is exact: either m divides
    the scale, and scale / m is exact too; or q is m, and m · (scale / m) may miss the scale. The neighbour misses it on
    the side of the BF16 number that the scale itself is rounded to. A test tries all scales and codes.
    """
    with torch.inference_mode(False):
        scale = torch.arange(0x7C00, dtype=torch.int16, device="cpu").view(torch.float16).float()
        near = scale / levels
        missed = scale.bfloat16().float() - (near * levels).bfloat16().float()
        return (near.view(torch.int32) + missed.sign().int()).view(torch.float32)
