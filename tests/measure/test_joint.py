"""Sets of policies measured together: the same as one by one, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from dictionaries import schema
from models import all_logits, identified, identity_of, random_model, random_tokens
from score_tables import random_table

from kvstages.analysis.joint_table import read_joint
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import QUANTIZED
from kvstages.cli import main
from kvstages.files.atomic import write_json, write_tensors
from kvstages.measure.evaluation import evaluate
from kvstages.measure.execution import dense_grid, position_slices
from kvstages.measure.metrics import divergence
from kvstages.measure.policy_set import JOINT_COLUMNS, last_states, measure
from kvstages.measure.setting import Setting
from kvstages.models.checkpoints import save_model
from kvstages.policies.budgets import Budget
from kvstages.policies.recipes import Recipe, equal_bytes
from kvstages.policies.record import read_policies

MEMORY = 1 << 30
RECIPES = [
    Recipe("exact", "exact", random_table(3, 2, ("int8", "int4"), widths=(8, 8), tokens=12)),
    Recipe("split", "exact", random_table(3, 2, QUANTIZED, "keys-values", widths=(8, 8), tokens=12)),
    Recipe("random", "at-random", random_table(3, 2, ("int8", "int4"), widths=(8, 8), tokens=12)),
]
SET = equal_bytes(RECIPES, Budget(2500, "bytes"), random=4, draws=9, seed=0)


@pytest.fixture
def model():
    return random_model()


@pytest.mark.parametrize("execution", ["one-pass", "token-by-token"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_policies_together_measure_what_each_does_alone(execution, dtype):
    setting = Setting(execution, dtype)
    model, tokens = random_model(dtype=setting.dtype), random_tokens()
    reference = all_logits(model, tokens, dense_grid(model), setting)
    table = measure(model, tokens, SET["policies"], reference, setting, MEMORY)
    assert list(table) == JOINT_COLUMNS and len(table["policy"]) == 3 * len(SET["policies"])
    agrees = {}
    for index, policy in enumerate(SET["policies"]):
        rows = slice(3 * index, 3 * index + 3)
        assert table["policy"][rows] == [policy["policy"]] * 3 and table["block"][rows] == [0, 1, 2]
        assert table["bytes"][rows] == [policy["bytes"]["total"]] * 3
        figures, positions = evaluate(model, tokens, policy, reference, setting, MEMORY)
        assert np.mean(table["mean_kl"][rows]) == pytest.approx(figures["mean_kl"], rel=1e-9)
        assert np.mean(table["agreement"][rows]) == pytest.approx(figures["agreement"])
        assert np.mean(table["cross_entropy"][rows]) == pytest.approx(figures["cross_entropy"])
        assert table["mean_kl"][3 * index] == pytest.approx(np.mean(positions["kl"][:12]), rel=1e-9)
        agrees[policy["policy"]] = positions["agrees"].reshape(3, 12).astype(bool)
    first = agrees[SET["policies"][0]["policy"]]
    for row, name in enumerate(table["policy"]):
        own, block = agrees[name], table["block"][row]
        assert table["agrees_alone"][row] == (own & ~first)[block].sum()
        assert table["first_agrees_alone"][row] == (first & ~own)[block].sum()
    assert set(table["precisions"]) == {"int8 int4", "int8 int4 int3 int2"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kl_from_the_truth_counts_the_arithmetic_and_the_cache(dtype):
    """Of the policy bf16 it is what an unquantized cache costs in this arithmetic; without a truth there is none."""
    setting, exact = Setting("one-pass", dtype), Setting("one-pass", "float32")
    model, tokens = random_model(dtype=setting.dtype), random_tokens()
    reference = all_logits(model, tokens, dense_grid(model), setting)
    truth = all_logits(random_model(), tokens, None, exact)
    table = measure(model, tokens, SET["policies"], reference, setting, MEMORY, truth=truth)
    without = measure(model, tokens, SET["policies"], reference, setting, MEMORY)
    assert np.isnan(without["truth_kl"]).all() and without["mean_kl"] == table["mean_kl"]
    found = {}
    for name, block, value in zip(table["policy"], table["block"], table["truth_kl"], strict=True):
        found.setdefault(name, [None] * 3)[block] = value
    for policy in SET["policies"]:
        logits = all_logits(model, tokens, PrecisionGrid.of_record(policy["precisions"]), setting)
        expected = divergence(logits, truth).mean(dim=1).tolist()
        assert found[policy["policy"]] == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert found["bf16"] == pytest.approx(divergence(reference, truth).mean(dim=1).tolist(), rel=1e-9)
    assert min(found["bf16"]) > 0
    # The exact cache rounds nothing: it is the model as it computes.
    assert torch.equal(truth, random_model()(tokens))


@pytest.mark.parametrize("execution", ["one-pass", "token-by-token"])
def test_first_layers_that_policies_have_in_common_are_run_once(execution, monkeypatch):
    model, tokens = random_model(), random_tokens()
    setting = Setting(execution, "float32")
    ran = []
    original = type(model.blocks[0]).forward
    monkeypatch.setattr(
        type(model.blocks[0]),
        "forward",
        lambda block, x, cache, layer: ran.append(layer) or original(block, x, cache, layer),
    )
    rows = {"a": ("int8", "int8"), "b": ("int4", "int8"), "c": ("bf16", "int4")}
    grids = [
        PrecisionGrid.of_heads([rows[name] for name in names]) for names in ("aba", "bbb", "abc", "aaa", "bba", "abb")
    ]
    alone = [all_logits(model, tokens, grid, setting) for grid in grids]
    assert len(ran) == 6 * 3 * (1 if execution == "one-pass" else 12)
    ran.clear()
    for index, x in last_states(model, tokens, grids, setting):
        assert torch.equal(model.logits(x), alone[index])
    steps = 1 if execution == "one-pass" else 12
    # Layer 0 for a and b; layer 1 for aa, ab and bb; layer 2 for each.
    assert [ran.count(layer) // steps for layer in range(3)] == [2, 3, 6]


@pytest.mark.parametrize("memory", [1, 10_000])
def test_splitting_positions_for_memory_changes_nothing_but_rounding(memory):
    model, tokens = random_model(), random_tokens()
    setting = Setting("one-pass", "float32")
    reference = all_logits(model, tokens, dense_grid(model), setting)
    whole = measure(model, tokens, SET["policies"], reference, setting, MEMORY)
    split = measure(model, tokens, SET["policies"], reference, setting, memory)
    assert len(position_slices(model, 1, 12, memory)) > 1
    for name in ("mean_kl", "agreement", "cross_entropy"):
        assert np.allclose(whole[name], split[name], rtol=1e-3, atol=1e-9)


def test_a_set_is_read_and_sets_follow_one_another(model, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    of_model = identity_of(model)
    write_json(first, identified(SET, of_model))
    write_json(second, identified({"policies": [{**SET["policies"][0], "policy": "refined"}]}, of_model))
    names = [policy["policy"] for policy in read_policies([first, second], of_model)]
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
    of_model = identity_of(model)
    write_json(tmp_path / "set.json", identified(record, of_model) if record else record)
    with pytest.raises(ValueError, match=rf"set\.json: {message}"):
        read_policies([tmp_path / "set.json"], of_model)


@pytest.fixture
def inputs(model, tmp_path, monkeypatch):
    """The working directory with a model, a window of two documents, and a set of policies."""
    monkeypatch.chdir(tmp_path)
    save_model(Path("model.safetensors"), model.config, model.state_dict())
    places = {"validation": {"starts": [0, 12, 24], "documents": ["a", "a", "b"]}}
    write_tensors(Path("windows.safetensors"), {"validation": random_tokens()}, {"block": 12, "windows": places})
    write_json(Path("set.json"), identified(SET, identity_of(model)))
    return ["--model", "model.safetensors", "--windows", "windows.safetensors", "--window", "validation"]


def run(*words):
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_stages_measure_against_reference_and_truth_and_name_documents(inputs):
    assert run("reference", *inputs, "--output", "reference.safetensors") == (0, "")
    assert run("reference", *inputs, "--exact-cache", "--output", "truth.safetensors") == (0, "")
    measured = ["evaluate-set", *inputs, "--policies", "set.json", "--output", "joint.csv"]
    assert run(*measured, "--reference", "reference.safetensors", "--truth", "truth.safetensors",
               "--without", "random") == (0, "")  # fmt: skip
    joint = read_joint(Path("joint.csv"))
    assert joint.documents == ["a", "a", "b"]
    assert "random" not in set(joint.policies["recipe"]) and {"exact", "uniform"} < set(joint.policies["recipe"])
    dense = joint.policies["policy"].tolist().index("bf16")
    assert (joint.excess()[dense] == 0).all() and (joint.metrics["mean_kl"][dense] == 0).all()
    # Without a reference the same logits are computed on the way.
    kept = Path("joint.csv").read_bytes()
    assert run(*measured, "--truth", "truth.safetensors", "--without", "random") == (0, "")
    assert Path("joint.csv").read_bytes() == kept
    assert set(pd.read_csv("joint.csv", nrows=0).columns) == set(schema("joint")["required"])
    for words, said in (
        (["--reference", "truth.safetensors"], "truth.safetensors: computed with cache exact, not None"),
        (["--reference", "reference.safetensors", "--truth", "reference.safetensors"], "with cache None, not exact"),
        (["--reference", "reference.safetensors", "--without", "best"], "--without best: no such recipe in set.json"),
    ):
        status, output = run(*measured, *words)
        assert status == 1 and output.count("\n") == 1 and said in output
    status, output = run("reference", *inputs, "--exact-cache", "--execution", "token-by-token", "--output", "x")
    assert status == 2 and "--exact-cache needs the execution one-pass" in output


def test_a_reference_of_another_window_is_refused(model):
    with pytest.raises(ValueError, match=r"reference logits \(3, 11, 50\), but window and model ask for \(3, 12, 50\)"):
        measure(model, random_tokens(), SET["policies"], torch.zeros(3, 11, 50), Setting("one-pass", "float32"), MEMORY)
