"""The KV cache of whole blocks, all positions in one pass: for measuring.

Axes: keys and values [B, H, T, D]; together [B, 2H, T, D], the heads' keys first.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvstages.cache.interventions import ReadBack, check_finite, check_precisions, method_of
from kvstages.cache.offsets import Contexts
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.rounding import Rounding, storage_rounding
from kvstages.cache.schemes import PUBLISHED, Method
from kvstages.cache.sides import join, part


class BlockCache:
    """The same cache for all positions of a block in one pass, for the ``one-pass`` execution.

    What a query may see is the reconstructed past and its own exact key and value. So each layer offers T
    reconstructed positions and T exact ones, [B, H, 2T, D], under a mask that shows the first strictly below the
    diagonal and the second only on it. A layer of BF16 heads does so too, though it rounds nothing further: every
    policy takes the same path, and one with all heads in BF16 measures exactly 0.

    Where a scheme keeps positions exact for longer, the mask says for each query and position which it reads; where
    keys and values do so for different times, exact keys with reconstructed values (or the reverse) are offered, too.
    """

    def __init__(
        self,
        grid: PrecisionGrid,
        device: torch.device | str = "cpu",
        rounding: Rounding = storage_rounding,
        contexts: Contexts | None = None,
    ):
        self.grid, self.device, self.rounding, self.contexts = grid, device, rounding, contexts
        self.read: dict[int, ReadBack] = {}
        for layer in range(len(grid.keys)):
            check_precisions(grid.row(layer), layer)

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """What the queries of a block attend to: keys and values [B, H, nT, D], n = 2 but for some schemes; nothing is
        stored."""
        both = join(keys, values)
        check_finite(both.detach(), layer)
        both = self.rounding(both, layer, 0)
        if layer not in self.read:
            widths = keys.shape[3], values.shape[3]
            self.read[layer] = ReadBack(self.grid.row(layer), layer, self.device, widths, self.contexts)
        stored = self.reconstruct(both, layer)
        heads = keys.shape[1]

        def offered(keys_stored: bool, values_stored: bool) -> Tensor:
            first, second = (stored if is_stored else both for is_stored in (keys_stored, values_stored))
            return first if first is second else torch.cat((first[:, :heads], second[:, heads:]), dim=1)

        seen = torch.cat([offered(*pair) for pair in self._offers(both.shape[2], layer).pairs], dim=2)
        return part(seen, keys, values)

    def reconstruct(self, both: Tensor, layer: int) -> Tensor:
        """Keys and values [B, 2H, T, D] of a layer as later steps read them back."""
        return self.read[layer].reconstruct(both)

    def mask(self, new: int, layer: int) -> Tensor | None:
        """Mask bool [T, nT] of what the queries of a block see: the past as stored, oneself as one is.

        [H, T, nT] where the KV heads of the layer keep positions exact for different times.
        """
        return self._offers(new, layer).mask

    def seen(self, layer: int = 0) -> int:
        return 0

    def _offers(self, tokens: int, layer: int) -> Offers:
        row = self.grid.row(layer)
        methods = tuple(timing(name, index // (len(row) // 2)) for index, name in enumerate(row))
        # Most layers store everything at once: one method stands for all, and is found faster.
        return offers_of(
            methods if any(method is not PUBLISHED for method in methods) else methods[:1], tokens, str(self.device)
        )


@cache
def timing(name: str, side: int) -> Method:
    """The method of a precision's keys (side 0) or values (1), as far as when tokens are stored matters: all that store
    a token at once are one."""
    method = method_of(name, side)
    return method if method.delayed else PUBLISHED


class Offers(NamedTuple):
    """What a layer offers its queries: for each pair (keys stored?, values stored?) the T positions, one pair after
    the other, and the ``mask`` of who sees which, bool [T, nT] or [H, T, nT]."""

    pairs: tuple[tuple[bool, bool], ...]
    mask: Tensor


TWO = ((True, True), (False, False))


@lru_cache(maxsize=16)
def offers_of(methods: tuple[Method, ...], tokens: int, device: str) -> Offers:
    """What a layer with tensors of these methods, [2H] or one for all, offers the T queries of a block."""
    if len(set(methods)) == 1:
        keys = values = read_stored(methods[0], tokens)
    else:
        keys, values = torch.stack([read_stored(method, tokens) for method in methods]).chunk(2)
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    which = {
        (True, True): keys & values,
        (False, False): ~keys & ~values & seen,
        (False, True): ~keys & values,
        (True, False): keys & ~values,
    }
    pairs = tuple(pair for pair, mask in which.items() if pair in TWO or bool(mask.any()))
    return Offers(pairs, torch.cat([which[pair] for pair in pairs], dim=-1).to(device))


def read_stored(method: Method, tokens: int) -> Tensor:
    """Whether the query of position t reads position j as it is stored, bool [t, j]; exact positions count as such
    where that is what is stored."""
    query, position = torch.arange(tokens).unsqueeze(1), torch.arange(tokens)
    if not method.delayed:
        return position < query
    at = torch.tensor([method.stored_at(index) for index in range(tokens)])
    return torch.where(at < 0, position < query, query >= at)


@lru_cache(maxsize=16)
def causal_mask(tokens: int, device: str) -> Tensor:
    """Who sees whom where each position sees itself and all before it, bool [T, T]; the same tensor at every call."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()


class DenseBlockCache:
    """All positions of a block in one pass with every head in BF16: rounded, and attended to causally."""

    def __init__(self, device: torch.device | str = "cpu", rounding: Rounding = storage_rounding):
        self.device, self.rounding = device, rounding

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, D] as BF16 holds them."""
        both = join(keys, values)
        check_finite(both, layer)
        both = self.rounding(both, layer, 0)
        return part(both, keys, values)

    def mask(self, new: int, layer: int) -> Tensor | None:
        return causal_mask(new, str(self.device))

    def seen(self, layer: int = 0) -> int:
        return 0
