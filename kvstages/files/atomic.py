"""Atomic, deterministic writers and checksums: every file of the project is written here.

A file is written under a temporary name beside its target, flushed to the disk and renamed; a kill or a full disk
leaves the old file or none, never half of one, and the next write removes what a kill left behind. Nothing written
here carries a time stamp or an absolute path. ``ledger`` keeps in mind what was written, and readers ask it.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import glob
import io
import json
import math
import numbers
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.files import ledger
from kvstages.files.ledger import sha256 as sha256
from kvstages.files.read import ITEM_BYTES, check_tensors

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from torch import Tensor


# The kernel's ways to say that a file cannot grow; these errors come without the file's name.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
PARTIAL = ".partial"


def remove_leftovers(path: Path) -> None:
    """Remove what killed writers of ``path`` left beside it; OSError where a writer still lives.

    A writer holds a lock on its temporary file, which the system takes from it when it ends. tempfile puts eight
    characters into a name, so those of ``path`` with another ending are not taken for its own.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 8}{PARTIAL}"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        with suppress(FileNotFoundError), leftover.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError(f"{path}: another process is writing it; wait until that ends") from None
            except OSError:  # a file system without locks
                pass
            leftover.unlink(missing_ok=True)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path to write to; renamed to ``path`` when the block ends well, removed when it does not.

    OSError where another process writes ``path`` at the same time.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        # mkstemp makes private files; what a user opens has the ordinary permissions.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        ledger.keep(path, temporary)
        temporary.replace(path)
    except OSError as error:
        if error.errno in NO_ROOM and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
        os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 ``text`` with Unix line ends."""
    write_bytes(path, text.encode("utf-8"))


def json_text(record: Any) -> str:
    """One record as JSON with sorted keys; NaN and infinity are refused (ValueError): JSON has neither."""
    return json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, record: Any) -> None:
    """Write one record as JSON with sorted keys; ValueError on NaN and infinity."""
    write_text(path, json_text(record))


def write_table(path: Path, table: pd.DataFrame | Mapping[str, Iterable[Any]], gaps: Container[str] = ()) -> None:
    """Write columns as CSV in full precision: the shortest text that reads back to the same number; None as nothing.

    A mapping of columns does as well as a DataFrame, so that stages without need of pandas do not import it. In the
    columns of ``gaps`` NaN and infinity are numbers that there are not, and written as nothing. ValueError names
    ``path``, a column and a row with either elsewhere; or says that columns differ in length.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table)
    columns = [_cells(path, name, table[name], name in gaps) for name in table]
    writer.writerows(zip(*columns, strict=True))
    write_text(path, text.getvalue())


def _cells(path: Path, name: str, values: Iterable[Any], may_lack: bool) -> Iterator[str]:
    # An array hands out Python's own numbers and texts faster all at once; most cells are one of them.
    for row, value in enumerate(values.tolist() if hasattr(values, "tolist") else values):
        if type(value) in (str, int):
            yield str(value)
            continue
        if type(value) is float and math.isfinite(value):
            yield repr(value)
            continue
        # pandas has a missing value that does not even compare; everything else equals itself but for NaN.
        missing = type(value).__name__ in ("NAType", "NaTType") or (value is not None and value != value)
        missing = missing or value in (math.inf, -math.inf)
        if missing and not may_lack:
            raise ValueError(f"{path}: {name} would be {value} in row {row + 1}, expected a finite number")
        if value is None or missing:
            yield ""
        elif isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
            yield repr(float(value))
        else:
            yield str(value)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor] | Mapping[str, np.ndarray], record: Mapping[str, Any] | None = None
) -> None:
    """Write tensors as safetensors; ``record`` is kept as sorted JSON under the metadata key ``record``.

    Arrays of numpy give the same bytes as tensors, so that a stage without need of torch does not import it. One
    metadata key only: with several, safetensors does not write the same bytes twice. OSError names ``path`` when the
    disk is full (safetensors has an error of its own for that), ValueError a tensor with NaN or infinity in it.
    """
    import numpy as np
    from safetensors import SafetensorError

    check_tensors(path, tensors)
    if all(isinstance(tensor, np.ndarray) for tensor in tensors.values()):
        from safetensors.numpy import save_file

        plain = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    else:
        from safetensors.torch import save_file

        plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = None if record is None else {"record": json.dumps(record, sort_keys=True)}
    with atomic_path(path) as temporary:
        try:
            save_file(plain, temporary, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{path}: cannot be written ({error})") from error


@contextmanager
def tensor_stream(
    path: Path, layout: Mapping[str, Sequence[int]], record: Mapping[str, Any]
) -> Iterator[Callable[[memoryview], None]]:
    """Write BF16 tensors as safetensors one after the other, so that they need not be in memory together.

    ``layout``: names and shapes, in the order in which the bytes of the tensors are then appended. ValueError where
    they are too many or too few for a tensor, or a tensor is missing.
    """
    header: dict[str, Any] = {"__metadata__": {"record": json.dumps(record, sort_keys=True)}}
    end = 0
    for name, shape in layout.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    waiting = list(layout.items())
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)

        def append(data: memoryview) -> None:
            name, shape = waiting.pop(0)
            if data.nbytes != 2 * math.prod(shape):
                raise ValueError(f"{path}: {data.nbytes} bytes for {name} of shape {tuple(shape)}")
            file.write(data)

        yield append
        if waiting:
            raise ValueError(f"{path}: {waiting[0][0]} was not written")


def write_tensor_slices(
    path: Path,
    name: str,
    code: str,
    shape: tuple[int, int, int],
    slices: Iterable[tuple[tuple[slice, slice], Iterable[memoryview]]],
    record: Mapping[str, Any],
) -> None:
    """Write one tensor as ``write_tensors`` does, byte for byte, but a part [blocks, positions, :] at a time.

    ``code``: the kind of number, F64, F32 or BF16. A part comes as the bytes of its rows, block by block. What is in
    memory is one part. The parts must cover the tensor.
    """
    row = shape[2] * ITEM_BYTES[code]
    header = {
        "__metadata__": {"record": json.dumps(record, sort_keys=True)},
        name: {"dtype": code, "shape": list(shape), "data_offsets": [0, shape[0] * shape[1] * row]},
    }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with atomic_path(path) as temporary, temporary.open("rb+") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (blocks, positions), part in slices:
            for block, rows in zip(range(*blocks.indices(shape[0])), part, strict=True):
                file.seek(8 + len(text) + (block * shape[1] + positions.start) * row)
                file.write(rows)
