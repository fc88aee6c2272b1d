"""The KV cache of whole blocks, all positions in one pass: for measuring.

Axes: keys and values [B, H, T, D]; together [B, 2H, T, D], the heads' keys first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstages.cache.interventions import ReadBack, check_finite
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import MAX_CODES
from kvstages.cache.quantizer import reconstruct
from kvstages.cache.rounding import Rounding, storage_rounding


class BlockCache:
    """The same cache for all positions of a block in one pass, for the ``one-pass`` execution.

    What a query may see is the reconstructed past and its own exact key and value. So each layer offers T
    reconstructed positions and T exact ones, [B, H, 2T, D], under a mask that shows the first strictly below the
    diagonal and the second only on it. A layer of BF16 heads does so too, though it rounds nothing further: every
    policy takes the same path, and one with all heads in BF16 measures exactly 0.
    """

    def __init__(self, grid: PrecisionGrid, device: torch.device | str = "cpu", rounding: Rounding = storage_rounding):
        self.device, self.rounding = device, rounding
        self.read = [ReadBack(grid.row(layer), layer, device) for layer in range(len(grid.keys))]

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """What the queries of a block attend to: keys and values [B, H, 2T, D]; nothing is stored."""
        both = torch.cat((keys, values), dim=1)
        check_finite(both, layer)
        both = self.rounding(both, layer, 0)
        read = self.read[layer]
        stored = read.moved(both)
        rows = read.quantized_rows
        if read.quantized and read.uniform:
            stored = reconstruct(both, MAX_CODES[read.quantized[0]])
        elif read.quantized:
            quantized = reconstruct(both.index_select(1, rows), read.levels.index_select(0, rows))
            stored = stored.index_copy(1, rows, quantized)
        seen = torch.cat((stored, both), dim=2)
        heads = keys.shape[1]
        return seen[:, :heads], seen[:, heads:]

    def mask(self, new: int, layer: int) -> Tensor | None:
        """Mask bool [T, 2T]: the past as stored, oneself as one is."""
        past = torch.ones(new, new, dtype=torch.bool, device=self.device).tril(-1)
        return torch.cat((past, torch.eye(new, dtype=torch.bool, device=self.device)), dim=1)

    def seen(self) -> int:
        return 0


class DenseBlockCache:
    """All positions of a block in one pass with every head in BF16: rounded, and attended to causally."""

    def __init__(self, device: torch.device | str = "cpu", rounding: Rounding = storage_rounding):
        self.device, self.rounding = device, rounding

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, D] as BF16 holds them."""
        both = torch.cat((keys, values), dim=1)
        check_finite(both, layer)
        both = self.rounding(both, layer, 0)
        return both[:, : keys.shape[1]], both[:, keys.shape[1] :]

    def mask(self, new: int, layer: int) -> Tensor | None:
        return torch.ones(new, new, dtype=torch.bool, device=self.device).tril()

    def seen(self) -> int:
        return 0
