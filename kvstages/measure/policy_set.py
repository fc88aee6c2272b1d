"""Many policies measured jointly on one window, against one reference: a row for each policy and block.

For comparisons, which pair policies block by block; ``evaluation`` says more of a single policy.
Axes: B blocks, T tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.measure.execution import blocks_per_pass, policy_cache, position_slices, run_layers
from kvstages.measure.metrics import Normalizer, argmax, divergences_and_normalizer, normalizer, target_logits
from kvstages.measure.reference import Logits, check_reference
from kvstages.measure.setting import Setting
from kvstages.models.decoder import Decoder

OF_POLICY = ["policy", "recipe", "allocator", "sensitivity", "unit"]
MEANS = ["mean_kl", "truth_kl", "agreement", "cross_entropy", "agrees_alone", "first_agrees_alone"]
JOINT_COLUMNS = [*OF_POLICY, "precisions", "bytes", "bf16_bytes", "limit", "proxy", "block", *MEANS]


@torch.no_grad()
def measure(
    model: Decoder,
    tokens: Tensor,
    policies: Sequence[Mapping[str, Any]],
    reference: Logits,
    setting: Setting,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
    truth: Logits | None = None,
) -> dict[str, list[Any]]:
    """Columns of a table by policy (in the order given) and block: means over the block's positions.

    Token ids [B, T], ``reference`` logits [B, T, V] by the same execution, memory in bytes. KL in nats, agreement as a
    share, cross entropy over the T − 1 targets. For McNemar's test: the positions where the policy's argmax
    is the reference's and the first policy's is not, and the other way round. Policies with equal precisions are run
    once, and so are the first layers that policies have in common. ``truth``: logits [B, T, V] of the FP32 model that
    stores keys and values exactly; where they are given, ``truth_kl`` is the KL from them, else NaN. ValueError where
    the reference or the truth does not fit the window.
    """
    check_reference(reference, model, tokens)
    if truth is not None:
        check_reference(truth, model, tokens)
    found = _measure_grids(
        model,
        tokens,
        list(dict.fromkeys(PrecisionGrid.of_record(policy["precisions"]) for policy in policies)),
        reference,
        setting,
        memory,
        progress,
        truth,
    )
    rows = []
    for policy in policies:
        grid = PrecisionGrid.of_record(policy["precisions"])
        means, agrees = found[grid]
        first = next(iter(found.values()))[1]
        alone = torch.stack(((agrees & ~first).sum(dim=1), (first & ~agrees).sum(dim=1)), dim=1)
        size = policy["bytes"]
        known = [policy[key] for key in OF_POLICY]
        precisions = " ".join(name for name in policy["ladder"] if name != "bf16")
        rows += [
            (*known, precisions, size["total"], size["bf16"], policy["limit"], policy["proxy"], block, *values, *counts)
            for block, (values, counts) in enumerate(zip(means.tolist(), alone.tolist(), strict=True))
        ]
    return {name: [row[index] for row in rows] for index, name in enumerate(JOINT_COLUMNS)}


def _measure_grids(
    model: Decoder,
    tokens: Tensor,
    grids: Sequence[PrecisionGrid],
    reference: Logits,
    setting: Setting,
    memory: int,
    progress: Callable[[float], None],
    truth: Logits | None,
) -> dict[PrecisionGrid, tuple[Tensor, Tensor]]:
    """Of each grid: mean KL, KL from the truth, agreement and cross entropy of each block, FP64 [B, 4]; where argmaxes
    agree, [B, T]."""
    following = F.pad(tokens[:, 1:], (0, 1), value=0)
    kl, from_truth, entropy = torch.full((3, len(grids), *tokens.shape), math.nan, dtype=torch.float64)
    agrees = torch.empty(len(grids), *tokens.shape, dtype=torch.bool)
    blocks, length = tokens.shape
    step = blocks_per_pass(model, blocks, length, setting.execution, memory)
    for start in range(0, blocks, step):
        rows = slice(start, min(start + step, blocks))
        slices = position_slices(model, rows.stop - start, length, memory)
        shape = rows.stop - start, length
        of_reference, of_truth = (Normalizer.room(*shape, device=tokens.device) for _ in range(2))
        top = torch.empty(shape, dtype=torch.long, device=tokens.device)
        filled: set[int] = set()
        kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        for done, (index, x) in enumerate(last_states(model, tokens[rows], grids, setting)):
            for positions in slices:
                where, here = (rows, positions), (slice(None), positions)
                if positions.start in kept:
                    other, exact = kept[positions.start]
                else:
                    other = reference[where].to(tokens.device)
                    exact = None if truth is None else truth[where].to(tokens.device)
                if len(slices) == 1:
                    kept[positions.start] = other, exact
                if positions.start not in filled:
                    filled.add(positions.start)
                    of_reference.fill(here, normalizer(other))
                    top[here] = argmax(other)
                    if exact is not None:
                        of_truth.fill(here, normalizer(exact))
                logits = model.logits(x[:, positions])
                compared = [(other, of_reference.at(here)), *([] if exact is None else [(exact, of_truth.at(here))])]
                found, own = divergences_and_normalizer(logits, compared)
                for values, distance in zip((kl, from_truth), found, strict=False):
                    values[index][where] = distance.cpu()
                entropy[index][where] = own.cross_entropy(target_logits(logits, following[where])).cpu()
                agrees[index][where] = (argmax(logits) == top[here]).cpu()
            progress((start + (rows.stop - start) * (done + 1) / len(grids)) / blocks)
    # The last position of a block predicts no token of it.
    averaged = kl, from_truth, agrees.double(), entropy[:, :, :-1]
    means = torch.stack([values.mean(dim=2) for values in averaged], dim=2)
    return {grid: (means[index], agrees[index]) for index, grid in enumerate(grids)}


def last_states(
    model: Decoder, tokens: Tensor, grids: Sequence[PrecisionGrid], setting: Setting
) -> Iterator[tuple[int, Tensor]]:
    """Index of each grid and the states [B, T, E] after the last layer, of blocks that go through together.

    Grids with the same first layers come one after the other, and those layers are run once for all of them.
    """
    order = sorted(range(len(grids)), key=lambda index: _rows(grids[index]))
    shared = [_shared_layers(grids[a], grids[b]) for a, b in itertools.pairwise(order)]
    # States before the layers at which later grids part from this one.
    kept = [(0, model.embed(tokens))]
    for place, index in enumerate(order):
        cache = policy_cache(model, grids[index], *tokens.shape, setting.execution)
        first, x = kept[-1]
        # How much each of the grids that follow has in common with this one.
        for layer in sorted(set(itertools.accumulate(shared[place:], min))):
            if layer > first:
                x = run_layers(model, x, cache, setting.execution, first, layer)
                first = layer
                kept.append((first, x))
        yield index, run_layers(model, x, cache, setting.execution, first)
        while place < len(shared) and kept[-1][0] > shared[place]:
            kept.pop()


def _rows(grid: PrecisionGrid) -> list[tuple[str, ...]]:
    """Precisions of each layer's tensors [L][2H]."""
    return [grid.row(layer) for layer in range(len(grid.keys))]


def _shared_layers(grid: PrecisionGrid, other: PrecisionGrid) -> int:
    """How many first layers two different grids have in common."""
    return next(layer for layer, (a, b) in enumerate(zip(_rows(grid), _rows(other), strict=True)) if a != b)
