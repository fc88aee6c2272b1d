"""Result files of tests with made-up numbers: richer than what was published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from kvstages.files import write_json
from kvstages.sensitivity import SENSITIVITY_COLUMNS

# How much a score and a relative reconstruction error grow from INT8.
GROWTH = {"int8": 1.0, "int4": 329.0, "int3": 1800.0, "int2": 16129.0}


def sensitivity_table(
    source: str = "measured-float32",
    layers: int = 12,
    heads: int = 8,
    parts: Sequence[str] = ("kv",),
    precisions: Sequence[str] = ("int8", "int4"),
    floor: float | None = 1e-12,
    seed: int = 0,
) -> pd.DataFrame:
    """A gathered table: INT8 scores near 1e-7 that vary between heads, others as rounding theory has them."""
    random = np.random.default_rng(seed)
    rows = []
    for layer in range(layers):
        for head in range(heads):
            for part in parts:
                score = 1e-7 * random.lognormal(0, 1)
                for precision in precisions:
                    kl = score * GROWTH[precision] * random.lognormal(0, 0.1)
                    low = None if floor is None else floor * random.lognormal(0, 0.2)
                    rows.append({
                        "layer": layer, "head": head, "part": part, "precision": precision, "mean_kl": kl,
                        "standard_error": kl / 9, "blocks": 8, "floor_kl": low,
                        "bf16_step_kl": None if low is None else 1e-8, "below_floor": int(low is not None and kl < low),
                        "reconstruction_error": 1e-5 * GROWTH[precision], "source": source, "execution": "parallel",
                        "compute_dtype": source.removeprefix("measured-"),
                    })  # fmt: skip
    return pd.DataFrame(rows, columns=SENSITIVITY_COLUMNS)


def split_policy_file(path: Path) -> Path:
    """Policy of 2 x 2 heads in which keys and values differ in two of them."""
    grid = {"keys": [["bf16", "int8"], ["int4", "int2"]], "values": [["bf16", "int3"], ["int2", "int2"]]}
    write_json(path, {"policy": "exact-9000B", "precisions": grid})
    return path
