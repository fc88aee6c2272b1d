"""Every policy of the frontier: bytes, joint KL and agreement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry
from kvstages.analysis.frontier import INPUTS
from kvstages.analysis.frontier import frontier as compare
from kvstages.analysis.joint_table import ARITHMETIC, ENDS, UNIFORM
from kvstages.tables.notes import EXCESS_NOTE, PROXY_NOTE, joint_notes, page_title
from kvstages.tables.page import Column, Section, count, divergence, factor, page, percent, share

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=6,
    title="Frontier",
    inputs=INPUTS,
)

COPIED = [
    "compute_dtype", "recipe", "policy", "allocator", "sensitivity", "unit", "precisions", "limit", "bytes",
    "compression", "proxy",
]  # fmt: skip
MEASURED = ["mean_kl", "kl_reduction", "excess_kl", "excess_reduction", "agreement"]
NOTES = [
    "Limit: the bytes that a policy was made for. Less KL is against the published recipe's policy of the same limit,"
    " paired over the same blocks; uniform policies are compared at their own bytes. Byte totals are the same on "
    "every machine; the published recipe's policy is not, for its BF16 scores are mostly rounding.",
    EXCESS_NOTE,
]


def make(frontier: Sequence[Path], study: str | None = None) -> tuple[pd.DataFrame, str]:
    """One row for each policy of the joint.csv files: arithmetics in their order, families, falling limits."""
    import pandas as pd

    joints, table = compare(frontier)
    table = table[[*COPIED, *(f"{name}{end}" for name in MEASURED for end in ("", *ENDS)), "cross_entropy"]]
    columns = [
        Column("limit", "limit", count),
        Column("bytes", "bytes", count),
        Column("compression", "compression", factor),
        Column("proxy (nats)", "proxy", divergence),
        Column("joint KL (nats)", "mean_kl", divergence, interval=True),
        Column("less KL than published", "kl_reduction", share, interval=True),
        Column("excess KL (nats)", "excess_kl", divergence, interval=True),
        Column("less excess KL", "excess_reduction", share, interval=True),
        Column("agreement", "agreement", percent, interval=True),
    ]
    sections = []
    for (dtype, recipe), own in table.groupby(["compute_dtype", "recipe"], sort=False):
        first = own.iloc[0]
        about = f"{first['allocator']}, scores {first['sensitivity']}, unit {first['unit']}, {first['precisions']}"
        said = ARITHMETIC[dtype]
        if recipe == UNIFORM:
            sections.append(Section(f"{recipe}, {said}", [Column("policy", "policy", str), *columns[1:]], own))
        else:
            sections.append(Section(f"{recipe}, {said}: {about}", columns, own))
    policies = pd.concat([joint.policies for joint in joints])
    documents = joints[0].documents or []
    notes = [
        *joint_notes(policies, joints[0].metrics["mean_kl"].shape[1], len(set(documents))),
        *NOTES,
        PROXY_NOTE,
    ]
    return table, page(page_title(study, "frontier"), sections, notes)
