"""Distances between a policy's next-token distributions and the reference's (STUDY.md, "Measuring").

Log-softmax and sums in FP64: in FP32 the scores of INT8 drown in rounding. Axes: B blocks, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# Rows are taken a few at a time: on a CPU so that the FP64 copies stay in its cache, on a GPU to bound them.
CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 25}
RESAMPLES = 10_000


def _by_rows(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply ``function`` to matching chunks of rows; each row's result is independent of the chunking."""
    rows, width = tensors[0].shape
    step = max(1, CHUNK_ELEMENTS[tensors[0].device.type] // width)
    parts = [function(*(tensor[i : i + step] for tensor in tensors)) for i in range(0, rows, step)]
    return torch.cat(parts)


def log_normaliser(logits: Tensor) -> Tensor:
    """log Σ exp of logits [..., V] in FP64: [...]."""

    def of_rows(rows: Tensor) -> Tensor:
        rows = rows.double()
        top = rows.amax(dim=-1, keepdim=True)
        return (rows - top).exp_().sum(dim=-1).log_() + top.squeeze(-1)

    return _by_rows(of_rows, logits.reshape(-1, logits.shape[-1])).view(logits.shape[:-1])


def divergence(logits: Tensor, reference: Tensor, reference_normaliser: Tensor | None = None) -> Tensor:
    """D(p ‖ q) in nats for each position, FP64 [...], p the softmax of logits [..., V] and q of the reference.

    Σ p · (log p − log q) = Σ p · (a − b) − (log Σ eᵃ − log Σ eᵇ) for logits a and b: one exponential a logit, and
    exactly 0 where a = b. ``reference_normaliser`` [...] spares the sum over b where one reference serves many.
    """
    if reference_normaliser is None:
        reference_normaliser = log_normaliser(reference)
    width = logits.shape[-1]

    def of_rows(rows: Tensor, others: Tensor, normaliser: Tensor) -> Tensor:
        rows, others = rows.double(), others.double()
        top = rows.amax(dim=-1, keepdim=True)
        weights = (rows - top).exp_()
        total = weights.sum(dim=-1)
        mean_gap = weights.mul_(rows - others).sum(dim=-1).div_(total)
        return mean_gap - ((total.log_() + top.squeeze(-1)) - normaliser)

    flat = _by_rows(of_rows, logits.reshape(-1, width), reference.reshape(-1, width), reference_normaliser.reshape(-1))
    return flat.view(logits.shape[:-1])


def position_metrics(logits: Tensor, reference: Tensor, tokens: Tensor) -> dict[str, np.ndarray]:
    """Metrics of each position of blocks: logits and reference [B, T, V], token ids [B, T]; arrays [B, T].

    kl; agrees (both argmaxes are the same token); logit_deviation (largest absolute difference); cross_entropy and
    reference_cross_entropy of token t + 1 at position t, NaN at the last position.
    """
    normaliser, reference_normaliser = log_normaliser(logits), log_normaliser(reference)

    def cross_entropy(scores: Tensor, normaliser: Tensor) -> Tensor:
        result = torch.full(tokens.shape, math.nan, dtype=torch.float64, device=scores.device)
        targets = scores[:, :-1].gather(-1, tokens[:, 1:].to(scores.device).unsqueeze(-1)).squeeze(-1)
        result[:, :-1] = normaliser[:, :-1] - targets.double()
        return result

    width = logits.shape[-1]
    deviation = _by_rows(
        lambda a, b: (a.double() - b.double()).abs_().amax(dim=-1),
        logits.reshape(-1, width),
        reference.reshape(-1, width),
    )
    metrics = {
        "kl": divergence(logits, reference, reference_normaliser),
        "agrees": logits.argmax(dim=-1) == reference.argmax(dim=-1),
        "logit_deviation": deviation.view(tokens.shape),
        "cross_entropy": cross_entropy(logits, normaliser),
        "reference_cross_entropy": cross_entropy(reference, reference_normaliser),
    }
    return {name: values.cpu().numpy() for name, values in metrics.items()}


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
