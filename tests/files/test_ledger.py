from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvstages.cli import main
from kvstages.files import ledger
from kvstages.files.atomic import write_bytes, write_json, write_table, write_tensors, write_text
from kvstages.files.read import read_columns, read_json, read_tensors
from kvstages.models.checkpoints import load_pickle
from kvstages.models.config import read_config
from kvstages.study.shards import read_shard, write_shard


@pytest.fixture(autouse=True)
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which files are recorded."""
    monkeypatch.chdir(tmp_path)
    Path(ledger.FOLDER).mkdir()
    ledger.begin()
    return tmp_path


def flip(path: Path) -> None:
    """Change the last byte and keep the size and the times, as a bad disk would."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def chain() -> list[Path]:
    """c.json, made of b.json, made of a.json."""
    paths = [Path(name) for name in ("results/a.json", "results/b.json", "results/c.json")]
    for number, path in enumerate(paths):
        ledger.begin()
        if number:
            read_json(paths[number - 1])
        write_json(path, number)
    return paths


def test_a_file_knows_what_it_was_made_of() -> None:
    paths = chain()
    record = json.loads(Path(".ledger/results/c.json.json").read_text())
    inputs = {"results/b.json": ledger.sha256(paths[1])}
    assert record == {"sha256": ledger.sha256(paths[2]), "inputs": inputs, "made": None}
    ledger.check_all(paths, {})


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (lambda path: write_json(path, {"a": 1}), read_json),
        (lambda path: write_table(path, {"x": [1]}), lambda path: read_columns(path, ["x"])),
        (lambda path: write_shard(path, np.arange(9)), read_shard),
        (lambda path: write_bytes(path, b"pickle"), load_pickle),
        (lambda path: write_bytes(path, b"header"), read_config),
        (lambda path: write_tensors(path, {}), read_tensors),
    ],
    ids=["json", "table", "shard", "checkpoint", "model shape", "tensors"],
)
def test_every_reader_refuses_a_file_that_changed_after_it_was_made(write, read) -> None:
    path = Path("results/file")
    write(path)
    flip(path)
    with pytest.raises(ValueError, match=r"^results/file: changed after it was made \(sha256 is .*: delete it and run"):
        read(path)


def test_sensitivities_are_checked_too() -> None:
    from kvstages.scores.gather import read_table

    path = Path("results/table.csv")
    write_table(path, {"x": [1]})
    flip(path)
    with pytest.raises(ValueError, match="changed after it was made"):
        read_table(path, ["x"])


def test_a_file_that_changed_is_found_at_the_end() -> None:
    paths = chain()
    flip(paths[0])
    with pytest.raises(ValueError, match=r"^results/a\.json: changed after it was made"):
        ledger.check_all(paths, {})


def test_a_result_of_another_version_of_its_input_is_found_though_nothing_is_damaged() -> None:
    """b was made again and c was not, as happens when an old file is put back with its old time."""
    paths = chain()
    ledger.begin()
    write_json(paths[1], "new")
    with pytest.raises(ValueError, match=r"^results/c\.json: was made of another results/b\.json than"):
        ledger.check_all(paths, {})


def test_a_file_that_no_stage_made_is_found() -> None:
    paths = chain()
    other = Path("results/d.json")
    other.write_text("1")
    with pytest.raises(ValueError, match=r"^results/d\.json: no stage made it here"):
        ledger.check_all([*paths, other], {})
    assert read_json(other) == 1, "but it can be read: a stage by hand takes any file"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"sha256": 1}', b"\xff", b'{"sha256": "", "inputs": []}'])
def test_a_damaged_record_is_one_line(content: bytes) -> None:
    path = chain()[0]
    Path(".ledger/results/a.json.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^results/a\.json: its record \.ledger/results/a\.json\.json is damaged"):
        read_json(path)


def test_files_elsewhere_are_not_recorded(tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside.txt"
    write_text(outside, "x")
    outside.unlink()
    assert not list(Path(ledger.FOLDER).iterdir())


def test_without_the_folder_nothing_is_recorded_or_compared() -> None:
    shutil.rmtree(ledger.FOLDER)
    paths = chain()
    flip(paths[0])
    assert read_json(paths[1]) == 1
    ledger.check_all(paths, {})
    assert sorted(path.name for path in Path().iterdir()) == ["results"]


def test_a_new_stage_forgets_what_was_read() -> None:
    paths = chain()
    read_json(paths[0])
    CliRunner().invoke(main, ["verify", "."])
    write_json(paths[1], 5)
    assert json.loads(Path(".ledger/results/b.json.json").read_text())["inputs"] == {}


def test_nothing_is_left_of_a_record_that_could_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(Path("file"), "x")
    assert sorted(path.name for path in Path().rglob("*")) == [".ledger"]


STAGE = {"stage": "gather", "arguments": {"--source": "x"}, "code": "0" * 16, "packages": {"python": "3.11.7"}}
PLANNED = {key: STAGE[key] for key in ledger.COMPARED}


def test_a_job_reads_only_what_was_made_as_the_plan_says() -> None:
    path = Path("results/a.json")
    ledger.begin({**STAGE, "planned": True})
    write_json(path, 1)
    ledger.write_plan({"results/a.json": PLANNED}, {})
    ledger.begin({**STAGE, "planned": True})
    assert read_json(path) == 1
    ledger.write_plan({"results/a.json": {**PLANNED, "arguments": {"--source": "y"}}}, {})
    ledger.begin({**STAGE, "planned": True})
    with pytest.raises(
        ValueError, match=r'^results/a\.json: was made with --source "x", where the workflow says "y": '
    ):
        read_json(path)
    ledger.begin({**STAGE, "planned": False})
    assert read_json(path) == 1, "a stage by hand takes any file that is whole"


def test_a_file_that_no_stage_wrote_is_not_what_the_plan_says() -> None:
    path = chain()[0]
    ledger.write_plan({"results/a.json": PLANNED}, {})
    ledger.begin({**STAGE, "planned": True})
    with pytest.raises(ValueError, match="was not made by a stage, where the workflow runs gather"):
        read_json(path)


def test_what_a_stage_found_out_is_recorded() -> None:
    ledger.begin({**STAGE, "planned": True})
    ledger.state(product="float32")
    write_json(Path("a.json"), 1)
    assert ledger.recorded(Path("a.json"))["made"]["facts"] == {"product": "float32"}
    ledger.begin()
    ledger.state(product="float32")
    write_json(Path("a.json"), 1)
    assert ledger.recorded(Path("a.json"))["made"] is None


def test_what_follows_from_a_stale_file_is_not_current() -> None:
    """c was made of b, which was made of a: when a is of other settings than now, none of the three is current."""
    paths = chain()
    for path, given in zip(paths, ([], paths[:1], paths[1:2]), strict=True):
        ledger.begin({**STAGE, "planned": True})
        for other in given:
            read_json(other)
        write_json(path, path.name)
    plan = {path.as_posix(): PLANNED for path in paths}
    assert all(ledger.current(path, plan, {}) for path in paths)
    other = {**plan, "results/a.json": {**PLANNED, "code": "1" * 16}}
    assert not any(ledger.current(path, other, {}) for path in paths)
    flip(paths[1])
    assert [ledger.current(path, plan, {}) for path in paths] == [True, False, False]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_a_damaged_plan_is_one_line(content: bytes) -> None:
    ledger.PLAN.write_bytes(content)
    with pytest.raises(ValueError, match=r"^\.ledger/plan: damaged: delete it and start the workflow again"):
        ledger.begin({**STAGE, "planned": True})


def test_a_plan_of_some_files_leaves_the_others_as_long_as_the_configuration_is_the_same() -> None:
    first, second = "results/s/a.json", "results/s/b.json"
    ledger.write_plan({first: PLANNED, "results/t/c.json": PLANNED}, {"s": 1, "t": 1})
    ledger.write_plan({second: PLANNED}, {"s": 1, "t": 1})
    assert set(ledger.read_plan()) == {first, second, "results/t/c.json"}
    ledger.write_plan({second: PLANNED}, {"s": 2, "t": 1})
    assert set(ledger.read_plan()) == {second, "results/t/c.json"}
    assert ledger.read_settings() == {"s": 2, "t": 1}


def test_a_configuration_is_written_when_it_is_another_one() -> None:
    path = ledger.write_settings("s", {"a": 1})
    os.utime(path, (1, 1))
    ledger.write_settings("s", {"a": 1})
    assert path.stat().st_mtime == 1
    ledger.write_settings("s", {"a": 2})
    assert path.stat().st_mtime > 1 and json.loads(path.read_text()) == {"a": 2}
