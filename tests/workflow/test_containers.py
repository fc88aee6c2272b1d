"""Stages in the image: what Snakemake hands to Apptainer, and what the stand-in hands to podman.

The real thing, which needs an image, is `make proof-image`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import REPOSITORY, SHARED, Project, study_of

STAND_IN = REPOSITORY / "proofs" / "apptainer-by-podman"
# Writes down its arguments, and runs the command here: everything after the image.
APPTAINER = """#!/bin/sh
[ "$1" != --version ] || { echo "apptainer version 1.3.0"; exit 0; }
echo "$@" | head -n 1 >> "$LOG"
while [ "${1%.sif}" = "$1" ]; do shift; done
shift
exec "$@"
"""
# Writes down its arguments; says what podman would say of an image.
PODMAN = """#!/bin/sh
echo "$@" >> "$LOG"
case "$1" in load) echo "Loaded image: localhost/kvstages:1" ;; image) echo 0123abc ;; esac
"""


def program(folder: Path, name: str, text: str) -> dict[str, str]:
    """A program of that name, the first on the PATH; it may write to ``folder``/log."""
    (folder / "bin").mkdir()
    (folder / "bin" / name).write_text(text)
    (folder / "bin" / name).chmod(0o755)
    return {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "LOG": str(folder / "log")}


@pytest.mark.parametrize("arguments", [[], ["--software-deployment-method", "apptainer"]])
def test_every_job_enters_the_image_when_asked(tmp_path, artifacts, arguments):
    settings = program(tmp_path, "apptainer", APPTAINER)
    project = Project(tmp_path / "project")
    project.environment["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{project.environment['PATH']}"
    project.environment["LOG"] = settings["LOG"]
    project.configure(study_of({"source": "local", "location": str(artifacts[0])}, *artifacts), SHARED)
    (project.folder / "kvstages.sif").touch()
    project.run("results/small/windows.safetensors", *arguments)
    log = tmp_path / "log"
    # A command may hold several lines, so entries are counted, not lines.
    entered = log.read_text() if log.exists() else ""
    jobs = 5 if arguments else 0  # fetch checkpoint, shard and documents; convert; windows
    assert entered.count(f"exec --home {project.folder}") == entered.count("kvstages.sif bash -c") == jobs
    assert entered.count("-m kvstages") >= jobs


def stand_in(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["python3", str(STAND_IN), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)


def test_stand_in_builds_from_an_archive_and_runs_in_the_image(tmp_path):
    environment = program(tmp_path, "podman", PODMAN) | {"HOME": "/elsewhere", "PYTHONPATH": "/code"}
    environment["APPTAINERENV_RUN"] = "{}"
    assert stand_in(tmp_path, environment, "--version").stdout == "apptainer version 1.3.0\n"
    built = stand_in(tmp_path, environment, "build", "kvstages.sif", "docker-archive:image.tar")
    assert built.returncode == 0, built.stderr
    options = ["--home", "/work", "--bind", "/data:/data:ro", "--net", "--network=none", "--nv", "--pwd", "/work"]
    done = stand_in(tmp_path, environment, "--quiet", "exec", *options, "kvstages.sif", "bash", "-c", "true")
    assert done.returncode == 0, done.stderr
    load, inspect, run = (tmp_path / "log").read_text().splitlines()
    assert load == "load --quiet --input image.tar"
    assert inspect.endswith("localhost/kvstages:1")
    assert run.endswith(" 0123abc bash -c true")
    words = run.split()
    assert "--network none" in run and "--pull=never" in words
    for volume in (f"{tmp_path}:{tmp_path}", "/work:/work", "/tmp:/tmp", "/data:/data:ro"):
        assert volume in words
    assert "HOME=/work" in words and {"PYTHONPATH", "RUN"} <= set(words) and "PATH" not in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pull", "x"], "expected build or exec, found pull"),
        (["exec", "--fakeroot", "x", "kvstages.sif", "true"], "unknown option --fakeroot"),
        (["build", "kvstages.sif", "docker://python"], "expected docker-archive:FILE, found docker://python"),
    ],
)
def test_stand_in_says_what_it_cannot_do(tmp_path, arguments, message):
    done = stand_in(tmp_path, program(tmp_path, "podman", PODMAN), *arguments)
    assert done.returncode == 1 and done.stderr.strip() == f"apptainer (by podman): {message}"
    assert not (tmp_path / "log").exists()
