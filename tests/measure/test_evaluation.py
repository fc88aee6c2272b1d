"""Joint evaluation against a plain run, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import all_logits, identified, identity_of, random_model, random_tokens
from plain_cache import PlainCache

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import BITS
from kvstages.files.atomic import write_json
from kvstages.measure.evaluation import evaluate
from kvstages.measure.execution import dense_grid
from kvstages.measure.metrics import divergence
from kvstages.measure.setting import Setting
from kvstages.policies.budgets import Budget
from kvstages.policies.making import policy_record
from kvstages.policies.record import read_policy

MEMORY = 1 << 30
GRID = PrecisionGrid(
    (("int4", "int8"), ("bf16", "int3"), ("int8", "bf16")), (("int4", "int2"), ("bf16", "bf16"), ("int8", "bf16"))
)

MODEL = identity_of(random_model())


def policy(grid):
    budget = Budget(0.1, "nats")
    proxy = 0.0 if set(grid.flat()) == {"bf16"} else 0.05
    return policy_record(
        "mixed", "greedy", budget, grid, proxy, 3, (8, 8), 12, unit="keys-values", ladder=BITS, sensitivity="made-up"
    )


def with_keys(*rows):
    """The policy's precisions, with other keys."""
    return {"keys": [list(row) for row in rows], "values": policy(GRID)["precisions"]["values"]}


@pytest.mark.parametrize("execution", ["one-pass", "token-by-token"])
def test_a_policy_measures_what_a_plain_run_does(execution):
    setting = Setting(execution, "float64")
    model, tokens = random_model(dtype=torch.float64), random_tokens()
    reference = all_logits(model, tokens, dense_grid(model), setting)
    figures, positions = evaluate(model, tokens, policy(GRID), reference, setting, MEMORY)
    plain = []
    for block in tokens:
        cache = PlainCache(GRID)
        plain.append(torch.cat([model(token.view(1, 1), cache)[0] for token in block]))
    kl = divergence(torch.stack(plain), reference)
    assert np.allclose(positions["kl"], kl.flatten(), rtol=1e-6, atol=1e-14)
    assert figures["mean_kl"] == pytest.approx(float(kl.mean()), rel=1e-6)
    assert figures["proxy_gap"] == pytest.approx(0.05 - figures["mean_kl"])
    assert len(positions["kl"]) == 36 and np.isnan(positions["cross_entropy"]).sum() == 3
    assert figures["total_bytes"] == policy(GRID)["bytes"]["total"]
    assert figures["mean_kl_low"] <= figures["mean_kl"] <= figures["mean_kl_high"]


def test_a_policy_that_nothing_scored_is_measured_without_a_proxy():
    setting, model, tokens = Setting("one-pass", "float64"), random_model(dtype=torch.float64), random_tokens()
    reference = all_logits(model, tokens, dense_grid(model), setting)
    scored, _ = evaluate(model, tokens, policy(GRID), reference, setting, MEMORY)
    figures, _ = evaluate(model, tokens, policy(GRID) | {"proxy": None}, reference, setting, MEMORY)
    assert figures == scored | {"proxy": None, "proxy_gap": None}


@pytest.mark.parametrize("execution", ["one-pass", "token-by-token"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_bf16_measures_zero_and_one(execution, dtype):
    setting = Setting(execution, dtype)
    model, tokens = random_model(dtype=setting.dtype), random_tokens()
    dense = dense_grid(model)
    reference = all_logits(model, tokens, dense, setting)
    figures, _ = evaluate(model, tokens, policy(dense), reference, setting, MEMORY)
    assert figures["mean_kl"] == figures["max_kl"] == figures["max_logit_deviation"] == 0
    assert figures["agreement"] == 1 and figures["compression"] == 1
    assert figures["cross_entropy"] == figures["reference_cross_entropy"]


def test_a_policy_or_reference_of_another_shape_is_refused():
    setting = Setting("one-pass", "float32")
    model, tokens = random_model(), random_tokens()
    with pytest.raises(ValueError, match=r"for heads \[2, 2\] a layer, but the model has \[2, 2, 2\]"):
        evaluate(
            model,
            tokens,
            policy(PrecisionGrid(GRID.keys[:2], GRID.values[:2])),
            torch.zeros(3, 12, 50),
            setting,
            MEMORY,
        )
    with pytest.raises(ValueError, match=r"reference logits \(3, 11, 50\)"):
        evaluate(model, tokens, policy(GRID), torch.zeros(3, 11, 50), setting, MEMORY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": None}, "key 'policy' is missing, expected a policy of the stage allocate"),
        ({"proxy": None}, "key 'proxy' is missing"),
        ({"precisions": None}, "key 'precisions' is missing"),
        ({"average_payload_bits": 4.0}, "average_payload_bits is 4.0, but its precisions give 9.75"),
        ({"tokens": 13}, "bytes is .*, but its precisions give .*'total'"),
        ({"tokens": 0}, "tokens is 0, expected a whole number from 1"),
        ({"tokens": "all"}, "tokens is 'all', expected a whole number from 1"),
        ({"tensors": {"bf16": 12}}, "tensors is {'bf16': 12}, but its precisions give {'bf16': 5,"),
        ({"proxy": -1e-9}, "proxy is -1e-09, expected a KL of 0 or more"),
        ({"average_payload_bits": "six"}, "average_payload_bits is 'six', expected a number"),
        ({"precisions": "int4"}, "precisions: str, expected the keys keys and values"),
        ({"precisions": {"keys": []}}, r"precisions: \['keys'\], expected the keys keys and values"),
        ({"precisions": {"keys": [], "values": "int4"}}, "precisions.values: expected a list of layers, each a list"),
        (
            {"precisions": with_keys(*GRID.keys[:2], ("int8", "int7"))},
            "layer 2, head 1, keys: 'int7', expected",
        ),
        (
            {"precisions": with_keys(*GRID.keys[:2], ("int8", 4))},
            "layer 2, head 1, keys: 4, expected a precision such as bf16, int8 or centred4",
        ),
        ({"precisions": with_keys(*GRID.keys[:2], ("int8",))}, "precisions: keys and values have different shapes"),
        ({"precisions": {"keys": [["int8"]], "values": [["int8"]]}}, r"heads \[1\] a layer, but the model has \[2, 2"),
    ],
)
def test_what_is_no_policy_is_refused_by_name(change, message, tmp_path):
    record = {**identified(policy(GRID), MODEL), **change}
    record = {key: value for key, value in record.items() if value is not None or key == "budget"}
    write_json(tmp_path / "policy.json", record)
    with pytest.raises(ValueError, match=rf"policy\.json: .*{message}"):
        read_policy(tmp_path / "policy.json", MODEL)


def test_an_empty_policy_or_a_list_is_refused(tmp_path):
    path, right = tmp_path / "policy.json", identified(policy(GRID), MODEL)
    for record, message in (({}, "key 'policy' is missing"), ([], "a policy is a JSON object, found list")):
        write_json(path, record)
        with pytest.raises(ValueError, match=rf"policy\.json: {message}"):
            read_policy(path, MODEL)
    write_json(path, right)
    assert read_policy(path, MODEL) == right
