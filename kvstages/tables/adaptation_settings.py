"""The settings of adaptation that were tried on the reserved window."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.files.read import read_columns
from kvstages.tables.notes import page_title
from kvstages.tables.page import Column, Section, count, decimal, divergence, page, percent

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=11,
    title="Settings of adaptation on the reserved window",
    inputs={"settings": Input("grid_files", "ARM/settings.csv", several=True)},
)

MEASURES = [
    "mean_kl", "agreement", "own_kl", "own_agreement", "cross_entropy", "bf16_mean_kl", "bf16_cross_entropy"
]  # fmt: skip
NOTES = [
    "Every combination was trained on the adaptation window, with the seed given, and measured on the reserved window "
    "alone. The first row of an arm is the model before training.",
    "Chosen (in bold): the least KL to the original model under the policy of training. These settings, and no others, "
    "were measured on the validation window.",
]


def make(settings: Sequence[Path], study: str | None = None) -> tuple[pd.DataFrame, str]:
    """Rows by arm, learning rate, β and steps, as they were tried; an arm is the folder of its file."""
    import pandas as pd

    numbers = ["learning_rate", "beta", "steps", *MEASURES, "seed", "chosen"]
    parts = []
    for path in settings:
        part = read_columns(path, numbers, ["policy", "window"])
        part.insert(0, "arm", path.absolute().parent.name)
        parts.append(part[["arm", "policy", *numbers, "window"]])
    table = pd.concat(parts, ignore_index=True)
    columns = [
        Column("arm", "arm", str),
        Column("policy", "policy", str),
        Column("learning rate", "learning_rate", divergence),
        Column("β", "beta", divergence),
        Column("steps", "steps", count),
        Column("KL to the original (nats)", "mean_kl", divergence),
        Column("agreement with it", "agreement", percent),
        Column("KL to its own BF16 (nats)", "own_kl", divergence),
        Column("cross entropy (nats)", "cross_entropy", decimal(4)),
        Column("BF16: KL to the original", "bf16_mean_kl", divergence),
        Column("BF16: cross entropy", "bf16_cross_entropy", decimal(4)),
    ]
    shown = table.assign(chosen=table["chosen"].map({0: "", 1: "chosen"}))
    sections = [
        Section(f"Arm {arm}", columns, rows, ("chosen", "chosen")) for arm, rows in shown.groupby("arm", sort=False)
    ]
    return table, page(page_title(study, "settings of adaptation"), sections, NOTES)
