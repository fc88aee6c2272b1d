"""Attention of one new token over packed tokens, without making their values.

A stored key is its codes times one number, and so is a value. Scores are then the query's products with the codes,
times those numbers; and what is added up over the values is their codes, each times its probability times that number.
So of a value nothing is made but its code in FP32, a slice of the text at a time, for all heads at once. Sums are FP32,
and no value is rounded to BF16 in between, as reading it back would do (``reading``).

Heads come in the order in which they are stored, and of the two INT4 codes of a byte the lower goes to the first half
of a vector and the upper to the second: a product is the same for any order that both sides have. At the top of a
signed byte the signs of codes need no care; they are 16 times what they are, which a factor makes good.

Axes: B sequences, H KV heads, R of them of one precision, G queries a KV head, S tokens stored, T of a slice of them,
D head width, W bytes of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvstages.cache.precisions import BITS, MAX_CODES
from kvstages.cache.quantizer import unpack
from kvstages.cache.reading import slices

# Codes that are in FP32 at once: a processor's cache has them still when they are multiplied.
SLICE_CODES = 1 << 20


class Stored(NamedTuple):
    """Keys or values of one precision as they are stored: ``packed`` [B, R, S, W] with ``scales`` FP16 [B, R, S], or
    the values themselves, without scales."""

    name: str
    packed: Tensor
    scales: Tensor | None

    def expand(self, out: Tensor, part: slice) -> None:
        """Write the codes, or values, of a slice of the text to ``out`` FP32 [B, R, T, D], in their order."""
        packed = self.packed[:, :, part]
        if halved(self.name):
            signed, half = packed.view(torch.int8), packed.shape[-1]
            torch.bitwise_left_shift(signed, 4, out=out[..., :half])
            torch.bitwise_and(signed, -16, out=out[..., half:])
        else:
            out.copy_(packed if self.scales is None else unpack(packed, BITS[self.name], out.shape[-1]))


class Side(NamedTuple):
    """What a layer has stored of its keys, or of its values, by precision; ``heads``: each KV head with its precision,
    in the order in which they are stored."""

    stored: Sequence[Stored]
    heads: tuple[tuple[int, str], ...]

    @property
    def tokens(self) -> int:
        return self.stored[0].packed.shape[2]

    def expanded(self, width: int) -> Iterator[tuple[slice, Tensor]]:
        """A slice of the text, and codes of all heads FP32 [B · H, T, D]; one after the other in the same memory."""
        batch, heads = len(self.stored[0].packed), len(self.heads)
        cut = slices(self.tokens, batch * heads * width, SLICE_CODES)
        room = torch.empty((batch, heads, cut[0].stop, width), device=self.stored[0].packed.device)
        for part in cut:
            codes = room[:, :, : part.stop - part.start]
            first = 0
            for stored in self.stored:
                rows = stored.packed.shape[1]
                stored.expand(codes[:, first : first + rows], part)
                first += rows
            yield part, codes.flatten(0, 1)

    def scale(self, x: Tensor) -> None:
        """Multiply x [B, H, G, S] by the scales of the tokens, where heads have some."""
        first = 0
        for stored in self.stored:
            rows = stored.packed.shape[1]
            if stored.scales is not None:
                x[:, first : first + rows].mul_(stored.scales.unsqueeze(2))
            first += rows


class Order(NamedTuple):
    """Where each element of vectors is that come as they are stored: ``there`` int32 [H · G · D] of a tensor of the
    model's [H, G, D], ``back`` the inverse; and what codes times scales of each head are multiplied by, FP32 [H, 1, 1].
    """

    there: Tensor
    back: Tensor
    factors: Tensor


def halved(name: str) -> bool:
    """Whether codes go to the halves of a vector by their place in a byte."""
    return BITS[name] == 4


@cache
def order_of(heads: tuple[tuple[int, str], ...], group: int, width: int, device: torch.device) -> Order:
    """The order of ``group`` vectors a head."""
    with torch.inference_mode(False):
        own = torch.arange(width, device=device)
        channels = {True: torch.cat((own[::2], own[1::2])), False: own}
        rows = torch.arange(len(heads) * group * width, device=device).view(len(heads), group, width)
        there = torch.stack([rows[head][:, channels[halved(name)]] for head, name in heads]).flatten()
        factors = [1 / (MAX_CODES.get(name, 1) * (16 if halved(name) else 1)) for _, name in heads]
        factors = torch.tensor(factors, device=device).view(-1, 1, 1)
        return Order(there.int(), there.argsort().int(), factors)


def ordered(x: Tensor, index: Tensor) -> Tensor:
    """Elements of x [B, H, G, D] in the order of ``index``."""
    return x.reshape(len(x), -1).index_select(1, index).view_as(x)


def attend(
    queries: Tensor, keys: Side, values: Side, own: tuple[Tensor, Tensor], scaling: float, mask: Tensor | None = None
) -> Tensor:
    """What the queries [B, G · H, 1, D] of one token take from the values, [B, G · H, 1, D] in their dtype.

    ``keys``, ``values``: those stored, of one token at least; ``own``: the token's key and value [B, H, 1, D], as they
    are. ``mask`` [B or 1, 1, 1, S + 1]: which tokens it sees (bool), or what is added to scores; None: all.
    """
    batch, count, _, width = queries.shape
    heads = len(keys.heads)
    group, device = count // heads, queries.device
    of_keys, of_values = (order_of(side.heads, group, width, device) for side in (keys, values))
    q = ordered(queries.view(batch, heads, group, width), of_keys.there).float().mul_(scaling)
    k = ordered(own[0], order_of(keys.heads, 1, width, device).there)
    v = ordered(own[1], order_of(values.heads, 1, width, device).there)
    scores = q.new_empty((batch, heads, group, keys.tokens + 1))
    past = scores[..., :-1]
    torch.sum(q * k, dim=-1, out=scores[..., -1])
    q.mul_(of_keys.factors)
    for part, codes in keys.expanded(width):
        torch.bmm(q.flatten(0, 1), codes.mT, out=past.flatten(0, 1)[:, :, part])
    keys.scale(past)
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(dim=-1)
    if keys.heads != values.heads:
        place = [head for head, _ in keys.heads].index
        weights = weights[:, [place(head) for head, _ in values.heads]]
    out = weights[..., -1:] * v
    past = weights[..., :-1]
    values.scale(past)
    sums = torch.zeros_like(q).flatten(0, 1)
    for part, codes in values.expanded(width):
        sums.baddbmm_(past.flatten(0, 1)[:, :, part], codes)
    out.addcmul_(sums.view_as(out), of_values.factors)
    return ordered(out.to(queries.dtype), of_values.back).view(batch, count, 1, width)
