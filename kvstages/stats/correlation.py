"""Correlations of two lists of numbers, by value and by rank."""

from __future__ import annotations

import math

import numpy as np


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation of two lists of numbers, ties at their mean rank; NaN where one list is constant.

    ValueError if they differ in length or hold less than two numbers.
    """
    first, second = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if first.shape != second.shape or first.ndim != 1 or len(first) < 2:
        raise ValueError(f"numbers of shapes {first.shape} and {second.shape}, expected lists of one length above 1")
    return correlation(_mean_ranks(first), _mean_ranks(second))


def rank_correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation of lists [..., N] that broadcast against each other: [...].

    It serves many draws at once. Unlike ``rank_correlation`` it ranks equal values by their order.
    """

    def centred(values: np.ndarray) -> np.ndarray:
        ranks = np.argsort(np.argsort(values, axis=-1, kind="stable"), axis=-1, kind="stable")
        return ranks - (values.shape[-1] - 1) / 2

    one, other = centred(np.asarray(first)), centred(np.asarray(second))
    return (one * other).sum(axis=-1) / np.square(one).sum(axis=-1)


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's correlation of two lists of numbers; NaN where one is constant."""
    a, b = first - first.mean(), second - second.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else math.nan


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[places]
