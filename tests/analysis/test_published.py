"""The published figures, as read: against the numbers that docs/method.md, "Published study", states."""

import pytest
from published_study import PUBLISHED

from kvstages.analysis.published import (
    published_adaptation,
    published_name,
    published_policies,
    published_sensitivities,
    published_validation,
)


def test_headline_table():
    rows = published_validation(PUBLISHED)
    assert set(rows) == {"bf16", "int8", "int4", *(f"greedy-{b}" for b in ("0.01", "0.05", "0.1", "0.25", "0.5"))}
    assert {name: rows[name]["total_bytes"] for name in ("bf16", "int8", "int4", "greedy-0.01")} == {
        "bf16": 1572864, "int8": 811008, "int4": 417792, "greedy-0.01": 579840,
    }  # fmt: skip
    assert round(rows["greedy-0.01"]["mean_kl"], 6) == 0.001528
    assert rows["bf16"]["mean_kl"] == 0.0
    assert rows["bf16"]["agreement"] == 1.0
    assert rows["bf16"]["first_disagreement_mean"] is None


def test_greedy_steps():
    policy = published_policies(PUBLISHED)["greedy-0.01"]
    assert policy["proxy"] == policy["steps"][-1]["proxy"] == 0.009985672175389482
    assert [step["step"] for step in policy["steps"]] == list(range(1, 160))
    assert policy["steps"][0] == {
        "step": 1, "layer": 11, "head": 2, "part": "kv", "from": "bf16", "to": "int8",
        "added_kl": 7.510973318858305e-06, "bytes_saved": 7936, "proxy": 7.510973318858305e-06,
    }  # fmt: skip
    grid = policy["precisions"]
    flat = [precision for layer in grid.keys for precision in layer]
    assert {name: flat.count(name) for name in ("bf16", "int8", "int4")} == {"bf16": 7, "int8": 19, "int4": 70}
    assert grid.keys == grid.values


def test_sensitivities_add_up_to_the_proxies_of_uniform_policies():
    policies = published_policies(PUBLISHED)
    for precision, grid in published_sensitivities(PUBLISHED).items():
        assert [len(layer) for layer in grid] == [8] * 12
        assert sum(map(sum, grid)) == pytest.approx(policies[precision]["proxy"], rel=1e-12)


def test_adaptation_means():
    seeds = published_adaptation(PUBLISHED)
    assert list(seeds) == [1337, 2026, 9001]
    for policy, mean in (("greedy-0.01", 0.001515), ("bf16", 0.000189)):
        assert round(sum(seed["policies"][policy]["mean_kl"] for seed in seeds.values()) / 3, 6) == mean
    assert seeds[1337]["curve"][0]["step"] == 0
    assert len(seeds[1337]["curve"]) == 50


def test_unknown_label():
    with pytest.raises(ValueError, match="published policy 'uniform_int2': expected uniform_int8, uniform_int4"):
        published_name("uniform_int2")


def test_missing_key_names_the_file(tmp_path):
    (tmp_path / "sensitivity.json").write_text('{"int8": []}')
    with pytest.raises(ValueError, match=r"sensitivity\.json: key 'int4' is missing; found int8"):
        published_sensitivities(tmp_path)
