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
    return correlations_of_ranks(centred_ranks(first), centred_ranks(second))


def centred_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks in lists [..., N], less their mean; equal values by their order."""
    order = np.argsort(np.ascontiguousarray(values), axis=-1, kind="stable")
    places = np.arange(order.shape[-1]) - (order.shape[-1] - 1) / 2
    ranks = np.empty(order.shape)
    np.put_along_axis(ranks, order, np.broadcast_to(places, order.shape), axis=-1)
    return ranks


def correlations_of_ranks(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """``rank_correlations`` of lists of which ``centred_ranks`` are known: [...]."""
    return np.vecdot(first, second) / np.vecdot(first, first)


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's correlation of two lists of numbers; NaN where one is constant."""
    a, b = first - first.mean(), second - second.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else math.nan


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[places]
