"""How the model's keys and values become the 16-bit values that a cache holds, before anything is quantized.

The model may compute in FP32; a cache stores BF16 (2 bytes an element). So keys and values are rounded to BF16 as
they leave the model, and what is quantized, kept dense or attended to is that. In a sweep one small change in layer l
would flip some of these roundings in every later layer, a whole BF16 step each: noise that counts the layers left to
run, not the head (docs/method.md, "Arithmetic and storage"). ``SharedRounding`` therefore gives an intervention the
*reference's* rounding errors: the reference still holds BF16 exactly, and the only difference is the quantizer.

Axes: keys and values together [B, 2H, T, D], the heads' keys first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Keys and values of a layer, and the position of the first of them, to what the cache takes instead.
Rounding = Callable[[Tensor, int, int], Tensor]

STORAGE = torch.bfloat16


def storage_rounding(both: Tensor, layer: int, start: int) -> Tensor:
    """Each value as BF16 holds it, in its own dtype."""
    return both.to(STORAGE).to(both.dtype)


class RecordedRounding:
    """``storage_rounding`` that keeps each layer's rounding error, and what one layer stored."""

    def __init__(self, layer: int):
        self.layer = layer
        self.errors: dict[int, Tensor] = {}
        self.stored: Tensor

    def __call__(self, both: Tensor, layer: int, start: int) -> Tensor:
        stored = storage_rounding(both, layer, start)
        self.errors[layer] = stored - both
        if layer == self.layer:
            self.stored = stored
        return stored


class SharedRounding:
    """The reference's rounding errors, added to every intervention on the same blocks.

    Reference values come out as BF16: x + (bf16(x) − x) has no rounding (Sterbenz). ``errors``: layer to
    [B, 2H, T, D]; rows of a batch are interventions on these B blocks, one after the other. Up to the layer
    ``same`` the values are the reference's own, and simply rounded.
    """

    def __init__(self, errors: dict[int, Tensor], same: int = -1):
        self.errors, self.same = errors, same

    def __call__(self, both: Tensor, layer: int, start: int) -> Tensor:
        if layer <= self.same:
            return storage_rounding(both, layer, start)
        error = self.errors[layer][:, :, start : start + both.shape[2]]
        return (both.unflatten(0, (-1, len(error))) + error).flatten(0, 1)
