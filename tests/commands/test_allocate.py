"""The stage allocate by its command line: every allocator, unit and precision, and what it refuses."""

from __future__ import annotations

import csv
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner
from models import random_model
from score_tables import write_sensitivities

from kvstages.cache.precisions import BITS, QUANTIZED
from kvstages.cli import main
from kvstages.files.atomic import write_table
from kvstages.files.read import read_json
from kvstages.models.checkpoints import save_model
from kvstages.policies.names import ALLOCATORS
from kvstages.scores.table import COLUMNS

SCHEMAS = Path(__file__).parents[2] / "workflow" / "schemas"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model of 3 layers × 2 heads and its scores."""
    monkeypatch.chdir(tmp_path)
    model = random_model()
    save_model(Path("model.safetensors"), model.config, model.state_dict())
    write_sensitivities(tmp_path / "sensitivity.csv", QUANTIZED)
    return tmp_path


def allocate(*more: object) -> tuple[int, str]:
    """Exit status and output; a traceback would be status 1 with an exception that is no SystemExit."""
    files = ("--sensitivity", "sensitivity.csv", "--model", "model.safetensors", "--tokens", 12)
    words = ("allocate", "--policy", "p", *files, "--output", "p.json", "--steps", "steps.csv", *more)
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def error(*more: object) -> str:
    """The one line of a run that ends with status 1 and writes nothing."""
    status, output = allocate(*more)
    assert status == 1 and output.count("\n") == 1, output
    assert not Path("p.json").exists() and not Path("steps.csv").exists()
    return output


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("unit", ["head", "keys-values"])
def test_every_allocator_writes_a_policy_and_its_path(folder, allocator, unit):
    assert allocate("--allocator", allocator, "--budget", "1500B", "--unit", unit) == (0, "")
    record = read_json(folder / "p.json")
    jsonschema.validate(record, yaml.safe_load((SCHEMAS / "policy.schema.yaml").read_text()))
    assert (record["allocator"], record["unit"], record["sensitivity"]) == (allocator, unit, "measured")
    assert (record["budget"], record["budget_in"]) == (1500, "bytes") and record["bytes"]["total"] <= 1500
    assert (record["execution"], record["compute_dtype"]) == ("one-pass", "float32")
    if unit == "head":
        assert record["precisions"]["keys"] == record["precisions"]["values"]
    with (folder / "steps.csv").open() as file:
        steps = list(csv.DictReader(file))
    assert len(steps) == record["proxy_steps"] and bool(steps) == (allocator not in ("exact", "at-random"))
    assert {step["part"] for step in steps} <= ({"kv"} if unit == "head" else {"k", "v"})


def test_precisions_and_nats(folder):
    words = ("--allocator", "greedy", "--budget", "0.001", "--precisions", "int8,int3")
    assert allocate(*words) == (0, "")
    record = read_json(folder / "p.json")
    used = {precision for precision, count in record["tensors"].items() if count}
    assert used <= {"bf16", "int8", "int3"} and "int3" in used
    assert (record["budget"], record["budget_in"]) == (0.001, "nats") and 0 < record["proxy"] <= 0.001


def test_random_policies_come_from_the_seed(folder):
    drawn = []
    for seed in (1, 1, 2):
        assert allocate("--allocator", "at-random", "--budget", "1500B", "--seed", seed) == (0, "")
        drawn.append((folder / "p.json").read_text())
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("precision", BITS)
def test_uniform_policies(folder, precision):
    assert allocate("--allocator", "uniform", "--precision", precision) == (0, "")
    record = read_json(folder / "p.json")
    assert record["tensors"][precision] == 12 and record["budget"] is None


@pytest.mark.parametrize(
    "words",
    [
        ["--allocator", "greedy"],
        ["--allocator", "uniform"],
        ["--allocator", "exact", "--precision", "int8"],
        ["--allocator", "greedy", "--precision", "int8", "--budget", "0.1"],
        ["--allocator", "uniform", "--precision", "int8", "--budget", "0.1"],
    ],
)
def test_allocators_go_with_their_own_option(folder, words):
    status, output = allocate(*words)
    assert status == 2
    assert "--allocator uniform goes with --precision, every other allocator with --budget or --bytes-of" in output
    assert not (folder / "p.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--budget", "much"],
            "budget 'much': expected nats, such as 0.01, or bytes, such as 400000B, or bits an element, such as "
            "4.25bits",
        ),
        (["--budget", "10B"], "budget 10 bytes: too small for any policy of bf16, int8, int4, int3, int2; "
                              "the smallest takes 576 bytes"),
        (["--budget", "0.1", "--precisions", "int8,fp8"], "sensitivity.csv: no fp8 scores (unit head); it holds "
                                                          "int8, int4, int3, int2"),
        (["--budget", "0.1", "--precisions", "int4,int8"], "sensitivity.csv: precisions int4, int8: expected some, "
                                                           "each once, from most bytes to fewest: int8, int4"),
    ],
)  # fmt: skip
def test_one_line_says_what_is_wrong(folder, words, message):
    assert error("--allocator", "greedy", *words) == f"Error: {message}\n"


def test_scores_of_another_model_are_refused(folder):
    write_sensitivities(folder / "sensitivity.csv", QUANTIZED, layers=2)
    line = error("--allocator", "greedy", "--budget", "0.3")
    assert line == "Error: sensitivity.csv: scores of 2 layers × 2 heads, but the model has 3 × 2\n"


def test_a_precision_without_scores_is_refused(folder):
    write_sensitivities(folder / "sensitivity.csv", ["int4"])
    line = error("--allocator", "uniform", "--precision", "int8")
    assert line == "Error: sensitivity.csv: no int8 scores (unit head); it holds int4\n"
    assert allocate("--allocator", "uniform", "--precision", "bf16") == (0, "")


def test_a_table_without_scores_is_refused(folder):
    write_table(folder / "sensitivity.csv", {name: [] for name in COLUMNS})
    assert error("--allocator", "greedy", "--budget", "0.3") == "Error: sensitivity.csv: no scores, only a header\n"
