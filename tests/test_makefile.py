"""The Makefile's targets that need no environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import REPOSITORY


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--file", str(REPOSITORY / "Makefile"), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.fixture
def working(tmp_path: Path) -> Path:
    """A working directory with files of two studies, and what ships with the repository."""
    for path in (
        "resources/bundled/sotu-12x8/model.safetensors",
        "resources/one/model.safetensors",
        "results/one/sensitivity.csv",
        ".ledger/results/one/sensitivity.csv.json",
        ".ledger/resources/one/model.safetensors.json",
        ".ledger/results/two/sensitivity.csv.json",
        "results/two/sensitivity.csv",
        "logs/sweep_layer/one/layer-00.log",
        "logs/convert_checkpoint/one.log",
        "logs/convert_checkpoint/two.log",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    return tmp_path


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_cleaning_a_study_leaves_the_others(working):
    assert make(working, "clean-study", "STUDY=one").returncode == 0
    assert files(working) == [
        ".ledger/results/two/sensitivity.csv.json",
        "logs/convert_checkpoint/two.log",
        "resources/bundled/sotu-12x8/model.safetensors",
        "results/two/sensitivity.csv",
    ]


@pytest.mark.parametrize(
    "name", ["", "bundled", "one/", "../one", "..", ".", "one two", "*", "bundled/sotu-12x8", "-f"]
)
def test_what_is_no_study_is_not_cleaned(working, name):
    before = files(working)
    done = make(working, "clean-study", f"STUDY={name}")
    assert done.returncode != 0 and "rm" not in done.stdout
    assert f"STUDY='{name}': expected the name of a study, such as STUDY=demo" in done.stderr.splitlines()
    assert files(working) == before
