"""Several stages in one process: what they write, what is passed over, and what a killed job leaves for the next."""

from __future__ import annotations

import shlex
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstages.cli import main
from kvstages.commands.arguments import lines, together
from kvstages.commands.planning import plan
from kvstages.commands.several import AGAIN
from kvstages.files import finished, ledger
from kvstages.provenance.code import stage_digest

NAMES = ("a", "b", "c")


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a workflow, with a folder to copy files from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(AGAIN, raising=False)
    Path("source").mkdir()
    for name in NAMES:
        Path("source", name).write_text(name)
    return tmp_path


def stage(name: str) -> list[str]:
    """A stage that copies one file, as a job of a workflow runs it."""
    digest = sha256(name.encode()).hexdigest()
    where = ["--source", "local", "--location", "source", "--path", name, "--sha256", digest]
    return ["--code", stage_digest("fetch"), "fetch", *where, "--output", f"results/s/{name}"]


def planned(*names: str) -> None:
    """What the Snakefile does when a workflow starts."""
    Path(".ledger").mkdir(exist_ok=True)
    command = shlex.join(["kvstages", "several", *together(map(stage, names))])
    ledger.write_plan(plan(main, [([f"results/s/{name}" for name in names], f"{command} 2> log")]), {"s": {}})


def several(*names: str) -> Result:
    return CliRunner().invoke(main, ["several", *together(map(stage, names))])


def writings() -> dict[str, tuple[int, int]]:
    """What tells one writing of a file from another."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in Path("results/s").iterdir()}


def left_aside() -> list[Path]:
    """Files that are kept for a job; it has ended, so there should be none."""
    return [path for path in finished.FOLDER.rglob("*") if path.is_file()]


def test_words_are_taken_apart_as_they_were_put_together() -> None:
    assert lines(together([["a", "--x", 1], ["b"]])) == [["a", "--x", "1"], ["b"]]


def test_each_stage_writes_what_it_would_write_by_itself(working: Path) -> None:
    result = CliRunner().invoke(main, ["several", *together(stage(name)[2:] for name in NAMES)])
    assert (result.exit_code, result.output) == (0, "")
    assert {path.name: path.read_text() for path in Path("results/s").iterdir()} == {name: name for name in NAMES}


def test_the_plan_knows_which_stage_of_a_job_makes_which_file(working: Path) -> None:
    planned(*NAMES)
    found = ledger.read_plan()
    assert {name: record["arguments"]["--path"] for name, record in found.items()} == {
        f"results/s/{name}": name for name in NAMES
    }


def test_a_stage_may_read_what_another_of_its_job_has_made(working: Path) -> None:
    """The first that names a file makes it."""
    where = ["--model", "model.safetensors", "--tokens", "8", "--sensitivity", "scores.csv"]
    first = ["--allocator", "greedy", "--budget", "0.1", "--output", "results/s/a.json", "--steps", "results/s/a.csv"]
    second = ["--allocator", "exact", "--bytes-of", "results/s/a.json", "--output", "results/s/b.json"]
    stages = together(["allocate", "--policy", "x", *where, *words] for words in (first, [*second, "--steps", "b.csv"]))
    paths = ["results/s/a.json", "results/s/a.csv", "results/s/b.json"]
    found = plan(main, [(paths, shlex.join(["kvstages", "several", *stages]))])
    assert {path: found[path]["arguments"]["--allocator"] for path in paths} == {
        "results/s/a.json": "greedy", "results/s/a.csv": "greedy", "results/s/b.json": "exact",
    }  # fmt: skip


def test_what_is_current_is_passed_over_and_what_is_not_is_made(working: Path) -> None:
    planned(*NAMES)
    assert several(*NAMES).exit_code == 0
    before = writings()
    assert several(*NAMES).exit_code == 0 and writings() == before
    Path("results/s/a").unlink()
    Path("results/s/b").write_text("damaged")
    assert several(*NAMES).exit_code == 0
    after = writings()
    assert after["c"] == before["c"] and after["b"] != before["b"]
    assert [Path("results/s", name).read_text() for name in NAMES] == list(NAMES)


def test_a_workflow_that_was_told_to_makes_everything_again(working: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(*NAMES)
    several(*NAMES)
    before = writings()
    monkeypatch.setenv(AGAIN, "1")
    assert several(*NAMES).exit_code == 0
    assert not set(writings().values()) & set(before.values())


def test_what_a_failed_job_had_finished_is_not_made_again(working: Path) -> None:
    """Snakemake deletes the outputs of a job that fails."""
    planned(*NAMES)
    Path("source/b").unlink()
    result = several(*NAMES)
    assert result.exit_code == 1 and result.output == "Error: source/b: no such file\n"
    made = writings()
    assert set(made) == {"a"}
    Path("results/s/a").unlink()
    Path("source/b").write_text("b")
    Path("source/a").unlink()  # it could not be made again
    assert several(*NAMES).exit_code == 0
    assert writings()["a"] == made["a"]
    assert not left_aside()


def test_other_versions_of_packages_make_files_again(working: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(*NAMES)
    several(*NAMES)
    before = writings()
    monkeypatch.setattr("kvstages.provenance.code.stage_packages", lambda *names: {"python": "0"})
    assert several(*NAMES).exit_code == 0
    assert not set(writings().values()) & set(before.values())


def test_jobs_that_end_at_once_do_not_remove_each_others_folders(working: Path) -> None:
    """Each puts a file aside and forgets it, in the same folder, which is empty again and again."""

    def job(name: str) -> None:
        for _ in range(300):
            finished.put_aside([Path("source", name)])
            assert finished.aside(Path("source", name)).read_text() == name
            finished.forget([Path("source", name)])

    with ThreadPoolExecutor(len(NAMES)) as jobs:
        list(jobs.map(job, NAMES))
    assert not left_aside()


def test_a_file_that_cannot_be_put_aside_is_said(working: Path) -> None:
    Path(".ledger").mkdir()
    finished.FOLDER.write_text("no folder")
    with pytest.raises(OSError, match="finished"):
        finished.put_aside([Path("source/a")])
    finished.FOLDER.unlink()
    with pytest.raises(FileNotFoundError, match="source/none"):
        finished.put_aside([Path("source/none")])
