"""Reallocation around a policy: by exhaustion on a small table, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from gappy import write_gappy
from score_tables import random_table

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.policies.budgets import Budget
from kvstages.policies.recipes import Recipe
from kvstages.policies.refinement import read_moves, refined_policy
from kvstages.scores.table import COLUMNS

TABLE = random_table(2, 2, ("int8", "int4"), widths=(8, 8), tokens=4)
BASE = Recipe("exact", "exact", TABLE).policy(Budget(500, "bytes"))


@pytest.mark.parametrize("seed", range(5))
def test_the_refined_policy_adds_least_within_the_bases_bytes(seed):
    moves = np.random.default_rng(seed).normal(size=(4, 3))
    found = refined_policy("refined", BASE, moves, TABLE)
    best = min(
        moves[np.arange(4), rungs].sum()
        for rungs in itertools.product(range(3), repeat=4)
        if TABLE.sizes[np.arange(4), rungs].sum() <= BASE["bytes"]["total"]
    )
    choice = [TABLE.ladder.index(name) for row in found["precisions"]["keys"] for name in row]
    assert moves[np.arange(4), choice].sum() == pytest.approx(best)
    assert found["bytes"]["total"] <= BASE["bytes"]["total"]
    assert found["policy"] == found["recipe"] == "refined"
    assert found["proxy"] == pytest.approx(TABLE.proxy([TABLE.ladder[rung] for rung in choice]))


def test_moves_that_add_nothing_anywhere_but_where_the_policy_is_leave_it():
    choice = TABLE.choice(PrecisionGrid.of_record(BASE["precisions"]))
    moves = np.ones((4, 3))
    moves[np.arange(4), [TABLE.ladder.index(name) for name in choice]] = 0
    assert refined_policy("refined", BASE, moves, TABLE)["precisions"] == BASE["precisions"]


def write_moves(path, missing=None):
    rows = [
        (*unit, precision, 0.1 * index - 0.2 * rung, 0.0, "around-0.01", "one-pass", "float32")
        for index, unit in enumerate(TABLE.units)
        for rung, precision in enumerate(TABLE.ladder)
        if (*unit[:2], precision) != missing
    ]
    write_gappy(path, dict(zip(COLUMNS, zip(*rows, strict=True), strict=True)))


def test_moves_are_read_by_unit_and_rung_negative_ones_too(tmp_path):
    write_moves(tmp_path / "moves.csv")
    expected = 0.1 * np.arange(4)[:, None] - 0.2 * np.arange(3)
    assert np.allclose(read_moves(tmp_path / "moves.csv", TABLE), expected)


def test_a_move_that_was_not_measured_is_named(tmp_path):
    write_moves(tmp_path / "moves.csv", missing=(1, 0, "bf16"))
    with pytest.raises(
        ValueError, match=r"moves\.csv: no score of layer 1, head 0, part kv, bf16; expected one around"
    ):
        read_moves(tmp_path / "moves.csv", TABLE)


def test_a_base_of_other_precisions_is_refused():
    other = Recipe("low", "exact", random_table(2, 2, ("int2",), widths=(8, 8), tokens=4)).policy(Budget(400, "bytes"))
    with pytest.raises(ValueError, match="policy low: precisions other than those of the scores"):
        refined_policy("refined", other, np.zeros((4, 3)), TABLE)
