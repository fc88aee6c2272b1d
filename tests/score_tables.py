"""Score tables of tests: from rows of numbers, of random ones, and of the published figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from gappy import write_gappy
from published import PUBLISHED

from kvstages.analysis.published import published_sensitivities
from kvstages.cache.precision_grid import units
from kvstages.scores.table import COLUMNS, ScoreTable


def head_table(
    scores: Mapping[str, Sequence[Sequence[float]]],
    head_dim: int = 8,
    tokens: int = 4,
    unit: str = "head",
    value_width: int | None = None,
) -> ScoreTable:
    """From {precision: [L][H]} or, for unit keys-values, {precision: [L][2H]} (a head's keys, then its values); of
    layers from those of their heads."""
    kl = np.stack([np.asarray(rows, dtype=np.float64).ravel() for rows in scores.values()])
    rows = next(iter(scores.values()))
    heads = len(rows[0]) // (2 if unit == "keys-values" else 1)
    widths, own = (head_dim, value_width or head_dim), "head" if unit == "layer" else unit
    table = ScoreTable(len(rows), heads, own, tuple(scores), kl, kl * np.nan, widths, tokens, "made-up")
    return table.by_layer() if unit == "layer" else table


def published_table() -> ScoreTable:
    """The published single-head scores, 64-token caches."""
    return head_table(published_sensitivities(PUBLISHED), 64, 64)


def random_table(
    layers: int,
    heads: int,
    precisions: Sequence[str],
    unit: str = "head",
    seed: int = 0,
    widths: tuple[int, int] = (64, 64),
    tokens: int = 64,
) -> ScoreTable:
    """Scores that grow with the error of a precision's steps, give or take; errors that grow likewise."""
    random = np.random.default_rng(seed)
    count = len(units(layers, heads, unit))
    size = np.array([{"int8": 1e-6, "int4": 4e-4, "int3": 2e-3, "int2": 2e-2}[name] for name in precisions])[:, None]
    kl = size * random.lognormal(0, 1, (1, count)) * random.lognormal(0, 0.3, (len(precisions), count))
    error = np.sqrt(size) * random.lognormal(0, 0.5, (len(precisions), count))
    return ScoreTable(layers, heads, unit, tuple(precisions), kl, error, widths, tokens, "made-up")


def write_sensitivities(
    path: Path, precisions: Sequence[str], layers: int = 3, source: str = "measured", seed: int = 0
) -> None:
    """A sensitivity table of heads, keys and values, 2 heads a layer: the columns that allocation reads."""
    rows = []
    for unit in ("head", "keys-values"):
        table = random_table(layers, 2, precisions, unit, seed)
        for index, place in enumerate(table.units):
            for number, precision in enumerate(precisions):
                scores = float(table.kl[number, index]), float(table.error[number, index])
                rows.append((*place, precision, *scores, source, "one-pass", "float32"))
    write_gappy(path, dict(zip(COLUMNS, zip(*rows, strict=True), strict=True)))
