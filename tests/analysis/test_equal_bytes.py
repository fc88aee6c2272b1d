"""The comparison at equal bytes, on numbers whose answer is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from made_up import policy_rows, write_comparison, write_set

from kvstages.analysis.equal_bytes import equal_bytes


@pytest.fixture
def rows(tmp_path):
    """Half the published KL in every block, and as much in one but not in the mean; four random policies."""
    published = np.array([4.0, 1.0, 2.0, 1.0])
    policies = [
        policy_rows("published", published, agreement=[0.5, 0.9, 0.7, 0.9], size=100),
        policy_rows("half", published / 2, agreement=[0.6, 1.0, 0.8, 1.0]),
        policy_rows("other", published[::-1] * 1.01),
        policy_rows("bf16", published * 0, "uniform", "uniform", size=400),
        *(policy_rows(f"random-{n}", published * n, "random", "at-random", size=97 + n) for n in (0.4, 0.6, 2, 3)),
    ]
    path = write_set(tmp_path / "0.01", policies, {"half": 0.25, "published": 1.0})
    return equal_bytes([path])[1].set_index("recipe")


def test_best_first(rows):
    assert rows.index.tolist() == ["uniform", "half", "published", "other", "random"]
    assert rows["policy"].tolist() == ["bf16", "half", "published", "other", "random"]
    assert rows["budget"].unique().tolist() == ["0.01"]
    assert rows["mean_kl"].tolist() == pytest.approx([0.0, 1.0, 2.0, 2.02, 3.0])
    # Among the recipes of equal bytes alone.
    for column in ("rank", "excess_rank"):
        assert rows[column].tolist()[1:4] == [1, 2, 3] and rows[column].isna().tolist() == [True, *[False] * 3, True]
    assert rows.loc["uniform", "bytes"] == 400 and rows.loc["half", "bytes"] == 200_000


def test_differences_from_the_published_recipe_are_paired(rows):
    half = rows.loc["half"]
    assert half[["kl_reduction", "kl_reduction_low", "kl_reduction_high"]].tolist() == pytest.approx([0.5] * 3)
    assert half["mean_kl_high"] - half["mean_kl_low"] > 0.4
    difference = ["agreement_difference", "agreement_difference_low", "agreement_difference_high"]
    assert half[difference].tolist() == pytest.approx([0.1] * 3)
    assert rows.loc["other", "kl_reduction_low"] < 0 < rows.loc["other", "kl_reduction_high"]
    assert rows.loc["published", ["kl_reduction", "agreement_p", *difference]].isna().all()
    # 12 positions where it alone agrees, 4 where only the published one does: 2 · Σ C(16, 0..4) / 2^16.
    assert half["agreement_p"] == pytest.approx(2 * (1 + 16 + 120 + 560 + 1820) / 2**16)


def test_place_among_the_random_policies(rows):
    assert rows["random_less_kl"].tolist()[:4] == [0, 0.25, 0.5, 0.5]
    assert rows["drawn_less_proxy"].tolist()[1:3] == [0.25, 1.0] and np.isnan(rows.loc["other", "drawn_less_proxy"])
    random = rows.loc["random"]
    assert random["policies"] == 4 and random["bytes"] == pytest.approx(98.5)
    assert random[["lowest_kl", "p50_kl", "highest_kl"]].tolist() == pytest.approx([0.8, 2.6, 6.0])
    assert rows.loc["half", ["lowest_kl", "p5_kl"]].isna().all() and np.isnan(random["random_less_kl"])


def test_nothing_reduces_a_kl_of_zero(tmp_path):
    path = write_set(tmp_path, [policy_rows("published", [0.0, 0.0]), policy_rows("exact", [0.0, 1e-9])])
    table = equal_bytes([path])[1].set_index("recipe")
    assert pd.isna(table.loc["exact", "kl_reduction"]) and table.loc["exact", "agreement_difference"] == 0
    assert table["random_less_kl"].isna().all()


def test_each_arithmetic_has_its_own_rows_and_the_excess_takes_its_cost_away(tmp_path):
    """Made-up BF16 arithmetic adds as much to every quantized policy: reductions shrink, those of the excess do not."""
    folder = write_comparison(tmp_path) / "comparison" / "0.01"
    table = equal_bytes([folder / "joint.csv", folder / "bfloat16" / "joint.csv"])[1]
    own, other = (table[table["compute_dtype"] == dtype].set_index("policy") for dtype in ("float32", "bfloat16"))
    assert "random" in own.index and "random" not in other.index
    assert list(own.loc[own["rank"].notna()].index) == list(other.loc[other["rank"].notna()].index)
    recipes = ["exact", "exact-split-low"]
    assert (other.loc[recipes, "kl_reduction"] < own.loc[recipes, "kl_reduction"] - 0.005).all()
    for name in ("excess_reduction", "excess_reduction_low", "excess_reduction_documents_high"):
        assert other.loc[recipes, name].tolist() == pytest.approx(own.loc[recipes, name].tolist(), rel=1e-6)
    # What was drawn stands beside the set of the study's own arithmetic.
    assert other.loc["greedy", "drawn_less_proxy"] == 0.0002
    exact = own.loc["exact"]
    assert exact["documents"] == 4
    assert exact["kl_reduction_documents_low"] < exact["kl_reduction"] < exact["kl_reduction_documents_high"]


def test_budgets_in_the_order_given(tmp_path):
    write_comparison(tmp_path)
    paths = [tmp_path / "comparison" / budget / "joint.csv" for budget in ("0.04", "0.01")]
    assert equal_bytes(paths)[1]["budget"].unique().tolist() == ["0.04", "0.01"]


def test_candidates_are_needed(tmp_path):
    path = write_set(tmp_path, [policy_rows("published", [1.0])])
    (tmp_path / "policy-set.json").write_text("{}")
    with pytest.raises(ValueError, match=r"policy-set\.json: key 'draws' is missing"):
        equal_bytes([path])
