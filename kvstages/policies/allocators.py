"""The allocators: which precision each unit gets, under a budget in nats of the KL proxy or in bytes of one cache.

A budget in bits an element is one in bytes once the cache is known (``allocate``).

All read the same ``ScoreTable`` and give the same ``Allocation``; a new one is a function here and an entry of
``ALLOCATORS`` (and its name in ``names``). A budget in nats bounds a sum of single-unit scores: a calibration proxy,
not a bound on the joint model. With a budget in bytes a policy takes that much or less. A ladder is BF16 and any of the
quantized precisions below it; a move takes a unit one rung down. Axes: U units, R rungs, N draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstages.cache.precision_grid import LAYER, Unit
from kvstages.policies import names
from kvstages.policies.budgets import Budget
from kvstages.policies.knapsack import frontier
from kvstages.policies.sampling import draw_assignments
from kvstages.scores.table import ScoreTable


@dataclass(frozen=True)
class Move:
    """One step down a path; KL in nats, bytes of one cache. ``head`` is None where a layer's heads move together: by
    that allocator, or because layers are the units."""

    layer: int
    head: int | None
    part: str
    before: str
    after: str
    added_kl: float
    bytes_saved: int
    proxy: float
    cache_bytes: int


@dataclass(frozen=True)
class Allocation:
    """Precision of each unit [U], in the table's order, and the moves that led there (none where no path did)."""

    choice: list[str]
    path: list[Move]


Allocator = Callable[[ScoreTable, Budget, int], Allocation]


def greedy(table: ScoreTable, budget: Budget, seed: int = 0) -> Allocation:
    """The published rule (docs/method.md, "Allocation"); nothing is random.

    A move adds max(score after − score before, 0). Of the moves that still fit a budget in nats, the one with the least
    added KL per byte saved is taken (ties: the unit that comes first), until none fits. With a budget in bytes: the
    same order of moves, until the bytes fit.
    """
    return _descend(table, _Parts.units(table), _rate(table.costs, table.sizes), budget, passing=True)


def exact(table: ScoreTable, budget: Budget, seed: int = 0) -> Allocation:
    """The best that the scores allow, by dynamic programming over bytes (``frontier``); nothing is random.

    Budget in nats: the fewest bytes whose proxy fits, and the least proxy of those bytes. In bytes: the least proxy
    that fits, and the fewest bytes of that proxy. ValueError where nothing fits.
    """
    found = frontier(table.costs, table.sizes)
    index = found.within_size(budget.amount) if budget.measure == "bytes" else found.within_cost(budget.amount)
    if index is None:
        raise _too_small(table, budget)
    return Allocation([table.ladder[rung] for rung in found.choice(index)], [])


def by_layer(table: ScoreTable, budget: Budget, seed: int = 0) -> Allocation:
    """The greedy rule where all heads of a layer (or their keys, or their values) move together; nothing is random.

    A layer saves many bytes at once. So that its policies can be compared at equal bytes, under a budget in bytes the
    last move takes only as many of the layer's heads, from the first, as the bytes need: at most one layer is mixed.
    """
    parts = _Parts.layers(table)
    costs, sizes = parts.merge(table.costs), parts.merge(table.sizes)
    return _descend(table, parts, _rate(costs, sizes), budget, passing=True)


def by_depth(table: ScoreTable, budget: Budget, seed: int = 0) -> Allocation:
    """A rule without scores: the first layers keep more bits; nothing is random.

    All units go down one rung, from the last layer to the first, before any goes down the next; within a layer the
    first head first, keys before values. A budget in nats ends the path before the first move that would not fit.
    """
    below = np.array([table.layers - 1 - unit.layer for unit in table.units])
    rank = np.arange(len(table.ladder) - 1) * table.layers + below[:, None]
    return _descend(table, _Parts.units(table), rank.astype(np.float64), budget, passing=False)


def reconstruction(table: ScoreTable, budget: Budget, seed: int = 0) -> Allocation:
    """The greedy rule by the error of keys and values instead of the output; nothing is random.

    The next move adds the least relative reconstruction error per byte saved. A budget in nats (of output KL, as for
    every allocator) ends the path before the first move that would not fit. ValueError where the table has no errors.
    """
    return _descend(table, _Parts.units(table), _rate(table.errors, table.sizes), budget, passing=False)


def at_random(table: ScoreTable, budget: Budget, seed: int = 0) -> Allocation:
    """One random policy of the budget's bytes (``draw``). ValueError for a budget in nats, which needs an order."""
    if budget.measure != "bytes":
        raise ValueError("allocator at-random: the budget is in nats, expected bytes, such as 400000B")
    return Allocation([table.ladder[rung] for rung in draw(table, int(budget.amount), 1, seed)[0]], [])


def allocate(allocator: str, table: ScoreTable, budget: Budget, seed: int = 0) -> Allocation:
    """What an allocator makes of a budget, one in bits an element too."""
    return ALLOCATORS[allocator](table, budget.of_cache(table.dense_bytes), seed)


# Each allocator is the function of its name, with underscores for hyphens.
ALLOCATORS: dict[str, Allocator] = {name: globals()[name.replace("-", "_")] for name in names.ALLOCATORS}


def granularity(table: ScoreTable) -> int:
    """The bytes by which a policy can miss a budget: the most that one unit saves by a move of one rung."""
    return int(-np.diff(table.sizes).min(initial=0))


def draw(table: ScoreTable, limit: int, count: int, seed: int) -> np.ndarray:
    """``count`` random policies, as rungs [N, U], uniform over all whose bytes lie within one unit's granularity.

    That is above ``limit`` − granularity and up to ``limit``; a limit above what all BF16 takes counts as that.
    """
    if limit < table.sizes[:, -1].sum():
        raise _too_small(table, Budget(limit, "bytes"))
    limit = min(limit, int(table.sizes[:, 0].sum()))
    return draw_assignments(table.sizes, limit - max(granularity(table), 1), limit, count, seed)


@dataclass(frozen=True)
class _Parts:
    """What moves at once: the units (indices) of each part, and how a path's table names the part."""

    members: list[list[int]]
    names: list[tuple[int, int | None, str]]

    @classmethod
    def units(cls, table: ScoreTable) -> _Parts:
        return cls([[index] for index in range(len(table.units))], [_named(unit) for unit in table.units])

    @classmethod
    def layers(cls, table: ScoreTable) -> _Parts:
        members: dict[tuple[int, int | None, str], list[int]] = {}
        for index, unit in enumerate(table.units):
            members.setdefault((unit.layer, None, _named(unit)[2]), []).append(index)
        return cls(list(members.values()), list(members))

    def merge(self, values: np.ndarray) -> np.ndarray:
        """Sums over each part's units, from values [U, R]."""
        return np.stack([values[indices].sum(axis=0) for indices in self.members])


def _named(unit: Unit) -> tuple[int, int | None, str]:
    """A unit as a path's table names it."""
    return (unit.layer, None, "kv") if unit.part == LAYER else tuple(unit)


def _moves(values: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What each move adds, at least 0, and the bytes that it saves, both [·, R − 1], from values and sizes [·, R]."""
    return np.maximum(np.diff(values), 0.0), -np.diff(sizes)


def _rate(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """What each move adds per byte that it saves [·, R − 1]."""
    added, saved = _moves(values, sizes)
    return added / saved


def _descend(table: ScoreTable, parts: _Parts, rank: np.ndarray, budget: Budget, passing: bool) -> Allocation:
    """From all BF16, the move of the lowest rank [parts, R − 1] each time (ties: the first part).

    Under nats until none fits, passing over moves that do not (``passing``), or up to the first that does not. Under
    bytes until they fit; the last move then goes unit by unit.
    """
    costs, sizes = parts.merge(table.costs), parts.merge(table.sizes)
    in_bytes = budget.measure == "bytes"
    if in_bytes and budget.amount < sizes[:, -1].sum():
        raise _too_small(table, budget)
    added, saved = _moves(costs, sizes)
    unit_added, unit_saved = _moves(table.costs, table.sizes)
    # A column more, that no move is in: what is on the last rung stays there.
    rank, added = (np.pad(values, ((0, 0), (0, 1)), constant_values=np.inf) for values in (rank, added))
    rungs, every = np.zeros(len(costs), dtype=int), np.arange(len(costs))
    choice, path = ["bf16"] * len(table.units), []
    spent, size = 0.0, int(sizes[:, 0].sum())
    while not (in_bytes and size <= budget.amount):
        more = added[every, rungs]
        fits = np.isfinite(more) if in_bytes else spent + more <= budget.amount
        ranks = np.where(fits, rank[every, rungs], np.inf) if passing else rank[every, rungs]
        part = int(np.argmin(ranks))
        if not fits[part]:
            break
        rung = rungs[part]
        before, after = table.ladder[rung : rung + 2]
        moving = [(parts.names[part], parts.members[part], added[part, rung], saved[part, rung])]
        if in_bytes and size - saved[part, rung] < budget.amount:
            units = parts.members[part]
            moving = [
                (_named(table.units[unit]), [unit], unit_added[unit, rung], unit_saved[unit, rung]) for unit in units
            ]
        for name, members, kl, less in moving:
            spent, size = float(spent + kl), size - int(less)
            path.append(Move(*name, before, after, float(kl), int(less), spent, size))
            for unit in members:
                choice[unit] = after
            if in_bytes and size <= budget.amount:
                break
        rungs[part] += 1
    return Allocation(choice, path)


def _too_small(table: ScoreTable, budget: Budget) -> ValueError:
    least, amount = table.sizes[:, -1].sum(), budget.amount
    return ValueError(
        f"budget {amount} {budget.measure}: too small for any policy of {', '.join(table.ladder)}; "
        f"the smallest takes {least} bytes"
    )
