"""Sets of policies to be measured together: recipes at equal bytes, and frontiers from all BF16 to the last rung.

A recipe is an allocator on a score table (its source, unit and ladder). A set has the proxy and the bytes of its
policies. A later stage measures their joint KL, all in one way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvstages.cache.precision_grid import UNITS, PrecisionGrid
from kvstages.cache.precisions import by_size
from kvstages.policies.allocators import ALLOCATORS, allocate, draw, granularity
from kvstages.policies.budgets import Budget
from kvstages.policies.making import policy_record
from kvstages.policies.names import AT_RANDOM
from kvstages.scores.table import ScoreTable

UNIFORM = "uniform"
NAME = r"[a-z0-9][a-z0-9.-]*"
# Quantiles that are recorded of the proxies of random policies.
QUANTILES = (0.0, 0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


class RecipeText(NamedTuple):
    """A recipe as text, with the source of its scores by name."""

    name: str
    allocator: str
    source: str
    unit: str
    precisions: tuple[str, ...]


def parse_recipe(text: str) -> RecipeText:
    """From NAME=ALLOCATOR:SOURCE:UNIT:PRECISIONS; ValueError on any other text."""
    match = re.fullmatch(rf"({NAME})=({'|'.join(ALLOCATORS)}):([^:]+):({'|'.join(UNITS)}):([^:]+)", text)
    if not match:
        raise ValueError(
            f"recipe {text!r}: expected NAME=ALLOCATOR:SOURCE:UNIT:PRECISIONS, such as "
            "exact=exact:measured-float32:head:int8,int4"
        )
    return RecipeText(*match.groups()[:4], tuple(match[5].split(",")))


@dataclass(frozen=True)
class Recipe:
    """A way to make policies."""

    name: str
    allocator: str
    table: ScoreTable

    def policy(self, budget: Budget) -> dict[str, Any]:
        """Record of the policy of a budget, named like the recipe; ValueError names the recipe."""
        try:
            found = allocate(self.allocator, self.table, budget)
        except ValueError as error:
            raise ValueError(f"recipe {self.name}: {error}") from None
        return self.record(self.name, found.choice, budget, len(found.path))

    def record(self, policy: str, choice: Sequence[str], budget: Budget | None, steps: int = 0) -> dict[str, Any]:
        """Record of a policy, by precision of each unit [U], with the recipe; its proxy is the sum of the scores."""
        table = self.table
        record = policy_record(
            policy,
            self.allocator,
            budget,
            table.grid(choice),
            table.proxy(choice),
            steps,
            table.widths,
            table.tokens,
            unit=table.unit,
            ladder=table.ladder,
            sensitivity=table.source,
        )
        limit = None if budget is None else budget.of_cache(table.dense_bytes)
        in_bytes = limit is not None and limit.measure == "bytes"
        return record | {"recipe": self.name, "limit": int(limit.amount) if in_bytes else record["bytes"]["total"]}

    @property
    def least(self) -> int:
        """Bytes of the smallest policy, with every unit on the last rung."""
        return int(self.table.sizes[:, -1].sum())


def equal_bytes(recipes: Sequence[Recipe], budget: Budget, random: int, draws: int, seed: int) -> dict[str, Any]:
    """One policy of every recipe at the bytes of the first recipe's policy, whose budget is in nats or bytes; and the
    uniform policies, each at its own bytes.

    A random recipe gives the first ``random`` of ``draws`` policies instead, and the spread of all their proxies (see
    ``spread``). Each policy of a recipe takes ``limit`` bytes or less, by less than the ``granularity`` of its recipe.
    Only exact may take even less, where more bytes would not lower its proxy. Recipes that cannot take so few bytes are
    ``left_out``, by name. ValueError where names repeat or the first recipe sets no bytes.
    """
    _check_names(recipes)
    if recipes[0].allocator == AT_RANDOM:
        raise ValueError(f"recipe {recipes[0].name}: the first recipe sets the bytes, so it cannot be random")
    first = recipes[0].policy(budget)
    limit = first["bytes"]["total"]
    at_limit = Budget(limit, "bytes")
    left_out = [recipe.name for recipe in recipes if recipe.least > limit]
    uniform = uniform_policies(recipes)
    recipes = [recipe for recipe in recipes if recipe.least <= limit]
    policies = [first, *(recipe.policy(at_limit) for recipe in recipes[1:] if recipe.allocator != AT_RANDOM)]
    policies += uniform
    chosen = list(policies)
    spreads = []
    for recipe in recipes:
        if recipe.allocator == AT_RANDOM:
            rungs = draw(recipe.table, limit, max(draws, random), seed)
            policies += [
                recipe.record(f"{recipe.name}-{number:04d}", choice, at_limit) | {"seed": seed}
                for number, choice in enumerate(np.array(recipe.table.ladder)[rungs[:random]].tolist(), start=1)
            ]
            spreads.append(spread(recipe, rungs, chosen))
    return {
        "limit": limit,
        "left_out": left_out,
        "granularity": {recipe.name: granularity(recipe.table) for recipe in recipes},
        "policies": policies,
        "draws": spreads,
    }


def spread(recipe: Recipe, rungs: np.ndarray, policies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Quantiles of the proxies of random policies, rungs [N, U], and the places of other policies among them.

    A policy that the recipe's table can score has its proxy by that table, and the share of the random ones below it.
    """
    table = recipe.table
    proxies = np.sort(table.costs[np.arange(rungs.shape[1]), rungs].sum(axis=1))
    choices = {policy["policy"]: table.choice(PrecisionGrid.of_record(policy["precisions"])) for policy in policies}
    scored = {name: table.proxy(choice) for name, choice in choices.items() if choice is not None}
    return {
        "recipe": recipe.name,
        "sensitivity": table.source,
        "unit": table.unit,
        "ladder": list(table.ladder),
        "count": len(proxies),
        "quantiles": [
            {"quantile": quantile, "proxy": float(value)}
            for quantile, value in zip(QUANTILES, np.quantile(proxies, QUANTILES), strict=True)
        ],
        "policies": {
            name: {"proxy": proxy, "share_below": float(np.searchsorted(proxies, proxy) / len(proxies))}
            for name, proxy in scored.items()
        },
    }


def uniform_policies(recipes: Sequence[Recipe]) -> list[dict[str, Any]]:
    """The uniform policies, all BF16 first, of every precision that a recipe may use; their proxies by the first such
    recipe's scores."""
    return [
        Recipe(UNIFORM, UNIFORM, tables[0]).record(precision, [precision] * len(tables[0].units), None)
        for precision in by_size(["bf16", *(name for recipe in recipes for name in recipe.table.precisions)])
        if (tables := [recipe.table for recipe in recipes if precision in ("bf16", *recipe.table.precisions)])
    ]


def frontier_policies(recipes: Sequence[Recipe], points: int) -> dict[str, Any]:
    """Policies of each recipe at the same byte totals, and the uniform policies of every precision.

    The totals are ``points`` ones evenly spaced from all BF16 to the fewest bytes of any recipe, and those of the
    uniform policies; a recipe is left out where it cannot take so few. A policy is named by its recipe and the total
    that it was made for. ValueError on a random recipe, and where names repeat.
    """
    _check_names(recipes)
    policies = uniform_policies(recipes)
    dense = int(recipes[0].table.sizes[:, 0].sum())
    limits = np.linspace(dense, min(recipe.least for recipe in recipes), points).astype(int).tolist()
    limits = sorted({*limits, *(policy["bytes"]["total"] for policy in policies)}, reverse=True)
    for recipe in recipes:
        if recipe.allocator == AT_RANDOM:
            raise ValueError(f"recipe {recipe.name}: a frontier cannot be random")
        for limit in limits:
            if limit >= recipe.least:
                policies.append(recipe.policy(Budget(limit, "bytes")) | {"policy": f"{recipe.name}-{limit}B"})
    return {"policies": policies}


def _check_names(recipes: Sequence[Recipe]) -> None:
    names = [recipe.name for recipe in recipes]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"two recipes have the name {repeated[0]}")
