"""Policies in figures: policies that coincide are drawn once, under one label that names them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvstages.policies.names import policy_order, split_policy

if TYPE_CHECKING:
    import pandas as pd


def policies_label(policies: Iterable[str]) -> str:
    """Policies that coincide as one label: ``INT4 = greedy 0.05, 0.1``."""
    ordered = sorted(policies, key=policy_order)
    parts: dict[str, list[str]] = {}
    for policy in ordered:
        allocator, budget = split_policy(policy)
        parts.setdefault(policy.upper() if budget is None else allocator, []).append(budget or "")
    return " = ".join(f"{name} {', '.join(budgets)}".strip() for name, budgets in parts.items())


def coinciding(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Label and rows of each group of policies whose rows are equal in all columns but ``policy``, in policy order."""
    groups: dict[tuple[object, ...], list[str]] = {}
    rows: dict[tuple[object, ...], pd.DataFrame] = {}
    for policy, part in sorted(table.groupby("policy", sort=False), key=lambda item: policy_order(item[0])):
        own = part.drop(columns="policy").reset_index(drop=True)
        key = tuple(own.itertuples(index=False, name=None))
        groups.setdefault(key, []).append(policy)
        rows.setdefault(key, own)
    return [(policies_label(policies), rows[key]) for key, policies in groups.items()]
