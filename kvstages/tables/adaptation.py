"""KL and agreement before and after adaptation, by cache policy, arm and seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.analysis import published as publication
from kvstages.analysis.arms import arm_and_seed
from kvstages.analysis.entries import Entry, Input
from kvstages.files.read import read_record
from kvstages.policies.names import policy_order
from kvstages.tables.notes import (
    HELD_OUT,
    INTERVAL_NOTE,
    MEASURED,
    PUBLISHED_HELD_OUT,
    PUBLISHED_NOTE,
    WINDOW,
    held_out_sections,
    measured_note,
    page_title,
    put_beside,
    storage_notes,
)
from kvstages.tables.page import Column, Section, divergence, page, percent

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=3,
    title="Adaptation by arm and seed",
    inputs={
        "adapted": Input("adapted_evaluation_files", "ARM/seed-SEED/POLICY/evaluation.json", several=True),
        "original": Input("original_evaluation_files", "FILE", "The same policy, original model.", several=True),
    },
    published=True,
)

# The arm of this project that repeats the published recipe.
PUBLISHED_ARM = "noise"


def make(
    adapted: Sequence[Path], original: Sequence[Path], published: Path | None = None, study: str | None = None
) -> tuple[pd.DataFrame, str]:
    """Rows by cache policy, arm and seed, with mean and (sample) standard deviation over the seeds of each arm.

    ``original`` are the evaluation.json files of the model before adaptation, ``adapted`` those in ARM/seed-SEED/POLICY
    folders; arms and seeds keep the order given.
    """
    import pandas as pd

    keys = ["policy", *HELD_OUT, *MEASURED, *WINDOW]
    before = [read_record(path, keys) for path in original]
    after = [(*arm_and_seed(path), read_record(path, keys)) for path in adapted]
    rows = [{"policy": record["policy"], "arm": "original", "seed": "", **_pick(record)} for record in before]
    rows += [
        {"policy": record["policy"], "arm": arm, "seed": str(seed), **_pick(record)} for arm, seed, record in after
    ]
    table = pd.DataFrame(rows)
    if published is not None:
        validation, seeds = publication.published_validation(published), publication.published_adaptation(published)
        for name in PUBLISHED_HELD_OUT:
            values = []
            for row in table.itertuples():
                source = validation if row.arm == "original" else {}
                if row.arm == PUBLISHED_ARM and int(row.seed) in seeds:
                    source = seeds[int(row.seed)]["policies"]
                values.append(source.get(row.policy, {}).get(name))
            put_beside(table, name, values)
    parts = []
    for policy in sorted(set(table["policy"]), key=policy_order, reverse=True):
        for _, part in table[table["policy"] == policy].groupby("arm", sort=False):
            parts.append(part)
            if len(part) > 1:
                parts.append(_over_seeds(part))
    table = pd.concat(parts, ignore_index=True)
    names = [Column("cache policy", "policy", str), Column("arm", "arm", str), Column("seed", "seed", str)]
    columns = [
        *names,
        Column("mean KL (nats)", "mean_kl", divergence, interval=True),
        Column("agreement", "agreement", percent, interval=True),
    ]
    notes = [
        "Every row, adapted models included, is measured against the original model with BF16 caches.",
        "Arm noise trains with cache noise; arm control takes the same steps without it. Evaluation has no noise.",
        "Mean and standard deviation are of the sample of seeds. An arm with one seed has neither. An arm without "
        "noise has nothing random and runs once.",
        measured_note(before + [record for _, _, record in after]),
        INTERVAL_NOTE,
        *storage_notes(before),
    ]
    mean = ("seed", "mean")
    sections = [Section("Divergence and agreement", columns, table, mean), *held_out_sections(names, table, mean)]
    return table, page(page_title(study, "adaptation"), sections, notes + [PUBLISHED_NOTE] * (published is not None))


def _pick(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in HELD_OUT}


def _over_seeds(part: pd.DataFrame) -> pd.DataFrame:
    """Rows "mean" and "standard deviation" of one arm and policy; intervals are those of single seeds only."""
    import pandas as pd

    metrics = [name for name in part.columns[3:] if not name.endswith(("_low", "_high"))]
    values = part[metrics].astype(float)
    both = pd.DataFrame([values.mean(skipna=False), values.std(ddof=1, skipna=False)])
    both.insert(0, "seed", ["mean", "standard deviation"])
    both.insert(0, "arm", part["arm"].iloc[0])
    both.insert(0, "policy", part["policy"].iloc[0])
    return both.reindex(columns=part.columns)
