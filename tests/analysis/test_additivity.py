"""Proxy against joint KL, on numbers whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from made_up import policy_rows, write_comparison, write_set

from kvstages.analysis.additivity import additivity, summarise
from kvstages.stats.correlation import rank_correlation, rank_correlations

BLOCKS = np.array([0.5, 1.5])


def test_scores_that_add_up_have_a_ratio_and_an_order_of_one(tmp_path):
    proxies = [2e-4, 5e-4, 9e-4, 2e-3, 3e-3, 4e-3]
    path = write_set(tmp_path, [policy_rows(f"p{proxy}", BLOCKS * proxy, proxy=proxy) for proxy in proxies])
    table = summarise(additivity([path]))
    assert table["proxies"].tolist() == ["all", "1e-04 to 1e-03", "1e-03 to 1e-02"]
    assert table["policies"].tolist() == [6, 3, 3]
    for name in ("rank_correlation", "rank_correlation_low", "rank_correlation_high", "median_ratio", "p95_ratio"):
        assert table[name].tolist() == pytest.approx([1.0] * 3), name
    assert table["smallest_proxy"].tolist() == [2e-4, 2e-4, 2e-3]


def test_where_the_ratio_changes_the_decades_show_it(tmp_path):
    policies = [policy_rows(f"s{n}", BLOCKS * n * 1e-5 * 3, proxy=n * 1e-5) for n in (1, 2, 3)]
    policies += [policy_rows(f"l{n}", BLOCKS * (4 - n) * 1e-3, proxy=n * 1e-3) for n in (1, 2, 3)]
    table = summarise(additivity([write_set(tmp_path, policies)])).set_index("proxies")
    assert table["median_ratio"].tolist() == pytest.approx([3.0, 3.0, 1.0])
    assert table["rank_correlation"].tolist()[1:] == pytest.approx([1.0, -1.0])
    assert table.loc["all", "rank_correlation"] == pytest.approx(1 - 6 * 8 / 210)


def test_each_policy_counts_once_and_none_without_kl(tmp_path):
    dense, same = policy_rows("bf16", [0.0, 0.0], proxy=0.0), policy_rows("again", BLOCKS)
    one = write_set(tmp_path / "0.01", [policy_rows("one", BLOCKS), same, dense])
    other = write_set(tmp_path / "frontier", [same, policy_rows("bf", BLOCKS, source="measured-bfloat16", proxy=0.1)])
    found = additivity([one, other])
    assert found.policies[["sensitivity", "set", "policy"]].to_numpy().tolist() == [
        ["measured-float32", "0.01", "one"],
        ["measured-bfloat16", "frontier", "bf"],
    ]
    assert found.kl.tolist() == [BLOCKS.tolist()] * 2
    assert summarise(found)["rank_correlation"].isna().all()


def test_the_source_with_most_policies_comes_first_with_its_own_kl(tmp_path):
    write_comparison(tmp_path)
    paths = [*sorted(tmp_path.glob("comparison/*/joint.csv")), tmp_path / "frontier" / "joint.csv"]
    found = additivity(paths)
    assert found.policies["sensitivity"].drop_duplicates().tolist() == ["measured-float32", "measured-bfloat16"]
    assert found.kl.mean(axis=1) == pytest.approx(found.policies["mean_kl"].to_numpy())


def test_tables_measured_in_different_ways_are_refused(tmp_path):
    one = write_set(tmp_path / "one", [policy_rows("a", [1.0, 2.0])])
    other = write_set(tmp_path / "other", [policy_rows("b", [1.0, 2.0, 3.0])])
    with pytest.raises(
        ValueError, match=r"other/joint\.csv: measured on 3 blocks of validation \(one-pass, float32\), but "
    ):
        additivity([one, other])


def test_rank_correlations_of_many_draws_are_those_of_each():
    random = np.random.default_rng(0)
    fixed, drawn = random.normal(size=9), random.normal(size=(5, 9))
    assert rank_correlations(fixed, drawn) == pytest.approx([rank_correlation(fixed, row) for row in drawn])
