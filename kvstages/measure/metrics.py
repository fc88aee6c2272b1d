"""Distances between a policy's next-token distributions and the reference's (docs/method.md, "Measuring").

Exponentials and sums in FP64: in FP32 the scores of INT8 drown in rounding. Axes: B blocks, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

# Rows are taken a few at a time: on a CPU so that three FP64 copies stay in its cache, on a GPU to bound them.
CHUNK_ELEMENTS = {"cpu": 40_000, "cuda": 1 << 25}
# A sum of exponentials within these bounds is exact to rounding: no term has overflowed, and those that have
# underflowed are too small to count.
SAFE_TOTAL = (1e-150, 1e150)


@torch.no_grad()
def exponential_sum(logits: Tensor, lowered: bool = False) -> Tensor:
    """Σ exp of logits [..., V] in FP64: [...]. It may overflow or underflow, unless ``lowered`` (see ``_lower``)."""
    flat = logits.reshape(-1, logits.shape[-1])
    total = torch.empty(len(flat), dtype=torch.float64, device=logits.device)
    for (rows,), (own,), (own_total,) in _chunks([flat], 1, [total]):
        rows.copy_(own)
        if lowered:
            _lower(rows)
        _sum_rows(rows.exp_(), own_total)
    return total.view(logits.shape[:-1])


@torch.no_grad()
def divergence(logits: Tensor, reference: Tensor, reference_total: Tensor | None = None) -> Tensor:
    """D(p ‖ q) in nats for each position, FP64 [...], p the softmax of logits [..., V] and q of the reference.

    For logits a and b and weights w = exp a: Σ w · (a − b) / Σ w − log(Σ w / Σ exp b). One exponential a logit, and
    exactly 0 where a = b. ``reference_total``, the ``exponential_sum`` [...] of the reference, spares the sum over b
    where one reference serves many. Logits may be any finite numbers: rows whose exponentials leave FP64 are taken
    again with their largest logits moved to 0.
    """
    if reference_total is None:
        reference_total = exponential_sum(reference)
    width = logits.shape[-1]
    flat, others, reference_total = logits.reshape(-1, width), reference.reshape(-1, width), reference_total.reshape(-1)
    total, gap = _weighted_gap(flat, others)
    result = gap - _log_ratio(total, reference_total)
    unsafe = _unsafe(total) | _unsafe(reference_total)
    if unsafe.any():
        flat, others = flat[unsafe], others[unsafe]
        total, gap = _weighted_gap(flat, others, lowered=True)
        result[unsafe] = gap - _log_ratio(total, exponential_sum(others, lowered=True))
    return result.view(logits.shape[:-1])


def _weighted_gap(logits: Tensor, reference: Tensor, lowered: bool = False) -> tuple[Tensor, Tensor]:
    """Σ w and Σ w · (a − b) / Σ w with w = exp a, for each row of logits a and b [N, V]: FP64 [N]."""
    total, gap = torch.empty(2, len(logits), dtype=torch.float64, device=logits.device)
    for (rows, others, weights), (own, other), (own_total, own_gap) in _chunks([logits, reference], 3, [total, gap]):
        rows.copy_(own)
        others.copy_(other)
        if lowered:
            _lower(rows)
            _lower(others)
        torch.exp(rows, out=weights)
        _sum_rows(weights, own_total)
        _sum_rows(rows.sub_(others).mul_(weights), own_gap)
    return total, gap.div_(total)


def _chunks(
    inputs: list[Tensor], copies: int, outputs: list[Tensor]
) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]]:
    """A few rows at a time: FP64 room [n, V], as often as ``copies``, and rows [n, V] and [n] of inputs and outputs.

    The room is the same for all chunks; each row's results are to be independent of the chunking.
    """
    rows, width = inputs[0].shape
    step = min(rows, max(1, CHUNK_ELEMENTS[inputs[0].device.type] // width))
    room = torch.empty(copies, step, width, dtype=torch.float64, device=inputs[0].device)
    whole = room.unbind()
    parts = [zip(*(tensor.split(step) for tensor in tensors), strict=True) for tensors in (inputs, outputs)]
    for own, results in zip(*parts, strict=True):
        yield whole if len(own[0]) == step else room[:, : len(own[0])].unbind(), own, results


def _sum_rows(rows: Tensor, out: Tensor) -> None:
    """Sum each row [n, V] into ``out`` [n], the same whatever n: torch would share out a single long row among
    threads, and so add in another order; it never gets a single one."""
    if len(rows) > 1:
        torch.sum(rows, dim=-1, out=out)
    else:
        out.copy_(rows.expand(2, -1).sum(dim=-1)[:1])


def _lower(rows: Tensor) -> None:
    """Move the largest logit of each row to 0, in place; differences beyond FP64 become the largest it has."""
    rows.sub_(rows.amax(dim=-1, keepdim=True)).clamp_(min=-torch.finfo(torch.float64).max)


def _unsafe(total: Tensor) -> Tensor:
    """Sums of exponentials that may have overflowed or underflowed, or are not numbers."""
    return ~((total > SAFE_TOTAL[0]) & (total < SAFE_TOTAL[1]))


def _log_ratio(total: Tensor, other: Tensor) -> Tensor:
    """log(total / other); of nearly equal sums by their difference, which is exact where a quotient would round."""
    near = (total > other / 2) & (total < other * 2)
    return torch.where(near, ((total - other) / other).log1p_(), total.log() - other.log())


@torch.no_grad()
def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy in nats of token t + 1 at position t: logits [B, T, V], token ids [B, T]; FP64 [B, T − 1].

    From the largest logit: exact where the prediction is sure, and never below 0.
    """
    logits = logits[:, :-1]
    targets = logits.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    below = logits.amax(dim=-1).double() - targets.double()
    return exponential_sum(logits, lowered=True).log_() + below


def position_metrics(logits: Tensor, reference: Tensor, tokens: Tensor) -> dict[str, np.ndarray]:
    """Metrics of each position of blocks: logits and reference [B, T, V], token ids [B, T]; arrays [B, T].

    kl and reverse_kl, D(p ‖ q) and D(q ‖ p) of the policy's p and the reference's q; agrees (both argmaxes are the same
    token); logit_deviation (largest absolute difference). Of the true next token, and so NaN at the last position:
    cross_entropy and reference_cross_entropy, and delta_p, its probability under the policy minus under the reference.
    """
    own, other = (
        torch.nn.functional.pad(cross_entropy(scores, tokens.to(scores.device)), (0, 1), value=math.nan)
        for scores in (logits, reference)
    )
    metrics = {
        "kl": divergence(logits, reference),
        "reverse_kl": divergence(reference, logits),
        "agrees": logits.argmax(dim=-1) == reference.argmax(dim=-1),
        "logit_deviation": _largest_gap(logits, reference),
        "cross_entropy": own,
        "reference_cross_entropy": other,
        "delta_p": (-own).exp() - (-other).exp(),
    }
    return {name: values.cpu().numpy() for name, values in metrics.items()}


def _largest_gap(logits: Tensor, reference: Tensor) -> Tensor:
    """Largest |a − b| of logits a and b [..., V] at each position: FP64 [...]."""
    flat = [logits.reshape(-1, logits.shape[-1]), reference.reshape(-1, logits.shape[-1])]
    result = torch.empty(len(flat[0]), dtype=torch.float64, device=logits.device)
    for (rows, others), (own, other), (largest,) in _chunks(flat, 2, [result]):
        rows.copy_(own).sub_(others.copy_(other))
        torch.amax(rows.abs_(), dim=-1, out=largest)
    return result.view(logits.shape[:-1])
