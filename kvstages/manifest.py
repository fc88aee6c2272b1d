"""What a study's results came from: inputs, outputs, code, configuration, environment; and their checksums.

The manifest is the one result with a time stamp. SHA256SUMS has none: two runs from scratch write the same bytes.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvstages import __version__
from kvstages.cli import STAGES
from kvstages.digests import stage_digest
from kvstages.files import read_json, sha256

PACKAGES = ("torch", "numpy", "pandas", "safetensors", "matplotlib", "snakemake")


def checksums(files: Iterable[Path]) -> dict[str, str]:
    """Path, as given, to sha256; ValueError on a path given twice."""
    sums: dict[str, str] = {}
    for path in files:
        if str(path) in sums:
            raise ValueError(f"{path}: named twice")
        sums[str(path)] = sha256(path)
    return dict(sorted(sums.items()))


def checksum_lines(sums: Mapping[str, str], folder: Path) -> str:
    """Lines of ``sha256sum`` for files inside ``folder``, sorted by their path from there."""
    relative = {Path(path).relative_to(folder).as_posix(): digest for path, digest in sums.items()}
    return "".join(f"{digest}  {path}\n" for path, digest in sorted(relative.items()))


def processor() -> str:
    """Name of the CPU, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def version(package: str) -> str | None:
    """Version of an installed package, None where there is none; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Python, packages, platform and CPU that this process sees."""
    return {
        "kvstages": __version__,
        "python": platform.python_version(),
        "packages": {package: version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "processor": processor(),
    }


def measured_with(outputs: Iterable[Path]) -> dict[str, list[Any]]:
    """Devices and thread counts that the evaluations among ``outputs`` say they ran with."""
    records = [read_json(path) for path in outputs if path.name == "evaluation.json"]
    return {
        "devices": sorted({record["device"] for record in records}),
        "threads": sorted({record["threads"] for record in records}),
    }


def manifest(
    study: str, settings: Mapping[str, Any], files: Iterable[Path], folder: Path, created: str
) -> tuple[dict[str, Any], str]:
    """The manifest's record and the text of SHA256SUMS.

    ``files`` inside ``folder`` (the study's results) are outputs, all others are inputs; ``created`` is the time of
    writing in ISO 8601.
    """
    files = list(files)
    outputs = [path for path in files if path.is_relative_to(folder)]
    output_sums = checksums(outputs)
    record = {
        "study": study,
        "created": created,
        "configuration": settings,
        "inputs": checksums(path for path in files if not path.is_relative_to(folder)),
        "outputs": output_sums,
        "code": {stage: stage_digest(stage) for stage in STAGES},
        "environment": environment() | measured_with(outputs),
    }
    return record, checksum_lines(output_sums, folder)
