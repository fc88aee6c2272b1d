"""Checked readers: records, tables and tensors with their keys, columns and names checked.

What is wrong with a file is one line that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
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
        return json.loads(Path(path).read_text(encoding="utf-8"), parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError(f"{path}: not a JSON file of this project (nested too deep)") from None
    except ValueError as error:  # of its text, its characters, or a number of thousands of digits
        raise ValueError(f"{path}: not a JSON file ({error})") from error


def _finite(text: str) -> float:
    """A number of a JSON file; ValueError on NaN and infinity, which JSON does not have but Python reads."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text}, expected a finite number")
    return value


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of a safetensors file and its record ({} where there is none); ValueError on any other file."""
    file, record = _open_safetensors(path, "pt")
    try:
        with file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a safetensors file of this project ({error})") from error
    check_tensors(path, tensors)
    return tensors, record


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The same as arrays, without torch. ValueError also on tensors in BF16, which numpy does not know.

    Plain reads: where memory runs out the library prints a traceback of its own and panics.
    """
    import numpy as np

    _, record = _open_safetensors(path, "np")
    arrays = {}
    for name, (shape, code, start) in sorted(_places(path).items()):
        if code not in ARRAY_KINDS:
            raise ValueError(f"{path}: {name} is of {code}, expected one of {', '.join(ARRAY_KINDS)}")
        arrays[name] = np.fromfile(path, ARRAY_KINDS[code], math.prod(shape), offset=start).reshape(shape)
    check_tensors(path, arrays)
    return arrays, record


# Bytes of a number, by the code that safetensors has for its kind.
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2}
# What numpy calls the kinds that it knows.
ARRAY_KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BOOL": "?"} | {
    f"{code}{8 * size}": f"<{code.lower()}{size}" for code in "IU" for size in (1, 2, 4, 8)
}


class TensorSlices:
    """A tensor [B, T, V] of a safetensors file, of which slices of blocks and positions are read when asked for.

    Plain reads: the library maps the whole file as private memory. ``record`` is that of the file.
    """

    def __init__(self, path: Path, name: str):
        """ValueError names ``path`` where it is no such file, or has no such tensor of three axes."""
        self.path = Path(path)
        file, self.record = _open_safetensors(path, "np")
        names = sorted(file.keys())
        if name not in names:
            raise ValueError(f"{path}: holds {', '.join(names[:5]) or 'no tensors'}; expected the tensor {name}")
        self.shape, self.code, self.start = _places(self.path)[name]
        if len(self.shape) != 3 or self.code not in ITEM_BYTES:
            raise ValueError(
                f"{path}: {name} {self.shape} of {self.code}, expected blocks × tokens × vocabulary, floating point"
            )

    def ranges(self, where: tuple[slice, slice]) -> tuple[range, range]:
        """Blocks and positions of a slice."""
        blocks, positions = (range(*each.indices(size)) for each, size in zip(where, self.shape[:2], strict=True))
        return blocks, positions

    def read_into(self, where: tuple[slice, slice], buffers: Iterable[memoryview]) -> None:
        """Fill one buffer for each block of a slice; ValueError where the file ends before its tensor does."""
        blocks, positions = self.ranges(where)
        row = self.shape[2] * ITEM_BYTES[self.code]
        with self.path.open("rb") as file:
            for block, buffer in zip(blocks, buffers, strict=True):
                file.seek(self.start + (block * self.shape[1] + positions.start) * row)
                if file.readinto(buffer) != len(positions) * row:
                    raise ValueError(f"{self.path}: ends before its tensor does")


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


def _places(path: Path) -> dict[str, tuple[tuple[int, ...], str, int]]:
    """Shape, code and first byte of each tensor of a file that the library has opened."""
    with Path(path).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: (tuple(tensor["shape"]), tensor["dtype"], 8 + length + tensor["data_offsets"][0])
        for name, tensor in header.items()
        if name != "__metadata__"
    }


def check_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """ValueError that names ``path`` and a tensor or array of floating point with NaN or infinity in it."""
    for name, tensor in tensors.items():
        # Of a sum no tensor of the same size is made; it may overflow where every element is finite.
        if not math.isfinite(tensor.sum()) and not math.isfinite(abs(tensor).max()):
            raise ValueError(f"{path}: {name} holds NaN or infinity")


def read_record(path: Path, keys: Iterable[str], numbers: Iterable[str] = ()) -> dict[str, Any]:
    """One JSON object that has all of ``keys``, and under ``numbers`` a number each.

    ValueError names the file and the key that is missing or holds something else.
    """
    record = read_json(path)
    if not isinstance(record, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(record).__name__}")
    missing = [key for key in (*keys, *numbers) if key not in record]
    if missing:
        raise ValueError(f"{path}: key {missing[0]!r} is missing; found {', '.join(sorted(record))}")
    for key in numbers:
        if isinstance(record[key], bool) or not isinstance(record[key], int | float):
            raise ValueError(f"{path}: {key} is {record[key]!r}, expected a number")
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
    check_numbers(path, table, numbers, gaps)
    return table[[*texts, *numbers, *gaps]]


def check_numbers(path: Path, table: pd.DataFrame, numbers: Iterable[str], gaps: Iterable[str] = ()) -> None:
    """Make columns of ``table``, as read from ``path``, numbers, and those of ``gaps`` numbers or nothing.

    ValueError names the file and a column that holds something else: text, nothing, NaN or infinity.
    """
    import numpy as np
    import pandas as pd

    gaps = list(gaps)
    for column in [*numbers, *gaps]:
        values = pd.to_numeric(table[column], errors="coerce")
        wrong = ~np.isfinite(values.to_numpy(dtype=float))
        if column in gaps:
            wrong &= table[column].notna().to_numpy()
        if wrong.any():
            raise ValueError(f"{path}: column {column!r} holds {table[column][wrong].iloc[0]!r}, expected a number")
        table[column] = values
