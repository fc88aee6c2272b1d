"""How identifiers are written in paths and tables; nothing else formats them."""

from __future__ import annotations

import re

LAYER = r"\d\d+"
BUDGET = r"[0-9][0-9.eE+-]*"
POLICY = rf"bf16|int8|int4|greedy-{BUDGET}"


def layer_name(layer: int) -> str:
    """Layer 3 as ``03``."""
    return f"{layer:02d}"


def greedy_policy(budget: object) -> str:
    """The greedy policy of a budget, as the budget is written in the configuration: ``greedy-0.01``."""
    return f"greedy-{budget}"


def budget_text(policy: str) -> str | None:
    """Budget as a greedy policy's name writes it (``0.01``), None for a uniform one; ValueError on any other name."""
    if not re.fullmatch(POLICY, policy):
        raise ValueError(f"policy {policy!r}: expected bf16, int8, int4 or greedy-BUDGET")
    return policy.removeprefix("greedy-") if policy.startswith("greedy-") else None


def policy_budget(policy: str) -> float | None:
    """Budget of a greedy policy's name, None for a uniform one; ValueError on any other name."""
    text = budget_text(policy)
    return None if text is None else float(text)
