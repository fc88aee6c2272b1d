"""Sets of policies measured together: the same as one by one, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import random_model, random_tokens
from score_tables import random_table

from kvstages.cache.precisions import QUANTIZED
from kvstages.files.atomic import write_json
from kvstages.measure.evaluation import evaluate
from kvstages.measure.execution import dense_grid, window_logits
from kvstages.measure.policy_set import JOINT_COLUMNS, measure
from kvstages.measure.setting import Setting
from kvstages.policies.budgets import Budget
from kvstages.policies.recipes import Recipe, equal_bytes
from kvstages.policies.record import read_policies

MEMORY = 1 << 30
RECIPES = [
    Recipe("exact", "exact", random_table(3, 2, ("int8", "int4"), head_dim=8, tokens=12)),
    Recipe("split", "exact", random_table(3, 2, QUANTIZED, "keys-values", head_dim=8, tokens=12)),
    Recipe("random", "at-random", random_table(3, 2, ("int8", "int4"), head_dim=8, tokens=12)),
]
SET = equal_bytes(RECIPES, Budget(2500, "bytes"), random=4, draws=9, seed=0)


@pytest.fixture
def model():
    return random_model()


def reference_of(model, tokens, setting):
    return torch.cat([part for _, part in window_logits(model, tokens, dense_grid(model), setting, MEMORY)])


@pytest.mark.parametrize("execution", ["one-pass", "token-by-token"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_policies_together_measure_what_each_does_alone(execution, dtype):
    setting = Setting(execution, dtype)
    model, tokens = random_model(dtype=setting.dtype), random_tokens()
    reference = reference_of(model, tokens, setting)
    table = measure(model, tokens, SET["policies"], reference, setting, MEMORY)
    assert list(table) == JOINT_COLUMNS and len(table["policy"]) == 3 * len(SET["policies"])
    for index, policy in enumerate(SET["policies"]):
        rows = slice(3 * index, 3 * index + 3)
        assert table["policy"][rows] == [policy["policy"]] * 3 and table["block"][rows] == [0, 1, 2]
        assert table["bytes"][rows] == [policy["bytes"]["total"]] * 3
        figures, positions = evaluate(model, tokens, policy, reference, setting, MEMORY)
        assert np.mean(table["mean_kl"][rows]) == pytest.approx(figures["mean_kl"], rel=1e-9)
        assert np.mean(table["agreement"][rows]) == pytest.approx(figures["agreement"])
        assert np.mean(table["cross_entropy"][rows]) == pytest.approx(figures["cross_entropy"])
        assert table["mean_kl"][3 * index] == pytest.approx(np.mean(positions["kl"][:12]), rel=1e-9)
    agrees = {}
    for policy in SET["policies"]:
        positions = evaluate(model, tokens, policy, reference, setting, MEMORY)[1]
        agrees[policy["policy"]] = positions["agrees"].reshape(3, 12).astype(bool)
    first = agrees[SET["policies"][0]["policy"]]
    for row, name in enumerate(table["policy"]):
        own, block = agrees[name], table["block"][row]
        assert table["agrees_alone"][row] == (own & ~first)[block].sum()
        assert table["first_agrees_alone"][row] == (first & ~own)[block].sum()
    assert set(table["precisions"]) == {"int8 int4", "int8 int4 int3 int2"}


def test_a_set_is_read_and_sets_follow_one_another(model, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    write_json(first, SET)
    write_json(second, {"policies": [{**SET["policies"][0], "policy": "refined"}]})
    names = [policy["policy"] for policy in read_policies([first, second], model.config)]
    assert names == [*(policy["policy"] for policy in SET["policies"]), "refined"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "no list under the key policies, expected a set of the stage policy-set"),
        ({"policies": []}, "no list under the key policies"),
        ({"policies": [{}]}, r"policies\[0\]: key 'policy' is missing"),
        ({"policies": SET["policies"][:1] * 2}, r"policies\[1\]: a second policy of the name exact"),
        (
            {"policies": [{k: v for k, v in SET["policies"][0].items() if k != "recipe"}]},
            r"policies\[0\]: key 'recipe' is missing, expected a set of the stage policy-set",
        ),
    ],
)
def test_what_is_no_set_is_refused_by_name(record, message, model, tmp_path):
    write_json(tmp_path / "set.json", record)
    with pytest.raises(ValueError, match=rf"set\.json: {message}"):
        read_policies([tmp_path / "set.json"], model.config)


def test_a_reference_of_another_window_is_refused(model):
    with pytest.raises(ValueError, match=r"reference logits \(3, 11, 50\), but window and model ask for \(3, 12, 50\)"):
        measure(model, random_tokens(), SET["policies"], torch.zeros(3, 11, 50), Setting("one-pass", "float32"), MEMORY)
