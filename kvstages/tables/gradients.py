"""How near scores from gradients come to measured ones, by part, precision and number of probes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.analysis.gradient_accuracy import LEAST_CORRELATION, RATIOS, accuracy, parting
from kvstages.analysis.labels import PART_LABELS
from kvstages.tables.notes import page_title
from kvstages.tables.page import Column, Section, count, decimal, page, percent

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=8,
    title="Scores from gradients",
    inputs={
        "measured": Input("checked_score_files", "MEASURED.csv"),
        "projections": Input("projection_files", "FILE", "Projections of the stage gradients."),
    },
)

NOTES = [
    "The rank correlation is Spearman's, of estimated and measured scores over the units (heads, or their keys or "
    "values) whose measured score is above its floor; of a study that measures a sample of heads, over these. The "
    "ratio is estimated / measured; quantiles are over the units. Brackets hold 95 % intervals (bootstrap over units).",
    "Rows with fewer probes take the same probes in disjoint groups: the rank correlation is the mean over the groups, "
    "and quantiles are over units and groups.",
    "The error of the probes is the standard error of a score on the same text, relative to it, median over the units. "
    "It falls with the square root of the probes. A ratio that stays away from 1 with many probes says that the change "
    "is too large for the second order.",
]


def make(measured: Path, projections: Path, study: str | None = None) -> tuple[pd.DataFrame, str]:
    """Rows by part, precision and number of probes; the page has those of all probes first."""
    table = accuracy(measured, projections)
    shown = table.assign(part=table["part"].map(PART_LABELS))
    names = [Column("of a head", "part", str), Column("precision", "precision", str)]

    def figures(interval: bool) -> list[Column]:
        return [
            Column("rank correlation", "rank_correlation", decimal(3), interval=interval),
            Column("median of the ratio", "median_ratio", decimal(2), interval=interval),
            *(
                Column(f"{said} of the ratio", f"{column}_ratio", decimal(2))
                for column, said in (("p5", "5 %"), ("p95", "95 %"))
            ),
            Column("error of the probes", "probe_error", percent),
        ]

    all_probes = table["probes"].max()
    sections = [
        Section(
            f"Estimated and measured scores, all {'' if table.empty else f'{all_probes} '}probes",
            [*names, Column("units", "units", count), *figures(True)],
            shown[shown["probes"] == all_probes],
        ),
        Section("By the number of probes", [*names, Column("probes", "probes", count), *figures(False)], shown),
    ]
    apart = parting(table)
    warning = [
        f"Warning: at {', '.join(apart)} the scores from gradients part from the measured ones (rank correlation below "
        f"{LEAST_CORRELATION}, or median ratio outside {RATIOS[0]} to {RATIOS[1]}). Policies of such scores are worth "
        "less; measure every unit (sensitivity: measured), or leave the precision out."
    ]
    return table, page(page_title(study, "scores from gradients"), sections, [*(warning if apart else []), *NOTES])
