"""The uncertainty of a measured figure: bootstrap over blocks or documents, paired comparisons, McNemar's test.

Positions of one block depend on each other, so the bootstrap draws whole blocks and never positions (docs/method.md,
"Intervals"). Blocks of one document depend on each other too. Where the document of each block is known
(``documents``, a label for each block [B]), whole documents can be drawn instead. That interval speaks of other
documents; the one over blocks speaks of other blocks of these. Samples are arrays with a row for each block, [B] or
[B, T]; NaN marks a position without a value (the last of a block has no next token). All blocks have the same weight.
Every draw has a seed, so the same files give the same intervals. Efron and Tibshirani, An Introduction to the
Bootstrap, 1993 (percentile intervals: chapter 13); Field and Welsh, Bootstrapping clustered data, J. R. Statist. Soc. B
69, 2007 (drawing whole clusters: section 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
# Documents of one window: fewer have no interval worth the name.
FEWEST_DOCUMENTS = 4


class Estimate(NamedTuple):
    """A figure and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def block_means(values: np.ndarray) -> np.ndarray:
    """Mean of each block of values [B] or [B, T]: FP64 [B]. ValueError if a block has no value at all."""
    values = np.asarray(values, dtype=float)
    if len(values) == 0:
        raise ValueError("no blocks, expected one at least")
    rows = values.reshape(len(values), -1)
    counts = (~np.isnan(rows)).sum(axis=1)
    if not counts.all():
        empty = int((counts == 0).sum())
        raise ValueError(f"{len(rows)} blocks, {empty} of them without a value; expected values in each")
    return np.nansum(rows, axis=1) / counts


def standard_error(values: np.ndarray) -> float:
    """Standard error of the mean over the blocks of values [B] or [B, T]; NaN where there is only one block."""
    return float(standard_errors(block_means(values)))


def standard_errors(means: np.ndarray) -> np.ndarray:
    """Standard error of each of many means over blocks [B, ...]: [...]; NaN where there is only one block."""
    if len(means) < 2:
        return np.full(means.shape[1:], math.nan)
    # Blocks beside each other, so that each figure's sum is the one that it has by itself.
    return np.ascontiguousarray(np.moveaxis(means, 0, -1)).std(axis=-1, ddof=1) / math.sqrt(len(means))


def resampled_means(*samples: np.ndarray, seed: int = 0, documents: Sequence[str] | None = None) -> list[np.ndarray]:
    """Means over resampled blocks, or over the blocks of resampled ``documents`` [B]: one array [RESAMPLES] a sample.

    All samples [B] or [B, T] are resampled by the same draws: what is computed of several is paired over the blocks.
    Where documents have different numbers of blocks, each draw is a mean over the blocks that it holds. ValueError if
    the samples or the labels differ in their number of blocks.
    """
    means = [block_means(values) for values in samples]
    if documents is None:
        _check_blocks(means)
        drawn = _times_drawn(len(means[0]), seed, RESAMPLES)
        return [drawn @ own / len(own) for own in means]
    _check_blocks([*means, np.asarray(documents)])
    members = document_members(documents)
    drawn = _times_drawn(len(members), seed, RESAMPLES)
    blocks = drawn @ members.sum(axis=1)
    return [drawn @ (members @ own) / blocks for own in means]


def document_members(documents: Sequence[str]) -> np.ndarray:
    """Which blocks each document holds, from the label of each block [B]: 0 and 1 as FP64 [documents, B], by label."""
    labels = np.asarray(documents)
    return (labels == np.unique(labels)[:, None]).astype(float)


def document_count(documents: Sequence[str] | None) -> int:
    """How many documents the labels of blocks name, 0 where the documents are not known."""
    return 0 if documents is None else len(set(documents))


def percentile_interval(draws: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of a statistic's values [RESAMPLES] over resampled blocks."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def medians(values: np.ndarray) -> np.ndarray:
    """Median of each list [..., N], NaN-free: [...]. numpy sorts many short lists faster than it selects in them."""
    ordered, count = np.sort(values, axis=-1), np.shape(values)[-1]
    return (ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2


def block_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of values [B] or [B, T], resampling whole blocks."""
    return percentile_interval(*resampled_means(values, seed=seed))


def document_interval(
    values: np.ndarray, documents: Sequence[str] | None, seed: int = 0
) -> tuple[float, float] | tuple[None, None]:
    """The same, resampling whole documents [B]; no interval where there are fewer than ``FEWEST_DOCUMENTS``.

    Few documents vary less among themselves than documents do, so it is a little narrow: of simulated normal documents
    it held the truth in 90 % of cases with 12 of them, in 92 % with 16, in 93 % with 32 (3,000 trials each).
    """
    if document_count(documents) < FEWEST_DOCUMENTS:
        return None, None
    return percentile_interval(*resampled_means(values, seed=seed, documents=documents))


def paired_difference(
    first: np.ndarray, second: np.ndarray, seed: int = 0, documents: Sequence[str] | None = None
) -> Estimate:
    """Mean of ``first`` minus mean of ``second``, measured on the same blocks in the same order: [B] or [B, T] each."""
    a, b = block_means(first), block_means(second)
    _check_blocks([a, b])
    drawn = resampled_means(a - b, seed=seed, documents=documents)
    return Estimate(float((a - b).mean()), *percentile_interval(*drawn))


def ratio_of_means(
    first: np.ndarray, second: np.ndarray, seed: int = 0, documents: Sequence[str] | None = None
) -> Estimate:
    """Mean of ``first`` over mean of ``second``, on the same blocks: [B] or [B, T] each.

    ValueError where the mean of ``second``, or one of its resampled means, is not above 0: no interval then.
    """
    a, b = block_means(first), block_means(second)
    above, below = resampled_means(a, b, seed=seed, documents=documents)
    least = min(float(b.mean()), float(below.min()))
    if not least > 0:
        raise ValueError(f"a ratio to a mean that may be {least!r}, expected one above 0 in every resample")
    return Estimate(float(a.mean() / b.mean()), *percentile_interval(above / below))


def relative_reduction(
    first: np.ndarray, second: np.ndarray, seed: int = 0, documents: Sequence[str] | None = None
) -> Estimate:
    """1 − mean of ``first`` / mean of ``second``, on the same blocks: 0.2 says that ``first`` is 20 % less."""
    ratio, low, high = ratio_of_means(first, second, seed, documents)
    return Estimate(1 - ratio, 1 - high, 1 - low)


def mcnemar(first: np.ndarray, second: np.ndarray) -> float:
    """Two-sided p of McNemar's exact test that two policies succeed equally often: booleans of the same positions.

    The test uses the positions where exactly one of the two succeeds (for example agrees with the reference). If
    neither policy is better, these are tosses of a fair coin. The test takes positions as independent. Those of one
    block are not, so a small p alone says less than the interval of ``paired_difference``. McNemar, Psychometrika 12,
    1947. ValueError if the shapes differ.
    """
    first, second = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if first.shape != second.shape:
        raise ValueError(f"paired outcomes of shapes {first.shape} and {second.shape}, expected the same")
    return mcnemar_counts(int((first & ~second).sum()), int((second & ~first).sum()))


def mcnemar_counts(only_first: int, only_second: int) -> float:
    """``mcnemar`` from the number of positions where only the first policy succeeds, and only the second."""
    coins = only_first + only_second
    tail = ways = 1
    for heads in range(min(only_first, only_second)):
        ways = ways * (coins - heads) // (heads + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**coins)


@lru_cache(maxsize=4)
def _times_drawn(count: int, seed: int, resamples: int) -> np.ndarray:
    """How often each resample holds each of ``count`` blocks or documents: FP64 [resamples, count]."""
    rows = np.arange(resamples)[:, None] * count
    return (
        np.bincount((rows + _draws(count, seed)).ravel(), minlength=resamples * count).reshape(-1, count).astype(float)
    )


def _draws(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def _check_blocks(samples: list[np.ndarray]) -> None:
    blocks = [len(values) for values in samples]
    if len(set(blocks)) != 1:
        raise ValueError(f"samples of {' and '.join(map(str, blocks))} blocks, expected the same blocks in each")
