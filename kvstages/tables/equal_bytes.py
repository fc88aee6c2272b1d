"""Every recipe at the same bytes, against the published one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.analysis.entries import Entry
from kvstages.analysis.equal_bytes import INPUTS, equal_bytes
from kvstages.analysis.joint_table import ARITHMETIC, ENDS, PUBLISHED, RANDOM, UNIFORM
from kvstages.tables.notes import EXCESS_NOTE, PROXY_NOTE, joint_notes, page_title
from kvstages.tables.page import Column, Section, count, decimal, divergence, factor, page, percent, share

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=5,
    title="Recipes at equal bytes",
    inputs=INPUTS,
    beside=("comparison_set_files",),
)

NOTES = [
    "Every recipe is measured in each arithmetic, against the unquantized cache in that arithmetic (KL) and beyond it"
    " from the FP32 model (excess KL). Rank: places among the recipes by these measures, in their order; 1 has the "
    "least. Uniform policies take their own bytes and have no rank.",
    EXCESS_NOTE,
    "Less KL and the change of agreement are paired: both policies are measured on the same blocks, and these are "
    "resampled for both together. Where the interval holds 0, the data do not show a difference.",
    "McNemar's p is that of the exact two-sided test that the recipe and the published one agree equally often. It "
    "takes positions as independent; the intervals are safer.",
    "Published: greedy, whole heads, INT8 and INT4, on scores measured in BF16, or from gradients where a study "
    "measures no others. Less KL: 1 − joint KL / that of the published recipe at the same budget; below 0 is more KL.",
    "Equal bytes: each budget is that of the published recipe, in bytes (B) or in nats of its proxy. Every other "
    "recipe takes the bytes of its policy or less, by less than what one unit's move saves. A budget in nats of BF16 "
    "scores ends at other bytes on another processor, for these scores are mostly rounding.",
    "Random policies are drawn uniformly from all that take those bytes. The row random is the mean over those that "
    "were measured, its interval that of this mean. The last two columns are shares: of these, those with less joint "
    "KL than the recipe; and of all that were drawn, those with a smaller proxy by the same scores.",
]


def make(comparisons: Sequence[Path], study: str | None = None) -> tuple[pd.DataFrame, str]:
    """One row for each budget, arithmetic and recipe of the comparisons' joint.csv; see ``equal_bytes.equal_bytes``."""
    import pandas as pd

    joints, table = equal_bytes(comparisons)
    dtypes = list(dict.fromkeys(table["compute_dtype"]))
    shown = table.assign(label=[_label(row) for row in table.itertuples()])
    own = shown[shown["compute_dtype"] == dtypes[0]]
    details = [
        Column("recipe", "label", str),
        Column("bytes", "bytes", count),
        Column("compression", "compression", factor),
        Column("proxy (nats)", "proxy", divergence),
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
    sections = []
    for budget, rows in own.groupby("budget", sort=False):
        wide, measures = _by_arithmetic(shown[shown["budget"] == budget], dtypes)
        said = f"Budget {budget} of the published recipe"
        emphasis = ("recipe", PUBLISHED)
        sections += [
            Section(f"{said}: which order holds in which arithmetic", measures, wide, emphasis),
            Section(
                f"{said}: agreement and place among random policies, {ARITHMETIC[dtypes[0]]}", details, rows, emphasis
            ),
        ]
    drawn = own[own["recipe"] == RANDOM]
    if len(drawn):
        sections.append(Section("Joint KL of the random policies (nats)", random, drawn))
    policies = pd.concat([joint.policies for joint in joints])
    described = [
        f"{row.recipe}: {row.allocator}, scores {row.sensitivity}, unit {row.unit}, {row.precisions}"
        for row in table[table["recipe"] != UNIFORM].drop_duplicates("recipe").itertuples()
    ]
    notes = [
        *joint_notes(policies, int(table["blocks"].iloc[0]), int(table["documents"].fillna(0).iloc[0])),
        f"Recipes: {'; '.join(described)}.",
        *NOTES,
        PROXY_NOTE,
    ]
    return table, page(page_title(study, "recipes at equal bytes"), sections, notes)


def _label(row: Any) -> str:
    """A recipe's name, or which uniform policy a row is."""
    return f"uniform {row.policy.upper()}" if row.recipe == UNIFORM else row.recipe


def _by_arithmetic(rows: pd.DataFrame, dtypes: Sequence[str]) -> tuple[pd.DataFrame, list[Column]]:
    """One row a recipe of one budget, in the order of the first arithmetic, with every measure; and its columns."""
    wide = rows[rows["compute_dtype"] == dtypes[0]][["label", "recipe", "bytes"]].reset_index(drop=True)
    columns = [Column("recipe", "label", str), Column("bytes", "bytes", count)]
    ranks = []
    for kind, measure, reduction, rank in (
        ("KL", "mean_kl", "kl_reduction", "rank"),
        ("excess KL", "excess_kl", "excess_reduction", "excess_rank"),
    ):
        for dtype in dtypes:
            own = rows[rows["compute_dtype"] == dtype].set_index("label")
            if own[measure].isna().all():
                continue
            for name, header, write in (
                (measure, f"{kind}, {ARITHMETIC[dtype]} (nats)", divergence),
                (reduction, f"less {kind} than published", share),
            ):
                for column in (name, *(f"{name}{end}" for end in ENDS)):
                    wide[f"{dtype}_{column}"] = wide["label"].map(own[column])
                columns.append(Column(header, f"{dtype}_{name}", write, interval=True))
            ranks.append(wide["label"].map(own[rank]))
    wide["ranks"] = [
        " / ".join("–" if place != place else f"{place:.0f}" for place in places) for places in zip(*ranks, strict=True)
    ]
    wide.loc[wide["recipe"].isin([UNIFORM, RANDOM]), "ranks"] = "–"
    return wide, [*columns, Column("ranks", "ranks", str)]


def p_value(value: float) -> str:
    """A p value with three decimals; never a plain 0."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def points(value: float) -> str:
    """A difference of shares, in percentage points."""
    return decimal(2)(100 * value)
