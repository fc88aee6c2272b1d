"""The ledger: what each file of a workflow was when it was made, and of what, so that damage is noticed.

Snakemake compares times and, of small inputs, checksums; it never asks whether an output is still what its job wrote,
and it forgets with which settings a file was made when its own records are deleted or touched. So in a working
directory that holds the folder ``.ledger`` (the Snakefile makes it) every file that a stage writes gets a record there:

- ``sha256`` of the file, and ``inputs``: the sha256 of each file of the working directory that the stage had read;
- ``made``: the stage, every argument of it (defaults too, paths as seen from the working directory), the digest of its
  code, the versions of the packages that it imports, whether a workflow planned it or someone ran it by hand, and what
  the stage itself found out (``state``).

When a workflow starts it writes into ``.ledger/plan`` what makes each file by the configuration and the code of now.
Every reader compares what it reads with the record, and in a job of a workflow the record with the plan; the Snakefile
does so before the first job (``check_plan``), and the stage ``manifest`` for all of a study's files before it signs
(``check_all``). Versions of packages are recorded and not compared: Snakemake reruns what a new one concerns, and the
manifest says for each file what made it.

What this finds: a file that changed after it was made, by whatever means and with whatever time; a file that other
settings, other code or another stage made; and a result made of another version of a file than the one there is. What
it does not: a change of both a file and its record that agrees with the plan, files from outside the working directory
(the pinned artifacts have their own sha256), and damage after the last run, which is what ``kvstages verify`` is for.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = ".ledger"
# Records end in .json, so that no file's record can have this name.
PLAN = Path(FOLDER, "plan")
KEYS = {"sha256", "inputs", "made"}
# Of the plan and of each record's ``made``: what has to agree.
COMPARED = ("stage", "arguments", "code")
# What this process has read so far, of recorded files: path from the working directory to sha256.
_read: dict[str, str] = {}
# The stage that runs in this process, as the records of its files will say, and what makes each file by the plan.
_stage: dict[str, Any] = {}
_plan: dict[str, dict[str, Any]] = {}


def check_regular(path: Path) -> None:
    """ValueError unless a path is, or leads to, an ordinary file: a pipe or a device may have no end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise ValueError(f"{path}: is {kinds.get(stat.S_IFMT(mode), 'a device')}, expected a file")


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file, read in pieces; ValueError on what is no file."""
    check_regular(path)
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def begin(stage: Mapping[str, Any] | None = None) -> None:
    """A new stage begins in this process: nothing is read yet. ``stage`` is what its files' records will say of it.

    A job of a workflow (``planned``) compares what it reads with the plan; a stage by hand takes any whole file.
    """
    for memory in (_read, _stage, _plan):
        memory.clear()
    if stage is not None:
        _stage.update(stage, facts={})
        if stage["planned"]:
            _plan.update(read_plan())


def state(**facts: Any) -> None:
    """Add a fact of this run, such as its device, to the records of this stage's files."""
    if _stage:
        _stage["facts"].update(facts)


def read_plan() -> dict[str, dict[str, Any]]:
    """What makes each file by the plan: path from the working directory to stage, arguments and code; {} without it."""
    return {name: record for study in _plans().values() for name, record in study["files"].items()}


def read_settings() -> dict[str, Any]:
    """The configuration that each study was planned with when a workflow of it was started last."""
    return {study: plan["settings"] for study, plan in _plans().items()}


def _plans() -> dict[str, dict[str, Any]]:
    try:
        return json.loads(PLAN.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{PLAN}: damaged: delete it and start the workflow again, which writes it") from error


def write_plan(files: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
    """Write what makes each of some files, and the configuration of each study that this follows from.

    A file belongs to the study that is the second part of its path. What was planned before stays where the study's
    configuration is the same: a workflow may have been asked for some of a study's files only.
    """
    plans = {
        study: plan for study, plan in _plans().items() if settings.get(study, plan["settings"]) == plan["settings"]
    }
    for name, record in files.items():
        study = (*Path(name).parts, "")[1]
        plan = plans.setdefault(study, {"settings": settings.get(study), "files": {}})
        plan["files"][name] = record
    write_json(PLAN, plans)


def write_settings(study: str, settings: Any) -> Path:
    """Keep a study's configuration as a file, which is newer than the results that were signed with another one."""
    path = Path(FOLDER, f"{study}.configuration")
    try:
        same = json.loads(path.read_bytes()) == settings
    except (FileNotFoundError, ValueError):
        same = False
    if not same:
        write_json(path, settings)
    return path


def place(path: Path) -> tuple[str, Path] | None:
    """A file's path from the working directory, and its record's; None outside, and where nothing is recorded."""
    if not os.path.isdir(FOLDER):
        return None
    relative = os.path.relpath(path)
    if relative.split(os.sep)[0] in (os.pardir, FOLDER):
        return None
    return Path(relative).as_posix(), Path(FOLDER, f"{relative}.json")


def is_record(record: Any) -> bool:
    """Whether a value has the keys of a file's record that its readers need."""
    return (
        isinstance(record, dict)
        and set(record) == KEYS
        and isinstance(record["inputs"], dict)
        and (record["made"] is None or (isinstance(record["made"], dict) and set(COMPARED) <= set(record["made"])))
    )


def recorded(path: Path) -> dict[str, Any] | None:
    """The record of a file, {sha256, inputs: {path: sha256}, made}, None where it has none; ValueError if damaged."""
    found = place(path)
    try:
        record = None if found is None else json.loads(found[1].read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: its record {found[1]} is damaged: delete both and run again") from error
    if record is None:
        return None
    if not is_record(record):
        raise ValueError(f"{path}: its record {found[1]} is damaged: delete both and run again")
    return record


def check(path: Path) -> tuple[str, dict[str, Any]] | None:
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


def difference(name: str, made: Mapping[str, Any] | None, plan: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What a file's record (``made``) says otherwise than the plan, in a few words; None where they agree.

    They agree also where the plan does not know the file: another target was asked for.
    """
    if name not in plan:
        return None
    expected = plan[name]
    if made is None:
        return f"was not made by a stage, where the workflow runs {expected['stage']}"
    if made["stage"] != expected["stage"]:
        return f"was made by the stage {made['stage']}, where the workflow runs {expected['stage']}"
    arguments, now = made["arguments"], expected["arguments"]
    for option in sorted({*arguments, *now}):
        if arguments.get(option) != now.get(option):
            found, wanted = (json.dumps(given.get(option)) for given in (arguments, now))
            return f"was made with {option} {found}, where the workflow says {wanted}"
    if made["code"] != expected["code"]:
        return f"was made by other code of the stage {made['stage']} than there is now"
    return None


def note(path: Path) -> None:
    """Note a file that is about to be read, an input of later files; ValueError if it is not as made or planned."""
    found = place(path)
    if found is None or not os.path.exists(path):
        return
    checked = check(path)
    wrong = None if checked is None else difference(found[0], checked[1]["made"], _plan)
    if wrong is not None:
        raise ValueError(f"{path}: {wrong}: delete it and run again")
    _read[found[0]] = sha256(path) if checked is None else checked[0]


def keep(path: Path, content: Path) -> None:
    """Record that ``path`` holds the bytes of ``content`` and was made of all files read so far."""
    found = place(path)
    if found is None:
        return
    inputs = {name: _read[name] for name in sorted(_read) if name != found[0]}
    write_json(found[1], {"sha256": sha256(content), "inputs": inputs, "made": dict(_stage) or None})


def write_json(path: Path, record: object) -> None:
    """Write a record of this folder, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def check_all(paths: Iterable[Path], others: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What made each file, by its path from the working directory, from its record.

    ValueError names the first file that is not what was made, has no record, was made otherwise than the plan says, or
    of other files than those there are. ``others`` are files that no stage makes: path to sha256. Where nothing is
    recorded (no folder ``.ledger``) there is nothing to compare, and the answer is {}.
    """
    now = dict(others)
    records: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in paths:
        found = place(path)
        if found is None:
            continue
        checked = check(path)
        if checked is None:
            raise ValueError(f"{path}: no stage made it here (no {found[1]}): delete it and run again")
        now[found[0]] = checked[0]
        records[found[0]] = path, checked[1]
    plan = read_plan()
    for name, (path, record) in records.items():
        wrong = difference(name, record["made"], plan)
        if wrong is not None:
            raise ValueError(f"{path}: {wrong}: delete it and run again")
        for other, digest in record["inputs"].items():
            if now.get(other, digest) != digest:
                raise ValueError(f"{path}: was made of another {other} than the one there is: delete it and run again")
    return {name: record["made"] for name, (_, record) in records.items()}


def check_plan(paths: Iterable[Path], plan: Mapping[str, Mapping[str, Any]]) -> list[tuple[Path, str]]:
    """Files of ``paths`` that are there and were made otherwise than ``plan`` says, each with what differs.

    Reads records only, not the files; a file without a record counts, a missing file does not.
    """
    found = []
    for path in paths:
        if place(path) is None or not path.exists():
            continue
        record = recorded(path)
        wrong = (
            "has no record of how it was made" if record is None else difference(place(path)[0], record["made"], plan)
        )
        if wrong is not None:
            found.append((path, wrong))
    return found


def current(path: Path, plan: Mapping[str, Mapping[str, Any]], known: dict[str, bool]) -> bool:
    """Whether a file is what its stage wrote, was made as ``plan`` says, and of files that are current themselves.

    ``known`` remembers the answers. A file from outside the working directory is current; one without a record is not.
    """
    found = place(path)
    if found is None:
        return True
    name = found[0]
    if name not in known:
        try:
            checked = check(path)
        except (ValueError, OSError):
            checked = None
        known[name] = (
            checked is not None
            and difference(name, checked[1]["made"], plan) is None
            and all(is_current(Path(other), digest, plan, known) for other, digest in checked[1]["inputs"].items())
        )
    return known[name]


def is_current(path: Path, digest: str, plan: Mapping[str, Mapping[str, Any]], known: dict[str, bool]) -> bool:
    """Whether a file of which another was made has the same sha256 still, and is current if a stage made it."""
    record = recorded(path)
    if record is None:
        return path.exists() and sha256(path) == digest
    return record["sha256"] == digest and current(path, plan, known)
