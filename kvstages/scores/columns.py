"""Columns of the tables of scores, and the table of one layer's sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstages.cache.precision_grid import LAYER, PARTS
from kvstages.cache.precisions import size_rank

SETTING = ["execution", "compute_dtype"]
SWEEP_COLUMNS = ["layer", "head", "part", "precision", "block", "mean_kl", "base_kl", "reconstruction_error", *SETTING]
# The control interventions come after the precisions (docs/method.md, "Floor and control interventions").
FLOOR, BF16_STEP = "compute-step", "bf16-step"
CONTROLS = (FLOOR, BF16_STEP)

# What has a score: the parts of a head, and a layer as a whole, whose head is 0.
SCORED = (*PARTS, LAYER)

Values = Mapping[tuple[str, str], Sequence[Sequence[float]]]


def changes(parts: Sequence[str], precisions: Sequence[str]) -> list[tuple[str, str]]:
    """Every part at every precision, in the order of the table."""
    tried = sorted(dict.fromkeys(precisions), key=precision_rank)
    return [(part, precision) for part in SCORED if part in parts for precision in tried]


def precision_rank(name: str) -> tuple[int, int, str]:
    """Sort key of precisions and controls in tables: from most bytes to fewest, then the controls."""
    return (1, CONTROLS.index(name), name) if name in CONTROLS else (0, *size_rank(name))


def sweep_table(
    layer: int,
    kl: Values,
    base_kl: Sequence[float],
    error: Values,
    setting: Mapping[str, str],
    heads: Sequence[int] | None = None,
) -> dict[str, list[Any]]:
    """Columns of one layer's sweep, sorted by head, part, precision and block; of some ``heads`` only, None: of all.

    ``kl`` and ``error``: {(part, precision): [H, B]}, of a whole layer [1, B]: mean KL in nats and relative squared
    error; ``base_kl`` [B].
    """
    order = sorted(kl, key=lambda change: (SCORED.index(change[0]), precision_rank(change[1])))
    every = range(max(map(len, kl.values()))) if heads is None else sorted(set(heads))
    rows = [
        (layer, head, *change, block, float(value), float(base), float(wrong), *(setting[key] for key in SETTING))
        for head in every
        for change in order
        if head < len(kl[change])
        for block, (value, base, wrong) in enumerate(zip(kl[change][head], base_kl, error[change][head], strict=True))
    ]
    return {name: [row[index] for row in rows] for index, name in enumerate(SWEEP_COLUMNS)}


UNIT = ["layer", "head", "part"]


SENSITIVITY_COLUMNS = [
    *UNIT,
    "precision",
    "mean_kl",
    "standard_error",
    "blocks",
    "floor_kl",
    "bf16_step_kl",
    "below_floor",
    "reconstruction_error",
    "source",
    *SETTING,
]
