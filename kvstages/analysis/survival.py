"""How long generated text stays that of the unquantized cache: shares of prompts, with intervals over texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvstages.analysis.entries import Input
from kvstages.files.read import read_columns
from kvstages.policies.names import policy_order
from kvstages.stats.bootstrap import (
    FEWEST_DOCUMENTS,
    Estimate,
    document_count,
    percentile_interval,
    resampled_means,
)

# Files that the figure and the table of these numbers read.
INPUTS = {"continuations": Input("continuation_files", "CONTINUATIONS.csv")}
CONTROL = "bf16"


class Run(NamedTuple):
    """Continuations under one policy and prefill: of each prompt how many tokens are ``same`` [B], out of ``tokens``;
    ``together`` prompts at once; the ``documents`` [B] of the prompts, None where they are not known."""

    policy: str
    prefill: str
    together: int
    prompt_tokens: int
    tokens: int
    same: np.ndarray
    documents: list[str] | None


def read_runs(path: Path) -> list[Run]:
    """The runs of the stage generate, by prefill and in policy order; the control comes first."""
    import pandas as pd

    numbers = ["together", "block", "prompt_tokens", "tokens", "same"]
    table = read_columns(path, numbers, ["policy", "prefill", "document"])
    return [
        Run(policy, prefill, *(int(rows[name].iloc[0]) for name in ("together", "prompt_tokens", "tokens")),
            rows["same"].to_numpy(), None if pd.isna(rows["document"]).any() else rows["document"].tolist())
        for (prefill, policy), rows in sorted(
            table.groupby(["prefill", "policy"], sort=False), key=lambda item: (item[0][0], policy_order(item[0][1]))
        )
    ]  # fmt: skip


def mean_of(values: np.ndarray, documents: list[str] | None) -> Estimate:
    """A mean over prompts [B] with its interval: over documents where there are enough, else over prompts."""
    known = documents if document_count(documents) >= FEWEST_DOCUMENTS else None
    return Estimate(float(values.mean()), *percentile_interval(*resampled_means(values, documents=known)))


def survival(run: Run) -> Iterator[tuple[int, Estimate]]:
    """After 1, 2, ... tokens the share of prompts whose continuation is the reference's so far."""
    for count in range(1, run.tokens + 1):
        yield count, mean_of((run.same >= count).astype(float), run.documents)
