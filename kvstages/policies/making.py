"""A policy as a record: which precision each head's keys and values have, how that was decided, and what it stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstages.cache.precision_grid import PrecisionGrid, average_payload_bits, byte_record, tensor_counts
from kvstages.policies.allocators import Move, allocate
from kvstages.policies.budgets import Budget
from kvstages.policies.names import AT_RANDOM
from kvstages.scores.table import ScoreTable

STEP_COLUMNS = ["step", "layer", "head", "part", "from", "to", "added_kl", "bytes_saved", "proxy", "bytes"]


def allocated_policy(
    name: str, allocator: str, budget: Budget, table: ScoreTable, seed: int = 0
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Record and path of the policy that an allocator makes of a budget; ``seed`` is what a random one draws with.

    The proxy is where the path ends, or the sum of the scores where there is no path.
    """
    found = allocate(allocator, table, budget, seed)
    spent = found.path[-1].proxy if found.path else table.proxy(found.choice)
    record = policy_record(
        name,
        allocator,
        budget,
        table.grid(found.choice),
        spent,
        len(found.path),
        table.widths,
        table.tokens,
        unit=table.unit,
        ladder=table.ladder,
        sensitivity=table.source,
    )
    return {**record, "seed": seed if allocator == AT_RANDOM else None}, step_table(found.path)


def uniform_policy(name: str, precision: str, table: ScoreTable) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Record and (empty) path of the policy with one precision everywhere."""
    choice = [precision] * len(table.units)
    record = policy_record(
        name,
        "uniform",
        None,
        table.grid(choice),
        table.proxy(choice),
        0,
        table.widths,
        table.tokens,
        unit=table.unit,
        ladder=table.ladder,
        sensitivity=table.source,
    )
    return record, step_table([])


def policy_record(
    name: str,
    allocator: str,
    budget: Budget | None,
    grid: PrecisionGrid,
    spent: float | None,
    steps: int,
    widths: Sequence[int],
    tokens: int,
    *,
    unit: str,
    ladder: Sequence[str],
    sensitivity: str,
) -> dict[str, Any]:
    """The record of a policy; bytes by formula for one cache of ``tokens`` positions, unquantized heads as BF16.

    ``widths``: of a head's keys and of its values; ``unit``: what got a precision of its own, head, keys-values or
    layer; ``ladder``: what precisions it could have; ``sensitivity``: the source of the scores; ``spent``: the proxy in
    nats, None where nothing scored the policy.
    """
    size = byte_record(grid, widths, tokens)
    return {
        "policy": name,
        "allocator": allocator,
        "sensitivity": sensitivity,
        "unit": unit,
        "ladder": list(ladder),
        "budget": None if budget is None else budget.amount,
        "budget_in": None if budget is None else budget.measure,
        "seed": None,
        "precisions": grid.as_record(),
        "tensors": tensor_counts(grid),
        "proxy": spent,
        "proxy_steps": steps,
        "average_payload_bits": average_payload_bits(grid, widths),
        "tokens": tokens,
        "bytes": size,
        "compression": size["bf16"] / size["total"],
    }


def step_table(path: list[Move]) -> dict[str, list[Any]]:
    """A path as columns, steps counted from 1; head is None where the heads of a layer move together."""
    rows = [
        (number, m.layer, m.head, m.part, m.before, m.after, m.added_kl, m.bytes_saved, m.proxy, m.cache_bytes)
        for number, m in enumerate(path, start=1)
    ]
    return {name: [row[index] for row in rows] for index, name in enumerate(STEP_COLUMNS)}
