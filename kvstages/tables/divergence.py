"""Divergence of each policy from the reference, as complete as llama.cpp's report of the KL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.files.read import read_record
from kvstages.policies.names import policy_order
from kvstages.stats.summary import PERCENTILES, SPREAD
from kvstages.tables.notes import MEASURED, WINDOW, measured_note, page_title
from kvstages.tables.page import Column, Section, count, decimal, divergence, page, percent

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=4,
    title="Divergence in full",
    inputs={
        "evaluations": Input("evaluation_files", "EVALUATION.json", several=True),
    },
)

NOTES = [
    "KL is in nats, over all positions. Position 0 of a block sees nothing quantized, so its KL is 0. llama.cpp and "
    "ModelOpt report KL(reference || policy).",
    "Δp is the probability of the true next token under the policy minus that under the reference: a probability "
    "between −1 and 1, not per cent. Δp and perplexities are over the positions that have a next token.",
    "Brackets hold the 95 % interval (bootstrap over blocks); comparisons of policy and reference are paired over the "
    "same blocks. ± is one standard error over blocks, for perplexities and the RMS by the delta method. "
    "99.9 % to 0.1 % are percentiles.",
    "A KL of 10⁻¹⁵ or less is rounding in FP64, and may be negative.",
]


def make(evaluations: Sequence[Path], study: str | None = None) -> tuple[pd.DataFrame, str]:
    """(table, page): one row a policy, from each evaluation.json; bf16, int8, int4, then by budget."""
    import pandas as pd

    columns = ["policy", "sequences", "positions", "targets", *_names()]
    records = [read_record(path, [*columns, *MEASURED, *WINDOW]) for path in evaluations]
    records.sort(key=lambda record: policy_order(record["policy"]))
    table = pd.DataFrame(records)[columns]
    policy = Column("policy", "policy", str)
    perplexity = [
        *_with_error("perplexity", "perplexity", decimal(4)),
        *_with_error("of the reference", "reference_perplexity", decimal(4)),
        *_with_error("ratio", "perplexity_ratio", decimal(6)),
        *_with_error("log ratio (nats)", "log_perplexity_ratio", divergence),
        *_with_error("difference", "perplexity_difference", divergence),
        Column("correlation of the cross entropies", "cross_entropy_correlation", decimal(6)),
    ]
    change = [
        *_with_error("mean", "mean_delta_p", divergence),
        *_with_error("RMS", "rms_delta_p", divergence),
        *_spread("delta_p"),
    ]
    sections = [
        Section(
            f"{direction} (nats)", [policy, *_with_error("mean", f"mean_{name}", divergence), *_spread(name)], table
        )
        for direction, name in (("KL(policy || reference)", "kl"), ("KL(reference || policy)", "reverse_kl"))
    ]
    sections += [
        Section("Perplexity", [policy, *perplexity], table),
        Section("Δp of the true next token, policy minus reference (probability)", [policy, *change], table),
        Section(
            "Same most likely token (share of positions)",
            [policy, *_with_error("share", "agreement", percent), Column("positions", "positions", count)],
            table,
        ),
    ]
    return table, page(page_title(study, "divergence in full"), sections, [measured_note(records), *NOTES])


def _names() -> list[str]:
    """The columns of figures, in the order of evaluation.json's schema."""

    def uncertain(*names: str) -> list[str]:
        return [f"{name}{end}" for name in names for end in ("", "_error", "_low", "_high")]

    def spread(name: str) -> list[str]:
        return [f"{place}_{name}" for place in SPREAD]

    return [
        *uncertain("mean_kl"), *spread("kl"), *uncertain("mean_reverse_kl"), *spread("reverse_kl"),
        *uncertain("agreement", "cross_entropy", "reference_cross_entropy"), "cross_entropy_correlation",
        *uncertain("perplexity", "reference_perplexity", "log_perplexity_ratio", "perplexity_ratio"),
        *uncertain("perplexity_difference", "mean_delta_p", "rms_delta_p"), *spread("delta_p"),
    ]  # fmt: skip


def _with_error(header: str, name: str, write: Callable[[float], str]) -> list[Column]:
    return [Column(header, name, write, interval=True), Column("±", f"{name}_error", write)]


def _spread(name: str) -> list[Column]:
    headers = ["max", *(f"{percentile:g} %" for percentile in PERCENTILES.values()), "min"]
    return [Column(header, f"{place}_{name}", divergence) for header, place in zip(headers, SPREAD, strict=True)]
