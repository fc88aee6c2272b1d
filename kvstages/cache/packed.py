"""The packed per-head KV cache, token by token or several at once.

Every head's keys and values have their own precision. Past positions stay packed (codes as a stream of bits, FP16
scales; "bf16" as BF16); a step quantizes only its new positions and appends them, and its attention sees the
reconstructed past and its own keys and values as they are (STUDY.md, "The cache"). Unlike Hugging Face's
QuantizedCache there is no residual window of recent tokens kept dense, and nothing is ever quantized twice.

Axes: keys and values [B, H, T, D]; together [B, 2H, T, D], the heads' keys first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstages.cache.interventions import ReadBack, check_finite
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import BITS, packed_width
from kvstages.cache.quantizer import choose_scale, dequantize, pack, quantize, unpack
from kvstages.cache.rounding import STORAGE, Rounding, storage_rounding


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
    ):
        self.layer, self.length, self.head_dim, self.arithmetic = layer, 0, head_dim, arithmetic
        self.read = ReadBack(row, layer, device)
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

    def update(self, both: Tensor) -> Tensor:
        """Append T positions [B, 2H, T, D]; return what their attention sees, [B, 2H, S, D]: the reconstructed past,
        then themselves."""
        start, stop = self.length, self.length + both.shape[2]
        self._reserve(stop)
        if self.working_copy:
            past = self.store["past"]
            if self.unsettled is not None:
                # The last step's exact keys and values have been attended to; now they give way to the stored ones.
                past[:, :, start - self.unsettled.shape[2] : start] = self.unsettled
            past[:, :, start:stop] = both
            self.unsettled = self._append(both, start, stop)
            seen = past[:, :, :stop]
        else:
            seen = torch.cat((self.reconstruct(), both), dim=2)
            self._append(both, start, stop)
        self.length = stop
        return seen

    def _append(self, both: Tensor, start: int, stop: int) -> Tensor | None:
        """Store the new positions [B, 2H, T, D]; what they will read back as (None: as they are)."""
        read = self.read
        dense = read.moved(both)
        if len(read.dense_rows) and not self.dense_in_past:
            self.store["dense"][:, :, start:stop] = read.pick(dense, read.dense_rows)
        if not read.quantized:
            return None if dense is both else dense
        scale = choose_scale(both)
        codes = quantize(both, scale, read.levels)
        self.store["scales"][:, :, start:stop, 0] = read.pick(scale, read.quantized_rows)
        for name in read.quantized:
            self.store[name][:, :, start:stop] = pack(read.pick(codes, read.rows[name]), BITS[name])
        rounded = dequantize(codes, scale, read.levels, self.arithmetic)
        return torch.where(read.is_dense, dense, rounded) if len(read.dense_rows) else rounded

    def _reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` positions; capacity at least doubles, so growing copies each position O(1) times."""
        capacity = self.store["past"].shape[2]
        if tokens <= capacity:
            return
        for name, old in self.store.items():
            new = old.new_empty((*old.shape[:2], max(tokens, 2 * capacity), old.shape[3]))
            new[:, :, : self.length] = old[:, :, : self.length]
            self.store[name] = new

    def _stored(self, name: str) -> Tensor:
        return self.store[name][:, :, : self.length]

    def reconstruct(self) -> Tensor:
        """All positions as stored, unpacked, in the arithmetic dtype: [B, 2H, tokens, D]."""
        read = self.read
        if self.dense_in_past:
            dense = self._stored("past").index_select(1, read.dense_rows)
        else:
            dense = self._stored("dense").to(self.arithmetic)
        if not read.quantized:
            return dense[:, read.dense_rows.argsort()]
        codes = torch.cat([unpack(self._stored(name), BITS[name], self.head_dim) for name in read.quantized], dim=1)
        levels = read.levels.index_select(0, read.quantized_rows)
        quantized = dequantize(codes, self._stored("scales").squeeze(-1), levels, self.arithmetic)
        order = torch.cat((read.dense_rows, read.quantized_rows)).argsort()
        return torch.cat((dense, quantized), dim=1).index_select(1, order)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the stored codes and dense elements, of the positions seen so far."""
        payload = sum(self._stored(name).nbytes for name in (*self.read.quantized, "dense"))
        return payload + (self._dense_in_past_bytes() if self.dense_in_past else 0)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the stored scales, of the positions seen so far."""
        return self._stored("scales").nbytes

    @property
    def working_bytes(self) -> int:
        """Bytes of the working copy beyond what is stored anyway: the price of not reconstructing the past anew."""
        return self._stored("past").nbytes - (self._dense_in_past_bytes() if self.dense_in_past else 0)

    def _dense_in_past_bytes(self) -> int:
        return self._stored("past").index_select(1, self.read.dense_rows).nbytes


class PackedCache:
    """The cache of a whole decoder, with the precision of each head's keys and values given by a grid.

    ``arithmetic`` is the model's dtype, ``dense_storage`` that in which "bf16" tensors are kept. With
    ``working_copy`` each layer also keeps its reconstructed past, so that a step reconstructs only its own positions:
    faster, and paid for in ``working_bytes``; without it the past is unpacked anew at every step. Both give the same
    numbers.
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
    ):
        self.rounding = rounding
        self.layers = [
            LayerCache(
                grid.row(layer), batch, head_dim, arithmetic, dense_storage, layer, capacity, working_copy, device
            )
            for layer in range(len(grid.keys))
        ]

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, H, T, D] of ``layer``; return those to attend to, [B, H, S, D].

        ValueError names layer and head where they hold NaN or infinity; nothing is then stored.
        """
        both = torch.cat((keys, values), dim=1)
        check_finite(both, layer)
        cache = self.layers[layer]
        seen = cache.update(self.rounding(both, layer, cache.length))
        heads = keys.shape[1]
        return seen[:, :heads], seen[:, heads:]

    def mask(self, new: int, layer: int) -> Tensor | None:
        """Causal mask bool [new, S] of the next update of ``layer``; None for one token, which sees everything."""
        if new == 1:
            return None
        past = self.layers[layer].length
        device = self.layers[layer].store["past"].device
        return torch.ones(new, past + new, dtype=torch.bool, device=device).tril(past)

    def seen(self) -> int:
        """Tokens stored so far."""
        return self.layers[0].length

    @property
    def payload_bytes(self) -> int:
        return sum(layer.payload_bytes for layer in self.layers)

    @property
    def scale_bytes(self) -> int:
        return sum(layer.scale_bytes for layer in self.layers)

    @property
    def working_bytes(self) -> int:
        return sum(layer.working_bytes for layer in self.layers)


def measured_bytes(grid: PrecisionGrid, head_dim: int, tokens: int) -> tuple[int, int]:
    """Payload and scale bytes of a real cache of one sequence of ``tokens``.

    Counted from the cache's tensors (STUDY.md, "Measuring"), whatever dtype a study measures in.
    """
    cache = PackedCache(grid, 1, head_dim, STORAGE, capacity=tokens)
    for layer, heads in enumerate(grid.shape):
        nothing = torch.zeros(1, heads, tokens, head_dim, dtype=STORAGE)
        cache.update(nothing, nothing, layer)
    return cache.payload_bytes, cache.scale_bytes
