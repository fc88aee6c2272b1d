"""Reading a study's result files: records and tables with their keys and columns checked, and policies put in order.

One policy is one folder: the files beside a policy's record belong to the same policy. What is wrong with a file is one
line that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages import made
from kvstages.files import read_json
from kvstages.names import ALLOCATORS, parse_policy
from kvstages.quantizer import BITS

if TYPE_CHECKING:
    import pandas as pd


def read_record(path: Path, keys: Iterable[str]) -> dict[str, Any]:
    """One JSON object that has all of ``keys``; ValueError names the file and the key that is missing."""
    record = read_json(path)
    if not isinstance(record, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(record).__name__}")
    missing = [key for key in keys if key not in record]
    if missing:
        raise ValueError(f"{path}: key {missing[0]!r} is missing; found {', '.join(sorted(record))}")
    return record


def read_columns(
    path: Path, numbers: Iterable[str], texts: Iterable[str] = (), gaps: Iterable[str] = ()
) -> pd.DataFrame:
    """Columns of a CSV table: texts, numbers, and numbers that may be missing in a row (``gaps``).

    Numbers are read back exactly. ValueError names the file and the column that is wrong.
    """
    import pandas as pd

    made.note(path)
    numbers, texts, gaps = list(numbers), list(texts), list(gaps)
    try:
        table = pd.read_csv(path, dtype=dict.fromkeys(texts, str))
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a CSV table ({error})") from error
    for column in [*texts, *numbers, *gaps]:
        if column not in table:
            raise ValueError(f"{path}: column {column!r} is missing; found {', '.join(map(str, table.columns))}")
    for column in [*numbers, *gaps]:
        values = pd.to_numeric(table[column], errors="coerce")
        wrong = values.isna() & (table[column].notna() if column in gaps else True)
        if wrong.any():
            raise ValueError(f"{path}: column {column!r} holds {table[column][wrong].iloc[0]!r}, expected a number")
        table[column] = values
    return table[[*texts, *numbers, *gaps]]


def policy_order(policy: str) -> tuple[int, str, float]:
    """Sort key of policies: the uniform ones by bits, then each allocator's, budgets in bytes first, from the least."""
    allocator, budget = parse_policy(policy)
    if budget is None:
        return -BITS[policy], "", 0.0
    return ALLOCATORS.index(allocator), budget.measure, budget.amount


def arm_and_seed(path: Path) -> tuple[str, int]:
    """Arm and seed of a file under adaptation/ARM/seed-SEED/; ValueError where the path does not say them.

    The folders nearest to the file tell: those above the study may be called anything.
    """
    for folder in path.absolute().parents:
        match = re.fullmatch(r"seed-(\d+)", folder.name)
        if match and folder.parent.name:
            return folder.parent.name, int(match[1])
    raise ValueError(f"{path}: expected a file in a folder ARM/seed-SEED, to tell the arm and the seed")
