"""One source of pins: pyproject.toml, the lock, this environment, the image and the conda file agree."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import tomllib
from types import ModuleType

import pytest
import yaml
from conftest import REPOSITORY
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ENVS = REPOSITORY / "envs"
RESOLVED = """click==1.0 \\
    --hash=sha256:aa
    # via kvstages (pyproject.toml)
nvidia-cublas==13.1 ; sys_platform == 'linux' \\
    --hash=sha256:bb
    # via torch
setuptools==84.2.1 \\
    --hash=sha256:cc
torch==9.8.7 \\
    --hash=sha256:dd
"""


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    """The module envs/lock.py."""
    spec = importlib.util.spec_from_file_location("lock", ENVS / "lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def locked(lock: ModuleType, name: str) -> list[Requirement]:
    return [Requirement(pin) for pin in lock.pins((ENVS / "lock" / f"{name}.txt").read_text())]


def version(requirement: Requirement) -> str:
    """The one version that a pin allows."""
    (specifier,) = requirement.specifier
    assert specifier.operator == "=="
    return specifier.version


def test_lock_holds_every_direct_pin_at_its_version(lock):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    direct = [project["dependencies"], *project["optional-dependencies"].values()]
    pins = {canonicalize_name(pin.name): pin for name in ("build", "common", "cuda") for pin in locked(lock, name)}
    for requirement in (Requirement(text) for group in direct for text in group):
        assert version(pins[canonicalize_name(requirement.name)]) == version(requirement), requirement


@pytest.mark.parametrize("name", ["build", "common", "cpu", "cuda"])
def test_everything_locked_has_one_version_and_hashes(lock, name):
    entries = lock.entries((ENVS / "lock" / f"{name}.txt").read_text())
    assert entries
    for entry in entries:
        assert version(Requirement(lock.pins(entry)[0]))
        assert re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry), entry


def test_builds_of_torch_are_one_version_and_share_no_wheel(lock):
    (cpu,) = lock.entries((ENVS / "lock" / "cpu.txt").read_text())
    cuda = next(e for e in lock.entries((ENVS / "lock" / "cuda.txt").read_text()) if e.startswith("torch=="))
    torch = version(Requirement(lock.pins(cuda)[0]))
    assert cpu == lock.cpu_build(torch, (ENVS / "lock" / "torch-cpu.sha256").read_text())
    assert not set(re.findall(r"sha256:\w+", cpu)) & set(re.findall(r"sha256:\w+", cuda))


def test_this_environment_is_the_locked_one(lock):
    installed = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions()}
    build = "cpu" if installed["torch"].endswith("+cpu") else "cuda"
    pins = [pin for name in ("build", "common", build) for pin in locked(lock, name)]
    expected = {canonicalize_name(pin.name): version(pin) for pin in pins if not pin.marker or pin.marker.evaluate()}
    found = {name: installed.get(name) for name in expected}
    # A build of torch names itself behind a plus, and the index's own is locked without.
    differ = {name for name in expected if (found[name] or "").split("+")[0] != expected[name].split("+")[0]}
    assert not differ, f"run make env: {[(name, found[name], expected[name]) for name in sorted(differ)]}"


def test_image_definitions_share_base_installer_and_lock():
    containerfile, definition = ((ENVS / name).read_text() for name in ("Containerfile", "kvstages.def"))
    (base,) = re.findall(r"^ARG BASE=docker\.io/library/(python:\S+@sha256:[0-9a-f]{64})$", containerfile, re.MULTILINE)
    assert re.findall(r"^ +base=(\S+)$", definition, re.MULTILINE) == [base]
    for text, variant in ((containerfile, "${VARIANT}"), (definition, "{{ variant }}")):
        assert f"sh /opt/kvstages/install.sh /opt/kvstages/venv/bin/python {variant}" in text
        # All comes from the lock: no second way to a package.
        assert "pip install" not in text and "apt" not in text.replace("apptainer", "").replace("Apptainer", "")


def test_conda_environment_installs_the_lock():
    packages = yaml.safe_load((ENVS / "conda.yaml").read_text())["dependencies"]
    (pip,) = (entry["pip"] for entry in packages if isinstance(entry, dict))
    assert pip == [f"--requirement lock/{name}.txt" for name in ("build", "common", "cuda")]


def test_resolved_packages_go_to_their_files(lock):
    texts = lock.split(RESOLVED, "ee  torch-9.8.7+cpu-cp311-cp311-linux.whl\n")
    assert {name: lock.pins(text) for name, text in texts.items()} == {
        "common.txt": ["click==1.0"],
        "build.txt": ["setuptools==84.2.1"],
        "cuda.txt": ["nvidia-cublas==13.1 ; sys_platform == 'linux'", "torch==9.8.7"],
        "cpu.txt": ["torch==9.8.7+cpu"],
    }
    assert "    # via torch\n" in texts["cuda.txt"]
    assert texts["cpu.txt"].endswith("torch==9.8.7+cpu \\\n    --hash=sha256:ee\n")


def test_cpu_wheels_of_another_torch_stop_the_lock(lock):
    with pytest.raises(ValueError, match=r"torch-cpu\.sha256: expected CPU wheels of torch 9\.8\.7, found"):
        lock.split(RESOLVED, "ee  torch-9.8.6+cpu-cp311-cp311-linux.whl\n")
