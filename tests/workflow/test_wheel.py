"""``pip install .``: the wheel holds the whole package, and works from any folder without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as its wheel installs it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    shutil.copytree(
        REPOSITORY / "kvstages", source / "kvstages", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    environment = {**os.environ, "PIP_USER": "0"}
    command = [*pip, "--no-build-isolation", "--target", str(target), "."]
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
    return target


def test_the_wheel_holds_every_file_of_the_package(installed: Path) -> None:
    def files(folder: Path) -> set[str]:
        found = (Path(top, name) for top, _, names in os.walk(folder, followlinks=True) for name in names)
        return {path.relative_to(folder).as_posix() for path in found if "__pycache__" not in path.parts}

    assert files(installed / "kvstages") == files(REPOSITORY / "kvstages")


def test_command_and_library_work_from_any_folder(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    script = [sys.executable, str(installed / "bin" / "kvstages"), "--help"]
    library = (
        "import kvstages, kvstages.cache.quantizer; from kvstages.provenance.code import stage_digest;"
        "from kvstages.stages import STAGES; [stage_digest(stage) for stage in STAGES]; print(kvstages.__file__)"
    )
    for command, expected in ((script, "sweep"), ([sys.executable, "-c", library], str(installed))):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and expected in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())
