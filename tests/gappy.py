"""Tables for tests whose every column may lack numbers, as few that a stage writes may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstages.files.atomic import write_table


def write_gappy(path: Path, table: Any) -> None:
    """Write a table in which a number that is not finite is nothing, whatever its column."""
    write_table(path, table, list(table))
