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
from kvstages.gpt import GPT, CausalCache, attend_through
from kvstages.metrics import divergence, exponential_sum
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
    total = torch.empty(tokens.shape, dtype=torch.float64, device=tokens.device)
    kl = torch.empty(len(variants), *tokens.shape, dtype=torch.float64, device=tokens.device)
    for where, group, logits in run(model, tokens, layer, groups, setting):
        if group is groups[0]:
            reference[:, where], total[:, where] = logits[0], exponential_sum(logits[0])
        for variant, own in zip(group, logits, strict=True):
            index = variants.index(variant)
            kl[index, :, where] = divergence(own, reference[:, where], total[:, where])
            if where.stop == tokens.shape[1]:
                yield variant, kl[index]


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


def _precisions(groups: list[list[Variant]]) -> list[str]:
    """BF16, and every precision that a variant asks for."""
    return sorted({precision for group in groups for _, precision in group})


def _parallel_logits(
    model: GPT, tokens: Tensor, layer: int, groups: list[list[Variant]], setting: Setting
) -> Iterator[tuple[slice, list[Variant], Tensor]]:
    """Logits [n, B, T, V] of each group of n variants, all positions in one pass."""
    arithmetic, dense_storage = setting.dtypes
    shape = dense_grid(model)

    def cache(precision: str) -> BlockCache:
        return BlockCache([[precision] * len(row) for row in shape], arithmetic, dense_storage, tokens.device)

    # Where storing rounds nothing, the layers around the intervened one need no cache, only causal attention.
    around = CausalCache(tokens.device) if arithmetic == dense_storage else cache("bf16")
    below = model.run_layers(model.embed(tokens), around, last=layer)
    block = model.blocks[layer]
    projections = block.projections(below)
    outputs = {precision: attend_through(cache(precision), *projections, layer) for precision in _precisions(groups)}
    for group in groups:
        x = block.finish(below.repeat(len(group), 1, 1), _mix(outputs, group))
        x = model.run_layers(x, around, first=layer + 1)
        yield slice(0, tokens.shape[1]), group, model.lm_head(x).unflatten(0, (len(group), -1))


def _incremental_logits(
    model: GPT, tokens: Tensor, layer: int, groups: list[list[Variant]], setting: Setting
) -> Iterator[tuple[slice, list[Variant], Tensor]]:
    """Logits [n, B, 1, V] of each group of n variants, position by position through packed caches.

    The intervened layer's inputs and outputs are the reference's and the same for all groups: they are run once and
    kept, and each group then starts from them.
    """
    arithmetic, dense_storage = setting.dtypes
    blocks, length = tokens.shape
    shape = dense_grid(model)

    def cache(precision: str, rows: int) -> PackedCache:
        grid = [[precision] * len(row) for row in shape]
        return PackedCache(grid, rows, model.config.head_dim, arithmetic, dense_storage, length, device=tokens.device)

    below = cache("bf16", blocks)
    intervened = {precision: cache(precision, blocks) for precision in _precisions(groups) if precision != "bf16"}
    block = model.blocks[layer]
    starts = []
    for position in range(length):
        x = model.run_layers(model.embed(tokens[:, position : position + 1], position), below, last=layer)
        projections = block.projections(x)
        caches = {"bf16": below, **intervened}
        outputs = {precision: attend_through(each, *projections, layer) for precision, each in caches.items()}
        starts.append((x, outputs))
    for group in groups:
        above = cache("bf16", len(group) * blocks)
        for position, (x, outputs) in enumerate(starts):
            x = block.finish(x.repeat(len(group), 1, 1), _mix(outputs, group))
            x = model.run_layers(x, above, first=layer + 1)
            yield slice(position, position + 1), group, model.lm_head(x).unflatten(0, (len(group), -1))
