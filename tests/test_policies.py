"""Policies as records."""

from __future__ import annotations

from published import PUBLISHED

from kvstages.policies import STEP_COLUMNS, greedy_policy, uniform_policy
from kvstages.published import published_policies, published_sensitivities


def test_the_record_of_the_published_mixed_policy():
    record, steps = greedy_policy("greedy-0.01", 0.01, published_sensitivities(PUBLISHED), 64, 64)
    assert record["heads"] == {"bf16": 7, "int8": 19, "int4": 70}
    assert record["bytes"] == {"payload": 557_056, "scale": 22_784, "total": 579_840, "bf16": 1_572_864}
    assert record["compression"] == 2.7125827814569536
    assert record["proxy"] == 0.009985672175389482 and record["proxy_steps"] == 159 == len(steps["step"])
    assert list(steps) == STEP_COLUMNS
    assert steps["bytes"][-1] == 579_840 and steps["step"][:2] == [1, 2]


def test_uniform_policies_have_the_published_proxies_and_no_path():
    for precision in ("bf16", "int8", "int4"):
        record, steps = uniform_policy(precision, precision, published_sensitivities(PUBLISHED), 64, 64)
        expected = published_policies(PUBLISHED)[precision]
        assert abs(record["proxy"] - expected["proxy"]) < 1e-15
        assert record["precisions"] == expected["precisions"] and record["budget"] is None
        assert steps == {name: [] for name in STEP_COLUMNS}
