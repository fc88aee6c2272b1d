"""`kvstages compare`: the same bytes, within tolerance, or outside and why."""

from __future__ import annotations

import functools
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from conftest import REPOSITORY
from published_study import write_study

import kvstages
from kvstages.cache.precision_grid import PrecisionGrid, Unit
from kvstages.cli import main
from kvstages.files.atomic import write_json, write_tensors, write_text
from kvstages.files.read import read_json, read_tensors
from kvstages.provenance.choices import differing, scores_of
from kvstages.provenance.reproduction import compare
from kvstages.provenance.tolerances import DERIVED, KINDS, PLACE, REDUCTION, SCHEMAS, kinds, named, read_schema

SENSITIVITY = Path("scores", "measured-float32.csv")
REFERENCE, ADAPTED = "reference/validation.safetensors", "adaptation/noise/seed-1337/model.safetensors"
EVALUATION, POSITIONS = "policies/int8/evaluation.json", "policies/int8/positions.csv"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study in FP32."""
    one = tmp_path_factory.mktemp("study")
    write_study(one, layers=1, heads=2, budgets=("0.01",))
    for path in [*one.rglob("*.json"), *one.rglob("*.csv")]:
        path.write_text(path.read_text().replace("bfloat16", "float32"))
    (one / "scores" / "measured-bfloat16.csv").rename(one / SENSITIVITY)
    for folder in ("comparison", "frontier", "gradients"):
        shutil.rmtree(one / folder)
    logits = torch.linspace(-20, 20, 64).reshape(2, 4, 8)
    write_tensors(one / "reference" / "validation.safetensors", {"logits": logits}, {"device": "cpu", "threads": 1})
    tokens = torch.arange(32).reshape(2, 16)
    write_tensors(one / "windows.safetensors", {"validation": tokens})
    weights = {"blocks.0.K.weight": torch.ones(4, 4), "lm_head.bias": torch.zeros(4)}
    write_tensors(one / "adaptation" / "noise" / "seed-1337" / "model.safetensors", weights)
    write_text(one / "tables" / "adaptation.csv", "arm,removed\nnoise,0.3\n")
    write_text(one / "tables" / "equal-bytes.csv", "recipe,kl_reduction\nexact,0.3\n")
    write_text(one / "figures" / "x.svg", "<svg/>")
    write_text(one / "figures" / "x.csv", "kl\n0.5\n")
    return one


@pytest.fixture
def folders(written: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two studies of the same files, in FP32."""
    return shutil.copytree(written, tmp_path / "a"), shutil.copytree(written, tmp_path / "b")


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


# A number of each kind: its file, its column, key or tensor.
NUMBERS = {
    "logit": (REFERENCE, "logits"),
    "mean": (SENSITIVITY.as_posix(), "mean_kl"),
    "few": (EVALUATION, "p99_kl"),
    "column": (POSITIONS, "kl"),
    "agreement": (EVALUATION, "agreement"),
    "count": (EVALUATION, "sequences_with_disagreement"),
    "loss": ("adaptation/published/seed-1337/curve.csv", "cross_entropy"),
    "trained": ("adaptation/published/seed-1337/evaluation.csv", "mean_kl"),
    "probability": (EVALUATION, "mean_delta_p"),
    "statistic": (EVALUATION, "perplexity_ratio"),
    "reduction": ("tables/equal-bytes.csv", "kl_reduction"),
    "weights": (ADAPTED, "blocks.0.K.weight"),
}


def differ(folder: Path, kind: str, share: float, bfloat16: bool) -> str:
    """Change a number of a kind by this share of its tolerance; its file."""
    name, key = NUMBERS[kind]
    relative, absolute = KINDS[kind][bfloat16]
    path = folder / name

    def moved(number: float) -> float:
        if kind == REDUCTION:
            return 1 - (1 - number) / (1 - relative * share)
        return number + share * (absolute + relative * abs(number)) / (1 - relative * share)

    if path.suffix == ".json":
        number = moved(read_json(path)[key])
        change(path, **{key: round(number) if kind == "count" else number})
    elif path.suffix == ".csv":
        lines = [line.split(",") for line in path.read_text().splitlines()]
        index = lines[0].index(key)
        for line in lines[1:] if kind == "column" else lines[1:2]:
            line[index] = repr(moved(float(line[index])))
        path.write_text("\n".join(map(",".join, lines)) + "\n")
    else:
        tensors, record = read_tensors(path)
        if kind == "weights":
            tensors = {name: tensor * (1 + share * relative) for name, tensor in tensors.items()}
        else:
            tensors[key][1, 2, 3] = moved(float(tensors[key][1, 2, 3]))
        write_tensors(path, tensors, record)
    return name


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_of_each_kind_inside_and_outside(folders: tuple[Path, Path], kind: str, bfloat16: bool) -> None:
    if bfloat16:
        for folder in folders:
            change(folder / EVALUATION, compute_dtype="bfloat16")
    one, other = folders
    name = differ(other, kind, 0.8, bfloat16)
    comparison = compare(*folders)
    assert not comparison.outside and 0.5 < comparison.within[name][0] <= 1
    shutil.copy(one / name, other / name)
    differ(other, kind, 1.6 if kind != "count" else 2.5, bfloat16)
    (line,) = outside(folders)
    assert line.startswith(f"{name}: ") and line.endswith(f"({kind})")


def test_of_a_ratio_to_next_to_nothing_only_whether_it_is_there(folders: tuple[Path, Path]) -> None:
    path = folders[1] / "tables" / "adaptation.csv"
    write_text(path, "arm,removed\nnoise,-7.5\n")
    assert not outside(folders)
    write_text(path, "arm,removed\nnoise,\n")
    (line,) = outside(folders)
    assert line.startswith("tables/adaptation.csv: removed, row 1: 0.3 and ")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mean_kl": 1.0}, r"mean_kl: .* and 1\.0 differ by more than 0\.05 \(mean\)"),
        ({"total_bytes": 1}, r"total_bytes: \d+ and 1, expected the same"),
        ({"compression": 1.5}, r"compression: .* and 1\.5 differ by more than .* \(exact\)"),
        ({"first_disagreement_mean": None}, r"first_disagreement_mean: .* and None, expected the same"),
        ({"agreement": 0.5}, r"agreement: .* \(agreement\)"),
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


def test_bfloat16_is_wider_in_every_kind() -> None:
    assert all(wide >= full for pair in KINDS.values() for wide, full in zip(pair[1], pair[0], strict=True))


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
        write_text(folder / "frontier/joint.csv", ROWS)
        write_json(folder / "frontier/policy-set.json", candidates)
    scale(folders[1] / by_path, "mean_kl", 1.4)
    scale(folders[1] / "frontier/joint.csv", "mean_kl", 1.4, row=2)
    write_json(folders[1] / "frontier/policy-set.json", [candidates[0] | {"proxy": 0.7}, candidates[1]])
    assert outside(folders) == []
    scale(folders[1] / steps, "added_kl", 1.4)
    scale(folders[1] / "frontier/joint.csv", "mean_kl", 1.4, row=1)
    write_json(folders[1] / "frontier/policy-set.json", [candidates[0], candidates[1] | {"proxy": 0.7}])
    assert [line.split(" and ")[0].rsplit(":", 1)[0] for line in outside(folders)] == [
        "frontier/joint.csv: mean_kl, row 1",
        "frontier/policy-set.json: [1].proxy",
        f"{steps}: added_kl, row 1",
    ]
    for folder in folders:
        change(folder / "policies" / "greedy-0.01" / "policy.json", sensitivity="measured-bfloat16")
    assert [line.split(":")[0] for line in outside(folders)] == ["frontier/joint.csv", "frontier/policy-set.json"]


def test_argmaxes_of_blocks_may_flip_in_few_positions(folders: tuple[Path, Path]) -> None:
    """One of 64 is more than the tolerance in its block, and less over all blocks."""
    for folder in folders:
        write_text(
            folder / "frontier/joint.csv", "block,agreement,agrees_alone\n" + "".join(f"{n},1.0,0\n" for n in range(32))
        )
    scale(folders[1] / "frontier/joint.csv", "agreement", 63 / 64, row=5)
    path = folders[1] / "frontier/joint.csv"
    path.write_text(path.read_text().replace("\n9,1.0,0\n", "\n9,1.0,1\n"))
    assert outside(folders) == []
    for row in range(6, 32):
        scale(path, "agreement", 63 / 64, row)
    (line,) = outside(folders)
    assert line.startswith("frontier/joint.csv: agreement, share of rows: ") and line.endswith("(agreement)")


def test_empty_cells_are_no_flips(folders: tuple[Path, Path]) -> None:
    for folder, mark in zip(folders, "01", strict=True):
        rows = "".join(f"{mark if row == 5 else ''},1\n" for row in range(200))
        write_text(folder / "figures" / "sensitivity.csv", "below_floor,layer\n" + rows)
    assert outside(folders) == []


def policies_of(folders: tuple[Path, Path], scores: str, budget_in: str, proxy: float) -> None:
    """Two policies of one budget: in the first run head 0 has INT4, in the second head 1; scores of both are given."""
    rows = [line.split(",") for line in scores.split()]
    text = "layer,head,part,precision,mean_kl\n" + "".join(f"0,{row[0]},kv,{row[1]},{row[2]}\n" for row in rows)
    for folder, keys in zip(folders, (["int4", "int8"], ["int8", "int4"]), strict=True):
        write_text(folder / SENSITIVITY, text)
        for name in ("policy", "evaluation"):
            change(folder / "policies" / "greedy-0.01" / f"{name}.json", proxy=proxy)
        change(
            folder / "policies" / "greedy-0.01" / "policy.json",
            precisions={"keys": [keys], "values": [keys]},
            budget_in=budget_in,
            sensitivity="measured-float32",
        )
    change(folders[1] / "policies" / "greedy-0.01" / "evaluation.json", mean_kl=9.0)
    for folder, kl in zip(folders, (1, 2), strict=True):
        write_text(folder / "tables" / "results.csv", f"policy,mean_kl\nint8,5.0\ngreedy-0.01,{kl}\n")


NEAR, FAR = "0,int8,1e-5 0,int4,1e-3 1,int8,1e-5 1,int4,1.02e-3", "0,int8,1e-5 0,int4,1e-3 1,int8,1e-5 1,int4,1.2e-3"


@pytest.mark.parametrize(
    ("scores", "budget_in", "proxy", "same"),
    [(NEAR, "bytes", 1e-3, True), (FAR, "bytes", 1e-3, False), (FAR, "nats", 1e-2, True), (FAR, "nats", 1e-3, False)],
)
def test_a_policy_that_differs_where_scores_do_not_tell_is_named_and_not_compared(
    folders: tuple[Path, Path], scores: str, budget_in: str, proxy: float, same: bool
) -> None:
    """Of moves that compete for bytes, or of a sum that meets a budget in nats."""
    policies_of(folders, scores, budget_in, proxy)
    result = run(folders)
    line = "policies/greedy-0.01/policy.json: greedy-0.01: layer 0 head 0 (int4/int8), layer 0 head 1 (int8/int4)"
    assert (f"choice     {line}\n" in result.output) is same
    assert result.exit_code == (0 if same else 1), result.output
    assert any("precisions" in line for line in outside(folders)) is not same
    path = folders[1] / "tables" / "results.csv"
    path.write_text(path.read_text().replace("5.0", "70.0"))
    assert any(line.startswith("tables/results.csv: mean_kl, row 1") for line in outside(folders))


@pytest.mark.parametrize(("key", "value"), [("unit", "keys-values"), ("budget", 0.02), ("allocator", "at-random")])
def test_only_the_moves_of_a_policy_may_differ(folders: tuple[Path, Path], key: str, value: object) -> None:
    policies_of(folders, NEAR, "bytes", 1e-3)
    change(folders[1] / "policies" / "greedy-0.01" / "policy.json", **{key: value})
    assert run(folders).exit_code == 1 and "choice" not in run(folders).output


def test_layers_that_differ_have_the_scores_of_their_heads(tmp_path: Path) -> None:
    grids = [PrecisionGrid.of_heads([[first] * 2, ["int8"] * 2]).as_record() for first in ("int4", "bf16")]
    pairs = dict(differing(*({"unit": "layer", "precisions": grid} for grid in grids)))
    assert pairs == {Unit(0, 0, "layer"): ("int4", "bf16"), Unit(1, 0, "layer"): ("int8", "int8")}
    text = "layer,head,part,precision,mean_kl\n0,0,kv,int4,0.5\n0,1,kv,int4,0.25\n"
    write_text(tmp_path / "s.csv", text)
    assert scores_of(tmp_path / "s.csv")[Unit(0, 0, "layer"), "int4"] == 0.75
    write_text(tmp_path / "s.csv", text + "0,0,layer,int4,2.0\n")
    assert scores_of(tmp_path / "s.csv")[Unit(0, 0, "layer"), "int4"] == 2.0


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_what_is_no_study_is_one_line(folders: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    result = run((folders[0], tmp_path / name))
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert f"{name}: " in result.output


@functools.cache
def dictionaries() -> dict[str, dict]:
    """The data dictionaries of results."""
    schemas = {path.name.split(".")[0]: read_schema(path) for path in sorted(SCHEMAS.iterdir())}
    return {name: schema for name, schema in schemas.items() if name not in ("config", "study", "manifest")}


def numbers(schema: object) -> Iterator[tuple[str, dict]]:
    """Every floating point column and key of a data dictionary, at whatever depth."""
    if isinstance(schema, dict):
        for name, inner in schema.get("properties", {}).items():
            types = inner.get("type")
            if "number" in (types if isinstance(types, list) else [types]):
                yield name, inner
            yield from numbers(inner)
        for key in ("items", "additionalProperties"):
            yield from numbers(schema.get(key))


@pytest.mark.parametrize("name", dictionaries())
def test_every_number_of_the_data_dictionaries_has_a_kind(name: str) -> None:
    schema = dictionaries()[name]
    for key, number in numbers(schema):
        assert number.get("kind") in {*KINDS, DERIVED, "exact"}, (
            f"{name}: {key}: a number names its kind (KINDS, or exact)"
        )
    seen: dict[str, str] = {}
    for key, kind in named(schema):
        assert kind in {*KINDS, "exact", PLACE, DERIVED} and seen.setdefault(key, kind) == kind, (
            f"{name}: {key}: {kind}"
        )


FILES = (
    "scores/measured-float32.csv sweep/float32/layer-03.csv policies/exact-100B/positions.csv frontier/joint.csv "
    "adaptation/noise/seed-1/int8/evaluation.json comparison/0.01/policy-set.json figures/floor.csv tables/results.csv"
)


@pytest.mark.parametrize("name", [*FILES.split(), REFERENCE])
def test_a_file_finds_its_kinds_by_its_path(name: str) -> None:
    assert kinds(name)


def test_the_data_dictionaries_are_in_the_package() -> None:
    """An installed kvstages compares as a clone does: package data, by a link to where the workflow keeps them."""
    package = Path(kvstages.__file__).parent
    data = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["kvstages"]
    assert package / "schemas" == SCHEMAS and "schemas/*" in data
    assert SCHEMAS.resolve() == REPOSITORY / "workflow" / "schemas"
