"""Quantizer schemes beside each other: bits, proxy, joint KL, and what allocation adds to the best of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry
from kvstages.analysis.screening import INPUTS, blocks_of, documents_of, screening
from kvstages.policies.screening import BOTH, KEYS, RECOMMENDED, VALUES
from kvstages.tables.notes import PROXY_NOTE, joint_notes, page_title
from kvstages.tables.page import Column, Section, decimal, divergence, factor, page, percent

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=15,
    title="Quantizer schemes",
    inputs=INPUTS,
)

PARTS = {BOTH: "Keys and values", KEYS: "Keys alone, values in BF16", VALUES: "Values alone, keys in BF16"}
NOTES = [
    "Bits: mean over the decoding steps of a block of what is quantized, with scales, zero points, exact tokens and "
    "groups that are not full; what is stored once a cache is left out. Bits at the end: everything that the cache of "
    "a whole block stores, what is stored once included; a budget in bits limits these.",
    "Times less KL: that of the published quantizer at the same payload bits on the same part, or of the published "
    "recipe at the same budget, over that of the row, paired over the same blocks.",
    "Ceiling: arithmetic over geometric mean of the scores of keys and values apart. Where KL falls as 4^-bits, no "
    "allocation has a KL lower by more than this factor at the same bits. Errors of scores make it a little larger.",
    "Recommended: the exact allocator, keys and values apart, on the scheme whose policy of the budget has the least "
    "proxy on the calibration window. exact-published: the same on the published quantizer, so what allocation alone "
    "buys. published: greedy, whole heads, INT8 and INT4, and below INT4 also INT3 and INT2.",
    "Schemes are explained in docs/schemes.md.",
]


def make(joint: Path, policies: Path, scores: Path, study: str | None = None) -> tuple[pd.DataFrame, str]:
    """One row for each policy that the screening measured, in the order of its set."""
    measured, table = screening(joint, policies, scores)
    kl = [
        Column("bits", "bits", decimal(2)),
        Column("at the end", "bits_at_end", decimal(2)),
        Column("proxy (nats)", "proxy", divergence),
        Column("joint KL (nats)", "mean_kl", divergence, interval=True),
        Column("agreement", "agreement", percent, interval=True),
        Column("compared with", "baseline", str),
        Column("times less KL", "times_less", factor, interval=True),
    ]
    sections = []
    for recipe, caption in PARTS.items():
        own = table[table["recipe"] == recipe].sort_values(["payload_bits", "mean_kl"], ascending=[False, True])
        columns = [Column("scheme", "scheme", str), *kl, Column("ceiling of allocation", "ceiling", factor)]
        sections.append(Section(caption, columns, own))
    for budget, own in table[table["budget"].notna()].groupby("budget", sort=False):
        columns = [Column("recipe", "recipe", str), Column("scheme", "scheme", str), *kl]
        sections.append(Section(f"Recipes at {budget}", columns, own, ("recipe", RECOMMENDED)))
    notes = [*joint_notes(measured.policies, blocks_of(measured), documents_of(measured)), *NOTES, PROXY_NOTE]
    return table, page(page_title(study, "quantizer schemes"), sections, notes)
