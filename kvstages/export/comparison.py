"""What an engine's restrictions cost: the set of policies that is measured to tell.

A policy of one's own; for each engine what it becomes there (*projected*), and at the bytes of that the best that the
engine can express (*allocated*), the best with the engine's formats chosen freely for each layer (*layer*) and the best
of one's own kind (*own*); at the bytes of one's own policy the best that the engine can express (*allocated-own*),
where it can take so few. Axes: L layers, H KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import by_size
from kvstages.cache.schemes import SIDES
from kvstages.export.engine import Cache, Engine, Layers, allocated, engine_bytes, projected
from kvstages.export.record import SCORED, setting_record
from kvstages.policies.budgets import Budget
from kvstages.policies.engine_recipes import ALLOCATED, AT_OWN_BYTES, EVERY_LAYER, OWN, PROJECTED
from kvstages.policies.recipes import Recipe
from kvstages.scores.table import ScoreTable, read_scores

if TYPE_CHECKING:
    from kvstages.models.config import DecoderShape

# What a policy's file says of itself, which a set says once.
OF_FILE = ("schema_version", "model", "schemes", "provenance", *SCORED)


def engine_set(
    policy: Mapping[str, Any], table: ScoreTable, engines: Sequence[Engine], scores: Path, shape: DecoderShape
) -> dict[str, Any]:
    """The set of policies, one's own first; recipes are ``own`` and ENGINE-projected, ENGINE-allocated, ...

    ``policy``: a checked record; ``table``: the scores that it was made from; ``scores``: those of the engines' formats
    (``stage score-engines``). ``left_out``: recipes that cannot take so few bytes. ValueError names what an engine
    lacks, and a policy that no allocator made of ``table``.
    """
    own = Recipe(OWN, policy["allocator"], table)
    if policy["allocator"] == "uniform" or table.choice(PrecisionGrid.of_record(policy["precisions"])) is None:
        raise ValueError(f"policy {policy['policy']}: expected one that an allocator made of the scores {table.source}")
    cache = Cache.of_policy(policy)
    limit = policy["bytes"]["total"]
    first = {key: value for key, value in policy.items() if key not in OF_FILE}
    policies, left_out = [{**first, "recipe": OWN, "limit": limit}], []
    for engine in engines:
        costs, source = read_costs(scores, engine, cache, shape)

        def record(kind: str, allocator: str, layers: Layers, bound: int, engine=engine, costs=costs, source=source):
            name = f"{engine.name}-{kind}"
            proxy = float(sum(
                costs[form.precision][2 * layer + side]
                for layer, pair in enumerate(layers)
                for side, form in enumerate(pair)
            ))  # fmt: skip
            made = setting_record(name, allocator, engine, layers, cache, source, proxy)
            return made | {"recipe": name, "limit": bound}

        layers, _ = projected(engine, PrecisionGrid.of_record(policy["precisions"]), cache)
        size = engine_bytes(layers, cache)
        policies += [
            record(PROJECTED, PROJECTED, layers, size),
            record(ALLOCATED, "exact", allocated(engine, costs, cache, size), size),
            record(EVERY_LAYER, "exact", allocated(engine, costs, cache, size, every_layer=True), size),
        ]
        at_size = own.policy(Budget(size, "bytes"))
        policies.append(at_size | {"policy": f"{engine.name}-{OWN}", "recipe": f"{engine.name}-{OWN}"})
        try:
            policies.append(record(AT_OWN_BYTES, "exact", allocated(engine, costs, cache, limit), limit))
        except ValueError:
            left_out.append(f"{engine.name}-{AT_OWN_BYTES}")
    return {"budget": None, "tokens": cache.tokens, "left_out": left_out, "policies": policies}


def read_costs(path: Path, engine: Engine, cache: Cache, shape: DecoderShape) -> tuple[dict[str, np.ndarray], str]:
    """Scores of an engine's formats summed over the heads of each layer's keys and values (nats) [2L], BF16 with them;
    and where they come from."""
    names = by_size(form.precision for form in engine.fitting(cache.widths) if form.precision != "bf16")
    table = read_scores(path, shape, cache.tokens, "keys-values", names)
    # Units by layer, head and part, keys before values.
    scores = table.scores.reshape(-1, cache.layers, cache.heads, len(SIDES)).sum(axis=2)
    found = dict(zip(("bf16", *table.precisions), scores.reshape(len(scores), -1), strict=True))
    return found, table.source
