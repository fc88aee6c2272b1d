"""The frontier in bytes: every family against the published recipe of the same byte total."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from gappy import write_gappy
from made_up import BF16_BYTES, policy_rows, write_comparison

from kvstages.analysis.frontier import frontier


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> pd.DataFrame:
    folder = write_comparison(tmp_path_factory.mktemp("study")) / "frontier"
    return frontier([folder / "joint.csv", folder / "bfloat16" / "joint.csv"])[1]


def test_families_by_falling_limit_in_each_arithmetic(table):
    assert table["compute_dtype"].drop_duplicates().tolist() == ["float32", "bfloat16"]
    for _, own in table.groupby("compute_dtype"):
        assert own["recipe"].drop_duplicates().tolist() == ["uniform", "published", "exact", "exact-split-low"]
        for _, family in own.groupby("recipe"):
            assert family["limit"].is_monotonic_decreasing


def test_reductions_are_against_the_published_policy_of_the_same_limit(table):
    own = table[table["compute_dtype"] == "float32"].set_index("policy")
    for policy in own.index[own["recipe"] != "published"]:
        base = own[(own["recipe"] == "published") & (own["limit"] == own.loc[policy, "limit"])]
        row = own.loc[policy]
        if base.empty or not base["mean_kl"].iloc[0]:
            assert np.isnan(row["kl_reduction"]), policy
        else:
            assert row["kl_reduction"] == pytest.approx(1 - row["mean_kl"] / base["mean_kl"].iloc[0])
            assert row["kl_reduction_low"] < row["kl_reduction"] < row["kl_reduction_high"]
            assert row["kl_reduction_documents_low"] < row["kl_reduction"] < row["kl_reduction_documents_high"]
    assert own.loc[own["recipe"] == "published", "kl_reduction"].isna().all()
    # Uniform INT8 takes exactly 55 % of the bytes, where the published recipe has a policy too.
    assert own.loc["int8", "kl_reduction"] == pytest.approx(1 - own.loc["int8", "mean_kl"] / own.loc[
        f"published-{int(BF16_BYTES * 0.55)}B", "mean_kl"])  # fmt: skip


def test_the_excess_is_the_same_in_both_arithmetics_where_only_the_floor_differs(table):
    wide = table.pivot(index="policy", columns="compute_dtype", values="excess_kl")
    assert wide["bfloat16"].tolist() == pytest.approx(wide["float32"].tolist())


def test_an_excess_that_may_be_zero_has_no_reduction(tmp_path):
    rows = [
        policy_rows("bf16", [0.0] * 4, "uniform", "uniform"),
        policy_rows("published-9B", [1e-6] * 4, "published", limit=9, truth=[2e-5, 0.0, 2e-5, 0.0]),
        policy_rows("exact-9B", [2e-6] * 4, "exact", limit=9),
    ]
    write_gappy(tmp_path / "joint.csv", pd.concat(rows))
    row = frontier([tmp_path / "joint.csv"])[1].set_index("policy").loc["exact-9B"]
    assert row["kl_reduction"] == pytest.approx(-1) and pd.isna(row["excess_reduction"])
