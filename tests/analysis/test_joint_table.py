"""Tables of policies measured jointly: what is read, and what is wrong with one."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from gappy import write_gappy
from made_up import policy_rows, write_comparison

from kvstages.analysis.joint_table import read_comparison, read_joint, with_figures


def test_policies_keep_the_order_of_the_file_and_blocks_their_number(tmp_path):
    rows = pd.concat([policy_rows("published", [3.0, 1.0, 2.0]), policy_rows("exact", [0.3, 0.1, 0.2], size=100_000)])
    write_gappy(tmp_path / "joint.csv", rows.iloc[[5, 2, 1, 4, 0, 3]])
    joint = read_joint(tmp_path / "joint.csv")
    assert joint.policies["policy"].tolist() == ["exact", "published"]
    assert joint.metrics["mean_kl"].tolist() == [[0.3, 0.1, 0.2], [3.0, 1.0, 2.0]]
    figures = with_figures(joint)
    assert figures["mean_kl"].tolist() == pytest.approx([0.2, 2.0])
    assert figures["compression"].tolist() == pytest.approx([3.93216, 1.96608])
    assert (figures["mean_kl_low"] < figures["mean_kl"]).all() and (figures["mean_kl_high"] > figures["mean_kl"]).all()
    assert figures["agreement_low"].tolist() == pytest.approx([0.9, 0.9])
    # Two documents have no interval worth the name, and without the policy bf16 no excess is known.
    assert joint.documents == ["text-0", "text-0", "text-1"]
    assert figures["mean_kl_documents_low"].isna().all() and figures["excess_kl"].isna().all()


def test_excess_is_beyond_what_the_unquantized_cache_costs(tmp_path):
    """On the same blocks: subtracted before the mean, so it has an interval of its own; and it may be negative."""
    rows = pd.concat([
        policy_rows("int8", [3.0, 1.0, 2.0, 2.0], truth=[5.0, 1.0, 4.0, 2.0]),
        policy_rows("bf16", [0.0] * 4, truth=[4.0, 1.5, 3.0, 1.5]),
    ])  # fmt: skip
    write_gappy(tmp_path / "joint.csv", rows)
    joint = read_joint(tmp_path / "joint.csv")
    assert joint.excess().tolist() == [[1.0, -0.5, 1.0, 0.5], [0.0] * 4]
    assert with_figures(joint)["excess_kl"].tolist() == [0.5, 0.0]
    write_gappy(tmp_path / "joint.csv", rows.assign(truth_kl=np.nan))
    assert read_joint(tmp_path / "joint.csv").excess() is None


def test_intervals_over_documents_stand_beside_those_over_blocks(tmp_path):
    """Two blocks a document that are alike: half as many independent values as blocks, so a wider interval."""
    write_gappy(tmp_path / "joint.csv", policy_rows("int8", np.repeat(np.arange(1.0, 9.0), 2)))
    (row,) = with_figures(read_joint(tmp_path / "joint.csv")).to_dict("records")
    over_blocks, over_documents = (row[f"mean_kl{end}_high"] - row[f"mean_kl{end}_low"] for end in ("", "_documents"))
    assert over_documents == pytest.approx(2**0.5 * over_blocks, rel=0.05)


def test_the_folder_of_a_comparison_is_its_budget(tmp_path):
    write_comparison(tmp_path, budgets=("1e-06",))
    budget, joint = read_comparison(tmp_path / "comparison" / "1e-06" / "joint.csv")
    assert budget == "1e-06"
    assert joint.policies.iloc[joint.rows("random")]["policy"].tolist() == [f"random-{n:04d}" for n in range(1, 13)]
    budget, joint = read_comparison(tmp_path / "comparison" / "1e-06" / "bfloat16" / "joint.csv")
    assert budget == "1e-06" and set(joint.policies["compute_dtype"]) == {"bfloat16"}


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda rows: rows.drop(columns="agreement"), "column 'agreement' is missing"),
        (lambda rows: rows.iloc[:0], "no policies, only a header"),
        (lambda rows: rows.iloc[:-1], "policy exact has 2 rows, expected one for each of 3 blocks"),
        (lambda rows: rows.assign(bytes=np.arange(len(rows))), "policy published is not the same in all of its rows"),
        (lambda rows: rows.assign(proxy="none"), "column 'proxy' holds 'none', expected a number"),
        (lambda rows: rows.assign(document=[None, "a", "b"] * 2), "blocks without a document of their own"),
        (lambda rows: rows.assign(document=list("abcabd")), "blocks without a document of their own"),
        (lambda rows: rows.assign(recipe="exact"), "the first policy is of the recipe exact, expected published"),
        (lambda rows: rows.assign(recipe="published"), "several policies of the recipe published, expected one"),
    ],
)
def test_errors_name_the_file(broken, said, tmp_path):
    rows = pd.concat([policy_rows("published", [1.0, 1.0, 1.0]), policy_rows("exact", [1.0, 1.0, 1.0])])
    write_gappy(tmp_path / "joint.csv", broken(rows.reset_index(drop=True)))
    with pytest.raises(ValueError, match=f"joint.csv: {said}"):
        read_comparison(tmp_path / "joint.csv")
