"""Two-step allocation: measure again around a policy, and reallocate by what each move then adds.

Single-unit scores are measured with everything else in BF16; around a policy a move may add more or less. The second
sensitivity table holds, for each unit and precision, KL(policy with that unit moved) − KL(policy): 0 for what the
policy has, negative for moves up. The exact allocator takes their sum as it took the sum of the first scores.
Axes: U units, R rungs of the ladder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.policies.budgets import Budget
from kvstages.policies.knapsack import frontier
from kvstages.policies.recipes import Recipe
from kvstages.scores.table import KEY, ScoreTable, describe, read_table


def read_moves(path: Path, table: ScoreTable) -> np.ndarray:
    """What each unit adds at each rung of the table's ladder, BF16 among them: nats [U, R].

    ValueError names ``path`` and a unit and precision without a finite score.
    """
    rows = read_table(path)
    found = dict(zip(rows[KEY].itertuples(index=False, name=None), rows["mean_kl"], strict=True))
    costs = np.empty((len(table.units), len(table.ladder)))
    for index, unit in enumerate(table.units):
        for rung, precision in enumerate(table.ladder):
            costs[index, rung] = found.get((*unit, precision), np.nan)
            if not np.isfinite(costs[index, rung]):
                raise ValueError(f"{path}: no score of {describe(unit)}, {precision}; expected one around the policy")
    return costs


def refined_policy(name: str, base: Mapping[str, Any], moves: np.ndarray, table: ScoreTable) -> dict[str, Any]:
    """Record of the policy with the least sum of moves [U, R] at the base's bytes or fewer, and a recipe's keys.

    Its proxy, like every policy's, is the sum of the first scores. ValueError where the base is no policy of the
    table's units and ladder.
    """
    if table.choice(PrecisionGrid.of_record(base["precisions"])) is None:
        raise ValueError(f"policy {base['policy']}: precisions other than those of the scores")
    budget = Budget(base["bytes"]["total"], "bytes")
    best = frontier(moves, table.sizes)
    choice = best.choice(best.within_size(budget.amount))
    recipe = Recipe(name, "exact", table)
    return recipe.record(name, [table.ladder[rung] for rung in choice], budget)
