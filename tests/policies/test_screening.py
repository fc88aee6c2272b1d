"""Screening: ladders, the sets of policies, and which scheme is recommended."""

from __future__ import annotations

import pytest
from gappy import write_gappy
from made_up import BITS, SCHEMES, scheme_scores, score_reader, write_screening

from kvstages.analysis.screening import baseline, ceiling, screening
from kvstages.cache.precision_grid import PrecisionGrid, policy_bits, policy_bytes
from kvstages.policies.screening import at_bits, is_candidate, precisions_of, recommend, screening_set


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    path = tmp_path_factory.mktemp("scores") / "scores.csv"
    write_gappy(path, scheme_scores())
    return score_reader(path)


def test_a_ladder_has_the_bits_that_its_levels_have():
    assert at_bits("centred3", [2, 4, 8]) == ["centred8", "centred4", "centred2"]
    assert at_bits("q4_0-hadamard", BITS) == ["q8_0-hadamard", "q5_0-hadamard", "q4_0-hadamard"]
    assert at_bits("int4", [3]) == ["int3"] and at_bits("int8_per_token_head", BITS) == ["int8_per_token_head"]


def test_what_stores_tokens_later_is_no_candidate():
    assert is_candidate("centred4") and is_candidate("int4")
    assert not is_candidate("kivi4") and not is_candidate("int4-v.recent16")


def test_scores_are_needed_of_ladders_and_of_what_is_measured():
    names = precisions_of(["centred4", "kivi4"], [8, 4], [3])
    assert set(names) == {"int8", "int4", "int3", "int2", "centred8", "centred4", "centred3", "kivi3"}


def test_the_scheme_of_the_least_proxy_is_recommended(scores):
    ladders = {scheme: at_bits(scheme, BITS) for scheme in ("int4", "centred4")}
    choice = recommend(ladders, "4.25bits", scores)
    assert choice.scheme == "centred4" and set(choice.proxies) == set(ladders)
    assert choice.policy["proxy"] == choice.proxies["centred4"] < choice.proxies["int4"]
    limit = 4.25 * 2 * 2 * 2 * 64 * 64 / 8
    assert choice.policy["bytes"]["total"] <= limit and choice.policy["unit"] == "keys-values"
    # With fewer bits than the exact token and the offset leave, the published quantizer alone has a policy.
    assert recommend(ladders, "2.25bits", scores).scheme == "int4"
    with pytest.raises(ValueError, match="too small for any policy"):
        recommend(ladders, "2bits", scores)
    with pytest.raises(ValueError, match="no scheme may be recommended"):
        recommend({}, "4bits", scores)


def test_a_set_has_every_scheme_in_three_ways_and_three_recipes_a_budget(scores):
    record = screening_set(SCHEMES, BITS, [4], ["4.25bits", "3bits"], scores)
    names = [policy["policy"] for policy in record["policies"]]
    assert names[:3] == ["int4", "int4-keys", "int4-values"] and len(names) == 3 * len(SCHEMES) + 3 * 2
    assert names[-3:] == ["published-3bits", "exact-published-3bits", "recommended-3bits"]
    policies = {policy["policy"]: policy for policy in record["policies"]}
    keys = PrecisionGrid.of_record(policies["centred4-keys"]["precisions"])
    assert set(keys.flat()) == {"centred4", "bf16"} and {name for row in keys.values for name in row} == {"bf16"}
    # At 4.25 bits the published recipe is INT4 everywhere; for 3 bits its ladder goes on.
    assert policies["published-4.25bits"]["precisions"] == policies["int4"]["precisions"]
    assert policies["published-3bits"]["ladder"] == ["bf16", "int8", "int4", "int3", "int2"]
    for budget, bits in (("4.25bits", 4.25), ("3bits", 3.0)):
        for recipe in ("published", "exact-published", "recommended"):
            grid = PrecisionGrid.of_record(policies[f"{recipe}-{budget}"]["precisions"])
            assert 8 * sum(policy_bytes(grid, (64, 64), 64)) <= bits * 8 * 64 * 64
    assert [each["scheme"] for each in record["recommended"]] == ["centred4", "centred4"]


def test_bits_are_the_mean_over_the_steps():
    # One token exact of two: 16 and then (16 + 4.25) / 2 bits, over elements 1 and 2.
    grid = PrecisionGrid.uniform(1, 1, "int4-first1")
    assert policy_bits(grid, (64, 64), 2) == pytest.approx((16 + 2 * (16 + 4.25) / 2) / 3)
    mixed = PrecisionGrid((("int4",),), (("bf16",),))
    assert [policy_bits(mixed, (64, 64), 8, sides) for sides in ("kv", "k", "v")] == [(4.25 + 16) / 2, 4.25, 16.0]


def test_what_a_policy_is_compared_with():
    assert baseline("centred4-keys", "keys", "centred4", None) == "int4-keys"
    assert baseline("centred3", "uniform", "centred3", None) == "int3"
    assert baseline("int4", "uniform", "int4", None) is None
    assert baseline("recommended-3bits", "recommended", "centred4", "3bits") == "published-3bits"
    assert baseline("published-3bits", "published", "int4", "3bits") is None


def test_figures_of_a_screening(tmp_path):
    write_screening(tmp_path)
    joint, table = screening(tmp_path / "joint.csv", tmp_path / "policies.json", tmp_path / "scores.csv")
    table = table.set_index("policy")
    assert len(table) == len(joint.policies)
    for name, row in table.iterrows():
        if isinstance(row["baseline"], str):
            assert row["times_less"] == pytest.approx(table.loc[row["baseline"], "mean_kl"] / row["mean_kl"])
            assert row["times_less_low"] < row["times_less"] < row["times_less_high"], name
    own = scheme_scores()
    own = own[(own["precision"] == "centred2") & (own["part"] == "k")]["mean_kl"]
    assert ceiling(scheme_scores(), "centred2", "k") == pytest.approx(own.mean() / own.prod() ** (1 / len(own)))
    assert table.loc["centred4", "bits"] == pytest.approx(4.25 + 2 * (16 - 4.25) / 65)
    assert table.loc["kivi4", "bits"] > table.loc["kivi4", "bits_at_end"] == 5.0


def test_a_policy_that_was_not_measured_is_named(tmp_path):
    import pandas as pd

    write_screening(tmp_path)
    joint = pd.read_csv(tmp_path / "joint.csv")
    write_gappy(tmp_path / "joint.csv", joint[joint["policy"] != "centred4"])
    with pytest.raises(ValueError, match=r"joint\.csv: policy centred4 is missing"):
        screening(tmp_path / "joint.csv", tmp_path / "policies.json", tmp_path / "scores.csv")
