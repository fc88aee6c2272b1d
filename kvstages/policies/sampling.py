"""Random assignments within a window of total sizes, each as likely as any other.

Counted first, for every unit and every size still allowed, then drawn unit by unit in proportion to how many
assignments of the later units complete each choice. Axes: U units, P choices, N draws.
"""

from __future__ import annotations

import numpy as np

from kvstages.policies.knapsack import common_step


def draw_assignments(size: np.ndarray, above: int, limit: int, count: int, seed: int) -> np.ndarray:
    """``count`` choices of each unit, int64 [N, U], uniform over all whose total size is > ``above`` and <= ``limit``.

    ``size``: whole sizes [U, P]. Counts are kept as logarithms, to double precision. ValueError if no assignment lies
    in the window.
    """
    excess, step = common_step(size)
    smallest = int(size.min(axis=1).sum())
    # In steps: what the choices may take in total, and the least that they must take.
    most = (limit - smallest) // step
    least = max((above - smallest) // step + 1, 0)
    if most < least:
        raise ValueError(f"no policy takes more than {above} and at most {limit} bytes")
    ways = _log_ways(excess, most, most - least)
    if np.isneginf(ways[0, most]):
        raise ValueError(f"no policy takes more than {above} and at most {limit} bytes")
    random = np.random.default_rng(seed)
    left = np.full(count, most)
    drawn = np.empty((count, len(size)), dtype=np.int64)
    for unit, steps in enumerate(excess):
        after = left - steps[:, None]
        weights = np.where(after >= 0, np.exp(ways[unit + 1, np.maximum(after, 0)] - ways[unit, left]), 0.0)
        reached = np.cumsum(weights, axis=0)
        drawn[:, unit] = np.argmax(reached > random.random(count) * reached[-1], axis=0)
        left -= steps[drawn[:, unit]]
    return drawn


def _log_ways(excess: np.ndarray, most: int, slack: int) -> np.ndarray:
    """Logarithm of how many assignments of the units from u on leave 0 to ``slack`` of r steps [U + 1, most + 1]."""
    ways = np.full((len(excess) + 1, most + 1), -np.inf)
    ways[-1, : slack + 1] = 0.0
    for unit in reversed(range(len(excess))):
        for up in excess[unit]:
            if up <= most:
                np.logaddexp(ways[unit, up:], ways[unit + 1, : most + 1 - up], out=ways[unit, up:])
    return ways
