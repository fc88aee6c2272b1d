"""Files of policies are for one model: every stage that takes one refuses it for another, or in another form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from models import identified, identity_of, random_model, random_tokens
from test_stages import POLICY, sensitivities

from kvstages.cli import main
from kvstages.files.atomic import write_json, write_tensors
from kvstages.files.read import read_json
from kvstages.models.checkpoints import save_model
from kvstages.models.identity import read_identity
from kvstages.policies.record import read_policy

ENTRY = {key: value for key, value in POLICY.items() if key not in ("schema_version", "model", "schemes", "provenance")}
ENTRY |= {"recipe": "mixed", "limit": POLICY["bytes"]["total"]}
COMMON = ("--model", "model.safetensors")
MEASURED = (*COMMON, "--windows", "windows.safetensors", "--window", "validation", "--device", "cpu")
SCORED = (*COMMON, "--sensitivity", "sensitivity.csv")
JUDGED = (*MEASURED, "--reference", "reference.safetensors")
# Every stage that takes a policy, and the file with it.
STAGES = {
    "evaluate": ("policy.json", "evaluate", *JUDGED, "--policy", "policy.json", "--output", "new", "--positions", "p"),
    "evaluate-set": ("set.json", "evaluate-set", *JUDGED, "--policies", "set.json", "--output", "new"),
    "sweep": ("policy.json", "sweep", *MEASURED, "--layer", "0", "--base", "policy.json", "--output", "new"),
    "allocate": (
        *("policy.json", "allocate", *SCORED, "--policy", "p", "--allocator", "greedy", "--bytes-of", "policy.json"),
        *("--output", "new", "--steps", "steps.csv"),
    ),
    "refine": (
        *("policy.json", "refine", *SCORED, "--base", "policy.json", "--moves", "sensitivity.csv", "--output", "new"),
    ),
    "predict": (
        *("set.json", "predict", "sensitivity.csv", *COMMON, "--projections", "p.safetensors"),
        *("--policies", "set.json", "--joint", "joint.csv", "--output", "new"),
    ),
}


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with a model, its policy and a set; what comes after the policy need not be right."""
    monkeypatch.chdir(tmp_path)
    model = random_model()
    save_model(Path("model.safetensors"), model.config, model.state_dict())
    write_tensors(tmp_path / "windows.safetensors", {"validation": random_tokens()})
    write_json(tmp_path / "policy.json", POLICY)
    write_json(tmp_path / "set.json", identified({"policies": [ENTRY]}, identity_of(model)))
    sensitivities(tmp_path / "sensitivity.csv", ["int8", "int4"])
    for name in ("p.safetensors", "joint.csv"):
        (tmp_path / name).write_bytes(b"")
    assert run("reference", *MEASURED, "--output", "reference.safetensors") == (0, "")
    return tmp_path


@pytest.mark.parametrize("stage", STAGES)
def test_a_policy_of_another_model_or_shape_is_refused_by_every_stage(folder, stage):
    name, *words = STAGES[stage]
    right = read_json(folder / name)
    wrong = {
        r"made for another model of this shape (digest of its weights 000000000000..., this one's ": {
            "weights": "0" * 64
        },
        "made for a model with key_width 16; this one has key_width 8": {"key_width": 16},
        "made for a model with layers 2, heads 1; this one has layers 3, heads 2": {"layers": 2, "heads": 1},
    }
    for message, change in wrong.items():
        write_json(folder / name, {**right, "model": {**right["model"], **change}})
        status, output = run(*words)
        assert status == 1 and output.startswith(f"Error: {name}: {message}") and output.count("\n") == 1, output
        assert not (folder / "new").exists()


@pytest.mark.parametrize("stage", ["evaluate", "evaluate-set"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": None}, "schema_version is None, expected 1: made by another version of kvstages"),
        ({"schema_version": 2}, "schema_version is 2, expected 1"),
        ({"schema_version": True}, "schema_version is True, expected 1"),
        ({"model": None}, "model: expected layers, heads, key_width, value_width, weights"),
        ({"model": {"layers": 3}}, "model: expected layers, heads, key_width, value_width, weights"),
        ({"schemes": None}, "key 'schemes' is missing"),
        ({"schemes": {"int7": {}}}, "precision 'int7'"),
        ({"schemes": {**POLICY["schemes"], "int8": {"bits": 8}}}, "schemes.int8 is {'bits': 8}, but int8 is {'bits'"),
        ({"schemes": {"bf16": {"bits": 16}}}, "schemes: int8 is missing, which the policy has"),
    ],
)
def test_another_form_is_refused(folder, stage, change, message):
    name, *words = STAGES[stage]
    write_json(folder / name, {**read_json(folder / name), **change})
    status, output = run(*words)
    assert status == 1 and output.startswith(f"Error: {name}: ") and message in output and output.count("\n") == 1


def test_the_right_files_are_taken(folder):
    for stage in ("evaluate", "evaluate-set", "sweep"):
        _, *words = STAGES[stage]
        assert run(*words) == (0, ""), stage
        (folder / "new").unlink()


def test_a_policy_of_the_original_is_for_its_adapted_copies_too(folder):
    words = ("adapt", *MEASURED, "--noise", "int4", "--seed", 1, "--steps", 2, "--learning-rate", 0.1, "--beta", 1)
    assert run(*words, "--output", "adapted.safetensors", "--curve", "curve.csv", "--record", "r.json") == (0, "")
    adapted = read_identity(folder / "adapted.safetensors")
    assert adapted.origin == read_identity(folder / "model.safetensors").weights != adapted.weights
    read_policy(folder / "policy.json", adapted)
    assert run(*(str(word).replace("model.saf", "adapted.saf") for word in words), "--output", "twice.safetensors",
               "--curve", "curve.csv", "--record", "r.json") == (0, "")  # fmt: skip
    assert read_identity(folder / "twice.safetensors").origin == adapted.origin


def test_files_identify_model_schemes_and_scores_and_are_the_same_bytes_again(folder):
    words = ("allocate", *SCORED, "--policy", "p", "--allocator", "greedy", "--budget", "0.3", "--steps", "steps.csv")
    recipe = ("--recipe", "a=greedy:measured-float32:head:int8,int4", "--points", "3")
    for name in ("first", "second"):
        assert run(*words, "--output", f"{name}.json") == (0, "")
        assert run("policy-set", *SCORED, *recipe, "--output", f"{name}-set.json") == (0, "")
    for kind in ("", "-set"):
        text = (folder / f"first{kind}.json").read_bytes()
        assert text == (folder / f"second{kind}.json").read_bytes() and str(folder).encode() not in text
        record = json.loads(text)
        assert record["model"] == identity_of(random_model()).as_record()
        assert list(record["schemes"]) == ["bf16", "int4", "int8"]
        method = record["schemes"]["int4"]["keys"]
        assert (method["levels"], method["stored"], method["share"]) == ("int", "fp16", "token")
        assert set(record["provenance"]["scores"]) == {"measured-float32"}
    read_policy(folder / "first.json", read_identity(Path("model.safetensors")))
