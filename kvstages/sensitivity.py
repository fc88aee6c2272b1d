"""The sensitivity table: one mean KL for each layer, head and precision, gathered from the sweeps of the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from kvstages import made
from kvstages.sweep_table import PRECISION_ORDER, SETTING, SWEEP_COLUMNS

SENSITIVITY_COLUMNS = ["layer", "head", "precision", "mean_kl", "standard_error", "blocks", *SETTING]


def read_table(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Read a CSV written here; ValueError names the file and a column that is missing or unexpected."""
    made.note(path)
    try:
        table = pd.read_csv(path)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a table ({error})") from error
    if list(table.columns) != list(columns):
        raise ValueError(f"{path}: columns {', '.join(table.columns)}; expected {', '.join(columns)}")
    return table


def gather(shards: Sequence[Path]) -> pd.DataFrame:
    """The sensitivity table of sweep shards: mean over the blocks and its standard error (nats).

    The standard error is that between blocks. ValueError if shards differ in how they were measured, a layer is
    missing or comes twice, or heads and precisions differ between layers.
    """
    table = pd.concat([read_table(shard, SWEEP_COLUMNS) for shard in shards], ignore_index=True)
    settings = table[SETTING].drop_duplicates()
    if len(settings) != 1:
        raise ValueError(f"the sweeps were measured in different ways: {settings.to_dict('records')}")
    layers = sorted(table["layer"].unique())
    if layers != list(range(len(layers))) or len(layers) != len(shards):
        raise ValueError(f"{len(shards)} sweeps hold the layers {[int(layer) for layer in layers]}, expected each once")
    repeated = table.duplicated(["layer", "head", "precision", "block"])
    grids = {tuple(map(tuple, rows[["head", "precision", "block"]].to_numpy())) for _, rows in table.groupby("layer")}
    if repeated.any() or len(grids) != 1:
        raise ValueError("the sweeps of the layers differ in heads, precisions or blocks")
    groups = table.groupby(["layer", "head", "precision"])["mean_kl"]
    gathered = groups.agg(
        mean_kl="mean",
        standard_error=lambda values: values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan,
        blocks="size",
    ).reset_index()
    order = gathered["precision"].map(PRECISION_ORDER.index)
    gathered = gathered.assign(order=order).sort_values(["layer", "head", "order"]).drop(columns="order")
    for key in SETTING:
        gathered[key] = settings.iloc[0][key]
    return gathered[SENSITIVITY_COLUMNS]


def read_scores(path: Path) -> dict[str, list[list[float]]]:
    """Scores {precision: [L][H]} in nats of a sensitivity table; ValueError names a head without a score."""
    table = read_table(path, SENSITIVITY_COLUMNS)
    if table.empty:
        raise ValueError(f"{path}: no scores, only a header")
    layers, heads = int(table["layer"].max()) + 1, int(table["head"].max()) + 1
    scores = {}
    for precision in (name for name in PRECISION_ORDER if (table["precision"] == name).any()):
        found = table[table["precision"] == precision].set_index(["layer", "head"])["mean_kl"]
        if not found.index.is_unique:
            raise ValueError(
                f"{path}: {precision} has two scores for layer, head {found.index[found.index.duplicated()][0]}"
            )
        missing = [
            (layer, head) for layer in range(layers) for head in range(heads) if (layer, head) not in found.index
        ]
        if missing:
            raise ValueError(f"{path}: no {precision} score for layer {missing[0][0]}, head {missing[0][1]}")
        scores[precision] = [[float(found[layer, head]) for head in range(heads)] for layer in range(layers)]
    return scores


def read_setting(path: Path) -> dict[str, str]:
    """How the scores of a sensitivity table were measured; ValueError if not all in one way."""
    settings = read_table(path, SENSITIVITY_COLUMNS)[SETTING].drop_duplicates().to_dict("records")
    if len(settings) != 1:
        raise ValueError(f"{path}: scores measured in {len(settings)} ways, expected one")
    return settings[0]
