"""The grid of an adaptation's settings: which row is chosen, and reading it back.

settings.csv has a row for each combination, measured on the reserved window (kvstages/measure/settings_grid.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstages.files.read import read_columns

SETTINGS = ["steps", "learning_rate", "beta"]


def choose(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Those rows as columns, with ``chosen``: 1 for the trained row of the least mean_kl, 0 for the others.

    Of equal ones the one with fewer steps is chosen, then the smaller learning rate, then the larger β. The model
    before training (steps 0) is there to compare with, and is never chosen. ValueError where nothing was trained.
    """
    trained = [row for row in rows if row["steps"]]
    if not trained:
        raise ValueError("a grid without a training, expected one at least")
    best = min(trained, key=lambda row: (row["mean_kl"], row["steps"], row["learning_rate"], -row["beta"]))
    return {
        **{name: [row[name] for row in rows] for name in rows[0]},
        "chosen": [int(row is best) for row in rows],
    }


def read_chosen(path: Path) -> tuple[int, float, float]:
    """Steps, learning rate and β of the chosen row; ValueError names ``path`` unless there is exactly one."""
    table = read_columns(path, [*SETTINGS, "chosen"])
    chosen = table[table["chosen"] == 1]
    if len(chosen) != 1:
        raise ValueError(f"{path}: {len(chosen)} rows are chosen, expected one")
    row = chosen.iloc[0]
    return int(row["steps"]), float(row["learning_rate"]), float(row["beta"])
