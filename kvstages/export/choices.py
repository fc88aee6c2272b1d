"""What an engine can express, as choices; a policy projected onto them, and the best of them for some bytes.

An engine sets formats for the keys and the values of whole layers. A *place* is one of them: 2 · layer for a layer's
keys, 2 · layer + 1 for its values. What must be chosen together is a *part*, and its choices are all that the engine
takes there. Parts that are chosen freely, each by itself, make an *alternative*. An engine has one or several of them.

Axes: L layers, N = 2 L places, F formats, P choices of a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np

from kvstages.policies.knapsack import frontier


class Part(NamedTuple):
    """Places that are chosen for together, and the choices: indices of formats, int [P, places]."""

    places: list[int]
    choices: np.ndarray


Alternative = Sequence[Part]


def project(
    alternatives: Iterable[Alternative], needed: np.ndarray, enough: np.ndarray, size: np.ndarray
) -> np.ndarray:
    """The choice of fewest bytes that gives no place less than it needs: formats [N].

    ``needed`` [N]: a format for each place; ``enough`` bool [F, F]: whether the first may stand for the second;
    ``size`` [N, F]: bytes. Ties: what comes first. ValueError where no choice is enough.
    """
    best: tuple[int, np.ndarray] | None = None
    for alternative in alternatives:
        chosen, total = np.empty_like(needed), 0
        for places, choices in alternative:
            fits = np.flatnonzero(enough[choices, needed[places]].all(axis=1))
            if not len(fits):
                break
            bytes_of = size[places, choices[fits]].sum(axis=1)
            chosen[places] = choices[fits[bytes_of.argmin()]]
            total += int(bytes_of.min())
        else:
            if best is None or total < best[0]:
                best = total, chosen
    if best is None:
        raise ValueError("no setting of the engine gives every layer as many bits as the policy does")
    return best[1]


def allocate(alternatives: Iterable[Alternative], cost: np.ndarray, size: np.ndarray, limit: int) -> np.ndarray:
    """The choice of least cost that takes ``limit`` bytes or less: formats [N]; of equal costs the fewest bytes.

    ``cost`` [N, F] in nats, ``size`` [N, F] in bytes. ValueError where nothing fits.
    """
    best: tuple[float, int, np.ndarray] | None = None
    for alternative in alternatives:
        parts = [_efficient(part, cost, size) for part in alternative]
        most = max(len(choices) for choices, _, _ in parts)
        # The last choice again, where a part has fewer than others.
        rows = [np.minimum(np.arange(most), len(choices) - 1) for choices, _, _ in parts]
        costs = np.stack([costs[row] for (_, costs, _), row in zip(parts, rows, strict=True)])
        sizes = np.stack([sizes[row] for (_, _, sizes), row in zip(parts, rows, strict=True)])
        found = frontier(costs, sizes)
        index = found.within_size(limit)
        if index is None:
            continue
        key = float(found.costs[index]), int(found.sizes[index])
        if best is None or key < best[:2]:
            chosen = np.empty(len(cost), dtype=np.int64)
            for part, (choices, _, _), row, choice in zip(alternative, parts, rows, found.choice(index), strict=True):
                chosen[part.places] = choices[row[choice]]
            best = *key, chosen
    if best is None:
        raise ValueError(f"no setting of the engine takes {limit} bytes or less")
    return best[2]


def each_layer(layers: int, pairs: Sequence[tuple[int, int]]) -> Alternative:
    """Every layer by itself: one of some pairs of formats for its keys and its values."""
    choices = np.array(pairs)
    return [Part([2 * layer, 2 * layer + 1], choices) for layer in range(layers)]


def each_side(layers: int, rows: np.ndarray) -> Alternative:
    """All keys together and all values together: each one of ``rows`` [P, L]."""
    return [Part(list(range(side, 2 * layers, 2)), rows) for side in (0, 1)]


def ends(layers: int, formats: int) -> np.ndarray:
    """One format for the first layers, one for the last and one for those between [P, L]; each row once."""
    rows = []
    for runs in range(1, min(3, layers) + 1):
        chosen = np.array(
            [each for each in product(range(formats), repeat=runs) if all(a != b for a, b in pairwise(each))]
        )
        if len(chosen):
            for cuts in combinations(range(1, layers), runs - 1):
                rows.append(np.repeat(chosen.astype(np.int8), np.diff([0, *cuts, layers]), axis=1))
    return np.concatenate(rows)


def _efficient(part: Part, cost: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Those choices of a part that cost less than every smaller one, with their costs and sizes; smallest first."""
    costs, sizes = (values[part.places, part.choices].sum(axis=1) for values in (cost, size))
    order = np.lexsort((costs, sizes))
    before = np.minimum.accumulate(np.concatenate([[np.inf], costs[order][:-1]]))
    kept = order[costs[order] < before]
    return part.choices[kept], costs[kept], sizes[kept]
