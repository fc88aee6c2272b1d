"""Stores: the packed tokens of some heads' keys, or of their values, under one method.

A store takes new tokens, says what is read back, and can drop its last tokens or pick sequences. Tokens are quantized
once. Under a method that delays it (a group of tokens shares a scale; a recent window stays exact) that happens at the
step after the one that makes it due: until then the last step's tokens can be dropped as if they had never come.

Axes: B sequences, H heads, T tokens, D head width; keys or values [B, H, T, D].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvstages.cache.coding import Codec, Encoded

# Empty room that even the smallest store may have, in tokens.
SPARE = 16


class Settled(NamedTuple):
    """Tokens that turned from exact to quantized: ``values`` [b, H, T, D] from token ``start`` on, in the sequences
    ``rows`` (None: in all)."""

    rows: Tensor | None
    start: int
    values: Tensor


def grown(tokens: int) -> int:
    """The capacity that a store gets which must hold ``tokens``: a 32nd more, so that little of what is resident is
    empty. A token is then copied about 32 times however many follow."""
    return tokens + max(SPARE, tokens // 32)


class Growing:
    """A tensor [B, H, capacity, W] of which the first ``length`` tokens count."""

    def __init__(self, like: Tensor, capacity: int):
        self.length = 0
        self.data = like.new_empty((*like.shape[:2], capacity, like.shape[3]))

    def append(self, x: Tensor) -> None:
        start, self.length = self.length, self.length + x.shape[2]
        if self.length > self.data.shape[2]:
            larger = self.data.new_empty((*self.data.shape[:2], grown(self.length), self.data.shape[3]))
            larger[:, :, :start] = self.data[:, :, :start]
            self.data = larger
        self.data[:, :, start : self.length] = x

    @property
    def tensor(self) -> Tensor:
        return self.data[:, :, : self.length]

    def select(self, rows: Tensor) -> None:
        self.data = self.data.index_select(0, rows)


class Store:
    """The tokens of B sequences, all of one length.

    ``turned``: what is read back is rotated as it is stored. ``dense``: the dtype of exact tokens.
    """

    def __init__(
        self,
        codec: Codec,
        batch: int,
        heads: int,
        arithmetic: torch.dtype,
        dense: torch.dtype,
        device: torch.device | str,
        capacity: int = 64,
        turned: bool = False,
    ):
        self.codec, self.arithmetic, self.turned, self.capacity = codec, arithmetic, turned, capacity
        self.first, self.last = (torch.empty(batch, heads, 0, codec.width, dtype=dense, device=device) for _ in "fl")
        self.codes: Growing | None = None
        self.parameters: list[Growing] = []
        self.quantized = 0

    @property
    def length(self) -> int:
        """Tokens in the store."""
        return self.first.shape[2] + self.quantized + self.last.shape[2]

    def append(self, x: Tensor) -> Tensor:
        """Take tokens [B, H, T, D]; return what they are read back as until something more is settled."""
        room = max(0, self.codec.method.first - self.length)
        if not room and not self.codec.method.delayed:
            return self._quantize(x)
        exact, rest = x[:, :, :room], x[:, :, room:]
        if room:
            self.first = torch.cat((self.first, exact.to(self.first.dtype)), dim=2)
        if self.codec.method.delayed:
            self.last = torch.cat((self.last, rest.to(self.last.dtype)), dim=2)
            return self._exact(x.to(self.last.dtype))
        if not rest.shape[2]:
            return self._exact(self.first[:, :, -x.shape[2] :])
        return torch.cat((self._exact(self.first[:, :, -exact.shape[2] :]), self._quantize(rest)), dim=2)

    def settle(self) -> list[Settled]:
        """Quantize what is due now that the step which brought the last tokens is over."""
        due = self.codec.method.stored_tokens(self.length) - self.quantized
        if due <= 0:
            return []
        start = self.first.shape[2] + self.quantized
        # A copy: a slice would keep the memory of all of them.
        tokens, self.last = self.last[:, :, :due], self.last[:, :, due:].clone()
        return [Settled(None, start, self._quantize(tokens.to(self.arithmetic)))]

    def read(self) -> Tensor:
        """All tokens as the next step reads them back, [B, H, length, D]."""
        parts = [self._exact(self.first)] if self.first.shape[2] else []
        if self.quantized:
            stored = Encoded(self.codes.tensor, tuple(each.tensor for each in self.parameters))
            coded = self.codec.unpack(stored)
            parts.append(self.codec.decode(coded, self.arithmetic, self.first.shape[2], self.turned))
        if self.last.shape[2] or not parts:
            parts.append(self._exact(self.last))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def check_crop(self, count: int) -> None:
        """ValueError where the last ``count`` tokens cannot be dropped: others would have to be exact again."""
        method = self.codec.method
        if method.delayed and method.stored_tokens(self.length - count) < self.quantized:
            most = self.length - method.first - method.recent - self.quantized
            raise ValueError(
                f"the last {count} tokens cannot be dropped: tokens before them were exact without them, and are "
                f"quantized now; at most {most} can"
            )

    def crop(self, count: int) -> None:
        """Drop the last ``count`` tokens, once ``check_crop`` allows it."""
        length, method = self.length - count, self.codec.method
        if not method.delayed:
            self.quantized = method.stored_tokens(length)
            for each in self._growing():
                each.length = self.quantized
        self.first = self.first[:, :, :length]
        self.last = self.last[:, :, : max(0, length - self.first.shape[2] - self.quantized)]

    def select(self, rows: Tensor) -> None:
        """Keep these sequences (indices, in this order; one may come twice)."""
        self.first, self.last = self.first.index_select(0, rows), self.last.index_select(0, rows)
        for each in self._growing():
            each.select(rows)

    @property
    def payload_bytes(self) -> int:
        """Bytes of codes and exact tokens."""
        codes = 0 if self.codes is None else self.codes.tensor.nbytes
        return codes + self.first.nbytes + self.last.nbytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales and zero points."""
        return sum(each.tensor.nbytes for each in self.parameters)

    def _growing(self) -> list[Growing]:
        return [] if self.codes is None else [self.codes, *self.parameters]

    def _quantize(self, x: Tensor) -> Tensor:
        """Store tokens quantized; what they are read back as."""
        start = self.first.shape[2] + self.quantized
        coded = self.codec.encode(x, start)
        stored = self.codec.pack(coded)
        if self.codes is None:
            self.codes = Growing(stored.codes, self.capacity)
            groups = -(-self.capacity // self.codec.method.tokens)
            self.parameters = [Growing(each, groups) for each in stored.parameters]
        self.codes.append(stored.codes)
        for growing, each in zip(self.parameters, stored.parameters, strict=True):
            growing.append(each)
        self.quantized += x.shape[2]
        return self.codec.decode(coded, self.arithmetic, start, self.turned)

    def _exact(self, x: Tensor) -> Tensor:
        """Exact tokens in the arithmetic dtype."""
        x = x.to(self.arithmetic)
        return self.codec.turn(x).to(self.arithmetic) if self.turned else x


class PaddedStore:
    """The tokens of sequences that begin with padding, ``padding`` [B] tokens of it.

    Sequences of one padding have a store of their own, which the padding never reaches: it would take the place of the
    first tokens, shift the groups that share a scale, and spoil their scales. It reads back as zeros.
    """

    def __init__(self, padding: Tensor, **options: object):
        self.options, self.tokens = options, 0
        self.arithmetic: torch.dtype = options["arithmetic"]
        self.shape = options["heads"], options["codec"].width
        self.padding = padding
        self.parts = {
            int(count): (rows := (padding == count).nonzero().flatten(), Store(batch=len(rows), **options))
            for count in padding.unique()
        }

    def extend(self, padding: Tensor) -> None:
        """Sequences that hold nothing but padding so far begin with ``padding`` [B] tokens of it, as many or more."""
        waiting = self.parts.pop(self.tokens, None)
        if waiting is None:
            return
        rows = waiting[0]
        self.padding = self.padding.index_copy(0, rows, padding[rows])
        for count in padding[rows].unique():
            own = rows[padding[rows] == count]
            self.parts[int(count)] = own, Store(batch=len(own), **self.options)

    def append(self, x: Tensor) -> Tensor:
        """Take tokens, padding included; see ``Store.append``."""
        back = torch.zeros_like(x)
        for count, (rows, store) in self.parts.items():
            skipped = min(max(0, count - self.tokens), x.shape[2])
            if skipped < x.shape[2]:
                back[rows, :, skipped:] = store.append(x[rows, :, skipped:])
        self.tokens += x.shape[2]
        return back

    def settle(self) -> list[Settled]:
        """See ``Store.settle``."""
        return [
            Settled(rows, count + settled.start, settled.values)
            for count, (rows, store) in self.parts.items()
            for settled in store.settle()
        ]

    def read(self) -> Tensor:
        """See ``Store.read``."""
        heads, width = self.shape
        back = torch.zeros(
            len(self.padding), heads, self.tokens, width, dtype=self.arithmetic, device=self.padding.device
        )
        for count, (rows, store) in self.parts.items():
            back[rows, :, count:] = store.read()
        return back

    def check_crop(self, count: int) -> None:
        """See ``Store.check_crop``."""
        for store, own in self._drops(count):
            store.check_crop(own)

    def crop(self, count: int) -> None:
        """See ``Store.crop``."""
        for store, own in self._drops(count):
            store.crop(own)
        self.tokens -= count

    def _drops(self, count: int) -> list[tuple[Store, int]]:
        """How many tokens of each store are among the last ``count``; the rest of them is padding."""
        left = self.tokens - count
        return [(store, store.length - max(0, left - padding)) for padding, (_, store) in self.parts.items()]

    def select(self, rows: Tensor) -> None:
        """See ``Store.select``."""
        self.padding = self.padding[rows]
        parts = {}
        for count, (old, store) in self.parts.items():
            new = (self.padding == count).nonzero().flatten()
            if len(new):
                store.select(torch.searchsorted(old, rows[new]))
                parts[count] = (new, store)
        self.parts = parts

    @property
    def payload_bytes(self) -> int:
        """Bytes of the stored codes and exact tokens."""
        return sum(store.payload_bytes for _, store in self.parts.values())

    @property
    def scale_bytes(self) -> int:
        """Bytes of the stored scales."""
        return sum(store.scale_bytes for _, store in self.parts.values())
