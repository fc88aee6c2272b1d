"""A policy as a record: which precision each head has, how that was decided, and what it stores."""

from __future__ import annotations

from typing import Any

from kvstages.allocation import BITS, Move, Scores, average_payload_bits, greedy, policy_bytes, proxy, uniform

STEP_COLUMNS = ["step", "layer", "head", "from", "to", "added_kl", "bytes_saved", "proxy", "bytes"]


def greedy_policy(
    name: str, budget: float, scores: Scores, head_dim: int, tokens: int
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Record and path of the greedy policy of a budget (nats), from scores {precision: [L][H]} (see ``allocation``)."""
    grid, path = greedy(scores, budget, head_dim, tokens)
    spent = path[-1].proxy if path else 0.0
    return policy_record(name, "greedy", budget, grid, spent, len(path), head_dim, tokens), step_table(path)


def uniform_policy(
    name: str, precision: str, scores: Scores, head_dim: int, tokens: int
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Record and (empty) path of the policy with one precision everywhere."""
    shape = next(iter(scores.values()))
    grid = uniform(len(shape), len(shape[0]), precision)
    return policy_record(name, "uniform", None, grid, proxy(grid, scores), 0, head_dim, tokens), step_table([])


def policy_record(
    name: str,
    allocator: str,
    budget: float | None,
    grid: list[list[str]],
    spent: float,
    steps: int,
    head_dim: int,
    tokens: int,
) -> dict[str, Any]:
    """The record of a policy [L][H]; bytes by formula for one cache of ``tokens`` positions, dense heads as BF16."""
    payload, scales = policy_bytes(grid, head_dim, tokens)
    dense = policy_bytes(uniform(len(grid), len(grid[0]), "bf16"), head_dim, tokens)[0]
    return {
        "policy": name,
        "allocator": allocator,
        "budget": budget,
        "precisions": grid,
        "heads": {precision: sum(row.count(precision) for row in grid) for precision in BITS},
        "proxy": spent,
        "proxy_steps": steps,
        "average_payload_bits": average_payload_bits(grid),
        "tokens": tokens,
        "bytes": {"payload": payload, "scale": scales, "total": payload + scales, "bf16": dense},
        "compression": dense / (payload + scales),
    }


def step_table(path: list[Move]) -> dict[str, list[Any]]:
    """The greedy path as columns, steps counted from 1."""
    rows = [
        (number, m.layer, m.head, m.before, m.after, m.added_kl, m.bytes_saved, m.proxy, m.cache_bytes)
        for number, m in enumerate(path, start=1)
    ]
    return {name: [row[index] for row in rows] for index, name in enumerate(STEP_COLUMNS)}
