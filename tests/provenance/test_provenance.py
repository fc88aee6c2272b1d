from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from kvstages.provenance import environment as provenance
from kvstages.provenance.environment import RUN, code_revision, environment, gpus, run_record, this_run

GIT = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository that tracks a package."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "first"]):
        subprocess.run([*GIT, *words], cwd=tmp_path, check=True)
    return package


def test_environment_names_python_packages_and_machine() -> None:
    found = environment()
    assert found["packages"]["torch"].startswith("2.")
    assert list(found["packages"]) == sorted(found["packages"]) and len(found["packages"]) > 20
    assert found["python"].count(".") == 2
    assert found["platform"] and found["processor"] and found["cores"] >= 1


def test_revision_and_whether_the_code_differs_from_it(repository: Path) -> None:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    assert code_revision(repository) == {"revision": head.strip(), "dirty": False}
    (repository / "new.py").write_text("")
    assert code_revision(repository) == {"revision": head.strip(), "dirty": True}


def test_a_package_that_the_repository_around_it_does_not_track_has_no_revision(repository: Path) -> None:
    installed = repository.parent / "environment" / "package"
    shutil.copytree(repository, installed)
    assert code_revision(installed) == {"revision": None, "dirty": None}


def test_without_git_nothing_is_known(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert code_revision(repository) == {"revision": None, "dirty": None}


@pytest.mark.parametrize("program", ["/a/bin/snakemake", "/a/lib/snakemake/__main__.py"])
def test_a_job_records_the_command_of_its_workflow(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN, run_record([program, "--config", "studies=[a b]"]))
    assert this_run(["kvstages", "manifest"])["command"] == "snakemake --config 'studies=[a b]'"
    monkeypatch.delenv(RUN)
    assert this_run(["/b/kvstages", "manifest"])["command"] == "kvstages manifest"


def test_gpus_are_named_with_their_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA X, 1.2'; echo 'NVIDIA Y, 1.2'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpus() == ["NVIDIA X, 1.2", "NVIDIA Y, 1.2"]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpus() == []


def test_a_program_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "SECONDS", 0.2)
    assert provenance.output_of("sleep", "20") is None
    assert json.loads(run_record(["x"]))["command"] == "x"
