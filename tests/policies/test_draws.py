"""Random assignments: all of a window, and each as likely as any other."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from kvstages.policies.sampling import draw_assignments

sizes = st.tuples(st.integers(1, 4), st.integers(1, 3)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(0, 9), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    )
)


def window(size: np.ndarray, above: int, limit: int) -> set[tuple[int, ...]]:
    """Every assignment in a window, by exhaustion."""
    every = itertools.product(range(size.shape[1]), repeat=len(size))
    return {choice for choice in every if above < size[np.arange(len(size)), list(choice)].sum() <= limit}


@settings(deadline=None)
@given(size=sizes.map(np.array), limit=st.integers(0, 36), slack=st.integers(1, 12))
def test_draws_lie_in_the_window_and_an_empty_one_is_refused(size, limit, slack):
    inside = window(size, limit - slack, limit)
    if inside:
        assert set(map(tuple, draw_assignments(size, limit - slack, limit, 50, 0).tolist())) <= inside
    else:
        with pytest.raises(ValueError, match=f"no policy takes more than {limit - slack} and at most {limit} bytes"):
            draw_assignments(size, limit - slack, limit, 50, 0)


@pytest.mark.parametrize(
    ("size", "above", "limit"),
    [
        ([[128, 66, 34]] * 4, 260, 322),
        ([[128, 66, 34, 26, 18]] * 3, 100, 162),
        ([[7, 3, 3], [5, 1, 0], [9, 2, 1]], 8, 13),
    ],
)
def test_each_assignment_is_as_likely_as_any_other(size, above, limit):
    size = np.array(size)
    inside = sorted(window(size, above, limit))
    assert len(inside) >= 8
    drawn = Counter(map(tuple, draw_assignments(size, above, limit, 400 * len(inside), seed=11).tolist()))
    assert set(drawn) == set(inside)
    assert chisquare([drawn[choice] for choice in inside]).pvalue > 0.01


def test_counts_beyond_what_a_float_holds():
    """700 units of three choices: 3^700 assignments, and the extremes are still found."""
    size = np.array([[16, 10, 4]] * 700)
    drawn = draw_assignments(size, 700 * 4 - 1, 700 * 4, 2, 0)
    assert (drawn == 2).all()
    middle = draw_assignments(size, 700 * 10 - 12, 700 * 10, 200, 0)
    # Uniform over all of about the mean size: each choice about a third of the time.
    assert np.bincount(middle.ravel()) / middle.size == pytest.approx([1 / 3] * 3, abs=0.01)
