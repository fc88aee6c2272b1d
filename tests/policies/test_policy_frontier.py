"""The exact frontier: against every assignment, against an integer program, and in the time it may take."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from score_tables import published_table, random_table

from kvstages.cache.precisions import QUANTIZED
from kvstages.policies.knapsack import frontier

problems = st.tuples(st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda shape: st.tuples(
        *(
            st.lists(st.lists(values, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0])
            for values in (st.floats(-1, 1, allow_subnormal=False), st.integers(0, 12))
        )
    )
)


@settings(deadline=None)
@given(problem=problems)
def test_every_total_size_at_its_least_cost_by_exhaustion(problem):
    cost, size = map(np.array, problem)
    least: dict[int, float] = {}
    units = np.arange(len(cost))
    for choice in itertools.product(range(cost.shape[1]), repeat=len(cost)):
        total = int(size[units, list(choice)].sum())
        least[total] = min(least.get(total, np.inf), float(np.cumsum(cost[units, list(choice)])[-1]))
    found = frontier(cost, size)
    assert found.sizes.tolist() == sorted(least)
    assert found.costs.tolist() == [least[total] for total in sorted(least)]
    for index, total in enumerate(found.sizes):
        choice = found.choice(index)
        assert size[units, choice].sum() == total
        assert np.cumsum(cost[units, choice])[-1] == found.costs[index]


def test_limits_of_size_and_cost():
    found = frontier(np.array([[0.0, 1.0, 3.0], [0.0, 1.0, 1.0]]), np.array([[9, 5, 2], [9, 5, 3]]))
    sizes = dict(zip(found.sizes.tolist(), found.costs.tolist(), strict=True))
    assert sizes == {18: 0.0, 14: 1.0, 12: 1.0, 11: 3.0, 10: 2.0, 8: 2.0, 7: 4.0, 5: 4.0}
    assert found.sizes[found.within_size(17)] == 12  # of the same cost as 14
    assert found.sizes[found.within_size(11.5)] == 8
    assert found.sizes[found.within_cost(1.5)] == 12
    assert found.within_size(4) is None and found.within_cost(-0.1) is None


def test_of_equal_assignments_the_last_units_take_the_first_choice_that_will_do():
    found = frontier(np.ones((3, 3)), np.array([[8, 4, 4]] * 3))
    assert found.sizes.tolist() == [12, 16, 20, 24]
    assert [found.choice(index).tolist() for index in range(4)] == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]]


def test_a_negative_cost_is_a_cost():
    found = frontier(np.array([[0.5, -1.0], [-2.0, 0.0]]), np.array([[2, 1], [2, 1]]))
    assert dict(zip(found.sizes.tolist(), found.costs.tolist(), strict=True)) == {4: -1.5, 3: -3.0, 2: -1.0}


def integer_program(cost: np.ndarray, size: np.ndarray, limit: int) -> float:
    """Least cost of one choice a unit within a total size, by HiGHS."""
    units, choices = cost.shape
    once = csr_array((np.ones(cost.size), (np.repeat(np.arange(units), choices), np.arange(cost.size))))
    found = milp(
        cost.ravel(),
        integrality=np.ones(cost.size),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(once, 1, 1), LinearConstraint(size.ravel()[None].astype(float), ub=limit)],
        options={"mip_rel_gap": 0.0},
    )
    assert found.success, found.message
    return float(cost.ravel()[np.round(found.x).astype(bool)].sum())


@pytest.mark.parametrize(
    ("table", "budgets"),
    [(random_table(4, 4, QUANTIZED, "keys-values", seed=5), 30), (random_table(6, 3, ("int8", "int4"), seed=6), 15),
     (published_table(), 15)],
    ids=["32 tensors, 5 precisions", "18 heads, 3 precisions", "published scores"],
)  # fmt: skip
def test_as_good_as_an_integer_program(table, budgets):
    """60 budgets between them."""
    found = frontier(table.costs, table.sizes)
    scale = table.costs.max()
    for limit in np.linspace(table.sizes[:, -1].sum(), table.sizes[:, 0].sum(), budgets).astype(int):
        program = integer_program(table.costs / scale, table.sizes // table.tokens, limit // table.tokens) * scale
        assert found.costs[found.within_size(limit)] == pytest.approx(program, rel=1e-6, abs=1e-9 * scale)


def test_192_units_at_five_precisions_take_less_than_five_seconds():
    table = random_table(12, 8, QUANTIZED, "keys-values")
    assert table.costs.shape == (192, 5)
    start = time.process_time()
    found = frontier(table.costs, table.sizes)
    found.choice(len(found.sizes) // 2)
    assert time.process_time() - start < 5
    assert found.sizes[[0, -1]].tolist() == [192 * 64 * 18, 192 * 64 * 128]


@pytest.mark.parametrize(
    ("cost", "size", "message"),
    [
        ([[0.0, 1.0]], [[1]], r"costs of shape \(1, 2\) and sizes of shape \(1, 1\), expected units × choices, alike"),
        ([[0.0], [np.nan]], [[1], [1]], "unit 1 has a cost that is not finite"),
        ([[0.0], [np.inf]], [[1], [1]], "unit 1 has a cost that is not finite"),
    ],
)
def test_what_is_no_problem_is_refused(cost, size, message):
    with pytest.raises(ValueError, match=message):
        frontier(np.array(cost), np.array(size))


def test_sizes_that_have_no_common_step_are_rounded_up(monkeypatch):
    random = np.random.default_rng(0)
    cost = -np.sort(-random.random((12, 4)), axis=1)
    size = np.sort(random.integers(1, 10_000, (12, 4)) * 2 + 1, axis=1)[:, ::-1]
    exact = frontier(cost[:, ::-1], size)
    monkeypatch.setattr("kvstages.policies.knapsack.MOST_STEPS", 500)
    found = frontier(cost[:, ::-1], size)
    step = found.sizes[1] - found.sizes[0]
    assert len(found.sizes) <= 501 + 12 < len(exact.sizes)
    units = np.arange(len(size))
    for limit in np.linspace(size.min(axis=1).sum(), size.max(axis=1).sum(), 20):
        index = found.within_size(limit)
        taken = size[units, found.choice(index)].sum()
        # Within its bound, and no worse than the best of a limit lower by a step a unit.
        assert found.sizes[index] - step * len(size) < taken <= found.sizes[index] <= limit
        lower = exact.within_size(limit - step * len(size))
        assert lower is None or found.costs[index] <= exact.costs[lower] + 1e-12
