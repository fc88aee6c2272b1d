from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstages.cli import main
from kvstages.manifest import checksum_lines, checksums, environment, manifest

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    contents = {
        "resources/s/model.safetensors": "weights",
        "results/s/policies/b/evaluation.json": '{"device": "cpu", "threads": 1}',
        "results/s/policies/a/evaluation.json": '{"device": "cuda", "threads": 1}',
        "results/s/a table.csv": "",
    }
    for name, content in contents.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    return list(contents)


def run(*arguments: str) -> None:
    outputs = ["--output", "results/s/manifest.json", "--checksums", "results/s/SHA256SUMS"]
    result = CliRunner().invoke(main, ["manifest", "--study", "s", *outputs, *arguments])
    assert result.exit_code == 0, result.output


def test_checksums_satisfy_sha256sum_in_the_results_folder(files: list[str]) -> None:
    run(*files)
    lines = Path("results/s/SHA256SUMS").read_text().splitlines()
    names = ["a table.csv", "policies/a/evaluation.json", "policies/b/evaluation.json"]
    assert [line[66:] for line in lines] == names
    assert lines[0] == f"{EMPTY}  a table.csv"
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd="results/s", check=True, capture_output=True)
    Path("results/s/a table.csv").write_text("changed")
    assert subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd="results/s", capture_output=True).returncode == 1


def test_checksums_do_not_depend_on_the_order_or_the_time(files: list[str]) -> None:
    run(*files)
    first = Path("results/s/SHA256SUMS").read_bytes()
    run(*reversed(files))
    assert Path("results/s/SHA256SUMS").read_bytes() == first


def test_manifest_tells_inputs_from_outputs_and_says_how(files: list[str]) -> None:
    run("--settings", '{"study": {"block": 8}}', *files)
    record = json.loads(Path("results/s/manifest.json").read_text())
    assert list(record["inputs"]) == ["resources/s/model.safetensors"]
    assert record["outputs"]["results/s/a table.csv"] == EMPTY
    assert len(record["outputs"]) == 3
    assert record["configuration"] == {"study": {"block": 8}}
    assert record["environment"]["devices"] == ["cpu", "cuda"]
    assert record["environment"]["threads"] == [1]
    assert len(record["code"]["sweep"]) == 16


def test_environment_names_python_packages_and_machine() -> None:
    found = environment()
    assert found["packages"]["torch"].startswith("2.")
    assert found["python"].count(".") == 2
    assert found["platform"] and found["processor"]


def test_file_named_twice_is_refused(files: list[str]) -> None:
    with pytest.raises(ValueError, match=r"results/s/a table\.csv: named twice"):
        checksums([Path(files[3]), Path(files[3])])


def test_missing_file_is_named(files: list[str]) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        manifest("s", {}, [Path("results/s/gone")], Path("results/s"), "2026-01-01")


def test_file_outside_the_folder_has_no_line() -> None:
    with pytest.raises(ValueError, match="is not in the subpath"):
        checksum_lines({"elsewhere/x": EMPTY}, Path("results/s"))


def test_settings_that_are_not_json_are_one_line(files: list[str]) -> None:
    outputs = ["--output", "results/s/m.json", "--checksums", "results/s/S"]
    result = CliRunner().invoke(main, ["manifest", "--study", "s", "--settings", "{", *outputs, *files])
    assert result.exit_code == 1
    assert result.output.startswith("Error: --settings: not JSON (") and result.output.count("\n") == 1
    assert not Path("results/s/m.json").exists()
