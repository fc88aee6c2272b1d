"""The table that one layer's sweep is written as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SETTING = ["execution", "arithmetic", "dense_storage"]
SWEEP_COLUMNS = ["layer", "head", "precision", "block", "mean_kl", *SETTING]
PRECISION_ORDER = ("int8", "int4")


def sweep_table(
    layer: int, kl: Mapping[str, Sequence[Sequence[float]]], setting: Mapping[str, str]
) -> dict[str, list[Any]]:
    """Columns of one layer's sweep, sorted by head, precision and block, from {precision: mean KL in nats [H, B]}."""
    rows = [
        (layer, head, precision, block, float(value), *(setting[key] for key in SETTING))
        for head in range(len(next(iter(kl.values()))))
        for precision in sorted(kl, key=PRECISION_ORDER.index)
        for block, value in enumerate(kl[precision][head])
    ]
    return {name: [row[index] for row in rows] for index, name in enumerate(SWEEP_COLUMNS)}
