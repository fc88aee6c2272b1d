"""The precisions of a stored value: names, bits, largest codes, bytes. Nothing here imports torch."""

from __future__ import annotations

import math

# Bits of a stored value, from most to fewest. BF16 is not quantized. A new precision is a new line here.
BITS = {"bf16": 16, "int8": 8, "int4": 4, "int3": 3, "int2": 2}


# Largest integer code m of each quantized precision.
MAX_CODES = {name: 2 ** (bits - 1) - 1 for name, bits in BITS.items() if name != "bf16"}


QUANTIZED = tuple(MAX_CODES)


SCALE_BYTES = 2


def packed_width(precision: str, head_dim: int) -> int:
    """Bytes of a vector of ``head_dim`` stored values, its scale aside."""
    return math.ceil(head_dim * BITS[precision] / 8)


def bytes_per_token(precision: str, head_dim: int) -> tuple[int, int]:
    """Payload and scale bytes of one token of one head's keys, or of its values (STUDY.md)."""
    return packed_width(precision, head_dim), 0 if precision == "bf16" else SCALE_BYTES
