"""Policies as records."""

from __future__ import annotations

import pytest
from dictionaries import schema, validator
from published import PUBLISHED
from score_tables import published_table, random_table

from kvstages.analysis.published import published_policies
from kvstages.cache.precisions import BITS, QUANTIZED
from kvstages.models.config import GPTConfig
from kvstages.models.identity import ModelIdentity
from kvstages.policies.budgets import Budget
from kvstages.policies.identity import identity_record
from kvstages.policies.making import STEP_COLUMNS, allocated_policy, uniform_policy
from kvstages.policies.names import ALLOCATORS

OF_SHAPE = ModelIdentity(GPTConfig(64, 16, 16, 3, 2).shape, "a" * 64)


def test_the_record_of_the_published_mixed_policy():
    record, steps = allocated_policy("greedy-0.01", "greedy", Budget(0.01, "nats"), published_table())
    assert record["tensors"] == {"bf16": 14, "int8": 38, "int4": 140, "int3": 0, "int2": 0}
    assert record["bytes"] == {"payload": 557_056, "scale": 22_784, "total": 579_840, "bf16": 1_572_864}
    assert record["compression"] == 2.7125827814569536
    assert record["proxy"] == 0.009985672175389482 and record["proxy_steps"] == 159 == len(steps["step"])
    assert (record["budget"], record["budget_in"], record["unit"], record["seed"]) == (0.01, "nats", "head", None)
    assert list(steps) == STEP_COLUMNS
    assert steps["bytes"][-1] == 579_840 and steps["step"][:2] == [1, 2] and set(steps["part"]) == {"kv"}


def test_uniform_policies_have_the_published_proxies_and_no_path():
    for precision in ("bf16", "int8", "int4"):
        record, steps = uniform_policy(precision, precision, published_table())
        expected = published_policies(PUBLISHED)[precision]
        assert abs(record["proxy"] - expected["proxy"]) < 1e-15
        assert record["precisions"] == expected["precisions"].as_record()
        assert record["budget"] is None and record["budget_in"] is None
        assert steps == {name: [] for name in STEP_COLUMNS}


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_every_record_and_path_is_what_its_schema_says(allocator):
    table = random_table(3, 2, QUANTIZED, "keys-values")
    limit = int(table.sizes[:, 3].sum())
    record, steps = allocated_policy("p", allocator, Budget(limit, "bytes"), table, seed=5)
    policy, step = schema("policy"), schema("steps")
    of_file = identity_record(OF_SHAPE.as_record(), table.ladder, {table.source: "0" * 64})
    assert [*of_file, *record, "execution", "compute_dtype"] == policy["required"] == list(policy["properties"])
    validator("policy").validate({**of_file, **record, "execution": "one-pass", "compute_dtype": "float32"})
    assert record["budget_in"] == "bytes" and limit - 10_000 < record["bytes"]["total"] <= limit
    assert record["seed"] == (5 if allocator == "at-random" else None)
    assert sum(record["tensors"].values()) == 12 and list(record["tensors"]) == list(BITS)
    assert list(steps) == step["required"] == list(step["properties"])
    for row in zip(*steps.values(), strict=True):
        validator("steps").validate(dict(zip(steps, row, strict=True)))
    assert bool(steps["step"]) == (allocator not in ("exact", "at-random")) and record["proxy_steps"] == len(
        steps["step"]
    )
