"""Many policies measured jointly on one window, against one reference: a row for each policy and block.

For comparisons, which pair policies block by block; ``evaluation`` says more of a single policy.
Axes: B blocks, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.measure.execution import window_logits
from kvstages.measure.metrics import cross_entropy, divergence, exponential_sum
from kvstages.measure.setting import Setting
from kvstages.models.gpt2_nano import GPT

OF_POLICY = ["policy", "recipe", "allocator", "sensitivity", "unit"]
MEANS = ["mean_kl", "agreement", "cross_entropy", "agrees_alone", "first_agrees_alone"]
JOINT_COLUMNS = [*OF_POLICY, "precisions", "bytes", "bf16_bytes", "proxy", "block", *MEANS]


@torch.no_grad()
def measure(
    model: GPT,
    tokens: Tensor,
    policies: Sequence[Mapping[str, Any]],
    reference: Tensor,
    setting: Setting,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
) -> dict[str, list[Any]]:
    """Columns of a table by policy (in the order given) and block: means over the block's positions.

    Token ids [B, T], ``reference`` logits [B, T, V] by the same execution, memory in bytes. KL in nats, agreement as a
    share, cross entropy over the T − 1 targets. For McNemar's test: the positions where the policy's argmax
    is the reference's and the first policy's is not, and the other way round. Policies with equal precisions are run
    once. ValueError where the reference does not fit the window.
    """
    expected = (*tokens.shape, model.config.vocab_size)
    if tuple(reference.shape) != expected:
        raise ValueError(f"reference logits {tuple(reference.shape)}, but window and model ask for {expected}")
    reference = reference.to(tokens.device)
    total, top = exponential_sum(reference), reference.argmax(dim=-1)
    found: dict[PrecisionGrid, tuple[Tensor, Tensor]] = {}
    rows = []
    for done, policy in enumerate(policies):
        grid = PrecisionGrid.of_record(policy["precisions"])
        if grid not in found:
            parts = [
                _block_metrics(logits, tokens[blocks], reference[blocks], total[blocks], top[blocks])
                for blocks, logits in window_logits(model, tokens, grid, setting, memory)
            ]
            found[grid] = tuple(torch.cat(part).cpu() for part in zip(*parts, strict=True))
        means, agrees = found[grid]
        first = next(iter(found.values()))[1]
        alone = torch.stack(((agrees & ~first).sum(dim=1), (first & ~agrees).sum(dim=1)), dim=1)
        size = policy["bytes"]
        known = [policy[key] for key in OF_POLICY]
        precisions = " ".join(name for name in policy["ladder"] if name != "bf16")
        rows += [
            (*known, precisions, size["total"], size["bf16"], policy["proxy"], block, *values, *counts)
            for block, (values, counts) in enumerate(zip(means.tolist(), alone.tolist(), strict=True))
        ]
        progress((done + 1) / len(policies))
    return {name: [row[index] for row in rows] for index, name in enumerate(JOINT_COLUMNS)}


def _block_metrics(
    logits: Tensor, tokens: Tensor, reference: Tensor, total: Tensor, top: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean KL, agreement and cross entropy of each block, FP64 [B, 3]; whether each position agrees, [B, T]."""
    agrees = logits.argmax(dim=-1) == top
    kl = divergence(logits, reference, total).mean(dim=1)
    return torch.stack((kl, agrees.double().mean(dim=1), cross_entropy(logits, tokens).mean(dim=1)), dim=1), agrees
