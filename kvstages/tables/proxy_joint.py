"""Proxy against joint KL: how well it orders policies, and their ratio by its size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.additivity import INPUTS, additivity, summarise
from kvstages.analysis.entries import Entry
from kvstages.analysis.joint_table import read_joint
from kvstages.tables.notes import PROXY_NOTE, joint_notes, page_title
from kvstages.tables.page import Column, Section, count, decimal, divergence, page

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=7,
    title="Proxy against joint KL",
    inputs=INPUTS,
)

NOTES = [
    "Rank correlation: Spearman's, of the policies' proxies with their joint KL. Ratio: joint KL / proxy, its "
    "quantiles over the policies. Both by the source of the scores, for all policies and for each decade of the proxy: "
    "scores add up where the ratio is the same at every size, and the windows agree where it is 1.",
    "Rows random are of the random policies of one budget: they take nearly the same bytes, so only the scores tell "
    "them apart. Policies of different sizes differ by orders of magnitude, and nearly any sum of scores orders those.",
    "The policies are those of the comparison at equal bytes and of the frontier, policies alike counted once. Random "
    "policies of one budget have nearly the same bytes, and proxies close together: within a decade they lower the "
    "correlation.",
]


def make(tables: Sequence[Path], study: str | None = None) -> tuple[pd.DataFrame, str]:
    """Rows by source of the scores and size of the proxy, from all policies of the joint.csv files given."""
    found = additivity(tables)
    table = summarise(found)
    columns = [
        Column("scores", "sensitivity", str),
        Column("proxies (nats)", "proxies", str),
        Column("policies", "policies", count),
        Column("smallest proxy", "smallest_proxy", divergence),
        Column("largest proxy", "largest_proxy", divergence),
        Column("rank correlation", "rank_correlation", decimal(3), interval=True),
        *(
            Column(f"ratio, {name}", f"{column}_ratio", decimal(3))
            for column, name in (("p5", "5 %"), ("median", "median"), ("p95", "95 %"))
        ),
    ]
    notes = [*joint_notes(read_joint(tables[0]).policies, found.kl.shape[1]), *NOTES, PROXY_NOTE]
    section = Section("Joint KL and proxy", columns, table, ("proxies", "all"))
    return table, page(page_title(study, "proxy against joint KL"), [section], notes)
