"""A policy in the words of engines: bytes, joint KL, and what the best setting of the engine would have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.engines import engines as compare
from kvstages.analysis.entries import Entry, Input
from kvstages.analysis.joint_table import ENDS, read_joint
from kvstages.tables.notes import joint_notes, page_title
from kvstages.tables.page import Column, Section, count, decimal, divergence, factor, page, percent

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=10,
    title="Engines",
    inputs={"joint": Input("engine_joint_files", "export/joint.csv")},
)

COPIED = [
    "engine",
    "kind",
    "policy",
    "allocator",
    "sensitivity",
    "unit",
    "precisions",
    "limit",
    "bytes",
    "compression",
    "proxy",
]
MEASURED = ["mean_kl", "times_less", "agreement"]
NOTES = [
    "Projected: the setting of the engine that is nearest to the policy and gives no unit fewer bits, with the "
    "engine's own quantizer. At the bytes of that: allocated, the setting of the engine of least proxy; layer, the "
    "least proxy where each layer takes any format of the engine, keys and values alike, whether or not the engine can "
    "express that; own, the policy's allocator on its own scores and ladder, which it cannot. Allocated-own: the "
    "setting of least proxy at the bytes of the policy itself. Times less KL: joint KL of the policy of the same "
    "bytes (the projected one of the same engine, for allocated-own the policy itself) over that of the row, paired "
    "over the same blocks; below 1 the row has more.",
    "The limit is in the engine's own layout; bytes count static scales too, which engines keep with the weights. The "
    "proxies of an engine's formats are from gradients. What engines do otherwise than here is in docs/engines.md.",
]


def make(joint: Path, study: str | None = None) -> tuple[pd.DataFrame, str]:
    """One row for each policy of a set of the stage engine-set, in its order."""
    found = read_joint(joint)
    table = compare(joint)[[*COPIED, *(f"{name}{end}" for name in MEASURED for end in ("", *ENDS)), "cross_entropy"]]
    columns = [
        Column("policy", "kind", str),
        Column("allocator", "allocator", str),
        Column("unit", "unit", str),
        Column("limit", "limit", count),
        Column("bytes", "bytes", count),
        Column("compression", "compression", factor),
        Column("proxy (nats)", "proxy", divergence),
        Column("joint KL (nats)", "mean_kl", divergence, interval=True),
        Column("times less KL at equal bytes", "times_less", decimal(2), interval=True),
        Column("agreement", "agreement", percent, interval=True),
    ]
    own = table[table["engine"].isna()]
    sections = [Section(f"The policy {own['policy'].iloc[0]}", columns, own)]
    for engine, rows in table[table["engine"].notna()].groupby("engine", sort=False):
        sections.append(Section(f"{engine}: {rows['precisions'].iloc[0]}", columns, rows))
    documents = found.documents or []
    notes = [*joint_notes(found.policies, found.metrics["mean_kl"].shape[1], len(set(documents))), *NOTES]
    return table, page(page_title(study, "engines"), sections, notes)
