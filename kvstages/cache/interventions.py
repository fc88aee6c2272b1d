"""What a sweep may do to a part of one unit, and what each tensor of a layer then reads back as.

An intervention gives a part of one head another precision. A control intervention quantizes nothing: it moves every
value to a neighbouring one, and so measures the floor. Axes: keys and values together [B, 2H, T, D], the heads' keys
first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvstages.cache.precisions import BITS, MAX_CODES
from kvstages.cache.quantizer import neighbour
from kvstages.cache.rounding import STORAGE

# Interventions that quantize nothing and measure the floor: each value moved to a neighbouring one, of the dtype that
# the model computes in, or of BF16. Stored dense, as "bf16" is.
CONTROLS = ("compute-step", "bf16-step")


DENSE = ("bf16", *CONTROLS)


def check_finite(both: Tensor, layer: int) -> None:
    """ValueError that names layer and head if keys and values [B, 2H, T, D] hold NaN or infinity."""
    # A sum is not finite if an element is not; only then (or if it overflows) is each element looked at.
    if math.isfinite(both.sum()):
        return
    heads = both.shape[1] // 2
    for _, row, *_ in (~torch.isfinite(both)).nonzero().tolist():
        kind = "keys" if row < heads else "values"
        raise ValueError(f"layer {layer}, head {row % heads}: NaN or infinity in the {kind}")


def check_precisions(row: Sequence[str], layer: int) -> None:
    """ValueError that names the layer and a precision that no cache knows."""
    for name in row:
        if name not in BITS and name not in CONTROLS:
            raise ValueError(f"layer {layer}: precision {name!r} is none of {', '.join(BITS)}")


class ReadBack:
    """What the tensors of one layer read back as, by their precisions [2H]: quantized, dense, or moved by a null."""

    def __init__(self, row: Sequence[str], layer: int, device: torch.device | str):
        check_precisions(row, layer)
        self.rows = {
            name: torch.tensor([index for index, found in enumerate(row) if found == name], device=device)
            for name in dict.fromkeys((*MAX_CODES, *DENSE))
            if name in row
        }
        self.uniform = len(self.rows) == 1
        quantized = [name for name in MAX_CODES if name in self.rows]
        self.quantized = quantized
        self.nulls = [name for name in CONTROLS if name in self.rows]
        nothing = torch.tensor([], dtype=torch.long, device=device)
        self.quantized_rows = torch.cat([nothing, *(self.rows[name] for name in quantized)])
        self.dense_rows = torch.cat([nothing, *(self.rows[name] for name in DENSE if name in self.rows)])
        # A step quantizes all tensors in one go, each to its own m; what comes out for the dense ones is not used.
        self.levels = torch.tensor([float(MAX_CODES.get(name, 1)) for name in row], device=device).view(-1, 1, 1)
        self.is_dense = torch.tensor([name in DENSE for name in row], device=device).view(-1, 1, 1)

    def pick(self, x: Tensor, rows: Tensor) -> Tensor:
        """Some tensors of x [B, 2H, ...]; x itself where the layer has one precision."""
        return x if self.uniform else x.index_select(1, rows)

    def moved(self, both: Tensor) -> Tensor:
        """Keys and values with those of a null intervention moved to their neighbours."""
        for name in self.nulls:
            values = both.index_select(1, self.rows[name])
            both = both.index_copy(
                1, self.rows[name], neighbour(values, both.dtype if name == "compute-step" else STORAGE)
            )
        return both
