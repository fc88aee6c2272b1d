"""Generated text: shares of prompts with the unquantized cache's continuation, and the first token that differs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstages.analysis.entries import Entry
from kvstages.analysis.survival import INPUTS, mean_of, read_runs
from kvstages.tables.notes import page_title
from kvstages.tables.page import Column, Section, count, decimal, page, percent

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=12,
    title="Generated text",
    inputs=INPUTS,
)

NOTES = [
    "The control is bf16: the unquantized cache with another number of prompts at once. What it differs in is the "
    "order of sums alone, and no policy can be told from it by less.",
    "Exact prefill: a prompt's tokens see each other as they are, as in engines. Stepwise: as they are stored, as in "
    "every other measurement of this study.",
    "Brackets hold the 95 % interval: bootstrap over the prompts' documents where there are at least 4, over prompts "
    "elsewhere. Where every prompt agrees (or none does) it has no width, and says nothing of other prompts.",
]


def make(continuations: Path, study: str | None = None) -> tuple[pd.DataFrame, str]:
    """(table, page): a row a prefill and policy."""
    import pandas as pd

    rows = []
    for run in read_runs(continuations):
        exact, same = mean_of((run.same == run.tokens).astype(float), run.documents), mean_of(run.same, run.documents)
        row = {"prefill": run.prefill, "policy": run.policy, "prompts": len(run.same), "together": run.together}
        row |= {"prompt_tokens": run.prompt_tokens, "tokens": run.tokens}
        for name, estimate in (("exact_match", exact), ("mean_same", same)):
            row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        rows.append({**row, "median_same": float(np.median(run.same)), "least_same": int(run.same.min())})
    table = pd.DataFrame(rows)
    columns = [
        Column("prefill", "prefill", str),
        Column("policy", "policy", str),
        Column("prompts", "prompts", count),
        Column("at once", "together", count),
        Column("tokens of the prompt", "prompt_tokens", count),
        Column("generated", "tokens", count),
        Column("same text", "exact_match", percent, interval=True),
        Column("same tokens before the first other, mean", "mean_same", decimal(1), interval=True),
        Column("median", "median_same", count),
        Column("least", "least_same", count),
    ]
    section = Section("Greedy continuations against those of the unquantized cache", columns, table)
    return table, page(page_title(study, "generated text"), [section], NOTES)
