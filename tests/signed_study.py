"""A small study of made-up files with its manifest and checksums, for tests of what reads them."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from published_study import write_study

from kvstages.files.atomic import write_bytes, write_json, write_text
from kvstages.files.ledger import sha256
from kvstages.provenance.manifest import manifest

RUN = {"command": "snakemake", "revision": None, "dirty": None}
FOLDER = Path("results", "small")
SHARD = Path("resources", "small", "shard", "held-out.bin")
MODEL = Path("resources", "small", "model.safetensors")


def make_study(folder: Path) -> None:
    """A small study in the working directory ``folder``: inputs, results, manifest and checksums."""
    shutil.copytree(made_study().name, folder, dirs_exist_ok=True)


@cache
def made_study() -> TemporaryDirectory:
    """The same in a folder of its own, made once."""
    folder = TemporaryDirectory()
    before = Path.cwd()
    os.chdir(folder.name)
    try:
        write_study(FOLDER, layers=1, heads=2, budgets=("0.01",))
        write_bytes(FOLDER / "windows.safetensors", b"\x08" + bytes(7) + b"{}      ")
        write_bytes(SHARD, bytes(range(256)))
        write_bytes(MODEL, b"weights")
        pinned = {"path": "held-out.bin", "sha256": sha256(SHARD)}
        artifacts = {"source": "local", "location": "files", "files": {"shard": pinned}}
        outputs = {path: "a_rule" for path in sorted([*FOLDER.rglob("*"), MODEL]) if path.is_file()}
        study = {"shared": {}, "study": {"artifacts": artifacts}}
        record, lines = manifest(
            "small", study, {"shard": SHARD}, (), outputs, FOLDER, RUN, "2026-01-01T00:00:00+00:00"
        )
        write_text(FOLDER / "SHA256SUMS", lines)
        write_json(FOLDER / "manifest.json", record)
    finally:
        os.chdir(before)
    return folder


def flip(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
