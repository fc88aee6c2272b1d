import errno
import hashlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from kvstages.files.atomic import atomic_path, write_bytes, write_json, write_table, write_tensors, write_text
from kvstages.files.ledger import sha256
from kvstages.files.read import read_arrays, read_columns, read_json, read_record, read_tensors


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_failure_inside_the_block_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_the_target_appears_only_when_the_block_ends(tmp_path):
    path = tmp_path / "new" / "file"
    with atomic_path(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
        assert temporary.parent == path.parent, "a rename must not cross file systems"
    assert path.read_text() == "whole"
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path, monkeypatch, call):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "write":
        monkeypatch.setattr(Path, "write_bytes", full)
    else:
        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*record\.json'") as caught:
        write_json(tmp_path / "record.json", {"a": 1})
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "write",
    ["write_bytes(path, bytes(100_000))", "import torch; write_tensors(path, {'x': torch.zeros(100_000)})"],
)
def test_a_file_that_cannot_grow_any_more(tmp_path, write):
    """The kernel's own refusal, by a limit on the size of files."""
    program = (
        "import sys; from pathlib import Path; from kvstages.files.atomic import *;"
        "path = Path(sys.argv[1])\n"
        f"try: {write}\n"
        "except OSError as error: print(error)"
    )
    result = subprocess.run(
        # The compiled modules that Python would keep beside the sources would be cut off, too.
        [sys.executable, "-B", "-c", program, str(tmp_path / "file")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "File too large" in result.stdout
    assert str(tmp_path / "file") in result.stdout
    assert names(tmp_path) == []


def test_the_next_write_removes_what_a_kill_left(tmp_path):
    path = tmp_path / "file"
    program = (
        "import os, signal, sys; from pathlib import Path; from kvstages.files.atomic import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not path.exists()
    assert len(names(tmp_path)) == 1
    with atomic_path(tmp_path / "file.csv") as other:  # being written at the same time by another process
        write_text(path, "whole")
        assert names(tmp_path) == [other.name, "file"]


def test_a_second_writer_of_a_file_is_refused_and_the_first_one_finishes(tmp_path):
    path = tmp_path / "file"
    with atomic_path(path) as temporary:
        temporary.write_text("first")
        with pytest.raises(OSError, match=f"^{path}: another process is writing it; wait until that ends$"):
            write_text(path, "second")
    assert path.read_text() == "first"
    write_text(path, "second")
    assert path.read_text() == "second" and names(tmp_path) == ["file"]


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_tensors_and_record_round_trip_in_the_same_bytes(tmp_path):
    tensors = {"b": torch.arange(6).reshape(2, 3).T, "a": torch.randn(3, dtype=torch.bfloat16)}
    record = {"z": 1, "config": {"y": [1, 2], "b": "ü"}, "a": None}
    write_tensors(tmp_path / "one", tensors, record)
    write_tensors(tmp_path / "two", dict(reversed(tensors.items())), dict(reversed(record.items())))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    read, read_record = read_tensors(tmp_path / "one")
    assert read_record == record
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_numpy_arrays_are_written_like_tensors(tmp_path):
    tensors = {"b": torch.arange(6).reshape(2, 3).T, "a": torch.randn(3)}
    write_tensors(tmp_path / "tensors", tensors, {"z": 1})
    write_tensors(tmp_path / "arrays", {name: tensor.numpy() for name, tensor in tensors.items()}, {"z": 1})
    assert (tmp_path / "arrays").read_bytes() == (tmp_path / "tensors").read_bytes()


def test_tensors_without_a_record(tmp_path):
    write_tensors(tmp_path / "file", {"x": torch.ones(2)})
    assert read_tensors(tmp_path / "file")[1] == {}


def test_other_files_are_not_tensors(tmp_path):
    write_text(tmp_path / "file", "text")
    with pytest.raises(ValueError, match="file: not a safetensors file"):
        read_tensors(tmp_path / "file")


@pytest.mark.parametrize(("record", "expected"), [("{", "not a safetensors file of this project"), ("3", "is int")])
def test_a_record_of_another_kind(tmp_path, record, expected):
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2)}, tmp_path / "file", metadata={"record": record})
    with pytest.raises(ValueError, match=f"file: .*{expected}"):
        read_tensors(tmp_path / "file")


def test_json_is_sorted_and_has_no_nan(tmp_path):
    write_json(tmp_path / "record.json", {"b": 0.1, "a": "ü"})
    assert (tmp_path / "record.json").read_bytes() == '{\n  "a": "ü",\n  "b": 0.1\n}\n'.encode()
    assert read_json(tmp_path / "record.json") == {"a": "ü", "b": 0.1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "other.json", {"a": float("nan")})
    assert names(tmp_path) == ["record.json"]


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe"])
def test_read_json_names_a_file_that_is_not_json(tmp_path, content):
    (tmp_path / "record.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"record\.json: not a JSON file"):
        read_json(tmp_path / "record.json")


def test_tables_keep_full_precision(tmp_path):
    number = 0.1 + 0.2
    write_table(tmp_path / "table.csv", pd.DataFrame({"layer": [0], "mean_kl": [number]}))
    assert (tmp_path / "table.csv").read_bytes() == f"layer,mean_kl\n0,{number!r}\n".encode()


def test_sha256(tmp_path):
    write_bytes(tmp_path / "file", b"abc" * 1000)
    assert sha256(tmp_path / "file") == hashlib.sha256(b"abc" * 1000).hexdigest()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_neither_written_nor_read(value, tmp_path):
    """In tables, records and tensors: a file that holds NaN or infinity where a number is required is refused."""
    table, record, tensors = tmp_path / "t.csv", tmp_path / "r.json", tmp_path / "w.safetensors"
    for columns in ({"block": [0, 1], "kl": [0.5, value]}, pd.DataFrame({"block": [0, 1], "kl": [0.5, value]})):
        with pytest.raises(ValueError, match=r"t\.csv: kl would be -?(nan|inf) in row 2, expected a finite number"):
            write_table(table, columns)
    with pytest.raises(ValueError, match=r"w\.safetensors: kl holds NaN or infinity"):
        write_tensors(tensors, {"kl": torch.tensor([0.5, value])})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(record, {"kl": value})
    assert names(tmp_path) == []
    table.write_text(f"block,kl\n0,0.5\n1,{value}\n")
    with pytest.raises(ValueError, match=r"t\.csv: column 'kl' holds .*, expected a number"):
        read_columns(table, ["block", "kl"])
    record.write_text(json.dumps({"kl": value}))
    with pytest.raises(ValueError, match=r"r\.json: not a JSON file \(-?(NaN|Infinity), expected a finite number\)"):
        read_json(record)
    save_file({"kl": torch.tensor([0.5, value])}, tensors)
    for read in (read_tensors, read_arrays):
        with pytest.raises(ValueError, match=r"w\.safetensors: kl holds NaN or infinity"):
            read(tensors)


def test_a_gap_is_nothing_where_it_may_be_and_an_error_where_not(tmp_path):
    path = tmp_path / "t.csv"
    write_table(path, {"block": [0, 1], "error": [None, math.nan]}, ["error"])
    assert path.read_text() == "block,error\n0,\n1,\n"
    assert read_columns(path, ["block"], gaps=["error"])["error"].isna().all()
    with pytest.raises(ValueError, match=r"column 'error' holds .*, expected a number"):
        read_columns(path, ["block", "error"])
    frame = pd.DataFrame({"block": [0, 1], "seed": pd.array([None, 7], dtype="Int64")})
    write_table(path, frame, ["seed"])
    assert path.read_text() == "block,seed\n0,\n1,7\n"
    with pytest.raises(ValueError, match="seed would be <NA> in row 1"):
        write_table(path, frame)
    write_table(path, {"block": [0], "error": [math.inf]}, ["error"])
    assert path.read_text() == "block,error\n0,\n"


def test_a_record_without_a_number_where_one_is_asked_for_is_refused(tmp_path):
    write_json(tmp_path / "r.json", {"mean_kl": None, "policy": "int8"})
    with pytest.raises(ValueError, match=r"r\.json: mean_kl is None, expected a number"):
        read_record(tmp_path / "r.json", ["policy"], ["mean_kl"])
