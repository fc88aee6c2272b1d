"""Identifiers in paths and tables: the only place that formats or parses them."""

from __future__ import annotations

import re

from kvstages.cache.precisions import check, size_rank
from kvstages.cache.schemes import PRECISION
from kvstages.policies.budgets import BITS, BYTES, NATS, Budget

LAYER = r"\d\d+"
DTYPE = "float32|bfloat16|float64"
# The allocators, each a function of ``allocators``; the last part of a policy's name is its budget.
AT_RANDOM = "at-random"
ALLOCATORS = ("greedy", "exact", "by-layer", "by-depth", "reconstruction", AT_RANDOM)
# Engines that take policies, each a class in kvstages/export.
ENGINES = ("vllm", "modelopt", "llama-cpp", "ik-llama-cpp", "kvtuner")
BUDGET = rf"(?:{BYTES}|{BITS}|{NATS})"
UNIFORM = rf"bf16|{PRECISION}"
ALLOCATED = rf"(?:{'|'.join(ALLOCATORS)})-{BUDGET}"
POLICY = rf"{UNIFORM}|{ALLOCATED}"


def layer_name(layer: int) -> str:
    """Layer 3 as ``03``."""
    return f"{layer:02d}"


def policy_name(allocator: str, budget: object) -> str:
    """The policy of an allocator and a budget, as the configuration writes the budget: ``greedy-0.01``."""
    return f"{allocator}-{budget}"


def split_policy(policy: str) -> tuple[str, str | None]:
    """Allocator of a policy's name and its budget as written, or ``uniform`` and None; ValueError on any other name."""
    if not re.fullmatch(POLICY, policy):
        raise ValueError(
            f"policy {policy!r}: expected a precision such as bf16, int8 or centred4, or one of "
            f"{', '.join(ALLOCATORS)} with a budget, such as greedy-0.01 or exact-4.25bits"
        )
    if re.fullmatch(UNIFORM, policy):
        check(policy)
        return "uniform", None
    allocator = next(name for name in ALLOCATORS if policy.startswith(f"{name}-"))
    return allocator, policy.removeprefix(f"{allocator}-")


def parse_policy(policy: str) -> tuple[str, Budget | None]:
    """Allocator and budget of a policy's name, ``uniform`` and None for a uniform one; ValueError on any other name."""
    allocator, text = split_policy(policy)
    return allocator, None if text is None else Budget.parse(text)


def policy_order(policy: str) -> tuple[int, str, float]:
    """Sort key of policies: the uniform ones from most bytes to fewest, then each allocator's, budgets in bits first,
    then in bytes, from the least."""
    allocator, budget = parse_policy(policy)
    if budget is None:
        size, name = size_rank(policy)
        return size, name, 0.0
    return ALLOCATORS.index(allocator), budget.measure, budget.amount
