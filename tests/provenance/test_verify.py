"""`kvstages verify`: a single flipped byte anywhere is found, and named."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from conftest import AS_ANY_USER, REPOSITORY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from signed_study import FOLDER, MODEL, SHARD, flip, make_study

from kvstages.cli import main
from kvstages.provenance.verify import verify


@pytest.fixture(scope="module")
def made_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    make_study(folder)
    return folder


@pytest.fixture
def study(made_study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh copy of the study, as the working directory."""
    shutil.copytree(made_study, tmp_path / "study")
    monkeypatch.chdir(tmp_path / "study")
    return FOLDER


def run(folder: Path | str = FOLDER, *options: str) -> Result:
    return CliRunner().invoke(main, ["verify", str(folder), *options])


def files() -> list[Path]:
    """Every file of the study, its inputs too."""
    return sorted(path for path in Path().rglob("*") if path.is_file())


def test_an_untouched_study_is_what_was_recorded(study: Path) -> None:
    result = run()
    assert result.exit_code == 0
    assert result.output == f"results/small: {len(files())} files are what was recorded\n"


def test_a_flipped_byte_of_any_file_is_found_and_named(study: Path) -> None:
    """At both ends and at random places of every file, manifest, checksums and inputs among them."""
    chance = random.Random(5)
    for path in files():
        size = path.stat().st_size
        for position in {0, size - 1, *(chance.randrange(size) for _ in range(3))}:
            bit = chance.randrange(8)
            flip(path, position, bit)
            result = run()
            lines = result.output.splitlines()
            assert result.exit_code == 1 and len(lines) == 1, (path, position, bit, lines)
            assert lines[0].startswith(f"{path}: "), lines
            flip(path, position, bit)
    assert run().exit_code == 0


@given(data=st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_byte_of_manifest_or_checksums_is_found(study: Path, data: st.DataObject) -> None:
    path = study / data.draw(st.sampled_from(["manifest.json", "SHA256SUMS"]))
    position = data.draw(st.integers(0, path.stat().st_size - 1))
    bit = data.draw(st.integers(0, 7))
    flip(path, position, bit)
    try:
        problems, _, _ = verify(study)
        assert len(problems) == 1 and problems[0].startswith(f"{path}: ") and "\n" not in problems[0]
    finally:
        flip(path, position, bit)


def test_missing_other_and_changed_files_are_each_a_line(study: Path) -> None:
    (study / "policies" / "int8" / "steps.csv").unlink()
    (study / "policies" / "extra.json").write_text("{}")
    (study / ".hidden").write_text("")
    (study / "linked").symlink_to("policies")
    flip(SHARD, 3, 0)
    MODEL.write_bytes(b"weight")
    result = run()
    assert result.exit_code == 1
    expected = [
        "resources/small/model.safetensors: differs (sha256 is ",
        "resources/small/shard/held-out.bin: differs (sha256 is ",
        "results/small/policies/int8/steps.csv: missing",
        "results/small/.hidden: not part of the study",
        "results/small/linked: not part of the study",
        "results/small/policies/extra.json: not part of the study",
    ]
    lines = result.output.splitlines()
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True)), lines


@pytest.mark.parametrize("name", ["manifest.json", "SHA256SUMS"])
def test_a_missing_record_is_named_and_the_rest_still_compared(study: Path, name: str) -> None:
    (study / name).unlink()
    flip(study / "policies" / "int8" / "steps.csv", 9, 1)
    lines = run().output.splitlines()
    assert f"results/small/{name}: missing" in lines
    assert [line.split(":")[0] for line in lines if "differs" in line] == ["results/small/policies/int8/steps.csv"]
    assert len(lines) == 2


def test_a_damaged_manifest_leaves_the_checksums(study: Path) -> None:
    (study / "manifest.json").write_bytes(b"\xff")
    (study / "SHA256SUMS").write_bytes((study / "SHA256SUMS").read_bytes() + b"nothing\n" + b"0" * 64 + b"  ../../x\n")
    flip(study / "policies" / "int8" / "steps.csv", 9, 1)
    lines = run().output.splitlines()
    count = len((study / "SHA256SUMS").read_bytes().splitlines())
    assert [line.split(" (")[0] for line in lines] == [
        "results/small/manifest.json: damaged, not a JSON file",
        f"results/small/SHA256SUMS: damaged, line {count - 1} is no checksum and path",
        f"results/small/SHA256SUMS: damaged, line {count} is no checksum and path",
        "results/small/policies/int8/steps.csv: differs",
    ]


def test_a_study_is_verified_from_any_working_directory(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path.cwd()
    monkeypatch.chdir("/")
    assert verify(here / study)[0] == []
    monkeypatch.chdir(here / study)
    assert verify(Path())[0] == []


def test_a_study_elsewhere_lacks_its_inputs_and_says_so(study: Path, tmp_path: Path) -> None:
    shutil.copytree(study, tmp_path / "moved" / "away" / "small")
    problems, _, _ = verify(tmp_path / "moved" / "away" / "small")
    assert [problem.split(": ")[1] for problem in problems] == ["missing", "missing"]
    assert all("resources" in problem for problem in problems)


@pytest.mark.parametrize(
    ("folder", "message"),
    [("nowhere", "nowhere: no such folder"), ("resources", "resources: holds neither manifest.json nor SHA256SUMS")],
)
def test_what_is_no_study_is_one_line(study: Path, folder: str, message: str) -> None:
    result = run(folder)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {message}") and result.output.count("\n") == 1


def test_a_file_that_cannot_be_read_is_named(study: Path) -> None:
    (study / "policies" / "int8" / "steps.csv").chmod(0)
    command = [*AS_ANY_USER, sys.executable, "-m", "kvstages", "verify", "results/small"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == "results/small/policies/int8/steps.csv: cannot be read (Permission denied)\n"


def test_what_is_no_part_of_the_study_is_listed_and_only_strictly_refused(study: Path) -> None:
    """A budget that was tried by its path, and the results of an allocator that was taken out."""
    shutil.copytree(study / "policies" / "int8", study / "policies" / "exact-0.5")
    names = sorted(path.name for path in (study / "policies" / "int8").iterdir())
    lines = [f"results/small/policies/exact-0.5/{name}: not part of the study" for name in names]
    result = run()
    assert result.exit_code == 0
    assert result.output.splitlines()[:-1] == lines and "files are what was recorded" in result.output
    result = run(FOLDER, "--strict")
    assert result.exit_code == 1 and result.output.splitlines() == lines


@pytest.mark.parametrize("name", ["policies/int8/steps.csv", "manifest.json", "SHA256SUMS", "windows.safetensors"])
@pytest.mark.parametrize(
    ("put", "kind"),
    [
        (os.mkfifo, "is a pipe, expected a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, expected a file"),
        (lambda path: path.mkdir(), "is a folder, expected a file"),
        (lambda path: path.symlink_to("nowhere"), "missing"),
    ],
    ids=["pipe", "device", "folder", "dangling link"],
)
def test_what_is_no_file_does_not_hold_verify_up(study: Path, name: str, put, kind: str) -> None:
    (study / name).unlink()
    put(study / name)
    result = run()
    assert result.exit_code == 1
    assert result.output.splitlines()[0] == f"results/small/{name}: {kind}"
