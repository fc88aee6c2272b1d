from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstages.cli import main
from kvstages.provenance.code import stage_digest
from kvstages.provenance.manifest import KEYS, checksum_lines, manifest, own_digest, read_manifest

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
SHARD = "resources/s/shard/held-out.bin"
OTHER = "results/s/a table.csv"
OUTPUTS = {
    "results/s/policies/b/evaluation.json": '{"device": "cpu", "threads": 1}',
    "results/s/policies/a/evaluation.json": '{"device": "cuda", "threads": 1}',
    "results/s/a table.csv": "",
    "resources/s/model.safetensors": "weights",
}
ARTIFACTS = {
    "source": "hub",
    "location": "owner/name",
    "revision": "a" * 40,
    "files": {"shard": {"path": "shards/held-out.bin", "sha256": hashlib.sha256(b"tokens").hexdigest()}},
}
SETTINGS = {"shared": {"threads": 1}, "study": {"block": 8, "artifacts": ARTIFACTS}}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    for name, content in {SHARD: "tokens", **OUTPUTS}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    return [f"rule_{number}={name}" for number, name in enumerate(OUTPUTS)]


def invoke(*arguments: str) -> object:
    outputs = ["--output", "results/s/manifest.json", "--checksums", "results/s/SHA256SUMS"]
    Path("settings.json").write_text(json.dumps(SETTINGS))
    words = ["manifest", "--study", "s", *outputs, "--settings", "settings.json", *arguments]
    return CliRunner().invoke(main, words)


def run(*arguments: str) -> dict:
    result = invoke("--artifact", f"shard={SHARD}", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(Path("results/s/manifest.json").read_text())


def test_checksums_satisfy_sha256sum_in_the_results_folder(files: list[str]) -> None:
    run(*files)
    lines = Path("results/s/SHA256SUMS").read_text().splitlines()
    names = ["a table.csv", "policies/a/evaluation.json", "policies/b/evaluation.json"]
    assert [line[66:] for line in lines] == names
    assert lines[0] == f"{EMPTY}  a table.csv"
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd="results/s", check=True, capture_output=True)


def test_checksums_do_not_depend_on_the_order_or_the_time(files: list[str]) -> None:
    run(*files)
    first = Path("results/s/SHA256SUMS").read_bytes()
    run(*reversed(files))
    assert Path("results/s/SHA256SUMS").read_bytes() == first


def test_manifest_tells_what_each_file_is_and_came_from(files: list[str]) -> None:
    record = run(*files)
    assert set(record) == set(KEYS)
    assert record["inputs"] == {
        SHARD: {
            "artifact": "shard", "source": "hub", "location": "owner/name", "revision": "a" * 40,
            "path": "shards/held-out.bin", "sha256": ARTIFACTS["files"]["shard"]["sha256"],
        }
    }  # fmt: skip
    assert record["outputs"]["results/s/a table.csv"] == {"sha256": EMPTY, "rule": "rule_2", "made": None}
    assert sorted(record["outputs"]) == sorted(OUTPUTS)
    assert record["configuration"] == SETTINGS
    assert record["environment"]["devices"] == ["cpu", "cuda"]
    assert record["environment"]["threads"] == [1]
    assert record["code"]["stages"]["sweep"] == stage_digest("sweep")
    assert record["folder"] == "results/s"


def test_manifest_knows_the_checksum_of_the_checksums_and_its_own(files: list[str]) -> None:
    record = run(*files)
    assert record["checksums"] == hashlib.sha256(Path("results/s/SHA256SUMS").read_bytes()).hexdigest()
    assert read_manifest(Path("results/s/manifest.json")) == record
    assert own_digest({**record, "study": "t"}) != record["sha256"] == own_digest(record)


def test_an_artifact_that_is_not_the_pinned_one_is_refused(files: list[str]) -> None:
    Path(SHARD).write_text("tokenz")
    result = invoke("--artifact", f"shard={SHARD}", *files)
    assert result.exit_code == 1
    assert (
        f"{SHARD}: sha256 is " in result.output
        and f"pinned is {ARTIFACTS['files']['shard']['sha256']}" in result.output
    )
    assert not Path("results/s/manifest.json").exists() and not Path("results/s/SHA256SUMS").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--artifact", f"weights={SHARD}"], "artifact 'weights': the settings say nothing of it"),
        (["--artifact", SHARD], f"--artifact '{SHARD}': expected NAME=PATH"),
        (["results/s/a table.csv"], "output 'results/s/a table.csv': expected RULE=PATH"),
        (["rule=results/s/gone"], "No such file or directory: 'results/s/gone'"),
        (["--settings", SHARD], f"{SHARD}: not a JSON file ("),
    ],
)
def test_wrong_arguments_are_one_line(files: list[str], arguments: list[str], message: str) -> None:
    result = invoke(*arguments, *files[:1])
    assert result.exit_code == 1
    assert message in result.output and result.output.count("\n") == 1
    assert not Path("results/s/manifest.json").exists()


def test_file_outside_the_folder_has_no_line() -> None:
    outputs = {"resources/x": {"sha256": EMPTY}, "results/s/y": {"sha256": EMPTY}}
    assert checksum_lines(outputs, "results/s") == f"{EMPTY}  y\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": {"../x": {"sha256": EMPTY}}}, "outputs: '../x': expected a path inside its folder"),
        ({"inputs": {"/etc/x": {"sha256": EMPTY}}}, "inputs: '/etc/x': expected a path inside its folder"),
        ({"outputs": {"x": EMPTY}}, "outputs: expected a sha256 for each file"),
        ({"outputs": []}, "outputs: expected a sha256 for each file"),
        ({"folder": ".."}, "folder '..': expected a path inside its folder"),
        ({"folder": 3}, "folder and checksums: expected texts"),
        ({"more": 3}, "its keys are not those of a manifest"),
    ],
)
def test_a_manifest_with_a_right_checksum_and_wrong_contents(tmp_path: Path, change: dict, message: str) -> None:
    run = {"command": "c", "revision": None, "dirty": None}
    record, _ = manifest("s", {}, {}, (), {}, Path("results/s"), run, "2026-01-01")
    record = {**record, **change}
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**record, "sha256": own_digest(record)}, indent=2, sort_keys=True) + "\n")
    with pytest.raises(ValueError) as caught:
        read_manifest(path)
    assert message in str(caught.value)


@pytest.fixture
def recorded(files: list[str]) -> list[str]:
    """The same files, each with a record that says what made it; a plan of the workflow that says the same."""
    from kvstages.files import ledger
    from kvstages.files.atomic import write_bytes

    Path(ledger.FOLDER).mkdir()
    plan = {}
    for name in (SHARD, *OUTPUTS):
        stage = {"stage": "gather", "arguments": {"--output": name, "--source": "x"}, "code": "0" * 16}
        ledger.begin({**stage, "packages": {"python": "3.11.7"}, "planned": True})
        ledger.state(product="float32")
        write_bytes(Path(name), Path(name).read_bytes())
        plan[name] = stage
    ledger.write_plan(plan, {})
    return files


def test_manifest_tells_of_each_file_what_made_it(recorded: list[str]) -> None:
    record = run(*recorded)
    made = {
        "stage": "gather", "code": "0" * 16, "packages": {"python": "3.11.7"}, "planned": True,
        "facts": {"product": "float32"},
    }  # fmt: skip
    assert record["outputs"]["results/s/a table.csv"]["made"] == made
    assert record["environment"]["products"] == ["float32"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"arguments": {"--output": OTHER, "--source": "y"}},
            'was made with --source "x", where the workflow says "y"',
        ),
        ({"arguments": {"--output": OTHER}}, 'was made with --source "x", where the workflow says null'),
        ({"code": "1" * 16}, "was made by other code of the stage gather than there is now"),
        ({"stage": "sweep"}, "was made by the stage gather, where the workflow runs sweep"),
    ],
)
def test_what_is_not_made_as_the_workflow_says_now_is_not_signed(
    recorded: list[str], change: dict, message: str
) -> None:
    from kvstages.files import ledger

    plan = ledger.read_plan()
    ledger.write_plan({**plan, OTHER: {**plan[OTHER], **change}}, {})
    result = invoke("--artifact", f"shard={SHARD}", *recorded)
    assert result.output == f"Error: {OTHER}: {message}: delete it and run again\n"
    assert not Path("results/s/manifest.json").exists() and not Path("results/s/SHA256SUMS").exists()
