"""The frozen reference of an adaptation: what the model as it was predicts on the batches that training takes.

Every arm and seed of one dtype compares with the same reference, so those of one process share it (``shared``).
Axes: B blocks, T tokens, E hidden width, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from kvstages.models.decoder import CausalCache
from kvstages.models.gpt2_nano import GPT

# References of a process: training in BF16 has one of its own.
MOST_SHARED = 2
_shared: dict[Hashable, Frozen] = {}


def batches(blocks: int, batch: int) -> list[list[int]]:
    """Batches of block indices, in order and round the window, up to where they come again."""
    cycle = blocks // math.gcd(blocks, batch)
    return [[(place * batch + offset) % blocks for offset in range(batch)] for place in range(cycle)]


def ordered_batches(blocks: int, batch: int, seed: int | None = None) -> Iterator[list[int]]:
    """The same batches without end: one round of them after the other, as they are, or shuffled by ``seed``.

    Shuffled, a round has them by the SHA-256 of SEED:ROUND:BATCH (both counted from 0), so that a seed means
    the same order on every machine. The batches themselves stay, and with them the reference's logits.
    """
    found = batches(blocks, batch)
    for turn in itertools.count():
        places = range(len(found)) if seed is None else _shuffled(len(found), seed, turn)
        yield from (found[place] for place in places)


def _shuffled(count: int, seed: int, turn: int) -> list[int]:
    return sorted(range(count), key=lambda place: hashlib.sha256(f"{seed}:{turn}:{place}".encode()).digest())


class Frozen:
    """What a model predicts on the batches of a window's blocks [B, T], from its states after the last layer and a copy
    of its output layer.

    It is computed when it is first asked for, and kept as far as it fits a quarter of ``memory`` (bytes).
    """

    @torch.no_grad()
    def __init__(self, model: GPT, tokens: Tensor, batch: int, memory: int):
        self.head = copy.deepcopy(model.lm_head)
        self.free = memory // 4
        causal = CausalCache(tokens.device)
        self.states = {
            tuple(rows): model.run_layers(model.embed(tokens[rows]), causal) for rows in batches(len(tokens), batch)
        }
        self.kept: dict[tuple[tuple[int, ...], int, int], Tensor] = {}

    @torch.no_grad()
    def log_probabilities(self, rows: tuple[int, ...], positions: slice) -> Tensor:
        """Logarithms of the probabilities of all tokens, FP32 [batch, t, V], at some positions of a batch."""
        key = rows, positions.start, positions.stop
        if key in self.kept:
            return self.kept[key]
        found = F.log_softmax(self.head(self.states[rows][:, positions]).float(), dim=-1)
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
