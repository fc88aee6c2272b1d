"""What a block's keys and values go through while a model is adapted: noise, or the quantizer itself.

Both know each tensor's precision from a policy's grid. Axes: keys and values [B, H, T, D]; together [B, 2H, T, D], the
heads' keys first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvstages.cache.interventions import check_finite
from kvstages.cache.one_pass import BlockCache
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import MAX_CODES
from kvstages.cache.quantizer import largest_magnitude
from kvstages.cache.rounding import storage_rounding
from kvstages.models.decoder import CausalCache, Decoder


class NoiseCache(CausalCache):
    """Keys and values with fresh uniform noise in ± scale / (2 m), scale = max |x| over D; none for BF16.

    m is the largest code of the tensor's precision, 7 for INT4. The current token gets noise, too. The noise's size is
    not differentiated through. ValueError names a precision whose rounding is not of this form.
    """

    def __init__(self, grid: PrecisionGrid, generator: torch.Generator):
        super().__init__(generator.device)
        check_noise(grid)
        self.generator = generator
        self.codes = [_largest_codes(grid.row(layer), generator.device) for layer in range(len(grid.keys))]

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, D] to attend to, noise added."""
        both = torch.cat((keys, values), dim=1).detach()
        check_finite(both, layer)
        reach = largest_magnitude(both).unsqueeze(-1) / (2 * self.codes[layer]).to(both.dtype)
        shape = 2, *keys.shape
        uniform = torch.rand(shape, generator=self.generator, dtype=torch.float32, device=self.device)
        of_keys, of_values = uniform.mul_(2).sub_(1).to(both.dtype)
        keys_reach, values_reach = reach.chunk(2, dim=1)
        return keys + keys_reach * of_keys, values + values_reach * of_values


def check_noise(grid: PrecisionGrid) -> None:
    """ValueError names a precision of a policy whose rounding noise does not imitate."""
    used = {name for layer in range(len(grid.keys)) for name in grid.row(layer)}
    for name in sorted(used - {"bf16", *MAX_CODES}):
        raise ValueError(f"noise like {name}: expected a policy of {', '.join(('bf16', *MAX_CODES))} alone")


def _largest_codes(row: tuple[str, ...], device: torch.device) -> Tensor:
    """Largest code of each tensor [2H, 1, 1]; infinite for BF16, whose noise is 0."""
    return torch.tensor([float(MAX_CODES.get(name, "inf")) for name in row], device=device).view(-1, 1, 1)


class StraightThroughCache(BlockCache):
    """The one-pass cache of a policy in the forward pass; in the backward pass rounding counts as the identity.

    So a token sees the past as the packed cache gives it back, and its own key and value exactly, as BF16 holds them.
    (Bengio, Léonard and Courville, Estimating or propagating gradients through stochastic neurons, 2013.)
    """

    def __init__(self, model: Decoder, grid: PrecisionGrid):
        super().__init__(grid, model.device, rounding=_straight_storage, contexts=model.contexts)

    def reconstruct(self, both: Tensor, layer: int) -> Tensor:
        return _Straight.apply(both, super().reconstruct(both.detach(), layer))


class _Straight(torch.autograd.Function):
    """The second tensor's values with the first one's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _straight_storage(both: Tensor, layer: int, start: int) -> Tensor:
    return _Straight.apply(both, storage_rounding(both.detach(), layer, start))
