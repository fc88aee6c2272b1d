"""A part of docs/results.md on engines: what their table says of one study, and what allocating for an engine buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstages.analysis.number_text import interval, nats, number, rounded
from kvstages.files.read import read_columns
from kvstages.policies.engine_recipes import ALLOCATED

FIGURES = ["limit", "mean_kl", "agreement"]
SPREAD = [
    *("mean_kl_low", "mean_kl_high", "mean_kl_documents_low", "mean_kl_documents_high"),
    *("times_less", "times_less_low", "times_less_high", "times_less_documents_low", "times_less_documents_high"),
]
Rows = Sequence[Mapping[str, Any]]


def read_engines(tables: Path) -> list[dict[str, Any]]:
    """The rows of the table of engines that the page states; none where the study exports no policy."""
    path = tables / "engines.csv"
    if not path.exists():
        return []
    found = read_columns(path, FIGURES, ["kind", "policy", "engine"], SPREAD).to_dict("records")
    return [{name: rounded(value) for name, value in row.items()} for row in found]


def engine_lines(rows: Rows) -> list[str]:
    """The text around these rows, and their table."""
    own = rows[0]
    lines = [
        f"The policy `{own['policy']}` as engines take it ([engines](engines.md)), with each engine's own quantizer: "
        "projected; and at the bytes of that the best setting of the engine (allocated), the best with its formats "
        "chosen freely for each layer (layer), and the best of the policy's own kind, which the engine cannot express "
        "(own). Allocated-own is the best setting of the engine at the policy's own bytes. *Times less KL* is against "
        "the projected policy, there against the policy itself; below 1 is more. Proxies of engines' formats come from "
        "gradients. Intervals are over documents.",
        "",
        "| engine | policy | bytes | mean KL (nats) | agreement | times less KL |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['engine'] or '–'} | {row['kind'] if row['engine'] else row['policy']} | {row['limit']:,} | "
            f"{nats(row['mean_kl'])}{interval(*_ends(row, 'mean_kl'), nats)} | {100 * row['agreement']:.1f} % | "
            f"{_times(row)} |"
        )
    return [*lines, "", verdict(rows)]


def verdict(rows: Rows) -> str:
    """Whether an allocator that makes only what the engine can express beats the projected policy, engine by engine;
    nothing where no engine has both."""
    said = []
    for row in rows:
        if row["kind"] != ALLOCATED or row["times_less"] is None:
            continue
        low, high = _ends(row, "times_less")
        if low is not None and low > 1:
            found = f"{_times(row)} times less KL than the projected policy"
        elif high is not None and high < 1:
            found = f"more KL than the projected policy ({_times(row)} times less)"
        elif low == high == 1:
            found = "the projected policy itself"
        else:
            found = f"no established gain over the projected policy ({_times(row)} times less KL)"
        said.append(f"for {row['engine']} {found}")
    return f"To allocate only what an engine can express gives {'; '.join(said)}." if said else ""


def _ends(row: Mapping[str, Any], name: str) -> tuple[float | None, float | None]:
    """The interval over documents, or over blocks where there are too few."""
    kind = "" if row[f"{name}_documents_low"] is None else "_documents"
    return row[f"{name}{kind}_low"], row[f"{name}{kind}_high"]


def _times(row: Mapping[str, Any]) -> str:
    return f"{number(row['times_less'])}{interval(*_ends(row, 'times_less'), number)}"
