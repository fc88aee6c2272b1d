"""The arm and seed of an adapted model, by the folder that it lies in."""

from __future__ import annotations

import re
from pathlib import Path


def arm_and_seed(path: Path) -> tuple[str, int]:
    """Arm and seed of a file under adaptation/ARM/seed-SEED/; ValueError where the path does not say them.

    The folders nearest to the file tell: those above the study may be called anything.
    """
    for folder in path.absolute().parents:
        match = re.fullmatch(r"seed-(\d+)", folder.name)
        if match and folder.parent.name:
            return folder.parent.name, int(match[1])
    raise ValueError(f"{path}: expected a file in a folder ARM/seed-SEED, to tell the arm and the seed")
