"""Files that a job has finished before the job itself ends: put aside, and put back when the job runs again.

Snakemake deletes the outputs of a job that fails, those that were whole too. Of a job that makes several files, each is
therefore also linked into ``FOLDER`` once it is made, until all are. Nothing is copied where the file system has links.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from kvstages.files import ledger

FOLDER = Path(ledger.FOLDER, "finished")


def aside(path: Path) -> Path:
    """Where a file lies while its job runs."""
    return FOLDER / os.path.relpath(path)


def put_aside(paths: Iterable[Path]) -> None:
    """Keep files, whatever becomes of the job."""
    for path in paths:
        transfer(path, aside(path))


def put_back(path: Path) -> None:
    """Restore a file that was put aside, where it is missing."""
    if not path.exists() and aside(path).exists():
        transfer(aside(path), path)


def forget(paths: Iterable[Path]) -> None:
    """The job has ended: its files need no keeping. Their folders stay, for another job may be about to use them."""
    for path in paths:
        aside(path).unlink(missing_ok=True)


def transfer(source: Path, target: Path) -> None:
    """The same file under another name, which may be taken; a copy where the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.link")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copy2(source, temporary)
    os.replace(temporary, target)
