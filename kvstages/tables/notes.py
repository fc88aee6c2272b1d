"""Shared parts of tables: held-out metrics and their sections, published columns, titles and notes."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvstages.tables.page import Column, Section, count, decimal, divergence

if TYPE_CHECKING:
    import pandas as pd

MEASURED = ["execution", "compute_dtype"]
WINDOW = ["window", "sequences", "positions", "targets", "tokens_per_cache"]
HELD_OUT = [
    "mean_kl", "mean_kl_low", "mean_kl_high", "p50_kl", "p95_kl", "p99_kl", "max_kl",
    "agreement", "agreement_low", "agreement_high", "cross_entropy", "perplexity", "max_logit_deviation",
    "first_disagreement_mean", "sequences_with_disagreement",
]  # fmt: skip
# What was published of them: all but the intervals.
PUBLISHED_HELD_OUT = [name for name in HELD_OUT if not name.endswith(("_low", "_high"))]

STORAGE_NOTES = [
    "Bytes are the persistent payload plus the scales of one cache of {tokens} at batch 1; transient reconstruction "
    "while decoding is not counted. Keys and values that are not quantized are stored in BF16, 2 bytes an element, "
    "whatever the model computes in.",
    "Less storage is not a speed-up: decoding from a packed cache does more work, and no speed is measured here.",
]
PROXY_NOTE = (
    "The proxy is a calibration proxy: the sum of single-head KL on the calibration window. It does not bound the KL "
    "of the joint policy."
)
INTERVAL_NOTE = (
    "Brackets hold the 95 % interval (bootstrap over blocks). KL is KL(policy || reference) in nats, over all "
    "positions, position 0 included."
)
DOCUMENTS_NOTE = (
    "In braces: 95 % interval, bootstrap over the {count} documents that the blocks were drawn from. It says how far "
    "the figure depends on which texts were taken, where the one over blocks says how far it depends on which parts "
    "of them."
)
EXCESS_NOTE = (
    "Excess KL: KL from the FP32 model that stores its keys and values exactly, less what the unquantized BF16 cache "
    "has of it in the same arithmetic, block by block. The reference of the joint KL is that unquantized cache, so "
    "the joint KL also counts roundings that differ between two runs without either being further from the model."
)
PUBLISHED_NOTE = (
    "“Published” figures are those of the write-up that this study repeats (NVIDIA RTX A5000, PyTorch 2.4.1, computed"
    " in BF16); the source is in the README beside the figures."
)


def page_title(study: str | None, table: str) -> str:
    """Title of a page: the study's (given in HTML), if known, and the table's."""
    return f"{table[0].upper()}{table[1:]}" if study is None else f"{html.unescape(study)}: {table}"


def held_out_sections(
    names: Sequence[Column], table: pd.DataFrame, emphasis: tuple[str, str] | None = None
) -> list[Section]:
    """Two sections of held-out metrics, narrow enough for published columns; ``names`` are the first columns."""
    distribution = [Column(f"{name} KL", f"{name}_kl", divergence) for name in ("p50", "p95", "p99", "max")]
    prediction = [
        Column("cross entropy (nats)", "cross_entropy", decimal(4)),
        Column("perplexity", "perplexity", decimal(3)),
        Column("largest logit deviation", "max_logit_deviation", decimal(3)),
        Column("first disagreement (mean position)", "first_disagreement_mean", decimal(1)),
        Column("blocks that disagree", "sequences_with_disagreement", count),
    ]
    return [
        Section("Distribution of the KL over positions (nats)", [*names, *distribution], table, emphasis),
        Section("Prediction, and where the most likely token differs", [*names, *prediction], table, emphasis),
    ]


def put_beside(table: pd.DataFrame, name: str, values: list[Any]) -> None:
    """Insert the published values of column ``name`` after it and its interval; whole numbers stay whole."""
    import pandas as pd

    if all(value is None or isinstance(value, int) for value in values):
        values = pd.array(values, dtype="Int64")
    place = table.columns.get_loc(f"{name}_high" if f"{name}_high" in table else name) + 1
    table.insert(place, f"published_{name}", values)


def settings(records: Sequence[Mapping[str, Any]]) -> str:
    """Execution and compute dtype; those that differ between records are all named."""
    said = {key: " / ".join(dict.fromkeys(str(record[key]) for record in records)) for key in MEASURED}
    return "{execution} execution, computed in {compute_dtype}".format(**said)


def measured_note(records: Sequence[Mapping[str, Any]]) -> str:
    """How and on what the records of evaluations were measured."""
    windows = dict.fromkeys(
        f"window {r['window']}, {r['sequences']:,} blocks of {r['tokens_per_cache']} tokens, "
        f"{r['positions']:,} positions ({r['targets']:,} targets of the cross entropy)"
        for r in records
    )
    return f"Measured with {settings(records)}, teacher-forced; {'; '.join(windows)}."


def storage_notes(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What bytes mean, for the caches that the records of evaluations count."""
    tokens = " / ".join(dict.fromkeys(f"{record['tokens_per_cache']} tokens" for record in records))
    return [note.format(tokens=tokens) for note in STORAGE_NOTES]


def joint_notes(policies: pd.DataFrame, blocks: int, documents: int = 0) -> list[str]:
    """How and on what the policies of joint.csv files were measured, and what their bytes mean; ``documents`` is how
    many the blocks were drawn from, 0 where that is not known."""
    records = policies.to_dict("records")
    windows = " / ".join(dict.fromkeys(policies["window"]))
    return [
        f"Measured jointly with {settings(records)}, teacher-forced; {blocks:,} blocks of the window {windows}.",
        INTERVAL_NOTE,
        *([DOCUMENTS_NOTE.format(count=documents)] if documents else []),
        *(note.format(tokens="one block") for note in STORAGE_NOTES),
    ]
