"""The precisions of a stored value by their names: bits, largest codes, bytes. Nothing here imports torch.

A name is "bf16", which is not quantized, or the text of a scheme with its bits (see ``schemes``); those of the
published quantizer (``QUANTIZED``) are the defaults of the stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvstages.cache.schemes import EXACT_BYTES, SIDES, Bytes, precision
from kvstages.cache.schemes import stored_bytes as scheme_bytes

# Bits of a stored value in the published quantizer's precisions, from most to fewest. BF16 is not quantized.
BITS = {"bf16": 16, "int8": 8, "int4": 4, "int3": 3, "int2": 2}
# Largest integer code m of each quantized precision.
MAX_CODES = {name: 2 ** (bits - 1) - 1 for name, bits in BITS.items() if name != "bf16"}
QUANTIZED = tuple(MAX_CODES)
# A cache for which precisions are ordered by size where none is at hand.
NOMINAL = (64, 64)


def packed_width(precision: str, head_dim: int) -> int:
    """Bytes of a vector of ``head_dim`` stored values, its scale aside."""
    return math.ceil(head_dim * BITS[precision] / 8)


def check(name: str) -> None:
    """ValueError unless there is a precision of this name."""
    if name != "bf16":
        precision(name)


def bits_of(name: str) -> int:
    """Bits of a stored value, scales aside."""
    return 16 if name == "bf16" else precision(name).bits


def stored_bytes(name: str, side: str, head_dim: int, tokens: int) -> Bytes:
    """Bytes of one head's keys (side k) or values (v) in a cache of ``tokens`` tokens, by formula
    (docs/schemes.md, "Bytes")."""
    if name == "bf16":
        return Bytes(tokens * head_dim * EXACT_BYTES, 0, 0)
    return scheme_bytes(precision(name), side, head_dim, tokens)


def size_rank(name: str) -> tuple[int, str]:
    """Sort key of precisions: from most bytes to fewest, keys and values together in a cache of ``NOMINAL`` size."""
    return -sum(sum(stored_bytes(name, side, *NOMINAL)) for side in SIDES), name


def by_size(names: Iterable[str]) -> list[str]:
    """Precisions from most bytes to fewest; ValueError names one that there is not."""
    return sorted(dict.fromkeys(names), key=size_rank)
