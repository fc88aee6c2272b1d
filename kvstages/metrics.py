"""Distances between a policy's next-token distributions and the reference's (STUDY.md, "Measuring").

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
RESAMPLES = 10_000


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


def log_normaliser(logits: Tensor) -> Tensor:
    """log Σ exp of logits [..., V], whatever their size, in FP64: [...]."""
    total = exponential_sum(logits)
    result = total.log()
    unsafe = _unsafe(total)
    if unsafe.any():
        rows = logits[unsafe]
        result[unsafe] = exponential_sum(rows, lowered=True).log_() + rows.amax(dim=-1).double()
    return result


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


def position_metrics(logits: Tensor, reference: Tensor, tokens: Tensor) -> dict[str, np.ndarray]:
    """Metrics of each position of blocks: logits and reference [B, T, V], token ids [B, T]; arrays [B, T].

    kl; agrees (both argmaxes are the same token); logit_deviation (largest absolute difference); cross_entropy and
    reference_cross_entropy of token t + 1 at position t, NaN at the last position.
    """

    def cross_entropy(scores: Tensor) -> Tensor:
        result = torch.full(tokens.shape, math.nan, dtype=torch.float64, device=scores.device)
        targets = scores[:, :-1].gather(-1, tokens[:, 1:].to(scores.device).unsqueeze(-1)).squeeze(-1)
        result[:, :-1] = log_normaliser(scores)[:, :-1] - targets.double()
        return result

    metrics = {
        "kl": divergence(logits, reference),
        "agrees": logits.argmax(dim=-1) == reference.argmax(dim=-1),
        "logit_deviation": _largest_gap(logits, reference),
        "cross_entropy": cross_entropy(logits),
        "reference_cross_entropy": cross_entropy(reference),
    }
    return {name: values.cpu().numpy() for name, values in metrics.items()}


def _largest_gap(logits: Tensor, reference: Tensor) -> Tensor:
    """Largest |a − b| of logits a and b [B, T, V] at each position: FP64 [B, T]."""
    result = torch.empty(logits.shape[:-1], dtype=torch.float64, device=logits.device)
    for block, (rows, others) in enumerate(zip(logits, reference, strict=True)):
        result[block] = (rows.double() - others.double()).abs_().amax(dim=-1)
    return result


def block_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of values [B, T], resampling whole blocks.

    Positions of one block depend on each other, blocks hardly. Efron and Tibshirani, An Introduction to the Bootstrap.
    """
    means = values.mean(axis=1)
    draws = np.random.default_rng(seed).integers(len(means), size=(RESAMPLES, len(means)))
    low, high = np.quantile(means[draws].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def summarise(metrics: dict[str, np.ndarray]) -> dict[str, float | int | None]:
    """The figures of one policy on one window, from its position metrics [B, T]."""
    kl, agrees = metrics["kl"], metrics["agrees"].astype(bool)
    disagreeing = ~agrees.all(axis=1)
    cross_entropy = float(np.nanmean(metrics["cross_entropy"]))
    kl_low, kl_high = block_interval(kl)
    agreement_low, agreement_high = block_interval(agrees.astype(float))
    p50, p95, p99 = (float(value) for value in np.quantile(kl, [0.5, 0.95, 0.99]))
    return {
        "sequences": kl.shape[0],
        "positions": kl.size,
        "targets": int(np.isfinite(metrics["cross_entropy"]).sum()),
        "mean_kl": float(kl.mean()),
        "mean_kl_low": kl_low,
        "mean_kl_high": kl_high,
        "p50_kl": p50,
        "p95_kl": p95,
        "p99_kl": p99,
        "max_kl": float(kl.max()),
        "agreement": float(agrees.mean()),
        "agreement_low": agreement_low,
        "agreement_high": agreement_high,
        "cross_entropy": cross_entropy,
        "perplexity": math.exp(cross_entropy),
        "reference_cross_entropy": float(np.nanmean(metrics["reference_cross_entropy"])),
        "max_logit_deviation": float(metrics["logit_deviation"].max()),
        "first_disagreement_mean": float((~agrees[disagreeing]).argmax(axis=1).mean()) if disagreeing.any() else None,
        "sequences_with_disagreement": int(disagreeing.sum()),
    }
