"""Projections, the predictions made of them, and the stages that write and read both."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pandas as pd
import pytest
import yaml
from click.testing import CliRunner
from gappy import write_gappy
from models import random_model, random_tokens

from kvstages.analysis.gradient_accuracy import accuracy, parting, probe_error
from kvstages.analysis.prediction import PREDICTION_COLUMNS, proxy, summarise, unit_scores
from kvstages.cache.precision_grid import UNITS, PrecisionGrid
from kvstages.cache.precisions import QUANTIZED
from kvstages.cli import main
from kvstages.files.atomic import write_tensors
from kvstages.files.read import read_arrays
from kvstages.models.checkpoints import save_model
from kvstages.scores.columns import SCORED, SENSITIVITY_COLUMNS
from kvstages.scores.projections import TENSOR, Projections, read_projections, record_of
from kvstages.scores.table import read_scores

SCHEMAS = Path(__file__).parents[2] / "workflow" / "schemas"
GRID = PrecisionGrid((("int8", "bf16"), ("int4", "int4")), (("int4", "bf16"), ("int4", "bf16")))


def made_up(probes=3, blocks=2, layers=2, heads=2) -> Projections:
    values = np.random.default_rng(0).normal(size=(probes, blocks, layers, 2 * heads, 4))
    return Projections(values, QUANTIZED, 5)


def test_units_of_a_head_add_up_before_they_are_squared():
    found = made_up()
    keys, values = found.values[:, :, 1, 0, 2], found.values[:, :, 1, 2, 2]
    assert found.kl("k")[:, 1, 0, 2] == pytest.approx(np.square(keys).mean(axis=0) / 10)
    assert found.kl("v")[:, 1, 0, 2] == pytest.approx(np.square(values).mean(axis=0) / 10)
    assert found.kl("kv")[:, 1, 0, 2] == pytest.approx(np.square(keys + values).mean(axis=0) / 10)


def test_a_policy_adds_up_its_tensors_with_interactions_or_its_units_without():
    found = made_up()
    a = {
        (0, 0): found.values[:, :, 0, 0, 0],  # keys of head 0 of layer 0 in INT8
        (0, 2): found.values[:, :, 0, 2, 1],  # its values in INT4
        (1, 0): found.values[:, :, 1, 0, 1],
        (1, 1): found.values[:, :, 1, 1, 1],
        (1, 2): found.values[:, :, 1, 2, 1],
    }
    assert found.joint_kl(GRID) == pytest.approx(np.square(sum(a.values())).mean(axis=0) / 10)
    tensors = sum(np.square(one).mean(axis=0) for one in a.values()) / 10
    assert found.additive_kl(GRID, "keys-values") == pytest.approx(tensors)
    heads = a[0, 0] + a[0, 2], a[1, 0] + a[1, 2], a[1, 1]
    assert found.additive_kl(GRID, "head") == pytest.approx(sum(np.square(one).mean(axis=0) for one in heads) / 10)
    assert (found.joint_kl(PrecisionGrid.uniform(2, 2, "bf16")) == 0).all()


def test_a_policy_of_another_shape_or_precision_is_refused():
    found = made_up()
    with pytest.raises(ValueError, match=r"a policy of \[2, 2, 2\] heads, expected \[2, 2\]"):
        found.joint_kl(PrecisionGrid.uniform(3, 2, "int8"))
    less = Projections(found.values[..., :2], ("int8", "int4"), 5)
    with pytest.raises(ValueError, match="a policy with int2; the projections hold int8, int4"):
        less.joint_kl(PrecisionGrid.uniform(2, 2, "int2"))


def test_the_error_of_the_probes_is_that_of_a_mean_of_squares():
    found = Projections(np.random.default_rng(1).normal(size=(4000, 2, 1, 2, 1)), ("int8",), 5)
    # Squares of normal numbers have the relative error √2, and two blocks halve its square.
    assert probe_error(found, "k") == pytest.approx(1.0, rel=0.1)


def test_a_file_that_holds_no_projections_is_named(tmp_path):
    path = tmp_path / "p.safetensors"
    right = record_of(QUANTIZED, 5, "calibration")
    values = made_up().values
    for tensors, record, said in (
        ({"logits": values}, right, "tensors logits, expected projections"),
        ({TENSOR: values}, {}, "expected projections of the stage gradients"),
        (
            {TENSOR: values},
            right | {"precisions": ["int8", "fp7"]},
            r"precisions \['int8', 'fp7'\]: .*'fp7' has 7 bits",
        ),
        ({TENSOR: values}, right | {"tokens": 0}, "tokens 0, expected the positions of a block"),
        ({TENSOR: values[..., :3]}, right, r"shape \(3, 2, 2, 4, 3\), expected \[P, B, L, 2H, 4\]"),
    ):
        write_tensors(path, tensors, record)
        with pytest.raises(ValueError, match=f"p.safetensors: .*{said}"):
            read_projections(path)


def run(*words: object) -> None:
    result = CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A small model through the stages: sweeps, gradients, a frontier measured on the same window, predictions."""
    folder = tmp_path_factory.mktemp("study")
    model = random_model(3, 2, 8)
    save_model(folder / "model.safetensors", model.config, model.state_dict())
    write_tensors(folder / "windows.safetensors", {"calibration": random_tokens(5, 16)})
    common = ["--model", folder / "model.safetensors", "--windows", folder / "windows.safetensors"]
    words = [word for part in SCORED for word in ("--part", part)]
    words += [word for precision in QUANTIZED for word in ("--precision", precision)]
    sweeps = [folder / f"layer-{layer}.csv" for layer in range(3)]
    for layer, path in enumerate(sweeps):
        run("sweep", *common, "--layer", layer, *words, "--device", "cpu", "--output", path)
    run("gather", *sweeps, "--source", "measured-float32", "--output", folder / "measured.csv")
    run("gradients", *common, "--probes", 16, "--device", "cpu", "--output-table", folder / "gradients.csv",
        "--projections", folder / "projections.safetensors")  # fmt: skip
    recipes = ["exact=exact:gradients:head:int8,int4", "split=exact:measured-float32:keys-values:int8,int4,int3,int2",
               "whole=exact:measured-float32:layer:int8,int4"]  # fmt: skip
    run("policy-set", "--sensitivity", folder / "measured.csv", "--sensitivity", folder / "gradients.csv",
        *common[:2], "--tokens", 16, *(word for recipe in recipes for word in ("--recipe", recipe)),
        "--points", 6, "--output", folder / "policy-set.json")  # fmt: skip
    run("reference", *common, "--window", "calibration", "--device", "cpu", "--output", folder / "r.safetensors")
    run("evaluate-set", *common, "--window", "calibration", "--policies", folder / "policy-set.json",
        "--reference", folder / "r.safetensors", "--device", "cpu", "--output", folder / "joint.csv")  # fmt: skip
    run("predict", *sweeps, *common[:2], "--projections", folder / "projections.safetensors",
        "--policies", folder / "policy-set.json", "--joint", folder / "joint.csv",
        "--output", folder / "predictions.csv")  # fmt: skip
    return folder


def test_the_table_of_gradients_is_one_that_allocators_read(study):
    table, measured = (pd.read_csv(study / name) for name in ("gradients.csv", "measured.csv"))
    assert list(table) == SENSITIVITY_COLUMNS
    key = ["layer", "head", "part", "precision"]
    whole, measured = (measured[(measured["part"] == "layer") == own].reset_index(drop=True) for own in (True, False))
    assert len(whole) == 3 * len(QUANTIZED) and (whole["head"] == 0).all()
    assert table[key].equals(measured[key])
    # Both round the same keys, added up in another order on some processors: a few of the 640 numbers of a head then go
    # to the next value of BF16, whose step is about as long as INT8's and far shorter than the others'.
    moved = (table["reconstruction_error"] / measured["reconstruction_error"] - 1).abs()
    assert (moved < table["precision"].eq("int8").map({True: 0.01, False: 0.002})).all()
    assert set(table["source"]) == {"gradients"} and (table["below_floor"] == 0).all()
    assert table[["floor_kl", "bf16_step_kl"]].isna().all(axis=None) and (table["standard_error"] > 0).all()
    shape = random_model(3, 2, 8).shape
    for unit in UNITS:
        assert read_scores(study / "gradients.csv", shape, 16, unit, QUANTIZED).source == "gradients"
    schema = yaml.safe_load((SCHEMAS / "sensitivity.schema.yaml").read_text())
    for row in json.loads(table.to_json(orient="records")):
        jsonschema.validate(row, schema)


def test_the_table_is_made_of_the_projections(study):
    found = read_projections(study / "projections.safetensors")
    table = pd.read_csv(study / "gradients.csv")
    own = table[(table["part"] == "kv") & (table["precision"] == "int3")]["mean_kl"].to_numpy()
    assert own == pytest.approx(found.kl("kv").mean(axis=0)[..., 2].ravel(), rel=1e-12)
    arrays, record = read_arrays(study / "projections.safetensors")
    assert arrays[TENSOR].dtype == np.float64 and record["window"] == "calibration" and record["tokens"] == 16


def test_predictions_stand_beside_what_was_measured(study):
    table, joint = pd.read_csv(study / "predictions.csv"), pd.read_csv(study / "joint.csv")
    assert list(table) == PREDICTION_COLUMNS
    assert table["joint_kl"].equals(joint["mean_kl"]) and table["policy"].equals(joint["policy"])
    schema = yaml.safe_load((SCHEMAS / "predictions.schema.yaml").read_text())
    for row in json.loads(table.to_json(orient="records")):
        jsonschema.validate(row, schema)
    means = table.groupby("policy", sort=False)[["proxy_kl", "additive_kl", "interaction_kl"]].mean()
    assert (means.loc["bf16"] == 0).all()
    own = pd.read_csv(study / "measured.csv")
    heads = own[(own["part"] == "kv") & (own["precision"] == "int4")]["mean_kl"]
    assert means.loc["int4", "proxy_kl"] == pytest.approx(heads.sum())


def test_the_proxy_of_predict_is_that_of_the_candidates(study):
    record = json.loads((study / "policy-set.json").read_text())
    scores = unit_scores([study / f"layer-{layer}.csv" for layer in range(3)])
    for recipe in ("split", "whole"):
        own = [policy for policy in record["policies"] if policy["recipe"] == recipe]
        assert len(own) > 3 and {policy["unit"] for policy in own} < set(UNITS)
        for policy in own:
            found = proxy(scores, PrecisionGrid.of_record(policy["precisions"]), policy["unit"]).mean()
            assert found == pytest.approx(policy["proxy"], rel=1e-9)
    with pytest.raises(ValueError, match="the sweeps have no score of layer 0, head 0, part kv, int8"):
        proxy(scores.drop(columns=(0, 0, "kv", "int8")), PrecisionGrid.uniform(3, 2, "int8"), "head")


def test_the_summary_tells_a_perfect_prediction_from_one_without_order(study, tmp_path):
    table = pd.read_csv(study / "predictions.csv")
    table["proxy_kl"] = table["joint_kl"]
    table["additive_kl"] = 2 * table["joint_kl"]
    write_gappy(tmp_path / "p.csv", table)
    found = summarise(tmp_path / "p.csv", [study / "joint.csv"])
    own = found[(found["window"] == "calibration") & (found["set"] == "all")].set_index("predictor")
    assert (
        own.loc["proxy_kl", ["rank_correlation", "median_ratio", "median_ratio_high", "p5_ratio"]].tolist() == [1] * 4
    )
    assert own.loc["additive_kl", ["rank_correlation", "median_ratio"]].tolist() == [1, 0.5]
    assert own.loc["interaction_kl", "p95_ratio"] != 1
    # The held-out window is the same file here, but its blocks are drawn apart from the predictions.
    other = found[(found["window"] == "validation") & (found["set"] == "all")].set_index("predictor")
    assert other.loc["proxy_kl", "median_ratio"] == 1 < other.loc["proxy_kl", "median_ratio_high"]


def test_accuracy_by_the_number_of_probes(study):
    table = accuracy(study / "measured.csv", study / "projections.safetensors")
    assert table["probes"].drop_duplicates().tolist() == [4, 8, 16]
    by_probes = table[table["precision"] == "int8"].groupby("probes")
    assert by_probes["rank_correlation"].mean().is_monotonic_increasing
    error = by_probes["probe_error"].mean()
    assert error.to_numpy() == pytest.approx(error[4] / np.sqrt([1, 2, 4]))
    whole = table[table["probes"] == 16]
    for name in ("rank_correlation", "median_ratio"):
        assert (whole[f"{name}_low"] <= whole[name]).all() and (whole[name] <= whole[f"{name}_high"]).all()
        assert table[table["probes"] < 16][[f"{name}_low", f"{name}_high"]].isna().all(axis=None)


def test_scores_that_part_are_named():
    rows = [
        ("kv", "int8", 4, 0.2, 1.0),
        ("kv", "int8", 8, 0.95, 1.0),
        ("k", "int4", 8, 0.8, 1.0),
        ("v", "int4", 8, 1, 2),
    ]
    table = pd.DataFrame(rows, columns=["part", "precision", "probes", "rank_correlation", "median_ratio"])
    assert parting(table) == ["k int4", "v int4"]
    assert parting(table[:2]) == []


def test_predict_refuses_a_policy_that_was_not_measured(study, tmp_path):
    joint = pd.read_csv(study / "joint.csv")
    write_gappy(tmp_path / "joint.csv", joint[joint["policy"] != "int4"])
    result = CliRunner().invoke(main, [str(word) for word in (
        "predict", study / "layer-0.csv", study / "layer-1.csv", study / "layer-2.csv",
        "--model", study / "model.safetensors", "--projections", study / "projections.safetensors",
        "--policies", study / "policy-set.json", "--joint", tmp_path / "joint.csv", "--output", tmp_path / "p.csv",
    )])  # fmt: skip
    assert result.exit_code == 1 and "policy int4: its joint KL was not measured on the window" in result.output
