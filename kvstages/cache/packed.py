"""The packed per-head KV cache, token by token or several at once.

Every head's keys and values have their own precision. Past positions stay packed (codes as a stream of bits, FP16
scales; "bf16" as BF16); a step quantizes only its new positions and appends them, and its attention sees the
reconstructed past and its own keys and values as they are (docs/method.md, "Cache rule"). Nothing is ever quantized
twice. Tensors of the published precisions are quantized in one go; those of other schemes have stores (``stores``).

Axes: keys and values [B, H, T, D]; together [B, 2H, T, D], the heads' keys first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvstages.cache.attention import Arrangement, Side, Stored, arrangement
from kvstages.cache.interventions import Group, ReadBack, check_finite
from kvstages.cache.offsets import Contexts
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import BITS, MAX_CODES, packed_width
from kvstages.cache.quantizer import choose_scale, dequantize, pack, quantize
from kvstages.cache.reading import put, read_into, slices
from kvstages.cache.rounding import STORAGE, Rounding, storage_rounding
from kvstages.cache.schemes import SIDES, Bytes
from kvstages.cache.sides import join, part
from kvstages.cache.stores import PaddedStore, Store, grown


class Turned(NamedTuple):
    """Tensors that are read back rotated: the KV heads whose ``keys`` are, and those whose ``values`` are."""

    group: Group
    keys: Tensor
    values: Tensor


class LayerCache:
    """One layer's cache; its tensors are grouped by precision, so a step costs a few operations whatever the mix."""

    def __init__(
        self,
        row: Sequence[str],
        batch: int,
        head_dim: int,
        arithmetic: torch.dtype,
        dense_storage: torch.dtype,
        layer: int = 0,
        capacity: int = 64,
        working_copy: bool = True,
        device: torch.device | str = "cpu",
        contexts: Contexts | None = None,
        padding: Tensor | None = None,
        turned: bool = False,
        sides: str = "kv",
    ):
        self.layer, self.length, self.head_dim, self.arithmetic = layer, 0, head_dim, arithmetic
        self.batch = batch
        self.read = ReadBack(row, layer, device, (head_dim, head_dim), contexts, sides)
        self.heads = len(row) // len(sides)
        # Groups that are read back rotated, with the KV heads of their keys and of their values.
        self.turned = [
            Turned(group, *(group.rows[group.rows // self.heads == sides.find(side)] % self.heads for side in SIDES))
            for group in self.read.groups
            if turned and group.codec.matrix is not None
        ]
        self.groups = [
            (group, self._store(group, batch, dense_storage, device, capacity, padding, turned))
            for group in self.read.groups
        ]
        # Dense tensors that need no rounding live in the working copy alone; it is their store.
        self.dense_in_past = working_copy and dense_storage == arithmetic
        self.working_copy = working_copy
        dense, quantized = len(self.read.dense_rows), len(self.read.quantized_rows)
        widths = {
            **{
                name: (len(self.read.rows[name]), packed_width(name, head_dim), torch.uint8)
                for name in self.read.quantized
            },
            "scales": (quantized, 1, torch.float16),
            "dense": (0 if self.dense_in_past else dense, head_dim, dense_storage),
            "past": (len(row) if working_copy else 0, head_dim, arithmetic),
        }
        self.store = {
            name: torch.empty((batch, rows, capacity, width), dtype=dtype, device=device)
            for name, (rows, width, dtype) in widths.items()
        }
        self.unsettled: Tensor | None = None
        # One number, where there is one precision, saves a step operations.
        self.alike = self.read.uniform and bool(self.read.quantized)
        self.levels = MAX_CODES[self.read.quantized[0]] if self.alike else self.read.levels
        # Rows as numbers: a step that asks a GPU for them would wait for it.
        self.places = {name: rows.tolist() for name, rows in self.read.rows.items()}
        self.dense_places, self.quantized_places = self.read.dense_rows.tolist(), self.read.quantized_rows.tolist()
        self.group_places = [group.rows.tolist() for group in self.read.groups]
        self.foldable = self._foldable()
        if self.foldable:
            heads, all_rows = self.heads, range(len(row))
            self.sides = {side: self._arranged(rows) for side, rows in
                          ((0, all_rows[:heads]), (1, all_rows[heads:]), (None, all_rows))}  # fmt: skip
            self.arrangements = self.sides[0][1], self.sides[1][1]

    def update(self, both: Tensor) -> Tensor:
        """Append T positions [B, 2H, T, D]; return what their attention sees, [B, 2H, S, D]: the reconstructed past,
        then themselves."""
        start, stop = self.length, self.length + both.shape[2]
        new = self._turn(both) if self.turned else both
        if not self.working_copy:
            self.append(both)
            if not start:
                return new
            seen = both.new_empty((*both.shape[:2], stop, self.head_dim))
            self.reconstruct_into(seen)
            seen[:, :, start:] = new
            return seen
        self._reserve(stop)
        self.settle()
        past = self.store["past"]
        past[:, :, start:stop] = new
        self.unsettled = self._append(both, start, stop)
        self.length = stop
        return past[:, :, :stop]

    def append(self, both: Tensor) -> None:
        """Store T positions [B, 2H, T, D] without a working copy, and reconstruct nothing."""
        start, stop = self.length, self.length + both.shape[2]
        self._reserve(stop)
        self.settle()
        # A slice at a time: what is freed between tensors that stay is of little use to anything larger.
        for piece in slices(stop - start, both[:, :, 0].numel()):
            self._store_new(both[:, :, piece], start + piece.start, start + piece.stop)
        self._store_groups(both)
        self.length = stop

    def settle(self) -> None:
        """Bring the past to what the next step finds: the last step's exact keys and values have been attended to,
        and give way to the stored ones, as do those that were to stay exact for longer and are now due."""
        past = self.store["past"]
        if self.unsettled is not None:
            past[:, :, self.length - self.unsettled.shape[2] : self.length] = self.unsettled
            self.unsettled = None
        for group, store in self.groups:
            for rows, start, values in store.settle():
                if self.working_copy:
                    where = slice(start, start + values.shape[2])
                    rows = torch.arange(len(past), device=past.device) if rows is None else rows
                    past[rows.unsqueeze(1), group.rows, where] = values

    def extend_padding(self, padding: Tensor) -> None:
        """Say how many positions of padding [B] those sequences begin with that hold nothing else so far."""
        for _, store in self.groups:
            store.extend(padding)

    def check_crop(self, count: int) -> None:
        """ValueError where the last ``count`` positions cannot be dropped."""
        if not 0 <= count <= self.length:
            raise ValueError(f"layer {self.layer}: {count} tokens to drop of {self.length}")
        for _, store in self.groups:
            try:
                store.check_crop(count)
            except ValueError as error:
                raise ValueError(f"layer {self.layer}: {error}") from None

    def crop(self, count: int) -> None:
        """Drop the last ``count`` positions, once ``check_crop`` allows it."""
        if self.unsettled is not None:
            self.store["past"][:, :, self.length - self.unsettled.shape[2] : self.length] = self.unsettled
            self.unsettled = None
        for _, store in self.groups:
            store.crop(count)
        self.length -= count

    def select(self, rows: Tensor) -> None:
        """Keep these sequences (indices, in this order; one may come twice)."""
        self.batch = len(rows)
        self.store = {name: stored.index_select(0, rows) for name, stored in self.store.items()}
        if self.unsettled is not None:
            self.unsettled = self.unsettled.index_select(0, rows)
        for _, store in self.groups:
            store.select(rows)

    def _store(
        self,
        group: Group,
        batch: int,
        dense: torch.dtype,
        device: torch.device | str,
        capacity: int,
        padding: Tensor | None,
        turned: bool,
    ) -> Store | PaddedStore:
        options = {
            "codec": group.codec,
            "heads": len(group.rows),
            "arithmetic": self.arithmetic,
            "dense": dense,
            "device": device,
            "capacity": capacity,
            "turned": turned,
        }
        return Store(batch=batch, **options) if padding is None else PaddedStore(padding, **options)

    def _foldable(self) -> bool:
        """Whether new tokens can attend to what is stored as it is (``attention``): to published codes, and BF16."""
        published = self.read.quantized and not self.groups and not self.read.nulls
        return bool(published) and not self.working_copy and self.head_dim % 2 == 0

    def _arranged(self, rows: range) -> tuple[list[tuple[str, slice | None, slice, slice | None]], Arrangement]:
        """How keys, values or both, by their rows, are stored: of each precision its heads (None: all), its rows among
        those of its name, and those among the scales; and the order of the heads (see ``attention``)."""
        parts, order, first = [], [], 0
        for name, places in self.places.items():
            here = [index for index, row in enumerate(places) if row in rows]
            if here:
                # Rows ascend, so those of one side stand together.
                start, stop = here[0], here[-1] + 1
                scales = None if name == "bf16" else slice(first + start, first + stop)
                heads = None if len(here) == len(rows) else slice(len(order), len(order) + len(here))
                parts.append((name, heads, slice(start, stop), scales))
                order += [(places[index] - rows.start, name) for index in here]
            first += len(places)
        return parts, arrangement(tuple(order))

    def _turn(self, both: Tensor) -> Tensor:
        """Keys and values, with those rotated whose past is read back rotated."""
        for group, _, _ in self.turned:
            rotated = group.codec.turn(both.index_select(1, group.rows)).to(both.dtype)
            both = both.index_copy(1, group.rows, rotated)
        return both

    def _append(self, both: Tensor, start: int, stop: int) -> Tensor | None:
        """Store the new positions [B, 2H, T, D]; what they will read back as (None: as they are)."""
        read = self.read
        settled = dense = read.moved(both)
        coded, groups = self._store_new(both, start, stop), self._store_groups(both)
        if coded is not None:
            settled = dequantize(*coded, self.levels, self.arithmetic)
            if len(read.dense_rows):
                settled = torch.where(read.is_dense, dense, settled)
        for (group, _), back in zip(self.groups, groups, strict=True):
            settled = back if back.shape == settled.shape else settled.index_copy(1, group.rows, back)
        return None if settled is both else settled

    def _store_new(self, both: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """Store new positions [B, 2H, T, D] of the dense tensors and of those of the published precisions; codes and
        scales of the latter, of no account for other tensors."""
        read = self.read
        if len(read.dense_rows) and not self.dense_in_past:
            self.store["dense"][:, :, start:stop] = read.pick(read.moved(both), read.dense_rows)
        if not read.quantized:
            return None
        scale = choose_scale(both)
        codes = quantize(both, scale, self.levels)
        self.store["scales"][:, :, start:stop, 0] = read.pick(scale, read.quantized_rows)
        for name in read.quantized:
            self.store[name][:, :, start:stop] = pack(read.pick(codes, read.rows[name]), BITS[name])
        return codes, scale

    def _store_groups(self, both: Tensor) -> list[Tensor]:
        """Store new positions [B, 2H, T, D] of other schemes; what each group's are read back as."""
        return [
            store.append(both if len(group.rows) == both.shape[1] else both.index_select(1, group.rows))
            for group, store in self.groups
        ]

    def _reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` positions (see ``stores.grown``)."""
        if tokens <= self.store["past"].shape[2]:
            return
        for name, old in self.store.items():
            new = old.new_empty((*old.shape[:2], grown(tokens), old.shape[3]))
            new[:, :, : self.length] = old[:, :, : self.length]
            self.store[name] = new

    def _stored(self, name: str) -> Tensor:
        return self.store[name][:, :, : self.length]

    def reconstruct_into(self, out: Tensor) -> None:
        """Write all positions as stored, unpacked, to ``out`` [B, 2H, tokens, D] of the arithmetic dtype."""
        read = self.read
        if self.dense_places:
            put(out, self.dense_places, self._stored("dense"))
        first = 0
        for name in read.quantized:
            rows = self.places[name]
            scales = self._stored("scales")[:, first : first + len(rows), :, 0]
            first += len(rows)
            read_into(out, rows, name, self._stored(name), scales)
        for places, (_, store) in zip(self.group_places, self.groups, strict=True):
            put(out, places, store.read())

    def stored(self, side: int | None) -> Side:
        """The keys (side 0), the values (1) or both (None) as they are stored; where ``foldable``."""
        parts, arranged = self.sides[side]
        found = []
        for name, heads, rows, scales in parts:
            packed = self.store["dense" if scales is None else name][:, rows, : self.length]
            steps = None if scales is None else self.store["scales"][:, scales, : self.length, 0]
            found.append(Stored(name, heads, packed, steps))
        return Side(found, arranged)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the stored codes and dense elements, of the positions seen so far."""
        payload = sum(self._stored(name).nbytes for name in (*self.read.quantized, "dense"))
        payload += sum(store.payload_bytes for _, store in self.groups)
        return payload + (self._dense_in_past_bytes() if self.dense_in_past else 0)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the stored scales and zero points, of the positions seen so far."""
        return self._stored("scales").nbytes + sum(store.scale_bytes for _, store in self.groups)

    @property
    def once_bytes(self) -> int:
        """Bytes that do not grow with the positions: offsets and static scales."""
        return sum(group.once_bytes for group in self.read.groups)

    @property
    def working_bytes(self) -> int:
        """Bytes of the working copy beyond what is stored anyway: the price of not reconstructing the past anew."""
        return self._stored("past").nbytes - (self._dense_in_past_bytes() if self.dense_in_past else 0)

    def _dense_in_past_bytes(self) -> int:
        return self._stored("past").index_select(1, self.read.dense_rows).nbytes


def append_all(caches: Sequence[LayerCache], new: Sequence[Tensor]) -> None:
    """Store positions of several layers, each [B, 2H, T, D] of one that is ``foldable``, as ``append`` of each would.

    They are quantized in one go: a token of one layer is so little that its operations cost what their calls do.
    """
    both = torch.cat(list(new), dim=1)
    firsts = list(accumulate((each.shape[1] for each in new), initial=0))
    count, one = both.shape[2], caches[0].levels
    alike = isinstance(one, int) and all(isinstance(cache.levels, int) and cache.levels == one for cache in caches)
    scale = choose_scale(both)
    codes = quantize(both, scale, one if alike else torch.cat([cache.read.levels for cache in caches]))
    tensors = {name: (codes, [cache.places.get(name, []) for cache in caches]) for name in MAX_CODES}
    tensors["scales"] = scale.unsqueeze(-1), [cache.quantized_places for cache in caches]
    tensors["dense"] = both, [cache.dense_places for cache in caches]
    for cache in caches:
        cache._reserve(cache.length + count)
    for name, (x, places) in tensors.items():
        rows = [first + row for first, own in zip(firsts, places, strict=False) for row in own]
        if not rows:
            continue
        if not alike:
            x = x.index_select(1, torch.tensor(rows, device=x.device))
        if name in MAX_CODES:
            x = pack(x, BITS[name])
        for cache, own in zip(caches, x.split([len(each) for each in places], dim=1), strict=True):
            if own.shape[1]:
                cache.store[name][:, :, cache.length : cache.length + count] = own
    for cache in caches:
        cache.length += count


class UnevenLayerCache:
    """One layer's cache where keys and values differ in width: one for each. What goes in and comes out is of the
    larger width (see ``sides``); what is stored is not."""

    foldable = False

    def __init__(self, keys: LayerCache, values: LayerCache):
        self.sides = keys, values

    @property
    def length(self) -> int:
        return self.sides[0].length

    @property
    def batch(self) -> int:
        return self.sides[0].batch

    @property
    def arithmetic(self) -> torch.dtype:
        return self.sides[0].arithmetic

    @property
    def heads(self) -> int:
        return self.sides[0].heads

    @property
    def turned(self) -> list[Turned]:
        return [turned for side in self.sides for turned in side.turned]

    def update(self, both: Tensor) -> Tensor:
        """As ``LayerCache.update``."""
        sides = zip(self.sides, both.chunk(2, dim=1), strict=True)
        return join(*(cache.update(side[..., : cache.head_dim]) for cache, side in sides))

    def extend_padding(self, padding: Tensor) -> None:
        for side in self.sides:
            side.extend_padding(padding)

    def settle(self) -> None:
        for side in self.sides:
            side.settle()

    def check_crop(self, count: int) -> None:
        for side in self.sides:
            side.check_crop(count)

    def crop(self, count: int) -> None:
        for side in self.sides:
            side.crop(count)

    def select(self, rows: Tensor) -> None:
        for side in self.sides:
            side.select(rows)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the stored codes and dense elements, of the positions seen so far."""
        return sum(side.payload_bytes for side in self.sides)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of these positions."""
        return sum(side.scale_bytes for side in self.sides)

    @property
    def once_bytes(self) -> int:
        """Bytes that are stored once for the whole cache."""
        return sum(side.once_bytes for side in self.sides)

    @property
    def working_bytes(self) -> int:
        """Bytes of the working copy, beside what is stored."""
        return sum(side.working_bytes for side in self.sides)


class PackedCache:
    """The cache of a whole decoder, with the precision of each head's keys and values given by a grid.

    ``arithmetic`` is the model's dtype, ``dense_storage`` that in which "bf16" tensors are kept. With
    ``working_copy`` each layer also keeps its reconstructed past, so that a step reconstructs only its own positions:
    faster, and paid for in ``working_bytes``; without it the past is unpacked anew at every step. Both give the same
    numbers. ``contexts``: what schemes need to know of the model. ``padding`` [B]: how many positions each sequence
    begins with that are padding. ``value_width`` is the width of a head's values where it is not that of its keys,
    ``head_dim``.

    ``turned``: heads whose scheme rotates are read back rotated, which saves rotating their past back at every step.
    Whoever attends then rotates queries and outputs instead (``queries``, ``outputs``): q · k = (q R) · (k R), and
    Σ p (v R) = (Σ p v) R for an orthonormal R.
    """

    def __init__(
        self,
        grid: PrecisionGrid,
        batch: int,
        head_dim: int,
        arithmetic: torch.dtype,
        capacity: int = 64,
        working_copy: bool = True,
        device: torch.device | str = "cpu",
        rounding: Rounding = storage_rounding,
        dense_storage: torch.dtype = STORAGE,
        value_width: int | None = None,
        contexts: Contexts | None = None,
        padding: Tensor | None = None,
        turned: bool = False,
    ):
        self.rounding, self.device, self.padding = rounding, device, padding

        def of_layer(layer: int, row: Sequence[str], width: int, sides: str = "kv") -> LayerCache:
            return LayerCache(
                row,
                batch,
                width,
                arithmetic,
                dense_storage,
                layer,
                capacity,
                working_copy,
                device,
                contexts,
                padding,
                turned,
                sides,
            )

        uneven = value_width not in (None, head_dim)
        self.layers = [
            UnevenLayerCache(
                of_layer(layer, grid.keys[layer], head_dim, "k"), of_layer(layer, grid.values[layer], value_width, "v")
            )
            if uneven
            else of_layer(layer, grid.row(layer), head_dim)
            for layer in range(len(grid.keys))
        ]

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, H, T, D] of ``layer``; return those to attend to, [B, H, S, D].

        ValueError names layer and head where they hold NaN or infinity; nothing is then stored.
        """
        both = join(keys, values)
        check_finite(both, layer)
        cache = self.layers[layer]
        return part(cache.update(self.rounding(both, layer, cache.length)), keys, values)

    def queries(self, queries: Tensor, layer: int) -> Tensor:
        """Queries [B, G · H, T, D], G of them a KV head, in the frame of the keys that ``update`` returns."""
        return self._turned(queries, layer, 0, back=False)

    def outputs(self, outputs: Tensor, layer: int) -> Tensor:
        """What attention gives, [B, G · H, T, D], out of the frame of the values that ``update`` returns."""
        return self._turned(outputs, layer, 1, back=True)

    def _turned(self, x: Tensor, layer: int, side: int, back: bool) -> Tensor:
        """Queries or outputs with those of heads rotated (or rotated back) whose keys (side 0) or values (1) are."""
        for turned in self.layers[layer].turned:
            heads = turned[1 + side]
            if len(heads):
                # The queries of a KV head stand together.
                shared = x.unflatten(1, (self.layers[layer].heads, -1))
                codec, own = turned.group.codec, shared.index_select(1, heads)
                rotated = (codec.turn_back(own) if back else codec.turn(own)).to(x.dtype)
                x = shared.index_copy(1, heads, rotated).flatten(1, 2)
        return x

    def mask(self, new: int, layer: int) -> Tensor | None:
        """Causal mask bool [new, S] of the next update of ``layer``; None for one token, which sees everything.

        With padding [B, 1, new, S]: no query sees padding, but for padding itself, which must see something.
        """
        past = self.layers[layer].length
        if self.padding is not None:
            own = torch.arange(past, past + new, device=self.device).unsqueeze(1)
            seen = torch.arange(past + new, device=self.device)
            return (seen == own) | (seen <= own) & (seen >= self.padding.to(self.device).view(-1, 1, 1, 1))
        if new == 1:
            return None
        return torch.ones(new, past + new, dtype=torch.bool, device=self.device).tril(past)

    def settle(self) -> None:
        """Bring every layer to what the next step finds: then bytes are those of the formula."""
        for layer in self.layers:
            layer.settle()

    def crop(self, count: int) -> None:
        """Drop the last ``count`` positions, as if they had never come.

        ValueError, and nothing is dropped, where a scheme has quantized positions that were exact without them: those
        that share scales over tokens or keep a recent window give back what the last step brought, and little more.
        """
        for layer in self.layers:
            layer.check_crop(count)
        for layer in self.layers:
            layer.crop(count)

    def select(self, rows: Tensor) -> None:
        """Keep these sequences (indices, in this order; one may come twice)."""
        if self.padding is not None:
            self.padding = self.padding[rows]
        for layer in self.layers:
            layer.select(rows)

    def seen(self, layer: int = 0) -> int:
        """Tokens that a layer has stored so far."""
        return self.layers[layer].length

    @property
    def payload_bytes(self) -> int:
        """Bytes of the stored codes and dense elements, of the positions seen so far."""
        return sum(layer.payload_bytes for layer in self.layers)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of these positions."""
        return sum(layer.scale_bytes for layer in self.layers)

    @property
    def once_bytes(self) -> int:
        """Bytes that are stored once for the whole cache."""
        return sum(layer.once_bytes for layer in self.layers)

    @property
    def working_bytes(self) -> int:
        """Bytes of the working copy, beside what is stored."""
        return sum(layer.working_bytes for layer in self.layers)


def measured_bytes(
    grid: PrecisionGrid,
    head_dim: int,
    tokens: int,
    value_width: int | None = None,
    contexts: Contexts | None = None,
) -> Bytes:
    """Bytes of a real cache of one sequence of ``tokens``, as the next step finds it.

    Counted from the cache's tensors (docs/method.md, "Bytes"), whatever dtype a study measures in. ``contexts``: of the
    model, where schemes need them; which values they hold is of no account.
    """
    cache = PackedCache(grid, 1, head_dim, STORAGE, capacity=tokens, value_width=value_width, contexts=contexts)
    for layer, heads in enumerate(grid.shape):
        sides = (torch.zeros(1, heads, tokens, width, dtype=STORAGE) for width in (head_dim, value_width or head_dim))
        cache.update(*sides, layer)
    cache.settle()
    return Bytes(cache.payload_bytes, cache.scale_bytes, cache.once_bytes)
