"""Every recipe at the same bytes, against the published one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.analysis.equal_bytes import equal_bytes
from kvstages.analysis.joint_table import PUBLISHED, RANDOM, read_joint
from kvstages.tables.notes import PROXY_NOTE, joint_notes, page_title
from kvstages.tables.page import Column, Section, count, decimal, divergence, factor, page, percent

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=5,
    title="Recipes at equal bytes",
    inputs={
        "comparisons": Input("comparison_files", "BUDGET/joint.csv", several=True),
    },
    beside=("comparison_set_files",),
)

NOTES = [
    "Less KL and the change of agreement are paired: both policies are measured on the same blocks, and these are "
    "resampled for both together. Where the interval holds 0, the data do not show a difference.",
    "McNemar's p is that of the exact two-sided test that the recipe and the published one agree equally often. It "
    "takes positions as independent; the interval over blocks is safer.",
    "Published: greedy on scores measured in BF16, whole heads, INT8 and INT4. Less KL: 1 − joint KL / that of the "
    "published recipe at the same budget; below 0 is more KL.",
    "Equal bytes: each budget is the KL budget of the published recipe, in nats of its proxy. Every other recipe takes "
    "the bytes of its policy or less, by less than what one unit's move saves.",
    "Random policies are drawn uniformly from all that take those bytes. The row random is the mean over those that "
    "were measured, its interval that of this mean over blocks. The last two columns are shares: of these, those with "
    "less joint KL than the recipe; and of all that were drawn, those with a smaller proxy by the same scores.",
]


def make(comparisons: Sequence[Path], study: str | None = None) -> tuple[pd.DataFrame, str]:
    """One row for each budget and recipe of the comparisons' joint.csv; see ``equal_bytes.equal_bytes``."""
    table = equal_bytes(comparisons)
    columns = [
        Column("recipe", "recipe", str),
        Column("bytes", "bytes", count),
        Column("compression", "compression", factor),
        Column("proxy (nats)", "proxy", divergence),
        Column("joint KL (nats)", "mean_kl", divergence, interval=True),
        Column("less KL than published", "kl_reduction", share, interval=True),
        Column("agreement", "agreement", percent, interval=True),
        Column("change of agreement (points)", "agreement_difference", points, interval=True),
        Column("McNemar's p", "agreement_p", p_value),
        Column("random ones with less KL", "random_less_kl", percent),
        Column("drawn ones with less proxy", "drawn_less_proxy", percent),
    ]
    random = [
        Column("budget", "budget", str),
        Column("policies", "policies", count),
        Column("lowest joint KL", "lowest_kl", divergence),
        *(Column(name, f"{name}_kl", divergence) for name in ("p5", "p50", "p95")),
        Column("highest", "highest_kl", divergence),
    ]
    sections = [
        Section(f"Budget {budget} of the published recipe", columns, own, ("recipe", PUBLISHED))
        for budget, own in table.groupby("budget", sort=False)
    ]
    drawn = table[table["recipe"] == RANDOM]
    if len(drawn):
        sections.append(Section("Joint KL of the random policies (nats)", random, drawn))
    policies = read_joint(comparisons[0]).policies
    described = [
        f"{row.recipe}: {row.allocator}, scores {row.sensitivity}, unit {row.unit}, {row.precisions}"
        for row in table.drop_duplicates("recipe").itertuples()
    ]
    notes = [
        *joint_notes(policies, int(table["blocks"].iloc[0])),
        f"Recipes: {'; '.join(described)}.",
        *NOTES,
        PROXY_NOTE,
    ]
    return table, page(page_title(study, "recipes at equal bytes"), sections, notes)


def share(value: float) -> str:
    """A share as per cent with one decimal, and a real minus."""
    return f"{decimal(1)(100 * value)} %"


def p_value(value: float) -> str:
    """A p value with three decimals; never a plain 0."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def points(value: float) -> str:
    """A difference of shares, in percentage points."""
    return decimal(2)(100 * value)
