"""Scores from gradients that were checked by measuring, and whether the model is in their regime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.files.read import read_columns
from kvstages.scores.second_order import OFF
from kvstages.tables.notes import page_title
from kvstages.tables.page import Column, Section, count, decimal, divergence, page

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=16,
    title="Scores beyond second order",
    inputs={"checks": Input("screening_check_files", "checks.csv")},
)

COLUMNS = [
    "first_exact", "checked", "checked_off", "marked", "marked_measured", "median_ratio", "least_ratio",
    "largest_ratio", "threshold",
]  # fmt: skip
NOTES = [
    "A score from gradients is a KL to second order. Of keys and values apart, at the precisions of the screening, a "
    f"sample was measured by itself. A score is off where the measured KL is more than {OFF} times larger or smaller, "
    "by more than two standard errors.",
    "From the threshold on at least half of the sampled scores are off: all scores above it are marked, and the "
    "largest of them were measured. Allocation uses measured scores where there are some.",
    "First token exact: the scheme keeps the first token in 16 bits. Where it does not, quantizing the first key can "
    "move an attention sink to another token, which no second-order score sees.",
]


def make(checks: Path, study: str | None = None) -> tuple[pd.DataFrame, str]:
    """A row for schemes that keep the first token exact, and one for the others; a warning where scores fail."""
    import pandas as pd

    numbers = ["first_exact", "score"]
    optional = ["measured_kl", "ratio", "is_off", "threshold"]
    found = read_columns(checks, numbers, ["why", "precision"], optional)
    rows = []
    for first_exact, own in found.groupby("first_exact", sort=True):
        sampled, marked = (
            own[own["why"] == "sample"],
            own[own["threshold"].notna() & (own["score"] >= own["threshold"])],
        )
        ratios = sampled["ratio"]
        rows.append(
            (
                int(first_exact), len(sampled), int(sampled["is_off"].sum()), len(marked),
                int(marked["measured_kl"].notna().sum()), ratios.median(), ratios.min(), ratios.max(),
                own["threshold"].min(),
            )
        )  # fmt: skip
    table = pd.DataFrame(rows, columns=COLUMNS)
    columns = [
        Column("schemes", "first", str),
        Column("sampled", "checked", count),
        Column("off", "checked_off", count),
        Column("marked", "marked", count),
        Column("of these measured", "marked_measured", count),
        Column("measured KL / score, median", "median_ratio", decimal(2)),
        Column("least", "least_ratio", decimal(2)),
        Column("largest", "largest_ratio", decimal(2)),
        Column("threshold (nats)", "threshold", divergence),
    ]
    said = table.assign(first=table["first_exact"].map({0: "first token quantized", 1: "first token exact"}))
    return table, page(
        page_title(study, "scores beyond second order"),
        [Section("Scores from gradients against measured KL", columns, said)],
        [*warnings(table), *NOTES],
    )


def warnings(table: pd.DataFrame) -> list[str]:
    """What a reader must know before trusting scores from gradients, a line each; none where they hold."""
    found = []
    for row in table.itertuples(index=False):
        left = row.marked - row.marked_measured
        if row.marked:
            kind = "keep the first token exact" if row.first_exact else "quantize the first token"
            rest = f"; {left} of them were not measured, so their proxies are not to be trusted" if left else ""
            found.append(
                f"Warning: this model leaves the second-order regime. Of schemes that {kind}, {row.marked} scores from "
                f"{divergence(row.threshold)} nats up are beyond it{rest}."
            )
    return found
