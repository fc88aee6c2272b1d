"""The manifest of a study: inputs, outputs, code, configuration, environment, and their checksums.

The manifest is the one result with a time stamp. SHA256SUMS has none: two runs from scratch write the same bytes. The
manifest knows the checksum of SHA256SUMS, and its own (of its JSON without that entry), so that ``verify`` finds a
changed byte in either. These are checksums against accidents: who changes a file on purpose can change them too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from kvstages.files import ledger
from kvstages.files.atomic import json_text
from kvstages.files.ledger import sha256
from kvstages.files.read import read_json
from kvstages.provenance.code import stage_digest
from kvstages.provenance.environment import environment
from kvstages.stages import STAGES
from kvstages.study.artifacts import check_inside
from kvstages.study.pinned import pinned_files

MANIFEST = "manifest.json"
CHECKSUMS = "SHA256SUMS"
KEYS = (
    "study", "created", "command", "folder", "configuration", "code", "environment", "inputs", "outputs", "checksums",
    "sha256",
)  # fmt: skip


def checksum_lines(outputs: Mapping[str, Mapping[str, str]], folder: str) -> str:
    """Lines of ``sha256sum`` for the outputs inside ``folder``, sorted by their path from there."""
    inside = {
        PurePosixPath(path).relative_to(folder).as_posix(): output["sha256"]
        for path, output in outputs.items()
        if PurePosixPath(path).is_relative_to(folder)
    }
    return "".join(f"{digest}  {path}\n" for path, digest in sorted(inside.items()))


def digest(text: str) -> str:
    """sha256 of a text."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def own_digest(record: Mapping[str, Any]) -> str:
    """A manifest's checksum of itself: the sha256 of its text without the entry sha256."""
    return digest(json_text({key: value for key, value in record.items() if key != "sha256"}))


def measured_with(outputs: Iterable[Path], made: Iterable[Mapping[str, Any] | None]) -> dict[str, list[Any]]:
    """Devices and thread counts that the evaluations among ``outputs`` say they ran with.

    ``products`` are the matrix products that stages chose, as their files' records (``made``) have it.
    """
    records = [read_json(path) for path in outputs if path.name == "evaluation.json"]
    facts = [record["facts"] for record in made if record is not None]
    return {
        "devices": sorted({record["device"] for record in records}),
        "threads": sorted({record["threads"] for record in records}),
        "products": sorted({found["product"] for found in facts if "product" in found}),
    }


def how(made: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The manifest's entry of how a file was made: its record without the arguments, which the rule has."""
    return None if made is None else {key: value for key, value in made.items() if key != "arguments"}


def artifact_record(study: str, name: str, path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The configured source of a pinned file, and its sha256; ValueError if it is not what is pinned."""
    try:
        pinned = {file.name: file for file in pinned_files(study, settings["study"])}[name]
    except (KeyError, TypeError):
        raise ValueError(f"artifact {name!r}: the settings say nothing of it") from None
    record = {"source": pinned.source, "location": pinned.location, "path": pinned.path}
    if pinned.version:
        record["version"] = pinned.version
    expected = pinned.sha256
    found = sha256(path)
    if found != expected:
        raise ValueError(f"{path}: sha256 is {found}, pinned is {expected}: delete it and run again")
    return {"artifact": name, **record, "revision": pinned.revision, "sha256": found}


def published_record(path: Path) -> dict[str, Any]:
    """A file of published figures, as an input; nothing pins it, so the manifest says what it was."""
    where = {"source": "local", "location": path.parent.as_posix(), "path": path.name}
    return {"artifact": "published", **where, "revision": None, "sha256": sha256(path)}


def manifest(
    study: str,
    settings: Mapping[str, Any],
    artifacts: Mapping[str, Path],
    published: Iterable[Path],
    outputs: Mapping[Path, str],
    folder: Path,
    run: Mapping[str, Any],
    created: str,
) -> tuple[dict[str, Any], str]:
    """The manifest's record and the text of SHA256SUMS.

    ``artifacts`` are the pinned inputs by their name in the configuration ``settings`` ({shared, study}), ``published``
    the files of published figures that it shows beside its own; ``outputs`` map each file to the rule that made it,
    those inside ``folder`` (the study's results) have a line in SHA256SUMS; ``run`` holds command, revision and dirty;
    ``created`` is the time of writing in ISO 8601. ValueError names a file that is not what was made, or not as the
    workflow makes it now (``kvstages.files.ledger``), or not what is pinned: nothing damaged, stale or foreign gets a
    checksum here.
    """
    others = {path.as_posix(): published_record(path) for path in published}
    made = ledger.check_all([*artifacts.values(), *outputs], {name: entry["sha256"] for name, entry in others.items()})
    listed = {
        path.as_posix(): {"sha256": sha256(path), "rule": rule, "made": how(made.get(path.as_posix()))}
        for path, rule in outputs.items()
    }
    lines = checksum_lines(listed, folder.as_posix())
    record = {
        "study": study,
        "created": created,
        "command": run["command"],
        "folder": folder.as_posix(),
        "configuration": settings,
        "code": {
            "revision": run["revision"],
            "dirty": run["dirty"],
            "stages": {stage: stage_digest(stage) for stage in STAGES},
        },
        "environment": environment() | measured_with(outputs, made.values()),
        "inputs": others
        | {path.as_posix(): artifact_record(study, name, path, settings) for name, path in artifacts.items()},
        "outputs": listed,
        "checksums": digest(lines),
    }
    return {**record, "sha256": own_digest(record)}, lines


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest as it was written, to the byte; ValueError says in one line what is wrong with any other file."""
    ledger.check_regular(path)
    try:
        text = path.read_bytes().decode("utf-8")
        record = json.loads(text)
        written = json_text(record)
        written.encode("utf-8")
    except ValueError as error:
        raise ValueError(f"{path}: damaged, not a JSON file ({error})") from error
    except RecursionError:
        raise ValueError(f"{path}: damaged, not a JSON file of this project (too deep)") from None
    if not isinstance(record, dict) or set(record) != set(KEYS):
        raise ValueError(f"{path}: damaged, or of another version: its keys are not those of a manifest")
    if written != text or own_digest(record) != record["sha256"]:
        raise ValueError(f"{path}: damaged, its text does not have the sha256 that it gives itself")
    check_paths(path, record)
    return record


def check_paths(path: Path, record: Mapping[str, Any]) -> None:
    """ValueError unless the manifest's files have a sha256 each and lie below the working directory."""
    for part in ("inputs", "outputs"):
        entries = record[part]
        if not isinstance(entries, dict) or not all(
            isinstance(entry, dict) and isinstance(entry.get("sha256"), str) for entry in entries.values()
        ):
            raise ValueError(f"{path}: {part}: expected a sha256 for each file")
        for name in entries:
            check_inside(f"{path}: {part}:", name)
    if not isinstance(record["folder"], str) or not isinstance(record["checksums"], str):
        raise ValueError(f"{path}: folder and checksums: expected texts")
    check_inside(f"{path}: folder", record["folder"])
