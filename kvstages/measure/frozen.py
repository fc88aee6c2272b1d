"""The frozen reference of an adaptation: the model as it was, and its logits on the batches that training takes.

Every arm and seed of one dtype compares with the same reference, so those of one process share it (``shared``).
Axes: B blocks, T tokens, E hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from kvstages.models.decoder import CausalCache
from kvstages.models.gpt2_nano import GPT

# References of a process: training in BF16 has one of its own.
MOST_SHARED = 2
_shared: dict[Hashable, Frozen] = {}


class Frozen:
    """Logits of a model on batches of a window's blocks [B, T], computed when they are first asked for.

    States after the last layer are kept; logits, too, as far as they fit a quarter of ``memory`` (bytes).
    """

    def __init__(self, model: GPT, tokens: Tensor, memory: int):
        self.model, self.tokens = model, tokens
        self.free = memory // 4
        self.states: dict[tuple[int, ...], Tensor] = {}
        self.kept: dict[tuple[tuple[int, ...], int, int], Tensor] = {}

    @torch.no_grad()
    def logits(self, rows: tuple[int, ...], positions: slice) -> Tensor:
        """Logits [batch, t, V] of some positions of a batch."""
        key = rows, positions.start, positions.stop
        if key in self.kept:
            return self.kept[key]
        if rows not in self.states:
            x = self.model.embed(self.tokens[list(rows)])
            self.states[rows] = self.model.run_layers(x, CausalCache(self.tokens.device))
        found = self.model.logits(self.states[rows][:, positions])
        if found.nbytes <= self.free:
            self.free -= found.nbytes
            self.kept[key] = found
        return found


def shared(key: Hashable, make: Callable[[], Frozen]) -> Frozen:
    """The reference that ``key`` describes completely; ``make`` gives it where this process has none yet."""
    if key not in _shared:
        while len(_shared) >= MOST_SHARED:
            del _shared[next(iter(_shared))]
        _shared[key] = make()
    return _shared[key]
