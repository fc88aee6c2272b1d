"""Keys and values of a layer as one tensor, so that each operation is done once for both.

Axes: keys and values [B, H, T, D]; together [B, 2H, T, D], the heads' keys first. Where keys and values differ in
width, D is the larger one and the narrower side is filled up with zeros: they change no largest value and no code.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def join(keys: Tensor, values: Tensor) -> Tensor:
    """Keys and values together [B, 2H, T, D]."""
    spare = keys.shape[-1] - values.shape[-1]
    if spare:
        keys, values = pad(keys, (0, max(0, -spare))), pad(values, (0, max(0, spare)))
    return torch.cat((keys, values), dim=1)


def part(both: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The two sides of ``both`` [B, 2H, S, D], of the widths that keys and values have."""
    # By chunk, whose backward pass is one copy; that of a slice is zeros, a copy and a sum.
    sides = zip(both.chunk(2, dim=1), (keys.shape[-1], values.shape[-1]), strict=True)
    first, second = (side if side.shape[-1] == width else side[..., :width] for side, width in sides)
    return first, second
