"""The sensitivity table: a mean KL for each layer, head, part and precision, gathered from the sweeps of the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.files import ledger
from kvstages.files.read import check_numbers
from kvstages.scores.columns import (
    BF16_STEP,
    FLOOR,
    SCORED,
    SENSITIVITY_COLUMNS,
    SETTING,
    SWEEP_COLUMNS,
    UNIT,
    precision_rank,
)

if TYPE_CHECKING:
    import pandas as pd

TEXTS = ("part", "precision", *SETTING)


def read_table(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Read a CSV written here; ValueError names the file and a column that is missing or unexpected."""
    import pandas as pd

    ledger.note(path)
    try:
        table = pd.read_csv(path)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a table ({error})") from error
    if list(table.columns) != list(columns):
        raise ValueError(f"{path}: columns {', '.join(table.columns)}; expected {', '.join(columns)}")
    check_numbers(path, table, [column for column in columns if column not in TEXTS])
    return table


def gather(shards: Sequence[Path], source: str, sample: bool = False) -> pd.DataFrame:
    """The sensitivity table of sweep shards: mean over the blocks and its standard error between blocks (nats).

    A score is the KL that an intervention adds to that of the sweep's base (0 where the base is the reference). Control
    interventions become the columns ``floor_kl`` and ``bf16_step_kl`` of the same head and part, and a score below its
    floor is marked (docs/method.md, "Floor and control interventions"). ``source`` names the table. ValueError if
    shards differ in how they were measured or in their interventions, or if a layer is missing or comes twice. A
    ``sample`` has some layers, and not the same heads of each.
    """
    import pandas as pd

    table = pd.concat([read_table(shard, SWEEP_COLUMNS) for shard in shards], ignore_index=True)
    settings = table[SETTING].drop_duplicates()
    if len(settings) != 1:
        raise ValueError(f"the sweeps were measured in different ways: {settings.to_dict('records')}")
    layers = sorted(table["layer"].unique())
    if (layers != list(range(len(layers))) and not sample) or len(layers) != len(shards):
        raise ValueError(f"{len(shards)} sweeps hold the layers {[int(layer) for layer in layers]}, expected each once")
    intervention = ["head", "part", "precision", "block"]
    repeated = table.duplicated(["layer", *intervention])
    by = ["layer", "head"] if sample else ["layer"]
    compared = intervention[len(by) - 1 :]
    grids = {tuple(map(tuple, rows[compared].to_numpy())) for _, rows in table.groupby(by)}
    if repeated.any() or len(grids) != 1:
        raise ValueError("the sweeps of the layers differ in heads, parts, precisions or blocks")
    table["added_kl"] = table["mean_kl"] - table["base_kl"]
    gathered = (
        table.groupby(["layer", "head", "part", "precision"])
        .agg(
            mean_kl=("added_kl", "mean"),
            standard_error=(
                "added_kl",
                lambda values: values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan,
            ),
            blocks=("added_kl", "size"),
            reconstruction_error=("reconstruction_error", "mean"),
        )
        .reset_index()
    )
    for precision, column in ((FLOOR, "floor_kl"), (BF16_STEP, "bf16_step_kl")):
        control = gathered[gathered["precision"] == precision].rename(columns={"mean_kl": column})
        gathered = gathered[gathered["precision"] != precision]
        gathered = gathered.merge(control[[*UNIT, column]], on=UNIT, how="left")
    gathered["below_floor"] = (gathered["mean_kl"] < gathered["floor_kl"]).astype(int)
    gathered["source"] = source
    for key in SETTING:
        gathered[key] = settings.iloc[0][key]
    order = sorted(gathered["precision"].unique(), key=precision_rank)
    ranks = {"part": SCORED.index, "precision": order.index}
    return gathered.sort_values(
        [*UNIT, "precision"], key=lambda column: column.map(ranks[column.name]) if column.name in ranks else column
    )[SENSITIVITY_COLUMNS]
