"""What adaptation did: differences in differences, what they cost, and how the models were trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis import published as publication
from kvstages.analysis.adaptation_effect import DENSE, INPUTS, ORIGINAL, effects, read_models, sentence
from kvstages.analysis.entries import Entry
from kvstages.stats.bootstrap import document_count
from kvstages.tables.notes import PUBLISHED_NOTE, page_title, put_beside, settings
from kvstages.tables.page import Column, Section, count, decimal, divergence, page, percent, share

if TYPE_CHECKING:
    import pandas as pd

    from kvstages.analysis.adaptation_effect import Model

TABLE = Entry(
    number=3,
    title="What adaptation did",
    inputs=INPUTS,
    published=True,
)

# The arm of this project that repeats the published recipe.
PUBLISHED_ARM = "published"
NOTES = [
    "Effect: (arm quantized − arm BF16) − (the same of what it is compared with): how much more quantization adds "
    "under the arm. Below 0 the training helps. Brackets hold the 95 % interval over seeds and {over} (Student's t); "
    "where it holds 0, no effect is established.",
    "KL to the original counts the drift of training, too. KL to its own BF16 cache compares each model with itself, "
    "so that only its response to quantization is left. Removed: the share of what quantization adds that the arm has "
    "less of.",
    "A seed draws the noise and, in shuffled arms, the order of the batches; an arm and its control are paired by it. "
    "An arm in which nothing is drawn has one seed, and an interval over {over} alone. Evaluation has no noise.",
    "Settings that were chosen were chosen on the reserved window; the validation window was measured once, with "
    "these.",
]


def make(
    evaluations: Sequence[Path], records: Sequence[Path], published: Path | None = None, study: str | None = None
) -> tuple[pd.DataFrame, str]:
    """Rows by arm, what it is compared with (its control, the original model) and policy.

    ``evaluations`` are evaluation.csv files of the original model and of the adapted ones, ``records`` the
    training.json files of these, all in ARM/seed-SEED folders; arms keep the order given.
    """
    models, documents, first = read_models(evaluations, records)
    table = effects(models, documents)
    if published is not None:
        _put_published(table, models, published)
    over = "blocks" if documents is None else f"the {document_count(documents)} documents of the window"
    blocks = len(first[first["policy"] == DENSE])
    notes = [
        *filter(None, [sentence(table)]),
        f"Measured with {settings(first.head(1).to_dict('records'))}, teacher-forced; {blocks:,} blocks of the window "
        f"{first['window'].iloc[0]}.",
        *(note.format(over=over) for note in NOTES),
        *([PUBLISHED_NOTE] if published is not None else []),
    ]
    names = [Column("arm", "arm", str), Column("against", "against", str), Column("policy", "policy", str)]
    own_names = [names[0], names[2]]
    effect = [
        *names,
        Column("seeds", "seeds", count),
        Column("effect on KL to the original (nats)", "kl_effect", divergence, interval=True),
        Column("removed", "removed", share),
        Column("effect on KL to its own BF16 (nats)", "own_effect", divergence, interval=True),
        Column("removed", "own_removed", share),
        Column("effect on cross entropy (nats)", "entropy_effect", divergence, interval=True),
        Column("what quantization adds", "finding", str),
    ]
    cost = [
        *names,
        Column("KL to the original, quantized", "kl_difference", divergence, interval=True),
        Column("cross entropy, quantized", "entropy_difference", divergence, interval=True),
        Column("KL to the original, BF16 (drift)", "drift_difference", divergence, interval=True),
        Column("cross entropy, BF16", "dense_entropy_difference", divergence, interval=True),
    ]
    levels = [
        *own_names,
        Column("KL to the original (nats)", "mean_kl", divergence),
        Column("agreement with it", "agreement", percent),
        Column("KL to its own BF16 (nats)", "own_kl", divergence),
        Column("agreement with it", "own_agreement", percent),
        Column("cross entropy (nats)", "cross_entropy", decimal(4)),
        Column("BF16: KL to the original", "bf16_mean_kl", divergence),
        Column("BF16: cross entropy", "bf16_cross_entropy", decimal(4)),
    ]
    training = [
        names[0],
        Column("weights", "weights_dtype", str),
        Column("order", "order", str),
        Column("cache", "cache", str),
        Column("policy of training", "trained_policy", str),
        Column("steps", "steps", count),
        Column("learning rate", "learning_rate", divergence),
        Column("β", "beta", divergence),
        Column("tokens seen", "tokens_seen", count),
        Column("weights changed", "changed_share", percent),
        Column("change / weights", "relative_change", divergence),
    ]
    alone = table[table["against"] == ORIGINAL]
    sections = [
        Section("Differences in differences: (arm − control), (quantized − BF16)", effect, table),
        Section("Arm minus what it is compared with (nats), cost included", cost, table),
        Section("What each arm has, mean over its seeds", levels, alone),
        Section("How they were trained", training, alone.drop_duplicates("arm")),
    ]
    return table, page(page_title(study, "what adaptation did"), sections, notes)


def _put_published(table: pd.DataFrame, models: dict[str, Model], folder: Path) -> None:
    """Put the published KL and agreement, mean over the same seeds, beside those of the arm that repeats them."""
    found = publication.published_adaptation(folder)
    seeds = models[PUBLISHED_ARM].seeds if PUBLISHED_ARM in models else []
    for name in ("mean_kl", "agreement"):
        values = []
        for row in table.itertuples():
            known = [found.get(seed, {}).get("policies", {}).get(row.policy, {}).get(name) for seed in seeds]
            shown = row.arm == PUBLISHED_ARM and known and None not in known
            values.append(sum(known) / len(known) if shown else None)
        put_beside(table, name, values)
