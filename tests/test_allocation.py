"""The greedy allocator: the published policies exactly, and its rules on small grids by exhaustion."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import PUBLISHED

from kvstages.allocation import LADDER, average_payload_bits, greedy, head_bytes, policy_bytes, proxy, uniform
from kvstages.published import published_policies, published_sensitivities

BUDGETS = ["0.01", "0.05", "0.1", "0.25", "0.5"]


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_published_policy_of_every_budget_exactly(budget):
    policy, path = greedy(published_sensitivities(PUBLISHED), float(budget), 64, 64)
    expected = published_policies(PUBLISHED)[f"greedy-{budget}"]
    assert policy == expected["precisions"]
    assert path[-1].proxy == expected["proxy"]


def test_each_of_the_159_published_steps_of_budget_001():
    scores = published_sensitivities(PUBLISHED)
    policy, path = greedy(scores, 0.01, 64, 64)
    steps = published_policies(PUBLISHED)["greedy-0.01"]["steps"]
    assert len(path) == len(steps) == 159
    for move, step in zip(path, steps, strict=True):
        assert (move.layer, move.head, move.before, move.after) == (
            step["layer"],
            step["head"],
            step["from"],
            step["to"],
        )
        assert (move.added_kl, move.bytes_saved, move.proxy) == (step["added_kl"], step["bytes_saved"], step["proxy"])
    assert path[-1].proxy == 0.009985672175389482 == pytest.approx(proxy(policy, scores), rel=1e-12)
    assert path[-1].cache_bytes == 579_840 == sum(policy_bytes(policy, 64, 64))
    assert [sum(row.count(p) for row in policy) for p in ("int4", "int8", "bf16")] == [70, 19, 7]
    assert average_payload_bits(policy) == pytest.approx(5.666666666666667)


score = st.floats(0, 1, allow_subnormal=False) | st.sampled_from([0.0, 0.5])
grids = st.tuples(st.integers(1, 3), st.integers(1, 3)).flatmap(
    lambda shape: st.fixed_dictionaries(
        {
            p: st.lists(st.lists(score, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0])
            for p in ("int8", "int4")
        }
    )
)


def step_by_exhaustion(policy, scores, spent, budget, head_dim, tokens):
    """The best next move by trying every head: (added KL per byte, layer, head, after), or None."""
    found = []
    for layer, row in enumerate(policy):
        for head, before in enumerate(row):
            if before == "int4":
                continue
            after = LADDER[LADDER.index(before) + 1]
            added = scores[after][layer][head] - (scores[before][layer][head] if before != "bf16" else 0.0)
            added = max(added, 0.0)
            saved = head_bytes(before, head_dim, tokens) - head_bytes(after, head_dim, tokens)
            if spent + added <= budget:
                found.append((added / saved, layer, head, after, added))
    return min(found) if found else None


@settings(deadline=None)
@given(scores=grids, budget=st.floats(0, 4), head_dim=st.integers(4, 9), tokens=st.integers(1, 8))
def test_every_step_is_the_best_that_fits_and_the_last_leaves_none(scores, budget, head_dim, tokens):
    policy, path = greedy(scores, budget, head_dim, tokens)
    grid = uniform(len(scores["int8"]), len(scores["int8"][0]), "bf16")
    spent = 0.0
    for move in path:
        best = step_by_exhaustion(grid, scores, spent, budget, head_dim, tokens)
        assert best is not None
        assert (move.layer, move.head, move.after, move.added_kl) == best[1:]
        grid[move.layer][move.head] = move.after
        spent += move.added_kl
        assert move.proxy == spent and move.cache_bytes == sum(policy_bytes(grid, head_dim, tokens))
    assert step_by_exhaustion(grid, scores, spent, budget, head_dim, tokens) is None
    assert grid == policy and spent <= budget


@settings(deadline=None, max_examples=30)
@given(scores=grids, budget=st.floats(0, 4))
def test_no_policy_is_smaller_than_the_smallest_that_fits(scores, budget):
    """Greedy is not optimal, but it stays within the budget and never beats exhaustive search."""
    layers, heads = len(scores["int8"]), len(scores["int8"][0])
    if layers * heads > 6:
        return
    policy, _ = greedy(scores, budget, 8, 4)
    smallest = min(
        sum(policy_bytes(grid, 8, 4))
        for flat in itertools.product(LADDER, repeat=layers * heads)
        if proxy(grid := [list(flat[row * heads : (row + 1) * heads]) for row in range(layers)], scores) <= budget
    )
    assert sum(policy_bytes(policy, 8, 4)) >= smallest


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_single_precision_makes_a_ladder_of_one_rung(precision):
    policy, path = greedy({precision: [[0.1, 0.2, 0.3]]}, 0.35, 8, 4)
    assert policy == [[precision, precision, "bf16"]]
    assert [(move.before, move.after) for move in path] == [("bf16", precision)] * 2


def test_ties_go_to_the_lower_layer_then_the_lower_head():
    path = greedy({"int8": [[0.1, 0.1], [0.1, 0.1]], "int4": [[1.0, 1.0]] * 2}, 0.45, 8, 4)[1]
    assert [(move.layer, move.head) for move in path] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e-11])
def test_a_score_that_is_none_names_the_head(bad):
    scores = {"int8": [[0.1, 0.1], [0.1, bad]], "int4": [[1.0, 1.0]] * 2}
    with pytest.raises(ValueError, match="layer 1, head 1, int8"):
        greedy(scores, 1.0, 8, 4)


def test_rounding_below_zero_counts_as_zero():
    policy, path = greedy({"int8": [[-1e-13]], "int4": [[-2e-13]]}, 0.0, 8, 4)
    assert policy == [["int4"]] and [move.added_kl for move in path] == [0.0, 0.0]


@pytest.mark.parametrize("budget", [-0.1, math.nan])
def test_a_budget_is_zero_or_more(budget):
    with pytest.raises(ValueError, match="budget"):
        greedy({"int8": [[0.1]]}, budget, 8, 4)


def test_ragged_scores_are_refused():
    with pytest.raises(ValueError, match="different shapes"):
        greedy({"int8": [[0.1, 0.2]], "int4": [[0.1]]}, 1.0, 8, 4)


def test_a_move_that_saves_nothing_is_not_made():
    """With one element a head, codes and scale take more than BF16."""
    assert greedy({"int8": [[0.0]], "int4": [[0.0]]}, 1.0, 1, 4) == ([["bf16"]], [])
