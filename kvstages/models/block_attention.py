"""Attention of all positions of a block, a few queries at a time on a CPU.

A position sees nothing of what comes after it, so the first queries of a block need only the first keys. PyTorch's
attention computes the scores of all keys that it is given, masked or not: pieces of the queries that are given little
more than what one of them sees take 0.7 of the time for 64 positions and half for 512 (beside the stored past each is
offered its own exact key and value; see ``kvstages/cache/one_pass.py``).

Axes: B blocks, H heads, T queries, S positions that are offered, D head width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Queries of a piece at least, and pieces of a block at most: more cost more in calls than they spare.
PIECE_QUERIES, MOST_PIECES = 32, 8
# Where a piece's keys begin and end is a multiple of this, the numbers of a vector: so few sums change their order.
VECTOR = 16


class Piece(NamedTuple):
    """Some of the queries, the positions they are given, and which of these each of them sees, bool [(H,) t, s]."""

    queries: slice
    positions: tuple[slice, ...]
    mask: Tensor

    def of(self, x: Tensor) -> Tensor:
        """The positions' keys or values, of all of them x [B, H, S, D]."""
        parts = [x[:, :, positions] for positions in self.positions]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q · kᵀ / √D) · v for queries [B, H, T, D] and keys, values [B, H, S, D]; mask bool [(B or 1,) (H,) T, S],
    None: every query sees every position."""
    short = queries.shape[2] < 2 * PIECE_QUERIES
    # A backward pass would add up the pieces' gradients; another device would start as many times as there are pieces.
    if mask is None or mask.dim() > 3 or short or torch.is_grad_enabled() or queries.device.type != "cpu":
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    found = [
        scaled_dot_product_attention(
            queries[:, :, piece.queries], piece.of(keys), piece.of(values), attn_mask=piece.mask
        )
        for piece in pieces(mask)
    ]
    return torch.cat(found, dim=2)


# By the mask's identity: caches give the same one at every layer.
@lru_cache(maxsize=16)
def pieces(mask: Tensor) -> tuple[Piece, ...]:
    """The pieces of the queries of a mask [(H,) T, S]."""
    length = mask.shape[-2]
    step = max(PIECE_QUERIES, -(-length // MOST_PIECES // VECTOR) * VECTOR)
    found = []
    for start in range(0, length, step):
        rows = mask[..., start : start + step, :]
        seen = rows.flatten(0, -2).any(dim=0)
        positions = tuple(_ranges(seen))
        found.append(
            Piece(slice(start, start + step), positions, torch.cat([rows[..., each] for each in positions], dim=-1))
        )
    return tuple(found)


def _ranges(seen: Tensor) -> list[slice]:
    """The positions that are seen, bool [S], in whole vectors, as ranges."""
    vectors = [bool(vector.any()) for vector in seen.split(VECTOR)]
    edges = [
        index
        for index, (own, before) in enumerate(zip([*vectors, False], [False, *vectors], strict=True))
        if own != before
    ]
    return [slice(first * VECTOR, last * VECTOR) for first, last in zip(edges[::2], edges[1::2], strict=True)]
