"""An adapted model under several cache policies, against two references: the original model and itself.

Against the original model's unquantized outputs a KL counts the drift of training and the response to quantization
together. Against the adapted model's own unquantized outputs it counts the response alone.
Axes: B blocks, T tokens, E hidden width, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.measure.execution import blocks_per_pass, dense_grid, policy_cache, position_slices, run_layers
from kvstages.measure.metrics import Normalizer, argmax, divergences_and_normalizer, normalizer, target_logits
from kvstages.measure.policy_set import last_states
from kvstages.measure.reference import Logits, check_reference
from kvstages.measure.setting import Setting
from kvstages.models.decoder import Decoder

MEANS = ["mean_kl", "agreement", "own_kl", "own_agreement", "cross_entropy"]


@torch.no_grad()
def evaluate_adapted(
    model: Decoder,
    tokens: Tensor,
    grids: Sequence[PrecisionGrid],
    original: Logits,
    setting: Setting,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
) -> Tensor:
    """Means over the positions of each block, FP64 [policies, B, 5] in the order of ``MEANS``.

    Token ids [B, T]; ``original``: logits [B, T, V] of the original model with a BF16 cache, by the same execution.
    ``mean_kl`` and ``agreement`` compare with them, ``own_kl`` and ``own_agreement`` with this model's own BF16 cache,
    which the dense grid measures as exactly 0 and 1. Cross entropy is over the T − 1 targets. Memory in bytes.
    """
    check_reference(original, model, tokens)
    # Policies may coincide: equal ones are run once. The dense grid's run is what the others are compared with.
    dense = dense_grid(model)
    others = [grid for grid in dict.fromkeys(grids) if grid != dense]
    blocks, length = tokens.shape
    following = F.pad(tokens[:, 1:], (0, 1), value=0)
    found = torch.empty(len(MEANS), 1 + len(others), blocks, length, dtype=torch.float64)
    step = blocks_per_pass(model, blocks, length, setting.execution, memory)
    for start in range(0, blocks, step):
        rows = slice(start, min(start + step, blocks))
        part = tokens[rows]
        cache = policy_cache(model, dense, len(part), length, setting.execution)
        own_states = run_layers(model, model.embed(part), cache, setting.execution)
        slices = position_slices(model, len(part), length, memory)
        kept: dict[int, list[tuple[Tensor, Normalizer, Tensor]]] = {}
        runs = itertools.chain([(-1, own_states)], last_states(model, part, others, setting))
        for done, (other, x) in enumerate(runs):
            index = 1 + other
            for positions in slices:
                where = rows, positions
                references = kept.get(positions.start)
                if references is None:
                    both = original[where].to(tokens.device), model.logits(own_states[:, positions])
                    references = [(each, normalizer(each), argmax(each)) for each in both]
                if len(slices) == 1:
                    kept[positions.start] = references
                logits = references[1][0] if x is own_states else model.logits(x[:, positions])
                top = references[1][2] if x is own_states else argmax(logits)
                distances, own = divergences_and_normalizer(logits, [each[:2] for each in references])
                for first, kl, (_, _, highest) in zip((0, 2), distances, references, strict=True):
                    found[first][index][where] = kl.cpu()
                    found[first + 1][index][where] = (top == highest).cpu().double()
                found[4][index][where] = own.cross_entropy(target_logits(logits, following[where])).cpu()
            progress((start + len(part) * (done + 1) / (1 + len(others))) / blocks)
    # The last position of a block predicts no token of it.
    means = [*found[:4].mean(dim=-1), found[4, ..., :-1].mean(dim=-1)]
    measured = [dense, *others]
    return torch.stack(means, dim=-1)[[measured.index(grid) for grid in grids]]


def columns(means: Tensor, policies: Sequence[str]) -> dict[str, list[Any]]:
    """Those means as columns of a table by policy and block."""
    blocks = means.shape[1]
    table: dict[str, list[Any]] = {
        "policy": [policy for policy in policies for _ in range(blocks)],
        "block": [block for _ in policies for block in range(blocks)],
    }
    return table | {name: means[..., index].flatten().tolist() for index, name in enumerate(MEANS)}
