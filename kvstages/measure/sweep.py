"""Single-unit interventions: one head of one layer, or its keys or values, at another precision (docs/method.md,
"Sensitivity").

Every other tensor stays as in a base policy: all BF16 for a study's sensitivities, or a policy around which moves are
measured again. Below the intervened layer nothing changes, so the sweep of layer l starts from the base's hidden
states there. The layer's keys and values are the base's too; only what its attention reads back differs. So one cache
per part and precision, with *all* heads changed, serves every intervention of the layer: the variant takes its
head's output from it and the others from the base. Above the layer all caches are the base's, and the variants, with
the base as the first of them, are rows of the same batches: an intervention that changes nothing measures a KL of
exactly 0.

In FP32 arithmetic all variants share the reference's rounding of keys and values to BF16 (see ``rounding``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvstages.cache.interventions import read_back
from kvstages.cache.offsets import Contexts
from kvstages.cache.one_pass import BlockCache, DenseBlockCache
from kvstages.cache.packed import PackedCache
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.rounding import STORAGE, RecordedRounding, Rounding, SharedRounding, storage_rounding
from kvstages.measure.execution import PASS_TOKENS, block_bytes, blocks_per_pass, dense_grid, window_logits
from kvstages.measure.metrics import divergence, exponential_sum
from kvstages.measure.setting import Setting
from kvstages.models.gpt2_nano import GPT, attend_through

# A part of a head and the precision to try on it; every head of a layer is tried.
Trial = tuple[str, str]


class Variant(NamedTuple):
    """One row of the batch: the head whose part is changed, and how; the base changes none."""

    head: int
    trial: Trial | None


BASE = Variant(-1, None)


@dataclass(frozen=True)
class LayerSweep:
    """What one layer's sweep measures; FP64, B blocks.

    ``kl``: mean KL over the positions of each block, {trial: [H, B]} in nats. ``base_kl``: that of the base [B], 0
    where the base is the reference. ``error``: what the trial does to the tensors themselves, Σ ‖x̂ − x‖² / Σ ‖x‖²
    over a block, keys and values added up, {trial: [H, B]}.
    """

    kl: dict[Trial, Tensor]
    base_kl: Tensor
    error: dict[Trial, Tensor]


@torch.no_grad()
def sweep_layer(
    model: GPT,
    tokens: Tensor,
    layer: int,
    trials: Sequence[Trial],
    setting: Setting,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
    base: PrecisionGrid | None = None,
) -> LayerSweep:
    """Measure every trial on every head of ``layer``, token ids [B, T]; always against the unquantized reference.

    ``memory`` bounds (in bytes) what goes through the model together: blocks and variants that do not fit follow in
    further passes. ``base`` is the policy around which to measure; None: all BF16. ValueError if the model has no such
    layer.
    """
    if not 0 <= layer < model.config.num_layers:
        raise ValueError(f"layer {layer}: the model has layers 0 to {model.config.num_layers - 1}")
    heads = model.config.num_heads
    variants = [BASE, *(Variant(head, trial) for trial in trials for head in range(heads))]
    kl = {trial: torch.zeros(heads, len(tokens), dtype=torch.float64) for trial in trials}
    error = {trial: torch.zeros(heads, len(tokens), dtype=torch.float64) for trial in trials}
    base_kl = torch.zeros(len(tokens), dtype=torch.float64)
    step = blocks_per_pass(model, *tokens.shape, setting.execution, memory)
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        rows = slice(start, start + len(part))
        recorded = RecordedRounding(layer)
        below = model.run_layers(model.embed(part), DenseBlockCache(part.device, recorded), last=layer)
        # In BF16 arithmetic keys and values are BF16 already, and every rounding in the model is a layer's own.
        shares = setting.dtype != STORAGE
        last = None if shares else layer + 1
        model.run_layers(below, DenseBlockCache(part.device, recorded), first=layer, last=last)
        for trial in trials:
            error[trial][:, rows] = reconstruction_error(recorded.stored, *trial, layer, model.contexts).cpu()
        rounding = storage_rounding
        if shares:
            rounding = SharedRounding(recorded.errors, same=layer if base is None else -1)
        for variant, found in _sweep_blocks(model, part, layer, variants, setting, memory, base, rounding, below):
            mean = found.mean(dim=1).cpu()
            if variant.trial is None:
                base_kl[rows] = mean
            else:
                kl[variant.trial][variant.head, rows] = mean
            progress((start + len(part) * (variants.index(variant) + 1) / len(variants)) / len(tokens))
    return LayerSweep(kl, base_kl, error)


def reconstruction_error(both: Tensor, part: str, name: str, layer: int, contexts: Contexts | None = None) -> Tensor:
    """Relative squared error of a precision (or control) on stored keys and values [B, 2H, T, D]: FP64 [H, B]."""
    return relative_error(read_back(both, name, layer, contexts) - both, both, part)


def relative_error(error: Tensor, both: Tensor, part: str) -> Tensor:
    """Σ ‖x̂ − x‖² / Σ ‖x‖² over each block's positions, keys and values [B, 2H, T, D] apart, and added: FP64 [H, B]."""
    wrong = error.double().square().sum(dim=(2, 3))
    size = both.double().square().sum(dim=(2, 3))
    relative = torch.where(size > 0, wrong / size, 0.0).T
    keys, values = relative.chunk(2)
    return {"k": keys, "v": values, "kv": keys + values}[part]


def _sweep_blocks(
    model: GPT,
    tokens: Tensor,
    layer: int,
    variants: list[Variant],
    setting: Setting,
    memory: int,
    base: PrecisionGrid | None,
    rounding: Rounding,
    below: Tensor,
) -> Iterator[tuple[Variant, Tensor]]:
    """KL [B, T] of every variant of ``layer`` on blocks that fit together."""
    groups = _groups(model, tokens, variants, setting.execution, memory)
    run = _one_pass_logits if setting.execution == "one-pass" else _token_by_token_logits
    reference = torch.empty(*tokens.shape, model.config.vocab_size, dtype=setting.dtype, device=tokens.device)
    total = torch.empty(tokens.shape, dtype=torch.float64, device=tokens.device)
    if base is not None:
        for blocks, logits in window_logits(model, tokens, dense_grid(model), setting, memory):
            reference[blocks] = logits
        total = exponential_sum(reference)
    kl = torch.empty(len(variants), *tokens.shape, dtype=torch.float64, device=tokens.device)
    for where, group, logits in run(model, tokens, layer, groups, setting, base, rounding, below):
        if base is None and group is groups[0]:
            reference[:, where], total[:, where] = logits[0], exponential_sum(logits[0])
        for variant, own in zip(group, logits, strict=True):
            index = variants.index(variant)
            kl[index, :, where] = divergence(own, reference[:, where], total[:, where])
            if where.stop == tokens.shape[1]:
                yield variant, kl[index]


def _groups(model: GPT, tokens: Tensor, variants: list[Variant], execution: str, memory: int) -> list[list[Variant]]:
    """Variants that go through the model together.

    All groups have the same size (the last is filled up with the base), so that each variant meets the same batch
    shape as the base, which opens the first.
    """
    blocks, length = tokens.shape
    size = max(1, memory // (blocks * block_bytes(model, length, execution)))
    if execution == "one-pass":
        size = min(size, max(1, PASS_TOKENS[tokens.device.type] // (blocks * length)))
    size = min(size, len(variants))
    groups = [variants[start : start + size] for start in range(0, len(variants), size)]
    groups[-1] = groups[-1] + [BASE] * (size - len(groups[-1]))
    return groups


def _mix(outputs: dict[Trial | None, Tensor], group: Sequence[Variant]) -> Tensor:
    """Heads' outputs [n · B, H, T, D] of n variants, from those of whole layers {trial: [B, H, T, D]}."""
    stacked = outputs[None].repeat(len(group), 1, 1, 1).unflatten(0, (len(group), -1))
    for index, (head, trial) in enumerate(group):
        if trial is not None:
            stacked[index, :, head] = outputs[trial][:, head]
    return stacked.flatten(0, 1)


def _layer_grids(base: PrecisionGrid, layer: int, groups: list[list[Variant]]) -> dict[Trial | None, PrecisionGrid]:
    """The base's grid (under None), and one with each trial on all heads of ``layer``."""
    trials = dict.fromkeys(variant.trial for group in groups for variant in group if variant.trial is not None)
    return {None: base, **{trial: base.with_layer(layer, *trial) for trial in trials}}


def _one_pass_logits(
    model: GPT,
    tokens: Tensor,
    layer: int,
    groups: list[list[Variant]],
    setting: Setting,
    base: PrecisionGrid | None,
    rounding: Rounding,
    below: Tensor,
) -> Iterator[tuple[slice, list[Variant], Tensor]]:
    """Logits [n, B, T, V] of each group of n variants, all positions in one pass.

    ``below``: the reference's hidden states [B, T, E] where the layer begins, the base's too where it is unquantized.
    """
    device = tokens.device
    # Around the intervened layer an unquantized base needs no past apart from the present, only causal attention.
    around = DenseBlockCache(device, rounding) if base is None else BlockCache(base, device, rounding, model.contexts)
    if base is not None:
        below = model.run_layers(model.embed(tokens), around, last=layer)
    block = model.blocks[layer]
    projections = block.projections(below)
    outputs = {
        trial: attend_through(BlockCache(grid, device, rounding, model.contexts), *projections, layer)
        for trial, grid in _layer_grids(base or dense_grid(model), layer, groups).items()
    }
    for group in groups:
        x = block.finish(below.repeat(len(group), 1, 1), _mix(outputs, group))
        x = model.run_layers(x, around, first=layer + 1)
        yield slice(0, tokens.shape[1]), group, model.lm_head(x).unflatten(0, (len(group), -1))


def _token_by_token_logits(
    model: GPT,
    tokens: Tensor,
    layer: int,
    groups: list[list[Variant]],
    setting: Setting,
    base: PrecisionGrid | None,
    rounding: Rounding,
    below: Tensor,
) -> Iterator[tuple[slice, list[Variant], Tensor]]:
    """Logits [n, B, 1, V] of each group of n variants, position by position through packed caches.

    The intervened layer's inputs and outputs are the base's and the same for all groups: they are run once and kept,
    and each group then starts from them. ``below`` comes from another path and is not used.
    """
    blocks, length = tokens.shape
    base = base or dense_grid(model)
    # With a shared rounding error, unquantized values are BF16 in the reference alone: they are kept as they come.
    storage = STORAGE if rounding is storage_rounding else setting.dtype

    def cache(grid: PrecisionGrid, rows: int) -> PackedCache:
        width = model.config.head_dim
        return PackedCache(
            grid, rows, width, setting.dtype, length, True, tokens.device, rounding, storage, model.contexts
        )

    caches = {trial: cache(grid, blocks) for trial, grid in _layer_grids(base, layer, groups).items()}
    block = model.blocks[layer]
    starts = []
    for position in range(length):
        x = model.run_layers(model.embed(tokens[:, position : position + 1], position), caches[None], last=layer)
        projections = block.projections(x)
        outputs = {trial: attend_through(each, *projections, layer) for trial, each in caches.items()}
        starts.append((x, outputs))
    for group in groups:
        above = cache(base, len(group) * blocks)
        for position, (x, outputs) in enumerate(starts):
            x = block.finish(x.repeat(len(group), 1, 1), _mix(outputs, group))
            x = model.run_layers(x, above, first=layer + 1)
            yield slice(position, position + 1), group, model.lm_head(x).unflatten(0, (len(group), -1))
