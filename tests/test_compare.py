"""`kvstages compare`: the same bytes, within tolerance, or outside and why."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from published_study import write_study

from kvstages.cli import main
from kvstages.files.atomic import write_json, write_tensors, write_text
from kvstages.files.read import read_json, read_tensors
from kvstages.provenance.reproduction import BFLOAT16, FULL, KINDS, compare, kind_of

SENSITIVITY = Path("scores", "measured-float32.csv")
SCHEMAS = Path(__file__).parents[1] / "workflow" / "schemas"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two studies of the same files, in FP32."""
    one, other = tmp_path / "a", tmp_path / "b"
    write_study(one, layers=1, heads=2, budgets=("0.01",))
    for path in [*one.rglob("*.json"), *one.rglob("*.csv")]:
        path.write_text(path.read_text().replace("bfloat16", "float32"))
    (one / "scores" / "measured-bfloat16.csv").rename(one / SENSITIVITY)
    logits = torch.linspace(-20, 20, 64).reshape(2, 4, 8)
    write_tensors(one / "reference" / "validation.safetensors", {"logits": logits}, {"device": "cpu", "threads": 1})
    tokens = torch.arange(32).reshape(2, 16)
    write_tensors(one / "windows.safetensors", {"validation": tokens})
    weights = {"blocks.0.K.weight": torch.ones(4, 4), "lm_head.bias": torch.zeros(4)}
    write_tensors(one / "adaptation" / "noise" / "seed-1337" / "model.safetensors", weights)
    write_text(one / "figures" / "x.svg", "<svg/>")
    write_text(one / "figures" / "x.csv", "kl\n0.5\n")
    shutil.copytree(one, other)
    return one, other


def run(folders: tuple[Path, Path]) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, folders)])


def outside(folders: tuple[Path, Path]) -> list[str]:
    return compare(*folders).outside


def scale(path: Path, column: str, factor: float, row: int = 1) -> None:
    """Multiply one cell of a table."""
    lines = [line.split(",") for line in path.read_text().splitlines()]
    index = lines[0].index(column)
    lines[row][index] = repr(float(lines[row][index]) * factor)
    path.write_text("\n".join(map(",".join, lines)) + "\n")


def change(path: Path, **values: object) -> None:
    write_json(path, read_json(path) | values)


def test_equal_studies_are_identical_file_by_file(folders: tuple[Path, Path]) -> None:
    write_text(folders[0] / "manifest.json", "one run")
    write_text(folders[1] / "manifest.json", "another run")
    write_text(folders[0] / "SHA256SUMS", "x")
    result = run(folders)
    files = sorted(path.relative_to(folders[1]).as_posix() for path in folders[1].rglob("*") if path.is_file())
    files.remove("manifest.json")
    assert result.exit_code == 0
    assert result.output.splitlines() == [f"identical  {name}" for name in files]


@pytest.mark.parametrize(
    ("name", "column", "kind"),
    [
        (SENSITIVITY.as_posix(), "mean_kl", "divergence"),
        ("policies/greedy-0.01/steps.csv", "added_kl", "divergence"),
        ("adaptation/noise/seed-1337/curve.csv", "cross_entropy", "loss"),
    ],
)
def test_tables_are_compared_by_the_kind_of_each_column(
    folders: tuple[Path, Path], name: str, column: str, kind: str
) -> None:
    relative = FULL[kind][0]
    scale(folders[1] / name, column, 1 + relative / 10)
    comparison = compare(*folders)
    assert not comparison.outside and name in comparison.within
    assert 0 < comparison.within[name][0] <= 0.2 and column in comparison.within[name][1]
    scale(folders[1] / name, column, 1 + 300 * relative)
    (line,) = outside(folders)
    assert line.startswith(f"{name}: {column}") and line.endswith(f"({kind})")


def test_single_positions_are_compared_as_a_column(folders: tuple[Path, Path]) -> None:
    """One that is twice as large is no matter where the others are the same; all twice as large are."""
    path = folders[1] / "policies" / "int8" / "positions.csv"
    scale(path, "kl", 2.0, row=2)
    assert outside(folders) == []
    for row in range(2, 1000):
        scale(path, "kl", 2.0, row)
    (line,) = outside(folders)
    assert re.match(r"policies/int8/positions\.csv: kl: 0\.\d+ of their length apart, allowed is 0\.2 \(pos", line), (
        line
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mean_kl": 1.0}, r"mean_kl: .* and 1\.0 differ by more than 0\.05 \(divergence\)"),
        ({"total_bytes": 1}, r"total_bytes: \d+ and 1, expected the same"),
        ({"compression": 1.5}, r"compression: .* and 1\.5 differ by more than .* \(exact\)"),
        ({"agreement": 0.5}, r"agreement: .* \(argmax\)"),
        ({"sequences_with_disagreement": 999}, r"sequences_with_disagreement: .* and 999\.0 differ"),
        ({"policy": "int9"}, r"policy: 'int8' and 'int9', expected the same"),
        ({"perplexity": float("1e9")}, r"perplexity: .* \(loss\)"),
        ({"proxy": None}, r"proxy: .* and None, expected the same"),
        ({"more": 1}, r"more: only in one of the two"),
    ],
)
def test_a_record_outside_names_its_key_and_both_values(
    folders: tuple[Path, Path], values: dict[str, object], message: str
) -> None:
    change(folders[1] / "policies" / "int8" / "evaluation.json", **values)
    (line,) = outside(folders)
    assert re.match(rf"policies/int8/evaluation\.json: {message}", line), line


def test_where_it_ran_is_no_difference(folders: tuple[Path, Path]) -> None:
    change(folders[1] / "policies" / "int8" / "evaluation.json", device="cuda", threads=8, memory_mb=9)
    logits, _ = read_tensors(folders[1] / "reference" / "validation.safetensors")
    write_tensors(folders[1] / "reference" / "validation.safetensors", logits, {"device": "cuda", "threads": 8})
    result = run(folders)
    assert result.exit_code == 0
    assert "within     policies/int8/evaluation.json\n" in result.output
    assert "within     reference/validation.safetensors\n" in result.output


def test_a_policy_must_be_equal(folders: tuple[Path, Path]) -> None:
    path = folders[1] / "policies" / "int8" / "policy.json"
    grid = read_json(path)["precisions"]
    grid["keys"] = [[*grid["keys"][0][:-1], "int4"]]
    change(path, precisions=grid)
    (line,) = outside(folders)
    assert line == "policies/int8/policy.json: precisions.keys[0][1]: 'int8' and 'int4', expected the same"
    assert run(folders).exit_code == 1
    assert f"outside    {line}\n" in run(folders).output


@pytest.mark.parametrize(
    ("name", "tensor", "index", "by", "message"),
    [
        ("reference/validation.safetensors", "logits", (1, 2, 3), 5e-4, None),
        ("reference/validation.safetensors", "logits", (1, 2, 3), 5e-3, r"logits\[51\]: .* \(logit\)"),
        ("reference/validation.safetensors", "logits", (0, 0, 0), float("nan"), r"logits\[0\]: .* \(logit\)"),
        ("windows.safetensors", "validation", (0, 1), 1, "validation: whole numbers differ, expected the same"),
        ("adaptation/noise/seed-1337/model.safetensors", "blocks.0.K.weight", (0, 0), 1e-3, None),
        ("adaptation/noise/seed-1337/model.safetensors", "lm_head.bias", (0,), 1.0, r"weights: 0\.25 of their length"),
    ],
)
def test_tensors(folders: tuple[Path, Path], name: str, tensor: str, index: tuple, by: float, message: str) -> None:
    tensors, record = read_tensors(folders[1] / name)
    tensors[tensor][index] += by
    write_tensors(folders[1] / name, tensors, record)
    found = outside(folders)
    if message is None:
        assert found == []
    else:
        assert len(found) == 1 and re.match(rf"{name}: {message}", found[0]), found


def test_tensors_of_other_shapes_and_names(folders: tuple[Path, Path]) -> None:
    write_tensors(folders[1] / "windows.safetensors", {"validation": torch.zeros(3)})
    assert outside(folders) == ["windows.safetensors: validation: int64 [2, 16] and float32 [3], expected the same"]
    write_tensors(folders[1] / "windows.safetensors", {"other": torch.zeros(3)})
    assert outside(folders) == ["windows.safetensors: tensors ['validation'] and ['other']"]


def test_argmaxes_may_flip_in_few_rows(folders: tuple[Path, Path]) -> None:
    path = folders[1] / "policies" / "int8" / "positions.csv"
    text = path.read_text()
    path.write_text(text.replace(",1,2.7", ",0,2.7", 3))
    assert outside(folders) == []
    path.write_text(text.replace(",1,2.7", ",0,2.7", 300))
    (line,) = outside(folders)
    assert line.startswith("policies/int8/positions.csv: agrees, share of rows: ")


def test_pictures_are_left_to_their_numbers(folders: tuple[Path, Path]) -> None:
    write_text(folders[1] / "figures" / "x.svg", "<svg />")
    assert compare(*folders).within == {"figures/x.svg": (0.0, "")}
    for folder in folders:
        (folder / "figures" / "x.csv").unlink()
    assert outside(folders) == ["figures/x.svg: differs, and there is no x.csv beside it with its numbers"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (SENSITIVITY.as_posix(), "layer\n0\n", "columns \\[\\[.* and \\[\\['layer'\\]\\]"),
        ("figures/x.csv", "kl\n0.5\n1\n", "1 and 2 rows"),
        ("figures/x.csv", "kl\n0.5,2\n", "row 1 has not 1 cells"),
        ("figures/x.csv", "kl\n\n", "row 1 has not 1 cells"),
        ("figures/x.csv", "kl\nx\n", "kl, row 1: 0.5 and 'x', expected the same"),
        ("policies/int8/policy.json", "{", r"cannot be compared \(.*not a JSON file"),
        ("windows.safetensors", "x", r"cannot be compared \(.*not a safetensors file"),
    ],
)
def test_files_of_another_form(folders: tuple[Path, Path], name: str, content: str, message: str) -> None:
    (folders[1] / name).write_text(content)
    found = outside(folders)
    assert len(found) == 1 and re.match(rf"{name}: {message}", found[0]), found


def test_files_in_one_folder_only_and_of_unknown_kind(folders: tuple[Path, Path]) -> None:
    write_text(folders[0] / "notes.txt", "a")
    write_text(folders[1] / "notes.txt", "b")
    (folders[1] / SENSITIVITY.as_posix()).unlink()
    assert outside(folders) == [
        f"{SENSITIVITY}: only in {folders[0]}",
        "notes.txt: differs, and nothing but bytes can be compared in a file of this kind",
    ]


def test_bfloat16_has_wider_tolerances(folders: tuple[Path, Path]) -> None:
    scale(folders[1] / SENSITIVITY.as_posix(), "mean_kl", 1.4)
    assert outside(folders)
    change(folders[0] / "policies" / "int8" / "evaluation.json", compute_dtype="bfloat16")
    change(folders[1] / "policies" / "int8" / "evaluation.json", compute_dtype="bfloat16")
    assert outside(folders) == []
    assert BFLOAT16.keys() == FULL.keys() and FULL.keys() >= KINDS.keys()
    assert all(wide >= full for kind in FULL for wide, full in zip(BFLOAT16[kind], FULL[kind], strict=True))


ROWS = """sensitivity,block,mean_kl,agreement
measured-float32,0,0.5,1.0
measured-bfloat16,0,0.5,1.0
"""


def test_bfloat16_in_a_study_of_fp32_is_what_names_it(folders: tuple[Path, Path]) -> None:
    """By its path, in its row, in its record, or in the policy or evaluation that it lies beside."""
    by_path, steps = "scores/measured-bfloat16.csv", "policies/greedy-0.01/steps.csv"
    candidates = [{"sensitivity": name, "proxy": 0.5} for name in ("measured-bfloat16", "measured-float32")]
    for folder in folders:
        shutil.copy(folder / SENSITIVITY, folder / by_path)
        write_text(folder / "joint.csv", ROWS)
        write_json(folder / "policy-set.json", candidates)
    scale(folders[1] / by_path, "mean_kl", 1.4)
    scale(folders[1] / "joint.csv", "mean_kl", 1.4, row=2)
    write_json(folders[1] / "policy-set.json", [candidates[0] | {"proxy": 0.7}, candidates[1]])
    assert outside(folders) == []
    scale(folders[1] / steps, "added_kl", 1.4)
    scale(folders[1] / "joint.csv", "mean_kl", 1.4, row=1)
    write_json(folders[1] / "policy-set.json", [candidates[0], candidates[1] | {"proxy": 0.7}])
    assert [line.split(" and ")[0].rsplit(":", 1)[0] for line in outside(folders)] == [
        "policy-set.json: [1].proxy",
        "joint.csv: mean_kl, row 1",
        f"{steps}: added_kl, row 1",
    ]
    for folder in folders:
        change(folder / "policies" / "greedy-0.01" / "policy.json", sensitivity="measured-bfloat16")
    assert [line.split(":")[0] for line in outside(folders)] == ["policy-set.json", "joint.csv"]


def test_argmaxes_of_blocks_may_flip_in_few_positions(folders: tuple[Path, Path]) -> None:
    """One of 64 is more than the tolerance in its block, and less over all blocks."""
    for folder in folders:
        write_text(folder / "joint.csv", "block,agreement,agrees_alone\n" + "".join(f"{n},1.0,0\n" for n in range(32)))
    scale(folders[1] / "joint.csv", "agreement", 63 / 64, row=5)
    path = folders[1] / "joint.csv"
    path.write_text(path.read_text().replace("\n9,1.0,0\n", "\n9,1.0,1\n"))
    assert outside(folders) == []
    for row in range(6, 32):
        scale(path, "agreement", 63 / 64, row)
    (line,) = outside(folders)
    assert line.startswith("joint.csv: agreement, share of rows: ") and line.endswith("(argmax)")


def test_spreads_of_few_seeds_are_told_by_their_row_and_empty_cells_are_no_flips(folders: tuple[Path, Path]) -> None:
    """The seeds' own rows are the ones to judge."""
    path = folders[1] / "adaptation.csv"
    for folder in folders:
        write_text(folder / "adaptation.csv", "seed,mean_kl,below_floor\nmean,0.5,\nstandard deviation,0.01,\n")
    scale(path, "mean_kl", 1.5, row=2)
    assert outside(folders) == []
    scale(path, "mean_kl", 4, row=2)
    (line,) = outside(folders)
    assert line.startswith("adaptation.csv: mean_kl, row 2: ") and line.endswith("(spread)")
    scale(path, "mean_kl", 1 / 6, row=2)
    scale(path, "mean_kl", 1.5, row=1)
    (line,) = outside(folders)
    assert line.startswith("adaptation.csv: mean_kl, row 1: ") and line.endswith("(divergence)")


def test_only_adapted_models_get_the_tolerance_of_adapted_models(folders: tuple[Path, Path]) -> None:
    """Of the lowest KL of all positions, for instance."""
    plain, adapted = "policies/int8/evaluation.json", "adaptation/noise/seed-1/int8/evaluation.json"
    for folder, lowest in zip(folders, (1e-4, 2e-4), strict=True):
        record = read_json(folder / plain)
        write_json(folder / adapted, record | {"min_kl": lowest})
    assert outside(folders) == []
    for folder, lowest in zip(folders, (1e-4, 2e-4), strict=True):
        change(folder / plain, min_kl=lowest)
    (line,) = outside(folders)
    assert line.startswith(f"{plain}: min_kl: ") and line.endswith("(extreme)")


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_what_is_no_study_is_one_line(folders: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    result = run((folders[0], tmp_path / name))
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert f"{name}: " in result.output


def numbers() -> list[tuple[str, str]]:
    """Every floating point column and key of the data dictionaries."""
    schemas = {path.name.split(".")[0]: yaml.safe_load(path.read_text()) for path in sorted(SCHEMAS.iterdir())}
    return [
        (name, key)
        for name, schema in schemas.items()
        for key, value in schema.get("properties", {}).items()
        if "number" in (value.get("type") if isinstance(value.get("type"), list) else [value.get("type")])
    ]


@pytest.mark.parametrize(("schema", "key"), numbers())
def test_every_number_of_the_data_dictionaries_has_a_kind(schema: str, key: str) -> None:
    """A new column must say what it is: KINDS of kvstages/compare.py."""
    assert any(re.search(pattern, key) for pattern in KINDS.values()), f"{schema}: {key}"
    assert kind_of(key) in FULL
