"""The stages that run a decoder or read its results, by their command line: what each refuses, and how."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from gappy import write_gappy
from models import identified, identity_of, random_model, random_tokens

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import BITS
from kvstages.cli import main
from kvstages.files.atomic import write_json, write_tensors
from kvstages.files.read import read_json, read_tensors
from kvstages.models.checkpoints import save_model
from kvstages.policies.budgets import Budget
from kvstages.policies.making import policy_record
from kvstages.scores.columns import SENSITIVITY_COLUMNS

WAYS = ["one-pass", "token-by-token"]
GRID = PrecisionGrid.of_heads([["int8", "int4"], ["int4", "int8"], ["bf16", "int8"]])
BUDGET = Budget(0.1, "nats")
POLICY = identified(
    policy_record(
        "mixed", "greedy", BUDGET, GRID, 0.05, 3, (8, 8), 12, unit="head", ladder=BITS, sensitivity="made-up"
    ),
    identity_of(random_model()),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model of 3 layers x 2 heads, windows, and sensitivities of its shape."""
    monkeypatch.chdir(tmp_path)
    save(random_model())
    write_tensors(tmp_path / "windows.safetensors", {"validation": random_tokens()})
    write_json(tmp_path / "policy.json", POLICY)
    sensitivities(tmp_path / "sensitivity.csv", ["int8", "int4"])
    return tmp_path


def save(model) -> None:
    save_model(Path("model.safetensors"), model.config, model.state_dict())


def sensitivities(path: Path, precisions: list[str], layers: int = 3) -> None:
    rows = [
        (layer, head, "kv", precision, 0.1, 0.01, 3, 1e-9, 1e-6, 0, 0.2, "measured-float32", "one-pass", "float32")
        for layer in range(layers)
        for head in range(2)
        for precision in precisions
    ]
    write_gappy(path, dict(zip(SENSITIVITY_COLUMNS, zip(*rows, strict=True), strict=True)))


def run(*words: object) -> tuple[int, str]:
    """Exit status and output; a traceback would be status 1 with an exception that is no SystemExit."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def error(*words: object) -> str:
    """The one line of a stage that ends with status 1."""
    status, output = run(*words)
    assert status == 1 and output.count("\n") == 1, output
    return output


def reference(*more: object) -> tuple[object, ...]:
    files = ("--model", "model.safetensors", "--windows", "windows.safetensors", "--window", "validation")
    return ("reference", *files, "--device", "cpu", "--output", "reference.safetensors", *more)


def evaluate(*more: object) -> tuple[object, ...]:
    files = ("--model", "model.safetensors", "--windows", "windows.safetensors", "--window", "validation")
    made = ("--policy", "policy.json", "--reference", "reference.safetensors", "--device", "cpu")
    return ("evaluate", *files, *made, "--output", "evaluation.json", "--positions", "positions.csv", *more)


def allocate(*more: object) -> tuple[object, ...]:
    files = ("--sensitivity", "sensitivity.csv", "--model", "model.safetensors")
    return ("allocate", "--policy", "p", *files, "--output", "p.json", "--steps", "steps.csv", *more)


def huge(part: str) -> None:
    """A model with finite weights whose keys or values overflow in layer 1, head 1, and its policy."""
    model = random_model()
    with torch.no_grad():
        getattr(model.blocks[1], part).weight[8:] = 3e38
    save(model)
    write_json(Path("policy.json"), identified(POLICY, identity_of(model)))


def test_the_files_of_these_tests_are_right(folder):
    assert run(*reference()) == (0, "")
    assert run(*evaluate()) == (0, "")
    assert (folder / "evaluation.json").exists()
    assert run(*allocate("--allocator", "greedy", "--budget", "0.3")) == (0, "")


@pytest.mark.parametrize("execution", WAYS)
@pytest.mark.parametrize(("part", "kind"), [("K", "keys"), ("V", "values")])
def test_overflow_in_the_cache_names_layer_and_head(folder, part, kind, execution):
    assert run(*reference("--execution", execution)) == (0, "")
    made = (folder / "reference.safetensors").read_bytes()
    huge(part)
    message = f"Error: layer 1, head 1: NaN or infinity in the {kind}\n"
    assert error(*reference("--execution", execution)) == message
    assert error(*evaluate("--execution", execution)) == message
    assert (folder / "reference.safetensors").read_bytes() == made
    assert not list(folder.glob("evaluation*")) and not list(folder.glob("positions*"))


def test_a_reference_made_in_another_way_is_refused(folder):
    assert run(*reference()) == (0, "")
    line = error(*evaluate("--execution", "token-by-token"))
    assert line.startswith("Error: reference.safetensors: computed with execution one-pass, not token-by-token:")
    assert not (folder / "evaluation.json").exists()


def test_a_reference_without_logits_is_refused(folder):
    assert run(*reference()) == (0, "")
    tensors, record = read_tensors(folder / "reference.safetensors")
    write_tensors(folder / "reference.safetensors", {"weights": tensors["logits"]}, record)
    line = error(*evaluate())
    assert line == "Error: reference.safetensors: holds weights; expected the tensor logits\n"
    assert not (folder / "evaluation.json").exists()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "key 'policy' is missing, expected a policy of the stage allocate"),
        ({**POLICY, "precisions": [["int8"] * 2] * 3}, "precisions: list, expected the keys keys and values"),
    ],
)
def test_what_is_no_policy_is_refused(folder, record, message):
    assert run(*reference()) == (0, "")
    write_json(folder / "policy.json", record)
    assert error(*evaluate()) == f"Error: policy.json: {message}\n"
    assert not (folder / "evaluation.json").exists()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.full((3, 12), 50), "token id 50 is outside the model's vocabulary of 50"),
        (random_tokens(length=33), "blocks of 33 tokens are longer than the model's context of 32"),
    ],
)
def test_windows_of_another_model_are_refused(folder, tokens, message):
    assert run(*reference()) == (0, "")
    write_tensors(folder / "windows.safetensors", {"validation": tokens})
    files = ("--model", "model.safetensors", "--windows", "windows.safetensors", "--window", "validation")
    sweep = ("sweep", *files, "--layer", 0, "--device", "cpu", "--output", "new")
    adapt = ("adapt", *files, "--device", "cpu", *SETTINGS, *ADAPTED)
    for words in (reference("--output", "new"), sweep, evaluate("--output", "new"), adapt):
        assert error(*words) == f"Error: windows.safetensors: {message}\n"
        assert not (folder / "new").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--allocator", "greedy"],
        ["--allocator", "uniform"],
        ["--allocator", "greedy", "--precision", "int8"],
        ["--allocator", "uniform", "--precision", "int8", "--budget", "0.1"],
    ],
)
def test_allocators_go_with_their_own_option(folder, words):
    status, output = run(*allocate(*words))
    assert status == 2
    assert "--allocator uniform goes with --precision, every other allocator with --budget or --bytes-of" in output
    assert not (folder / "p.json").exists()


SETTINGS = ["--seed", 1, "--steps", 1, "--learning-rate", 1e-3, "--beta", 1]
ADAPTED = ["--output", "new", "--curve", "curve.csv", "--record", "training.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [*SETTINGS, "--noise", "int4", "--straight-through", "int4"],
            "give --noise or --straight-through, or neither",
        ),
        (["--seed", 1, "--steps", 1, "--beta", 1], "give either --settings, or --steps, --learning-rate and --beta"),
        ([*SETTINGS, "--settings", "policy.json"], "give either --settings, or --steps, --learning-rate and --beta"),
        ([*SETTINGS, "--noise", "int9"], "int9: neither a policy's file (.json) nor a precision such as int4"),
        ([*SETTINGS, "--noise", "greedy-0.01"], "greedy-0.01: neither a policy's file (.json) nor a precision"),
    ],
)
def test_an_arm_has_one_cache_and_one_choice_of_settings(folder, words, said):
    write_json(folder / "policy.json", {})
    files = ("--model", "model.safetensors", "--windows", "windows.safetensors", "--window", "validation")
    status, output = run("adapt", *files, *words, *ADAPTED)
    assert status == 2 and said in " ".join(output.split())
    assert not (folder / "new").exists()


def test_a_policy_that_is_not_there_and_noise_of_another_scheme_are_refused(folder):
    files = ("--model", "model.safetensors", "--windows", "windows.safetensors", "--window", "validation")
    line = error("adapt", *files, *SETTINGS, "--noise", "none.json", *ADAPTED)
    assert line.startswith("Error: none.json: ") and line.count("\n") == 1
    line = error("adapt", *files, *SETTINGS, "--noise", "rotated4", *ADAPTED)
    assert line.startswith("Error: noise like rotated4: expected a policy of bf16, int8")
    assert not (folder / "new").exists()


def test_a_training_whose_loss_is_not_finite_names_the_step_and_writes_nothing(folder):
    files = ("--model", "model.safetensors", "--windows", "windows.safetensors", "--window", "validation")
    settings = ("--seed", 1, "--steps", 9, "--learning-rate", 1e30, "--beta", 1)
    line = error("adapt", *files, *settings, "--straight-through", "int4", *ADAPTED)
    assert re.match(r"Error: adaptation, seed 1, step [1-8]: .*; lower the learning rate$", line)
    assert not [name for name in ("new", "curve.csv", "training.json") if (folder / name).exists()]


def test_a_grid_is_tried_on_its_window_and_the_best_settings_are_taken(folder):
    """Every combination once; what is chosen is what the next stage trains with."""
    windows = {"adaptation": random_tokens(4), "reserved": random_tokens(2, seed=3)}
    write_tensors(folder / "windows.safetensors", windows)
    files = ("--model", "model.safetensors", "--windows", "windows.safetensors", "--device", "cpu")
    tried = ("--steps", 1, "--steps", 2, "--learning-rate", 1e-3, "--learning-rate", 1e-2, "--beta", 1)
    cache = ("--straight-through", "int2", "--batch", 2)
    grid = ("adapt-grid", *files, *cache, "--seed", 1, "--weights", "float32", *tried, "--output")
    assert run(*grid, "settings.csv") == (0, "") and run(*grid, "again.csv") == (0, "")
    assert (folder / "settings.csv").read_bytes() == (folder / "again.csv").read_bytes()
    table = pd.read_csv(folder / "settings.csv")
    assert table[["learning_rate", "beta", "steps"]].to_numpy().tolist() == [
        [0, 0, 0], [1e-3, 1, 1], [1e-3, 1, 2], [1e-2, 1, 1], [1e-2, 1, 2],
    ]  # fmt: skip
    assert set(table["window"]) == {"reserved"} and table["bf16_mean_kl"].iloc[0] == 0
    trained = table[table["steps"] > 0]
    best = trained.loc[trained["mean_kl"].idxmin()]
    assert trained["chosen"].sum() == 1 and best["chosen"] == 1
    assert run("adapt", *files, *cache, "--seed", 1, "--settings", "settings.csv", *ADAPTED) == (0, "")
    record = read_json(folder / "training.json")
    assert [record[name] for name in ("steps", "learning_rate", "beta")] == [
        best[name] for name in ("steps", "learning_rate", "beta")
    ]
    assert record["cache"] == "straight-through" and record["policy"] == "int2" and record["control"] == ""
    assert record["tokens_seen"] == record["steps"] * 2 * 12 and record["changed_share"] > 0.5


def test_an_adapted_model_is_measured_against_the_original_and_itself(folder):
    assert run(*reference()) == (0, "")
    files = ("--model", "model.safetensors", "--windows", "windows.safetensors", "--window", "validation")
    written = ("--output", "new.safetensors", *ADAPTED[2:])
    assert run("adapt", *files, *SETTINGS, "--noise", "int4", "--device", "cpu", *written) == (0, "")
    measured = ("--policy", "int2", "--policy", "bf16", "--reference", "reference.safetensors", "--device", "cpu")
    table = {}
    for model in ("model.safetensors", "new.safetensors"):
        words = ("evaluate-adapted", "--model", model, *files[2:], *measured, "--output", "evaluation.csv")
        assert run(*words) == (0, "")
        table[model] = pd.read_csv(folder / "evaluation.csv").set_index("policy")
    before, after = table.values()
    for name in ("kl", "agreement"):
        own, original = f"own_{name}", {"kl": "mean_kl"}.get(name, name)
        assert (after.loc["bf16", own] == (0 if name == "kl" else 1)).all()
        # The original model is its own reference.
        assert before[own].tolist() == before[original].tolist()
    assert (after.loc["bf16", "mean_kl"] > 0).all() and (after.loc["int2", "own_kl"] > 0).all()
    assert "is given twice" in error(
        "evaluate-adapted", *files, *measured, "--policy", "int2", "--output", "evaluation.csv"
    )


def test_scores_of_another_model_are_refused(folder):
    sensitivities(folder / "sensitivity.csv", ["int8", "int4"], layers=2)
    line = error(*allocate("--allocator", "greedy", "--budget", "0.3"))
    assert line == ("Error: sensitivity.csv: scores of 2 layers × 2 heads, but the model has 3 × 2\n")
    assert not (folder / "p.json").exists()


def test_a_precision_without_scores_is_refused(folder):
    sensitivities(folder / "sensitivity.csv", ["int4"])
    line = error(*allocate("--allocator", "uniform", "--precision", "int8"))
    assert line == "Error: sensitivity.csv: no int8 scores (unit head); it holds int4\n"
    assert not (folder / "p.json").exists()
    assert run(*allocate("--allocator", "uniform", "--precision", "bf16")) == (0, "")


def test_a_table_without_scores_is_refused(folder):
    write_gappy(folder / "sensitivity.csv", {name: [] for name in SENSITIVITY_COLUMNS})
    line = error(*allocate("--allocator", "greedy", "--budget", "0.3"))
    assert line == "Error: sensitivity.csv: no scores, only a header\n"
