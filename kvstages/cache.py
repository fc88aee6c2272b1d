"""The packed per-head KV cache, token by token or several at once.

Every head of every layer has its own precision. Past positions stay packed (INT4 two to a byte, INT8 codes, FP16
scales; "BF16" heads in the dense dtype); a step quantizes only its new positions and appends them, and its attention
sees the reconstructed past and its own keys and values as they are (STUDY.md, "The cache"). Unlike Hugging Face's
QuantizedCache there is no residual window of recent tokens kept dense, and nothing is ever quantized twice.

Axes: keys and values [B, H, T, D]; stored together as [2, B, heads, tokens, D], keys first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvstages.quantizer import LEVELS, choose_scale, dequantize, pack_int4, quantize, reconstruct, unpack_int4

Grid = Sequence[Sequence[str]]


def check_finite(both: Tensor, layer: int) -> None:
    """ValueError that names layer and head if keys or values [2, B, H, T, D] hold NaN or infinity."""
    # A sum is not finite if an element is not; only then (or if it overflows) is each element looked at.
    if math.isfinite(both.sum()):
        return
    for kind, _, head, *_ in (~torch.isfinite(both)).nonzero().tolist():
        raise ValueError(f"layer {layer}, head {head}: NaN or infinity in the {('keys', 'values')[kind]}")


class LayerCache:
    """One layer's cache; its heads are grouped by precision, so a step costs a few operations whatever the mix."""

    def __init__(
        self,
        precisions: Sequence[str],
        batch: int,
        head_dim: int,
        arithmetic: torch.dtype,
        dense_storage: torch.dtype,
        layer: int = 0,
        capacity: int = 64,
        working_copy: bool = True,
        device: torch.device | str = "cpu",
    ):
        heads = {name: [h for h, p in enumerate(precisions) if p == name] for name in ("bf16", "int8", "int4")}
        if sum(map(len, heads.values())) != len(precisions):
            raise ValueError(f"layer {layer}: a precision among {sorted(set(precisions))} is none of bf16, int8, int4")
        self.layer, self.length, self.head_dim, self.arithmetic = layer, 0, head_dim, arithmetic
        self.dense_heads, self.int8_heads, self.int4_heads = (
            torch.tensor(heads[name], dtype=torch.long, device=device) for name in ("bf16", "int8", "int4")
        )
        self.quantized_heads = torch.cat((self.int8_heads, self.int4_heads))
        # A step quantizes all heads in one go, each to its own m; what comes out for the dense heads is not used.
        self.levels = torch.tensor([float(LEVELS.get(p, 1)) for p in precisions], device=device).view(-1, 1, 1)
        self.is_dense = torch.tensor([p == "bf16" for p in precisions], device=device).view(-1, 1, 1)
        # Dense heads that need no rounding live in the working copy alone; it is their store.
        self.dense_in_past = working_copy and dense_storage == arithmetic
        self.uniform = len(set(precisions)) == 1
        self.working_copy = working_copy
        shapes = {
            "int8": ((2, batch, len(heads["int8"]), capacity, head_dim), torch.int8),
            "int4": ((2, batch, len(heads["int4"]), capacity, (head_dim + 1) // 2), torch.uint8),
            "scales": ((2, batch, len(self.quantized_heads), capacity, 1), torch.float16),
            "dense": ((2, batch, 0 if self.dense_in_past else len(heads["bf16"]), capacity, head_dim), dense_storage),
            "past": ((2, batch, len(precisions) if working_copy else 0, capacity, head_dim), arithmetic),
        }
        self.store = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
        self.unsettled: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append T positions; return what their attention sees, [B, H, S, D]: reconstructed past, then themselves."""
        fresh = torch.stack((keys, values))
        check_finite(fresh, self.layer)
        start, stop = self.length, self.length + keys.shape[2]
        self._reserve(stop)
        if self.working_copy:
            past = self.store["past"]
            if self.unsettled is not None:
                # The last step's exact keys and values have been attended to; now they give way to the stored ones.
                past[:, :, :, start - self.unsettled.shape[3] : start] = self.unsettled
            past[:, :, :, start:stop] = fresh
            self.unsettled = self._append(fresh, start, stop)
            seen = past[:, :, :, :stop]
        else:
            seen = torch.cat((self.reconstruct(), fresh), dim=3)
            self._append(fresh, start, stop)
        self.length = stop
        return seen[0], seen[1]

    def _append(self, fresh: Tensor, start: int, stop: int) -> Tensor | None:
        """Store the new positions [2, B, H, T, D]; what they will read back as (None: as they are)."""
        dense = fresh
        if len(self.dense_heads) and not self.dense_in_past:
            dense = fresh.to(self.store["dense"].dtype)
            self.store["dense"][:, :, :, start:stop] = self._pick(dense, self.dense_heads)
            dense = dense.to(self.arithmetic)
        if not len(self.quantized_heads):
            return None if self.dense_in_past else dense
        scale = choose_scale(fresh)
        codes = quantize(fresh, scale, self.levels)
        self.store["scales"][:, :, :, start:stop, 0] = self._pick(scale, self.quantized_heads)
        if len(self.int8_heads):
            self.store["int8"][:, :, :, start:stop] = self._pick(codes, self.int8_heads)
        if len(self.int4_heads):
            self.store["int4"][:, :, :, start:stop] = pack_int4(self._pick(codes, self.int4_heads))
        rounded = dequantize(codes, scale, self.levels, self.arithmetic)
        return torch.where(self.is_dense, dense, rounded) if len(self.dense_heads) else rounded

    def _pick(self, x: Tensor, heads: Tensor) -> Tensor:
        """Some heads of x [2, B, H, ...]; x itself where the layer has one precision."""
        return x if self.uniform else x.index_select(2, heads)

    def _reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` positions; capacity at least doubles, so growing copies each position O(1) times."""
        capacity = self.store["past"].shape[3]
        if tokens <= capacity:
            return
        for name, old in self.store.items():
            new = old.new_empty((*old.shape[:3], max(tokens, 2 * capacity), old.shape[4]))
            new[:, :, :, : self.length] = old[:, :, :, : self.length]
            self.store[name] = new

    def _stored(self, name: str) -> Tensor:
        return self.store[name][:, :, :, : self.length]

    def reconstruct(self) -> Tensor:
        """All positions as stored, unpacked, in the arithmetic dtype: [2, B, H, tokens, D]."""
        if self.dense_in_past:
            dense = self._stored("past").index_select(2, self.dense_heads)
        else:
            dense = self._stored("dense").to(self.arithmetic)
        codes = torch.cat((self._stored("int8"), unpack_int4(self._stored("int4"), self.head_dim)), dim=2)
        levels = self.levels.index_select(0, self.quantized_heads)
        quantized = dequantize(codes, self._stored("scales").squeeze(-1), levels, self.arithmetic)
        order = torch.cat((self.dense_heads, self.quantized_heads)).argsort()
        return torch.cat((dense, quantized), dim=2).index_select(2, order)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the stored codes and dense elements, of the positions seen so far."""
        payload = sum(self._stored(name).nbytes for name in ("int8", "int4", "dense"))
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
        return self._stored("past").index_select(2, self.dense_heads).nbytes


class PackedCache:
    """The cache of a whole decoder, with the precision of each head given by a grid [L][H] of names.

    ``dense_storage`` is the dtype in which "bf16" heads are kept, ``arithmetic`` that of the model. With
    ``working_copy`` each layer also keeps its reconstructed past, so that a step reconstructs only its own positions:
    faster, and paid for in ``working_bytes``; without it the past is unpacked anew at every step. Both give the same
    numbers.
    """

    def __init__(
        self,
        precisions: Grid,
        batch: int,
        head_dim: int,
        arithmetic: torch.dtype,
        dense_storage: torch.dtype,
        capacity: int = 64,
        working_copy: bool = True,
        device: torch.device | str = "cpu",
    ):
        self.layers = [
            LayerCache(row, batch, head_dim, arithmetic, dense_storage, layer, capacity, working_copy, device)
            for layer, row in enumerate(precisions)
        ]

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, H, T, D] of ``layer``; return those to attend to, [B, H, S, D].

        ValueError names layer and head where they hold NaN or infinity; nothing is then stored.
        """
        return self.layers[layer].update(keys, values)

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


def measured_bytes(precisions: Grid, head_dim: int, tokens: int) -> tuple[int, int]:
    """Payload and scale bytes of a real cache of one sequence of ``tokens``, dense heads as BF16.

    Counted from the cache's tensors (STUDY.md, "Measuring"), whatever dtype a study measures in.
    """
    cache = PackedCache(precisions, 1, head_dim, torch.bfloat16, torch.bfloat16, capacity=tokens)
    for layer, row in enumerate(precisions):
        nothing = torch.zeros(1, len(row), tokens, head_dim, dtype=torch.bfloat16)
        cache.update(nothing, nothing, layer)
    return cache.payload_bytes, cache.scale_bytes


class BlockCache:
    """The same cache for all positions of a block in one pass, for the ``parallel`` execution.

    What a query may see is the reconstructed past and its own exact key and value. So each layer offers T
    reconstructed positions and T exact ones, [B, H, 2T, D], under a mask that shows the first strictly below the
    diagonal and the second only on it. A layer of BF16 heads does so too, though it may round nothing: every policy
    takes the same path, and one with all heads in BF16 measures exactly 0.
    """

    def __init__(
        self,
        precisions: Grid,
        arithmetic: torch.dtype,
        dense_storage: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        self.arithmetic, self.dense_storage, self.device = arithmetic, dense_storage, device
        self.heads = [
            torch.tensor([h for h, p in enumerate(row) if p != "bf16"], dtype=torch.long, device=device)
            for row in precisions
        ]
        self.levels = [
            torch.tensor([float(LEVELS[p]) for p in row if p != "bf16"], device=device).view(-1, 1, 1)
            for row in precisions
        ]

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """What the queries of a block attend to: keys and values [B, H, 2T, D]; nothing is stored."""
        fresh = torch.stack((keys, values))
        check_finite(fresh, layer)
        stored = fresh.to(self.dense_storage).to(self.arithmetic)
        if len(self.heads[layer]):
            quantized = reconstruct(fresh.index_select(2, self.heads[layer]), self.levels[layer])
            stored = stored.index_copy(2, self.heads[layer], quantized)
        seen = torch.cat((stored, fresh), dim=3)
        return seen[0], seen[1]

    def mask(self, new: int, layer: int) -> Tensor | None:
        """Mask bool [T, 2T]: the past as stored, oneself as one is."""
        past = torch.ones(new, new, dtype=torch.bool, device=self.device).tril(-1)
        return torch.cat((past, torch.eye(new, dtype=torch.bool, device=self.device)), dim=1)

    def seen(self) -> int:
        return 0
