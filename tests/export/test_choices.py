"""What an engine can express: projections and allocations by choices, against trying everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstages.export.choices import allocate, each_layer, each_side, ends, project

PAIRS = [(0, 0), (1, 1), (2, 2), (1, 2)]
# Formats from most to least; the first is enough for all.
ENOUGH = np.triu(np.ones((3, 3), dtype=bool))
SIZE = np.tile([16, 8, 4], (6, 1))


def every(alternatives, places):
    """All settings of some alternatives, as formats [N]."""
    for alternative in alternatives:
        for chosen in itertools.product(*(range(len(part.choices)) for part in alternative)):
            setting = np.empty(places, dtype=int)
            for part, index in zip(alternative, chosen, strict=True):
                setting[part.places] = part.choices[index]
            yield setting


ALTERNATIVES = {
    "free pairs": [each_layer(3, PAIRS)],
    "two tiers": [each_layer(3, [(0, 0), (1, 1)]), each_layer(3, [(0, 0), (2, 2)])],
    "ends": [each_side(3, ends(3, 3))],
    "uniform": [each_side(3, np.repeat(np.arange(3)[:, None], 3, axis=1))],
}


@pytest.mark.parametrize("kind", ALTERNATIVES)
@given(needed=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_a_projection_gives_enough_in_the_fewest_bytes(kind, needed):
    needed = np.array(needed)
    found = project(ALTERNATIVES[kind], needed, ENOUGH, SIZE)
    settings = [each for each in every(ALTERNATIVES[kind], 6) if ENOUGH[each, needed].all()]
    place = np.arange(6)
    assert ENOUGH[found, needed].all() and any((found == each).all() for each in settings)
    assert SIZE[place, found].sum() == min(SIZE[place, each].sum() for each in settings)


@pytest.mark.parametrize("kind", ALTERNATIVES)
@given(seed=st.integers(0, 1000), limit=st.integers(24, 96))
def test_an_allocation_has_the_least_cost_that_fits(kind, seed, limit):
    cost = np.sort(np.random.default_rng(seed).random((6, 3)).round(3), axis=1)
    place = np.arange(6)
    settings = [each for each in every(ALTERNATIVES[kind], 6) if SIZE[place, each].sum() <= limit]
    found = allocate(ALTERNATIVES[kind], cost, SIZE, limit)
    assert SIZE[place, found].sum() <= limit and any((found == each).all() for each in settings)
    assert cost[place, found].sum() == pytest.approx(min(cost[place, each].sum() for each in settings))


def test_ends_are_each_there_once():
    rows = ends(4, 3)
    runs = [len(list(itertools.groupby(row))) for row in rows.tolist()]
    assert len(np.unique(rows, axis=0)) == len(rows) and max(runs) == 3
    by_hand = [row for row in itertools.product(range(3), repeat=4) if len(list(itertools.groupby(row))) <= 3]
    assert sorted(map(tuple, rows.tolist())) == sorted(by_hand)
    assert ends(1, 2).tolist() == [[0], [1]] and ends(2, 1).tolist() == [[0, 0]]


def test_what_cannot_be_is_an_error():
    with pytest.raises(ValueError, match="as many bits"):
        project([each_layer(3, [(1, 1)])], np.zeros(6, dtype=int), ENOUGH, SIZE)
    with pytest.raises(ValueError, match="takes 23 bytes"):
        allocate(ALTERNATIVES["ends"], np.zeros((6, 3)), SIZE, 23)
