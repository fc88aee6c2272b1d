"""The environment of a run: command, code, packages, machine. Nothing here imports torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstages import __version__

PACKAGE = Path(__file__).parents[1]
# The workflow's own command and code revision, as JSON: set by the Snakefile for its jobs, which see neither.
RUN = "KVSTAGES_RUN"
SECONDS = 10


def output_of(*command: str) -> str | None:
    """The output of a program; None where there is no such program, or it fails or does not end."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def code_revision(package: Path = PACKAGE) -> dict[str, Any]:
    """Commit of the repository that tracks the package, and whether anything in it differs from that commit.

    Both None where the package is not tracked (installed, or in an image). Files that git ignores do not count.
    """
    git = ("git", "-C", str(package))
    if output_of(*git, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {"revision": None, "dirty": None}
    status = output_of(*git, "status", "--porcelain")
    return {"revision": output_of(*git, "rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def run_record(arguments: Sequence[str]) -> str:
    """Command and code of the process with these arguments, as JSON for ``RUN``; the program by its name alone."""
    program = Path(arguments[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return json.dumps({"command": shlex.join([name, *arguments[1:]]), **code_revision()})


def this_run(arguments: Sequence[str]) -> dict[str, Any]:
    """Command, revision and dirty of the workflow that this job belongs to, or of this process itself."""
    return json.loads(os.environ.get(RUN) or run_record(arguments))


def processor() -> str:
    """Name of the CPU, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def gpus() -> list[str]:
    """Name and driver of each NVIDIA GPU of this machine; [] where there is none, or none to be seen."""
    listed = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return [line.strip() for line in (listed or "").splitlines()]


def packages() -> dict[str, str]:
    """Version of every installed package, sorted by name in lower case; nothing is imported."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name.lower(), distribution.version)
    return dict(sorted(found.items()))


def environment() -> dict[str, Any]:
    """Python, packages, platform, CPU and GPUs that this process sees."""
    return {
        "kvstages": __version__,
        "python": platform.python_version(),
        "packages": packages(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "gpus": gpus(),
    }
