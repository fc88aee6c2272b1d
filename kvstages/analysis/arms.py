"""The arm and seed of an adapted model, from the folder that holds it."""

from __future__ import annotations

import re
from pathlib import Path


def arm_and_seed(path: Path) -> tuple[str, int]:
    """Arm and seed of a file under adaptation/ARM/seed-SEED/; ValueError where the path does not say them.

    The folders nearest to the file count; those above the study may have any name.
    """
    for folder in path.absolute().parents:
        match = re.fullmatch(r"seed-(\d+)", folder.name)
        if match and folder.parent.name:
            return folder.parent.name, int(match[1])
    raise ValueError(f"{path}: expected a file in a folder ARM/seed-SEED, which names the arm and the seed")
