"""What each file of a workflow was when it was made, and of what it was made: how a damaged file is noticed.

Snakemake compares times and, of small inputs, checksums; it never asks whether an output is still what its job wrote.
A flipped byte in a table would be read by whatever runs next, and the results that follow would count as finished.
So in a working directory that holds the folder ``.ledger`` (the Snakefile makes it) every file that a stage writes
gets a record there: its sha256, and that of each recorded file that the stage had read before. Every reader of this
package compares what it reads with that record, and the stage ``manifest`` compares all of a study's files with
theirs, and what each was made of with what those files are now.

What this finds: a file of the study that changed after it was made, by whatever means and with whatever time, at the
latest when the study's checksums are written; and a result made of another version of a file than the one there is.
What it does not: a change of both a file and its record, files from outside the working directory (the pinned
artifacts have their own sha256), and damage after the last run, which is what ``kvstages verify`` is for.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

FOLDER = ".ledger"
# What this process has read so far, of recorded files: path from the working directory to sha256.
_read: dict[str, str] = {}


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file, read in pieces."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def forget() -> None:
    """Forget what was read: a new stage begins in the same process."""
    _read.clear()


def place(path: Path) -> tuple[str, Path] | None:
    """A file's path from the working directory, and its record's; None outside, and where nothing is recorded."""
    if not os.path.isdir(FOLDER):
        return None
    relative = os.path.relpath(path)
    if relative.split(os.sep)[0] in (os.pardir, FOLDER):
        return None
    return Path(relative).as_posix(), Path(FOLDER, f"{relative}.json")


def recorded(path: Path) -> dict[str, object] | None:
    """The record of a file, {sha256, inputs: {path: sha256}}, None where it has none; ValueError on a damaged one."""
    found = place(path)
    try:
        record = None if found is None else json.loads(found[1].read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: its record {found[1]} is damaged: delete both and run again") from error
    if record is None:
        return None
    if not isinstance(record, dict) or set(record) != {"sha256", "inputs"} or not isinstance(record["inputs"], dict):
        raise ValueError(f"{path}: its record {found[1]} is damaged: delete both and run again")
    return record


def check(path: Path) -> tuple[str, dict[str, object]] | None:
    """sha256 and record of a recorded file, None of any other; ValueError if the file is not what was made."""
    record = recorded(path)
    if record is None:
        return None
    found = sha256(path)
    if found != record["sha256"]:
        raise ValueError(
            f"{path}: changed after it was made (sha256 is {found}, {record['sha256']} was written): "
            "delete it and run again"
        )
    return found, record


def note(path: Path) -> None:
    """Say that a file is about to be read: ValueError if it is not what was made; later files were made of it."""
    checked = check(path)
    if checked is not None:
        _read[place(path)[0]] = checked[0]


def keep(path: Path, content: Path) -> None:
    """Record that ``path`` is made with the bytes of ``content``, of all that was read so far."""
    found = place(path)
    if found is None:
        return
    record = {"sha256": sha256(content), "inputs": {name: _read[name] for name in sorted(_read) if name != found[0]}}
    found[1].parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=found[1].parent, prefix=".", suffix=".partial")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.chmod(name, 0o644)
        os.replace(name, found[1])
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def check_all(paths: Iterable[Path]) -> None:
    """ValueError names the first file that is not what was made, has no record, or was made of other files than now.

    Where nothing is recorded (no folder ``.ledger``) there is nothing to compare.
    """
    now: dict[str, str] = {}
    records: list[tuple[Path, dict[str, object]]] = []
    for path in paths:
        found = place(path)
        if found is None:
            continue
        checked = check(path)
        if checked is None:
            raise ValueError(f"{path}: no stage made it here (no {found[1]}): delete it and run again")
        now[found[0]] = checked[0]
        records.append((path, checked[1]))
    for path, record in records:
        for name, digest in record["inputs"].items():
            if now.get(name, digest) != digest:
                raise ValueError(f"{path}: was made of another {name} than the one there is: delete it and run again")
