"""Checked readers: records, tables and tensors with their keys, columns and names checked.

What is wrong with a file is one line that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.files import ledger

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from torch import Tensor


LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is what Git LFS leaves in place of a large one that was not downloaded."""
    with Path(path).open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def read_json(path: Path) -> Any:
    """Read one JSON record; ValueError names a file that is not JSON."""
    ledger.note(path)
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path}: not a JSON file of this project (nested too deep)") from None
    except ValueError as error:  # of its text, its characters, or a number of thousands of digits
        raise ValueError(f"{path}: not a JSON file ({error})") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of a safetensors file and its record ({} where there is none); ValueError on any other file."""
    return _read_safetensors(path, "pt")


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The same as arrays, without torch. ValueError also on tensors in BF16, which numpy does not know."""
    return _read_safetensors(path, "np")


def open_tensors(path: Path) -> tuple[Any, dict[str, Any]]:
    """An open safetensors file, whose ``get_slice`` reads a part of a tensor, and its record.

    ValueError on any other file.
    """
    return _open_safetensors(path, "pt")


def _open_safetensors(path: Path, framework: str) -> tuple[Any, dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    ledger.note(path)
    try:
        file = safe_open(path, framework=framework)
        record = json.loads((file.metadata() or {}).get("record", "{}"))
    except (SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: not a safetensors file of this project ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path}: its record is {type(record).__name__}, expected a mapping")
    return file, record


def _read_safetensors(path: Path, framework: str) -> tuple[dict[str, Any], dict[str, Any]]:
    file, record = _open_safetensors(path, framework)
    try:
        with file:
            return {name: file.get_tensor(name) for name in file.keys()}, record  # noqa: SIM118
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a safetensors file of this project ({error})") from error


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

    ledger.note(path)
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
