"""Every policy of the frontier: bytes, joint KL and agreement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.analysis.joint_table import UNIFORM, read_joint, with_figures
from kvstages.tables.notes import PROXY_NOTE, joint_notes, page_title
from kvstages.tables.page import Column, Section, count, decimal, divergence, factor, page, percent

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=6,
    title="Frontier",
    inputs={
        "frontier": Input("frontier_files", "joint.csv"),
    },
)

COPIED = ["recipe", "policy", "allocator", "sensitivity", "unit", "precisions", "bytes", "compression", "proxy"]
MEASURED = [f"{name}{end}" for name in ("mean_kl", "agreement") for end in ("", "_low", "_high")]


def make(frontier: Path, study: str | None = None) -> tuple[pd.DataFrame, str]:
    """One row a policy of a joint.csv: families in the order of the file, each by falling bytes."""
    joint = read_joint(frontier)
    table = with_figures(joint)
    families = list(dict.fromkeys(table["recipe"]))
    table = table.sort_values(
        ["recipe", "bytes"], key=lambda values: values.map(families.index) if values.name == "recipe" else -values
    )[[*COPIED, *MEASURED, "cross_entropy"]].reset_index(drop=True)
    columns = [
        Column("bytes", "bytes", count),
        Column("compression", "compression", factor),
        Column("proxy (nats)", "proxy", divergence),
        Column("joint KL (nats)", "mean_kl", divergence, interval=True),
        Column("agreement", "agreement", percent, interval=True),
        Column("cross entropy (nats)", "cross_entropy", decimal(4)),
    ]
    sections = []
    for recipe in families:
        own = table[table["recipe"] == recipe]
        first = own.iloc[0]
        about = f"{first['allocator']}, scores {first['sensitivity']}, unit {first['unit']}, {first['precisions']}"
        if recipe == UNIFORM:
            sections.append(Section(recipe, [Column("policy", "policy", str), *columns], own))
        else:
            sections.append(Section(f"{recipe}: {about}", columns, own))
    notes = [*joint_notes(joint.policies, joint.metrics["mean_kl"].shape[1]), PROXY_NOTE]
    return table, page(page_title(study, "frontier"), sections, notes)
