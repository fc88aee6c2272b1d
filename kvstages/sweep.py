"""Single-head interventions: one head of one layer quantized, every other head in BF16 (STUDY.md, "Sensitivity").

Below the intervened layer nothing changes, so the sweep of layer l starts from the reference's hidden states there.
The layer's keys and values are the reference's too; only what its attention reads back differs. So one cache per
precision, with *all* heads quantized, serves every intervention of the layer: the variant (head, precision) takes
that head's output from it and the others from the reference. Above the layer all caches are BF16, and the variants,
with the reference as the first of them, are rows of the same batches: an intervention that changes nothing
measures a KL of exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvstages.cache import BlockCache, PackedCache
from kvstages.execution import PASS_TOKENS, block_bytes, blocks_per_pass, dense_grid
from kvstages.gpt import GPT, attend_through
from kvstages.metrics import divergence, log_normaliser
from kvstages.runtime import Setting

# (head, precision); the reference is the variant that takes no head from a quantized cache.
Variant = tuple[int, str]
REFERENCE: Variant = (-1, "bf16")


@torch.no_grad()
def sweep_layer(
    model: GPT,
    tokens: Tensor,
    layer: int,
    precisions: Sequence[str],
    setting: Setting,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
) -> dict[str, Tensor]:
    """Mean KL over the T positions of each block, for each single head of ``layer``: {precision: FP64 [H, B]}.

    Token ids [B, T]; ``memory`` bounds (in bytes) what goes through the model together: blocks and variants that do
    not fit follow in further passes. ValueError if the model has no such layer.
    """
    if not 0 <= layer < model.config.num_layers:
        raise ValueError(f"layer {layer}: the model has layers 0 to {model.config.num_layers - 1}")
    heads = model.config.num_heads
    variants = [REFERENCE, *((head, precision) for precision in precisions for head in range(heads))]
    result = {precision: torch.zeros(heads, len(tokens), dtype=torch.float64) for precision in precisions}
    step = blocks_per_pass(model, *tokens.shape, setting.execution, memory)
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        for variant, kl in _sweep_blocks(model, part, layer, variants, setting, memory):
            if variant != REFERENCE:
                result[variant[1]][variant[0], start : start + len(part)] = kl.mean(dim=1).cpu()
            progress((start + len(part) * (variants.index(variant) + 1) / len(variants)) / len(tokens))
    return result


def _sweep_blocks(
    model: GPT, tokens: Tensor, layer: int, variants: list[Variant], setting: Setting, memory: int
) -> Iterator[tuple[Variant, Tensor]]:
    """KL [B, T] of every variant of ``layer`` on blocks that fit together."""
    groups = _groups(model, tokens, variants, setting.execution, memory)
    run = _parallel_logits if setting.execution == "parallel" else _incremental_logits
    reference = torch.empty(*tokens.shape, model.config.vocab_size, dtype=setting.dtypes[0], device=tokens.device)
    normaliser = torch.empty(tokens.shape, dtype=torch.float64, device=tokens.device)
    for number, group in enumerate(groups):
        kl = torch.empty(len(group), *tokens.shape, dtype=torch.float64, device=tokens.device)
        for where, logits in run(model, tokens, layer, group, setting):
            if number == 0:
                reference[:, where], normaliser[:, where] = logits[0], log_normaliser(logits[0])
            for index in range(len(group)):
                kl[index, :, where] = divergence(logits[index], reference[:, where], normaliser[:, where])
        yield from zip(group, kl, strict=True)


def _groups(model: GPT, tokens: Tensor, variants: list[Variant], execution: str, memory: int) -> list[list[Variant]]:
    """Variants that go through the model together.

    All groups have the same size (the last is filled up with the reference), so that each variant meets the same
    batch shape as the reference, which opens the first.
    """
    blocks, length = tokens.shape
    size = max(1, memory // (blocks * block_bytes(model, length, execution)))
    if execution == "parallel":
        size = min(size, max(1, PASS_TOKENS[tokens.device.type] // (blocks * length)))
    size = min(size, len(variants))
    groups = [variants[start : start + size] for start in range(0, len(variants), size)]
    groups[-1] = groups[-1] + [REFERENCE] * (size - len(groups[-1]))
    return groups


def _mix(outputs: dict[str, Tensor], group: Sequence[Variant]) -> Tensor:
    """Heads' outputs [n · B, H, T, D] of n variants, from those of whole layers {precision: [B, H, T, D]}."""
    stacked = outputs["bf16"].repeat(len(group), 1, 1, 1).unflatten(0, (len(group), -1))
    for index, (head, precision) in enumerate(group):
        if head >= 0:
            stacked[index, :, head] = outputs[precision][:, head]
    return stacked.flatten(0, 1)


def _quantized_precisions(group: Sequence[Variant]) -> list[str]:
    return sorted({precision for head, precision in group if head >= 0})


def _parallel_logits(
    model: GPT, tokens: Tensor, layer: int, group: Sequence[Variant], setting: Setting
) -> Iterator[tuple[slice, Tensor]]:
    """Logits [n, B, T, V] of a group of variants, all positions in one pass."""
    arithmetic, dense_storage = setting.dtypes
    dense = dense_grid(model)
    caches = {
        precision: BlockCache([[precision] * len(row) for row in dense], arithmetic, dense_storage, tokens.device)
        for precision in ("bf16", *_quantized_precisions(group))
    }
    x = model.run_layers(model.embed(tokens), caches["bf16"], last=layer)
    block = model.blocks[layer]
    projections = block.projections(x)
    outputs = {precision: attend_through(cache, *projections, layer) for precision, cache in caches.items()}
    x = block.finish(x.repeat(len(group), 1, 1), _mix(outputs, group))
    x = model.run_layers(x, caches["bf16"], first=layer + 1)
    yield slice(0, tokens.shape[1]), model.lm_head(x).unflatten(0, (len(group), -1))


def _incremental_logits(
    model: GPT, tokens: Tensor, layer: int, group: Sequence[Variant], setting: Setting
) -> Iterator[tuple[slice, Tensor]]:
    """Logits [n, B, 1, V] of a group of variants, position by position through packed caches."""
    arithmetic, dense_storage = setting.dtypes
    blocks, length = tokens.shape
    dense = dense_grid(model)

    def cache(precision: str, rows: int) -> PackedCache:
        grid = [[precision] * len(row) for row in dense]
        return PackedCache(grid, rows, model.config.head_dim, arithmetic, dense_storage, length, device=tokens.device)

    intervened = {precision: cache(precision, blocks) for precision in _quantized_precisions(group)}
    below, above = cache("bf16", blocks), cache("bf16", len(group) * blocks)
    block = model.blocks[layer]
    for position in range(length):
        x = model.run_layers(model.embed(tokens[:, position : position + 1], position), below, last=layer)
        projections = block.projections(x)
        outputs = {
            precision: attend_through(cache, *projections, layer)
            for precision, cache in {"bf16": below, **intervened}.items()
        }
        x = block.finish(x.repeat(len(group), 1, 1), _mix(outputs, group))
        x = model.run_layers(x, above, first=layer + 1)
        yield slice(position, position + 1), model.lm_head(x).unflatten(0, (len(group), -1))
