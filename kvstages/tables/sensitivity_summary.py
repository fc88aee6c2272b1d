"""The single-head scores in numbers: spread, floor, trend over layers, and how they add up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.analysis import published as publication
from kvstages.analysis.entries import Entry, Input
from kvstages.analysis.labels import PART_LABELS
from kvstages.cache.precision_grid import LAYER
from kvstages.cache.precisions import MAX_CODES
from kvstages.files.read import read_columns, read_record
from kvstages.tables.notes import (
    MEASURED,
    PROXY_NOTE,
    PUBLISHED_NOTE,
    WINDOW,
    page_title,
    put_beside,
    settings,
    storage_notes,
)
from kvstages.tables.page import Column, Section, count, decimal, divergence, page

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=2,
    title="Sensitivity in numbers",
    inputs={
        "evaluations": Input("uniform_evaluation_files", "UNIFORM/evaluation.json", several=True),
        "sensitivity": Input("score_files", "FILE", "A gathered sensitivity table.", several=True),
    },
    published=True,
)

# What was published can say nothing about floors, which were not measured, and theory is the same for all.
PUBLISHED_COLUMNS = [
    "sum",
    "minimum",
    "median",
    "maximum",
    "correlation_with_layer",
    "median_ratio_to_int8",
    "joint_mean_kl",
    "sum_over_joint",
]


def make(
    evaluations: Sequence[Path],
    sensitivity: Sequence[Path],
    published: Path | None = None,
    study: str | None = None,
) -> tuple[pd.DataFrame, str]:
    """One row for each source, part and precision of the sensitivity tables, in the order given.

    ``evaluations`` are the evaluation.json of uniform policies; ``sum_over_joint`` is the sum of a precision's scores
    of whole heads, or layers, over the mean KL of the uniform policy of that name, measured in the same arithmetic.
    ``median_ratio_to_int8`` is the median over heads of score / INT8 score, ``theoretical_ratio_to_int8`` what rounding
    theory says, the square of the ratio of levels. Floors are empty where the source has none.
    """
    import pandas as pd

    scores = [
        read_columns(
            path,
            ["layer", "head", "mean_kl", "blocks", "below_floor"],
            ["source", "part", "precision", *MEASURED],
            ["floor_kl", "bf16_step_kl"],
        )
        for path in sensitivity
    ]
    records = [read_record(path, ["policy", *MEASURED, *WINDOW], ["mean_kl"]) for path in evaluations]
    joint = {(record["policy"], record["compute_dtype"]): record["mean_kl"] for record in records}
    rows = []
    for table in scores:
        for (source, part), own in table.groupby(["source", "part"], sort=False):
            # The sum of the scores of keys or values alone stands against no policy's KL.
            own_dtype = own["compute_dtype"].iloc[0] if part in ("kv", LAYER) else None
            same = {policy: kl for (policy, dtype), kl in joint.items() if dtype == own_dtype}
            rows += [{"source": source, "part": part, **row} for row in _summarise(own, same)]
    table = pd.DataFrame(rows)
    if published is not None:
        found = _published(published)
        for name in PUBLISHED_COLUMNS:
            put_beside(
                table,
                name,
                [
                    found.get(row.precision, {}).get(name) if row.part == "kv" else None
                    for row in table.itertuples(index=False)
                ],
            )
    shown = table.assign(part=table["part"].map(PART_LABELS))
    names = [Column("source", "source", str), Column("of a head", "part", str), Column("precision", "precision", str)]
    spread = [
        *names,
        Column("heads", "heads", count),
        *(Column(name, name, divergence) for name in ("sum", "minimum", "median", "maximum")),
    ]
    floor = [
        *names,
        Column("median score", "median", divergence),
        Column("median floor", "median_floor", divergence),
        Column("scores below their floor", "below_floor", count),
        Column("median of one BF16 step", "median_bf16_step", divergence),
    ]
    structure = [
        *names,
        Column("correlation with layer (r)", "correlation_with_layer", decimal(2)),
        Column("median ratio to INT8", "median_ratio_to_int8", decimal(1)),
        Column("ratio by rounding theory", "theoretical_ratio_to_int8", decimal(1)),
        Column("joint KL of the uniform policy", "joint_mean_kl", divergence),
        Column("sum / joint KL", "sum_over_joint", decimal(2)),
    ]
    sources = dict.fromkeys(
        f"{row.source}: {settings([row._asdict()])}, {int(row.blocks)} blocks"
        for table in scores
        for row in table.itertuples(index=False)
    )
    notes = [
        "A score is the mean KL(policy || reference) (nats) over the calibration window with one head (or its keys, or "
        "its values, or all heads of one layer) at this precision and all others in BF16.",
        f"Sources: {'; '.join(sources)}.",
        "The floor is the KL of a change that means nothing: each stored key and value of that head moves to the "
        "neighbouring value of the dtype that the model computes in. A score below it measures the arithmetic and not "
        "the quantizer. One BF16 step moves to the neighbouring BF16 value, the resolution of an unquantized cache.",
        "By rounding theory the error grows with the square of the step, (127/7)² ≈ 329 from INT8 to INT4. A ratio far "
        "below it, or a strong correlation with the layer, says that something else than the rounding of the cache was "
        "measured.",
        "The joint KL is that of the uniform policy on the held-out window "
        + "; ".join(sorted({f"{r['window']}, {r['positions']:,} positions, {settings([r])}" for r in records}))
        + ", for scores of whole heads or layers in the same arithmetic. The sum is over the calibration window, so "
        "the quotient also compares two windows.",
        PROXY_NOTE,
        *storage_notes(records),
    ]
    sections = [
        Section("Spread of the single-head scores (nats)", spread, shown),
        Section("Scores and their floor (nats)", floor, shown),
        Section("Trend over layers, ratio to INT8, sum against the joint policy", structure, shown),
    ]
    said = page_title(study, "sensitivity summary")
    return table, page(said, sections, notes + [PUBLISHED_NOTE] * (published is not None))


def _summarise(scores: pd.DataFrame, joint: dict[str, float]) -> list[dict[str, Any]]:
    """Rows of one source and part, by precision."""
    by_head = scores.set_index(["layer", "head"])
    rows = []
    for precision in dict.fromkeys(scores["precision"]):
        own = by_head[by_head["precision"] == precision]
        kl = own["mean_kl"]
        layer = kl.index.get_level_values("layer").to_series(index=kl.index).astype(float)
        int8 = by_head.loc[by_head["precision"] == "int8", "mean_kl"]
        rows.append({
            "precision": precision, "heads": len(kl), "sum": kl.sum(), "minimum": kl.min(), "median": kl.median(),
            "maximum": kl.max(), "median_floor": own["floor_kl"].median(),
            "below_floor": int(own["below_floor"].sum()) if own["floor_kl"].notna().any() else None,
            "median_bf16_step": own["bf16_step_kl"].median(),
            "correlation_with_layer": kl.corr(layer) if layer.nunique() > 1 and kl.nunique() > 1 else None,
            "median_ratio_to_int8": (kl / int8).median() if len(int8) and (int8 > 0).all() else None,
            "theoretical_ratio_to_int8": rounding_ratio(precision),
            "joint_mean_kl": joint.get(precision),
            "sum_over_joint": kl.sum() / joint[precision] if joint.get(precision) else None,
        })  # fmt: skip
    return rows


def _published(folder: Path) -> dict[str, dict[str, Any]]:
    """The same of the published scores, by precision."""
    import pandas as pd

    rows = [
        (layer, head, precision, score)
        for precision, grid in publication.published_sensitivities(folder).items()
        for layer, row in enumerate(grid)
        for head, score in enumerate(row)
    ]
    scores = pd.DataFrame(rows, columns=["layer", "head", "precision", "mean_kl"])
    scores = scores.assign(floor_kl=float("nan"), bf16_step_kl=float("nan"), below_floor=0)
    joint = {name: metrics["mean_kl"] for name, metrics in publication.published_validation(folder).items()}
    return {row["precision"]: row for row in _summarise(scores, joint)}


def rounding_ratio(precision: str) -> float | None:
    """The score of a precision over that of INT8, by rounding theory; None where the precision has no codes."""
    return (MAX_CODES["int8"] / MAX_CODES[precision]) ** 2 if precision in MAX_CODES else None
