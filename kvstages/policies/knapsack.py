"""The least total cost for every total size, by dynamic programming over sizes: the multiple-choice knapsack, exactly.

Axes: U units, P choices of each. Sizes are counted in their greatest common step, so the work is U · P · (steps). Where
that is too many, because a cache of several hundred tokens keeps one exact, steps are longer and sizes rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Steps of the largest total size above the smallest: 48 MB and a second for 200 units.
MOST_STEPS = 1 << 18


@dataclass(frozen=True)
class Frontier:
    """The least cost of every total size that can be had.

    ``sizes`` int64 [F], ascending; ``costs`` float64 [F], summed in the order of the units; ``steps`` int64 [F]: the
    sizes in steps above the smallest. ``picked`` uint8 [U, S]: the choice of unit u in the best assignment of the units
    up to u that is s steps above their smallest; ``excess`` int64 [U, P]: steps of each choice above the
    unit's smallest. Where there would be more than ``MOST_STEPS`` of them, a size is the most that its assignment
    takes: what it takes is less by less than a step a unit.
    """

    sizes: np.ndarray
    costs: np.ndarray
    steps: np.ndarray
    picked: np.ndarray
    excess: np.ndarray

    def choice(self, index: int) -> np.ndarray:
        """The choice of each unit [U] that has the size and the cost at ``index``."""
        step = self.steps[index]
        chosen = np.empty(len(self.picked), dtype=np.int64)
        for unit in reversed(range(len(chosen))):
            chosen[unit] = self.picked[unit, step]
            step -= self.excess[unit, chosen[unit]]
        return chosen

    def within_size(self, limit: float) -> int | None:
        """Index of the least cost at sizes up to ``limit`` (of equal costs the smallest size); None if none is."""
        count = int(np.searchsorted(self.sizes, limit, side="right"))
        return int(np.argmin(self.costs[:count])) if count else None

    def within_cost(self, limit: float) -> int | None:
        """Index of the smallest size that costs ``limit`` or less, with the least cost of that size; None if none."""
        fitting = np.flatnonzero(self.costs <= limit)
        return int(fitting[0]) if len(fitting) else None


def common_step(size: np.ndarray) -> tuple[np.ndarray, int]:
    """Steps of each choice above its unit's smallest [U, P], and the size of a step: the greatest that fits all."""
    above = size - size.min(axis=1, keepdims=True)
    step = int(np.gcd.reduce(above, axis=None)) or 1
    return above // step, step


def frontier(cost: np.ndarray, size: np.ndarray) -> Frontier:
    """Least cost for every total size, from cost [U, P] and whole size [U, P] of each unit's choices.

    Costs are any finite numbers, negative ones too. Of assignments alike in size and cost, units from the last
    backwards take the first choice that will do. ValueError on shapes that differ or costs that are not finite.
    """
    cost, size = np.asarray(cost, dtype=np.float64), np.asarray(size, dtype=np.int64)
    if cost.ndim != 2 or cost.shape != size.shape or not cost.size:
        raise ValueError(
            f"costs of shape {cost.shape} and sizes of shape {size.shape}, expected units × choices, alike"
        )
    if not np.isfinite(cost).all():
        raise ValueError(f"unit {np.argwhere(~np.isfinite(cost))[0][0]} has a cost that is not finite")
    excess, step = common_step(size)
    if int(excess.max(axis=1).sum()) > MOST_STEPS:
        above = size - size.min(axis=1, keepdims=True)
        step = -(-int(above.max(axis=1).sum()) // MOST_STEPS)
        excess = -(-above // step)
    width = int(excess.max(axis=1).sum()) + 1
    best = np.full(width, np.inf)
    best[0] = 0.0
    picked = np.zeros((len(cost), width), dtype=np.min_scalar_type(cost.shape[1]))
    reach = 1
    for unit, (costs, steps) in enumerate(zip(cost, excess, strict=True)):
        before, best = best, np.full(width, np.inf)
        for choice, (added, up) in enumerate(zip(costs, steps, strict=True)):
            total = before[:reach] + added
            better = total < best[up : up + reach]
            np.copyto(best[up : up + reach], total, where=better)
            np.copyto(picked[unit, up : up + reach], choice, where=better)
        reach += int(steps.max())
    reached = np.flatnonzero(np.isfinite(best))
    smallest = int(size.min(axis=1).sum())
    return Frontier(smallest + step * reached, best[reached], reached, picked, excess)
