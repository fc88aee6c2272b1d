"""The Makefile's targets that need no environment, and what stops an environment before it is made."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
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


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A working directory with what an environment is made from."""
    for name in ("envs/install.sh", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def python_of_version(path: Path, version: str) -> Path:
    """A Python that says it is of another version, and does nothing but answer."""
    pretend = f"import sys; sys.version_info = tuple(map(int, '{version}'.split('.'))); "
    path.write_text(
        f'#!/bin/sh\ntest "$1" = -c || {{ echo "installs: $*"; exit 9; }}\n'
        f'exec {shlex.quote(sys.executable)} -c {shlex.quote(pretend)}"$2"\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("version", "supported"),
    [("3.10.14", False), ("3.11.0", True), ("3.12.9", True), ("3.13.1", True), ("3.14.0", False), ("4.0.0", False)],
)
def test_other_pythons_are_refused_before_anything_is_installed(bare: Path, version: str, supported: bool) -> None:
    python = python_of_version(bare / "python", version)
    done = make(bare, "env", f"PYTHON={python}")
    assert done.returncode != 0
    assert ("installs: -m venv .venv" in done.stdout) is supported
    line = f"Python 3.11, 3.12 or 3.13 is needed, {python} is {version.rsplit('.', 1)[0]}: make PYTHON=python3.11"
    assert (line in done.stderr.splitlines()) is not supported
    assert not (bare / ".venv").exists()


def test_the_supported_pythons_are_those_of_the_package() -> None:
    import tomllib

    from packaging.specifiers import SpecifierSet

    supported = SpecifierSet(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["requires-python"])
    assert [minor for minor in range(30) if f"3.{minor}" in supported] == [11, 12, 13]


def test_packages_go_into_the_environment_whatever_the_configuration_of_pip_says(bare: Path) -> None:
    """pip refuses `user = true` in an environment; what this variable says counts more than the file."""
    (bare / "pip.conf").write_text("[install]\nuser = true\n")
    python = bare / "python"
    python.write_text('#!/bin/sh\necho "$PIP_USER $*" >> said\n')
    python.chmod(0o755)
    environment = os.environ | {"PIP_CONFIG_FILE": str(bare / "pip.conf"), "PIP_USER": "1"}
    subprocess.run(["sh", "envs/install.sh", python, "cpu"], cwd=bare, env=environment, check=True)
    said = (bare / "said").read_text().splitlines()
    assert len(said) == 4 and all(line.startswith("0 -m pip ") for line in said)


def test_git_changes_no_line_end(tmp_path: Path) -> None:
    """Checksums pin the bundled files, and a shell script with Windows line ends does not run."""

    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", "-c", "core.autocrlf=true", *identity, *words], cwd=tmp_path, check=True)

    shutil.copy(REPOSITORY / ".gitattributes", tmp_path)
    files = {"vocab.json": b'{\n"a": 1}\n', "install.sh": b"set -eu\n", "odd.txt": b"a\r\nb\n"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    for name in files:
        (tmp_path / name).unlink()
    git("checkout", "--quiet", ".")
    assert {name: (tmp_path / name).read_bytes() for name in files} == files
