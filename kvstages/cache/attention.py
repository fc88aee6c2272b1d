"""Attention of one new token over packed tokens, without making their values.

A stored key is its codes times one number, and so is a value. Scores are then the query's products with the codes,
times those numbers; and what is added up over the values is their codes, each times its probability times that number.
So of a value nothing is made but its code in FP32, a slice of the text at a time. Sums are FP32, and no value is
rounded to BF16 in between, as reading it back would (``reading``).

Two INT4 codes of a byte go to the two halves of a vector: q · k = Σ q' k' for any order of the channels that both have.
Shifted to the top of a signed byte they need no sign extended, and are 16 times what they are; the number has the rest.

Axes: B sequences, H KV heads, R of them of one precision, G queries a KV head, S tokens stored, T of a slice of them,
D head width, W bytes of a vector.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvstages.cache.precisions import BITS, MAX_CODES
from kvstages.cache.quantizer import unpack
from kvstages.cache.reading import slices

# Codes that are in FP32 at once: a processor's cache has them still when they are multiplied.
SLICE_CODES = 1 << 20


class Alike(NamedTuple):
    """Keys, or values, of one precision in a layer: their KV ``heads``, and what is ``stored`` of them [B, R, S, W],
    with ``scales`` FP16 [B, R, S], or None where it is the values themselves."""

    heads: list[int]
    name: str
    stored: Tensor
    scales: Tensor | None

    @property
    def halved(self) -> bool:
        """Whether codes go to the halves of a vector by their place in a byte."""
        return BITS[self.name] == 4

    @property
    def factors(self) -> Tensor | None:
        """What codes as ``expand`` gives them are multiplied by, FP32 [B, R, S]."""
        if self.scales is None:
            return None
        return self.scales.float() / (MAX_CODES[self.name] * (16 if self.halved else 1))

    def order(self, x: Tensor) -> Tensor:
        """Channels of x [..., D] in the order in which codes come."""
        return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1) if self.halved else x

    def order_back(self, x: Tensor) -> Tensor:
        """The inverse of ``order``."""
        return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2) if self.halved else x

    def expand(self, out: Tensor, part: slice) -> None:
        """Write the codes, or values, of a slice of the text to ``out`` FP32 [B, R, T, D]."""
        packed = self.stored[:, :, part]
        if self.halved:
            signed, half = packed.view(torch.int8), packed.shape[-1]
            torch.bitwise_left_shift(signed, 4, out=out[..., :half])
            torch.bitwise_and(signed, -16, out=out[..., half:])
        elif self.scales is None:
            out.copy_(packed)
        else:
            out.copy_(unpack(packed, BITS[self.name], out.shape[-1]))


def attend(
    queries: Tensor,
    keys: list[Alike],
    values: list[Alike],
    own: tuple[Tensor, Tensor],
    scaling: float,
    mask: Tensor | None = None,
) -> Tensor:
    """What the queries [B, G · H, 1, D] of one token take from the values, [B, G · H, 1, D] in their dtype.

    ``keys``, ``values``: those stored, every head once in each; ``own``: the token's own key and value [B, H, 1, D], as
    they are. ``mask`` [B or 1, 1, 1, S + 1]: which tokens it sees (bool), or what is added to scores; None: all.
    """
    batch, count, _, width = queries.shape
    heads, tokens = own[0].shape[1], keys[0].stored.shape[2]
    q = (queries.float() * scaling).view(batch, heads, count // heads, width)
    k, v = (each.float() for each in own)
    scores = q.new_empty((batch, heads, q.shape[2], tokens + 1))
    torch.sum(q * k, dim=-1, out=scores[..., -1])
    for alike in keys:
        found = products(alike, alike.order(of_heads(q, alike.heads)))
        if alike.heads == list(range(heads)):
            scores[..., :-1] = found
        else:
            scores[:, alike.heads, :, :-1] = found
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(dim=-1)
    out = weights[..., -1:] * v
    for alike in values:
        sums = alike.order_back(weighted(alike, of_heads(weights[..., :-1], alike.heads), width))
        if alike.heads == list(range(heads)):
            out += sums
        else:
            out[:, alike.heads] += sums
    return out.view(batch, count, 1, width).to(queries.dtype)


def of_heads(x: Tensor, heads: list[int]) -> Tensor:
    """Some heads of x [B, H, ...]; x itself where it is all of them."""
    return x if heads == list(range(x.shape[1])) else x[:, heads]


def products(keys: Alike, queries: Tensor) -> Tensor:
    """Products of queries [B, R, G, D] with stored keys, FP32 [B, R, G, S]."""
    batch, rows, group, width = queries.shape
    tokens = keys.stored.shape[2]
    found = queries.new_empty((batch, rows, group, tokens))
    for part, codes in expanded(keys, width):
        torch.bmm(queries.flatten(0, 1), codes.mT, out=found.flatten(0, 1)[:, :, part])
    factors = keys.factors
    return found if factors is None else found.mul_(factors.unsqueeze(2))


def weighted(values: Alike, weights: Tensor, width: int) -> Tensor:
    """Sums of stored values, each times its weight of ``weights`` [B, R, G, S], FP32 [B, R, G, D]."""
    factors = values.factors
    weights = weights if factors is None else weights * factors.unsqueeze(2)
    sums = weights.new_zeros((weights.shape[0] * weights.shape[1], weights.shape[2], width))
    for part, codes in expanded(values, width):
        sums.baddbmm_(weights.flatten(0, 1)[:, :, part], codes)
    return sums.view(*weights.shape[:3], width)


def expanded(alike: Alike, width: int):
    """A slice of the text and its codes FP32 [B · R, T, D], one after the other in the same memory."""
    batch, rows, tokens, _ = alike.stored.shape
    parts = slices(tokens, batch * rows * width, SLICE_CODES)
    room = torch.empty((batch, rows, parts[0].stop, width), device=alike.stored.device)
    for part in parts:
        codes = room[:, :, : part.stop - part.start]
        alike.expand(codes, part)
        yield part, codes.flatten(0, 1)
