"""Verification of a study's folder against its manifest: every file is read again.

What is compared: manifest.json with the sha256 that it gives itself, SHA256SUMS with the one in the manifest, and each
input and output with its own. What else the folder holds is listed: a budget that was tried by its path, results of
settings that were taken out. Where the manifest is damaged, the results are still compared with SHA256SUMS.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvstages.files.ledger import check_regular, sha256
from kvstages.provenance.manifest import CHECKSUMS, MANIFEST, read_manifest


def verify(folder: Path) -> tuple[list[str], list[str], int]:
    """Lines of files that differ or are missing, lines of files that are no part of the study; how many were compared.

    ``folder`` is results/STUDY; inputs are looked for beside it, as the paths in the manifest say. ValueError where it
    is no folder or has neither manifest nor checksums.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    manifest, checksums = folder / MANIFEST, folder / CHECKSUMS
    if not manifest.exists() and not checksums.exists():
        raise ValueError(f"{folder}: holds neither {MANIFEST} nor {CHECKSUMS}, so there is nothing to compare with")
    problems: list[str] = []
    expected: dict[Path, str] = {}
    try:
        record = read_manifest(manifest)
    except FileNotFoundError:
        problems.append(f"{manifest}: missing")
    except (ValueError, OSError) as error:
        problems.append(one_line(error))
    else:
        within = Path(record["folder"])
        root = folder.absolute()
        for _ in within.parts:
            root = root.parent
        for path, entry in {**record["inputs"], **record["outputs"]}.items():
            inside = Path(path).is_relative_to(within)
            expected[folder / Path(path).relative_to(within) if inside else near(root / path)] = entry["sha256"]
        expected[checksums] = record["checksums"]
    if not expected:
        expected.update(listed(checksums, problems))
    for path, digest in sorted(expected.items()):
        problems.extend(compare(path, digest))
    known = {path.absolute() for path in (*expected, manifest, checksums)}
    others = [f"{path}: not part of the study" for path in found(folder) if path.absolute() not in known]
    return problems, others, len(expected) + 1


def one_line(error: Exception) -> str:
    """An error about a file, in one line that opens with the file's name."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: cannot be read ({error.strerror})"
    return " ".join(str(error).split())


def near(path: Path) -> Path:
    """The path as seen from the working directory, where that is shorter."""
    relative = Path(os.path.relpath(path))
    return path if relative.parts[:1] == ("..",) else relative


def listed(checksums: Path, problems: list[str]) -> Iterator[tuple[Path, str]]:
    """Files and sha256 of SHA256SUMS; lines that are none go to ``problems``."""
    try:
        check_regular(checksums)
        lines = checksums.read_bytes().decode("utf-8", "surrogateescape").split("\n")
    except FileNotFoundError:
        problems.append(f"{checksums}: missing")
        return
    except (ValueError, OSError) as error:
        problems.append(one_line(error))
        return
    for number, line in enumerate(lines, start=1):
        match = re.fullmatch(r"([0-9a-f]{64})  ([^/].*)", line)
        if match and ".." not in Path(match[2]).parts and "\0" not in match[2]:
            yield checksums.parent / match[2], match[1]
        elif line or number < len(lines):
            problems.append(f"{checksums}: damaged, line {number} is no checksum and path")


def compare(path: Path, digest: str) -> Iterator[str]:
    """The problem with one file; None where there is none."""
    try:
        actual = sha256(path)
    except (FileNotFoundError, NotADirectoryError):
        yield f"{path}: missing"
    except (ValueError, OSError) as error:
        yield one_line(error)
    else:
        if actual != digest:
            yield f"{path}: differs (sha256 is {actual}, recorded is {digest})"


def found(folder: Path) -> Iterator[Path]:
    """Everything in a folder but the folders in it, sorted; links are not followed, and those to folders count."""

    def fail(error: OSError) -> None:
        raise error

    for top, folders, files in os.walk(folder, onerror=fail):
        folders.sort()
        links = [name for name in folders if Path(top, name).is_symlink()]
        yield from sorted(Path(top, name) for name in (*files, *links))
