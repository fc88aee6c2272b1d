"""Attention of one new token over packed tokens, without making their values.

A stored key, or value, is its codes times its scale. So a score is the query's product with the codes of a key, times
the scale; and the result is the sum over values of their codes, each times its probability and its scale. Only codes
are made in FP32, a slice of the text at a time, for all heads at once. Sums are FP32. No value is rounded to BF16 in
between, as reading it back would do (``reading``).

A short text is in FP32 all at once, times its scales, and PyTorch's attention does the rest: a dozen operations a
layer instead of thirty. Their calls are what a short text costs; of a longer one it is memory.

Heads come in the order in which they are stored. The lower INT4 code of a byte goes to the first half of a vector and
the upper one to the second: a product is the same for any order that both sides have. A code at the top of a signed
byte keeps its sign and is 16 times too large; ``Order.factors`` makes that good.

Axes: B sequences, H KV heads, R of them of one precision, G queries a KV head, S tokens stored, T of a slice of them,
D head width, W bytes of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvstages.cache.precisions import BITS, MAX_CODES
from kvstages.cache.quantizer import unpack
from kvstages.cache.reading import slices

# Codes that are in FP32 at once: a processor's cache has them still when they are multiplied. A text whose keys and
# values are no more is attended to at once. On an AMD EPYC that took two thirds of the time of attention by slices for
# 98,304 codes, 0.85 of it for 393,216, and the same time for 786,432.
SLICE_CODES = 1 << 19


class Stored(NamedTuple):
    """Keys or values of one precision as they are stored: ``packed`` [B, R, S, W] with ``scales`` FP16 [B, R, S], or
    the values themselves, without scales. ``heads``: where they are among those of their side; None: they are all."""

    name: str
    heads: slice | None
    packed: Tensor
    scales: Tensor | None

    def of(self, x: Tensor) -> Tensor:
        """What belongs to these heads of x [B, H, ...]."""
        return x if self.heads is None else x[:, self.heads]

    def expand(self, out: Tensor, part: slice | None) -> None:
        """Write codes, or values, of a slice of the text (None: of all) to ``out`` FP32 [B, R, T, D], in order."""
        packed = self.packed if part is None else self.packed[:, :, part]
        if halved(self.name):
            signed, half = packed.view(torch.int8), packed.shape[-1]
            torch.bitwise_left_shift(signed, 4, out=out[..., :half])
            torch.bitwise_and(signed, -16, out=out[..., half:])
        else:
            out.copy_(packed if self.scales is None else unpack(packed, BITS[self.name], out.shape[-1]))

    def scale(self, x: Tensor) -> None:
        """Multiply what belongs to tokens, x [B, H, G, S], by their scales."""
        if self.scales is not None:
            self.of(x).mul_(self.scales.unsqueeze(2))

    def scaled(self, out: Tensor) -> None:
        """Write codes times their scales, or values, to what belongs to these heads of ``out`` FP32 [B, H, S, D]."""
        own = self.of(out)
        self.expand(own, None)
        if self.scales is not None:
            own.mul_(self.scales.unsqueeze(3))


class Arrangement:
    """How the heads of one side come as they are stored: each KV head with its precision, in that order. There is one
    object for each order, so that tables made for it are found fast, and are shared by all caches."""

    def __init__(self, heads: tuple[tuple[int, str], ...]):
        self.heads = heads


arrangement = cache(Arrangement)


class Side(NamedTuple):
    """What a layer has stored of its keys, or of its values; or of both, the heads' keys first."""

    stored: Sequence[Stored]
    arrangement: Arrangement

    @property
    def tokens(self) -> int:
        """How many tokens are stored."""
        return self.stored[0].packed.shape[2]

    def expanded(self, width: int) -> Iterator[tuple[slice | None, Tensor]]:
        """A slice of the text (None: all of it), and codes of all heads FP32 [B · H, T, D]; one slice after the other
        in the same memory."""
        batch, heads = len(self.stored[0].packed), len(self.arrangement.heads)
        cut = slices(self.tokens, batch * heads * width, SLICE_CODES)
        room = self.stored[0].packed.new_empty((batch, heads, cut[0].stop, width), dtype=torch.float32)
        for part in cut if len(cut) > 1 else [None]:
            codes = room if part is None else room[:, :, : part.stop - part.start]
            for stored in self.stored:
                stored.expand(stored.of(codes), part)
            yield part, codes.flatten(0, 1)


class Holds(Protocol):
    """What holds the tokens of a layer, one at least, on a CPU."""

    length: int
    # Whether all that it holds is of one precision; how the heads of keys and of values are arranged.
    alike: bool
    arrangements: tuple[Arrangement, Arrangement]

    def stored(self, side: int | None) -> Side:
        """The keys (side 0) or the values (1) as they are stored; None, where all is alike: both."""


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
def order_of(side: Arrangement, group: int, width: int) -> Order:
    """The order of ``group`` vectors a head."""
    with torch.inference_mode(False):
        own = torch.arange(width)
        channels = {True: torch.cat((own[::2], own[1::2])), False: own}
        rows = torch.arange(len(side.heads) * group * width).view(len(side.heads), group, width)
        there = torch.cat([rows[head][:, channels[halved(name)]] for head, name in side.heads]).flatten()
        factors = [1 / (MAX_CODES.get(name, 1) * (16 if halved(name) else 1)) for _, name in side.heads]
        return Order(there.int(), there.argsort().int(), torch.tensor(factors).view(-1, 1, 1))


def attend(
    queries: Tensor, holds: Holds, own: tuple[Tensor, Tensor], scaling: float, mask: Tensor | None = None
) -> Tensor:
    """What the queries [B, G · H, 1, D] of one token take from the values, [B, G · H, 1, D] in their dtype.

    ``own``: the token's key and value [B, H, 1, D], as they are. ``mask`` [B or 1, 1, 1, S + 1]: which tokens it sees
    (bool), or what is added to scores; None: all.
    """
    of_text = attend_at_once if 2 * holds.length * own[0].numel() <= SLICE_CODES else attend_by_slices
    return of_text(queries, holds, own, scaling, mask)


def attend_by_slices(
    queries: Tensor, holds: Holds, own: tuple[Tensor, Tensor], scaling: float, mask: Tensor | None
) -> Tensor:
    """As ``attend``: products with codes, a slice of the text at a time."""
    batch, count, _, width = queries.shape
    heads, keys, values = own[0].shape[1], holds.stored(0), holds.stored(1)
    group = count // heads
    of_keys, of_values = (order_of(side.arrangement, group, width) for side in (keys, values))
    q = ordered(queries, of_keys.there).float().mul_(scaling).view(batch, heads, group, width)
    k, v = (
        ordered(each, order_of(side.arrangement, 1, width).there)
        for each, side in zip(own, (keys, values), strict=True)
    )
    scores = q.new_empty((batch, heads, group, keys.tokens + 1))
    past = scores[..., :-1]
    torch.sum(q * k, dim=-1, out=scores[..., -1])
    q = q.mul_(of_keys.factors).flatten(0, 1)
    for part, codes in keys.expanded(width):
        found = past.flatten(0, 1)
        torch.bmm(q, codes.mT, out=found if part is None else found[:, :, part])
    for stored in keys.stored:
        stored.scale(past)
    weights = softmax(scores, mask)
    if keys.arrangement is not values.arrangement:
        weights = weights[:, places(keys.arrangement, values.arrangement)]
    out, past = weights[..., -1:] * v, weights[..., :-1]
    for stored in values.stored:
        stored.scale(past)
    sums = torch.zeros_like(q)
    for part, codes in values.expanded(width):
        given = past.flatten(0, 1)
        sums.baddbmm_(given if part is None else given[:, :, part], codes)
    out.addcmul_(sums.view_as(out), of_values.factors)
    return ordered(out.to(queries.dtype), of_values.back).view(batch, count, 1, width)


def attend_at_once(
    queries: Tensor, holds: Holds, own: tuple[Tensor, Tensor], scaling: float, mask: Tensor | None
) -> Tensor:
    """As ``attend``: codes times scales, of all the text at once."""
    batch, count, _, width = queries.shape
    heads, tokens = own[0].shape[1], holds.length
    room = queries.new_empty((batch, 2 * heads, tokens + 1, width), dtype=torch.float32)
    k, v = room.chunk(2, dim=1)
    if holds.alike:
        parts = [(holds.stored(None), torch.cat(own, dim=1), room)]
    else:
        parts = [(holds.stored(side), new, out) for side, new, out in zip((0, 1), own, (k, v), strict=True)]
    for side, new, out in parts:
        past, order = out[:, :, :tokens], order_of(side.arrangement, 1, width)
        for stored in side.stored:
            stored.scaled(past)
        # Its own as if they were stored: what codes times scales are.
        torch.div(ordered(new, order.there), order.factors, out=out[:, :, tokens:])
    keys, values = holds.arrangements
    of_keys, of_values = (order_of(each, count // heads, width) for each in (keys, values))
    q = ordered(queries, of_keys.there).view(batch, heads, -1, width) * of_keys.factors
    if keys is not values:
        here = places(keys, values)
        q, k = q[:, here], k[:, here]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.float()
    out = scaled_dot_product_attention(q, k, v, mask, scale=scaling).mul_(of_values.factors)
    return ordered(out.to(queries.dtype), of_values.back).view(batch, count, 1, width)


def places(of: Arrangement, others: Arrangement) -> list[int]:
    """Where heads in the order of ``others`` are in that ``of`` the other side."""
    place = [head for head, _ in of.heads].index
    return [place(head) for head, _ in others.heads]


def softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Probabilities of tokens by their scores [B, H, G, S]; all 0 of a query that sees none, which is padding's."""
    if mask is None:
        return scores.softmax(dim=-1)
    if mask.dtype != torch.bool:
        return (scores + mask).softmax(dim=-1)
    weights = torch.where(mask, scores, -torch.inf).softmax(dim=-1)
    return torch.where(mask.any(dim=-1, keepdim=True), weights, 0.0)


def ordered(x: Tensor, index: Tensor) -> Tensor:
    """Elements of x [B, H, G, D] in the order of ``index``, [B, H, G, D]."""
    return x.flatten(1).index_select(1, index).view_as(x)
