"""Greedy continuations of held-out prompts, and how long those of a policy are the unquantized cache's.

Tokens go one after the other through the packed cache, on any decoder. A prompt's own tokens see each other exactly
("exact" prefill), as in engines, or those before them as they are stored ("stepwise"), as in every other measurement
here.

Axes: B prompts, P tokens of a prompt, T tokens of a continuation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.measure.execution import packed_cache, run_layers
from kvstages.measure.metrics import argmax
from kvstages.models.decoder import Decoder

PREFILLS = ("exact", "stepwise")


@torch.no_grad()
def continued(model: Decoder, prompts: Tensor, grid: PrecisionGrid, tokens: int, prefill: str, together: int) -> Tensor:
    """The most likely continuations [B, T] of prompts [B, P] through the cache of a policy's grid.

    ``together``: how many prompts go through the decoder at once.
    """
    return torch.cat([_continued(model, part, grid, tokens, prefill) for part in prompts.split(together)])


def _continued(model: Decoder, prompts: Tensor, grid: PrecisionGrid, tokens: int, prefill: str) -> Tensor:
    length = prompts.shape[1]
    cache = packed_cache(model, grid, len(prompts), length + tokens)
    execution = {"exact": "one-pass", "stepwise": "token-by-token"}[prefill]
    x = run_layers(model, model.embed(prompts), cache, execution)
    found = [argmax(model.logits(x[:, -1:]))]
    for position in range(length, length + tokens - 1):
        x = model.run_layers(model.embed(found[-1], position), cache)
        found.append(argmax(model.logits(x)))
    return torch.cat(found, dim=1)


def same_tokens(continuations: Tensor, reference: Tensor) -> Tensor:
    """How many tokens of each continuation [B, T] are the reference's before the first that is not: [B], T for all."""
    return (continuations == reference).long().cumprod(dim=1).sum(dim=1)
