"""Calibration on one text against calibration on another: joint KL of each policy on each domain and block length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.analysis.domains import INPUTS, Place, read_domains
from kvstages.analysis.entries import Entry
from kvstages.analysis.joint_table import ENDS
from kvstages.tables.notes import INTERVAL_NOTE, STORAGE_NOTES, page_title, settings
from kvstages.tables.page import Column, Section, divergence, factor, page

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=17,
    title="Calibrated here, measured there",
    inputs=INPUTS,
)

NOTES = [
    "A row is where the scores of a policy come from, a column where the policy was measured. All policies of a budget "
    "are the exact allocator's, with the study's unit and precisions. Calibration and validation share no document.",
    "Blocks of every length are cut of the same tokens, so scores from longer blocks come from fewer of them.",
    "Ratio: KL of the row's policy over that of the policy which was calibrated on the column's own domain and length, "
    "paired over the same blocks. Above 1 it is what calibrating elsewhere costs. An interval that holds 1 says that "
    "these blocks do not tell the two apart.",
    "In braces: 95 % interval, bootstrap over the documents of the column's blocks, where there are at least 4. No "
    "interval covers other calibration blocks or other probes: a ratio also holds the errors of both policies' scores.",
]


def make(joints: Sequence[Path], study: str | None = None) -> tuple[pd.DataFrame, str]:
    """(table, page): a row for each budget, place of measuring and place of calibration."""
    measured, table = read_domains(joints)
    sections = []
    for budget, own in table.groupby("budget", sort=False):
        sections += [
            _matrix(f"Mean joint KL (nats), policies of {budget}", own, "mean_kl", divergence),
            _matrix(f"Over the KL of calibrating where it is measured, {budget}", own, "ratio", factor),
        ]
    how = f"Measured jointly with {settings(measured[0].policies.to_dict('records'))}, teacher-forced."
    storage = [note.format(tokens="the study's block") for note in STORAGE_NOTES]
    return table, page(
        page_title(study, "calibrated here, measured there"), sections, [how, *NOTES, INTERVAL_NOTE, *storage]
    )


def _matrix(caption: str, table: pd.DataFrame, name: str, write: Callable[[float], str]) -> Section:
    """A row for each place of calibration, a column for each place of measuring."""
    import pandas as pd

    rows: dict[Place, dict[str, Any]] = {}
    columns: dict[str, Column] = {}
    for row in table.to_dict("records"):
        here, made = (Place(row[f"{of}domain"], row[f"{of}length"]) for of in ("", "calibrated_"))
        columns[str(here)] = Column(f"on {here}", str(here), write, interval=True)
        cells = rows.setdefault(made, {"calibrated": str(made)})
        cells |= {f"{here}{end}": row[f"{name}{end}"] for end in ("", *ENDS)}
    return Section(
        caption, [Column("calibrated on", "calibrated", str), *columns.values()], pd.DataFrame(rows.values())
    )
