"""Kills, damage, full disks and bad hubs: afterwards a plain rerun gives the right SHA256SUMS, or a clear error.

Never may a wrong result count as finished. A few quick cases run by default; the long ones (`make faults`) are marked.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from conftest import AS_ANY_USER, REVISION, Project, whole_study_of
from hub import hub

from kvstages.files.read import read_json
from kvstages.provenance.verify import verify

RESULTS = Path("results", "small")
SUMS = RESULTS / "SHA256SUMS"
SENSITIVITY = RESULTS / "scores" / "measured-float32.csv"
POLICY = "results/small/policies/greedy-0.5/policy.json"
SWEEP = RESULTS / "sweep" / "float32" / "layer-00.csv"
MADE = "changed after it was made (sha256 is "


def start(project: Project, *arguments: str, before: Sequence[str] = ()) -> subprocess.Popen:
    """The workflow in a process group of its own, not waited for; ``before`` is a command that runs it."""
    return subprocess.Popen(
        [*before, *project.command(*arguments)],
        cwd=project.folder,
        env=project.environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to the workflow and every job of it."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def right(project: Project, undisturbed: Project) -> None:
    """The same checksums as the run that nothing happened to, and every file is what they say."""
    assert (project.folder / SUMS).read_bytes() == (undisturbed.folder / SUMS).read_bytes()
    assert verify(project.folder / RESULTS)[0] == []


def flip(path: Path, keep_time: bool) -> None:
    """Change one byte in the middle; with the old times if asked to, as a bad disk does."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def copy(finished: Project, tmp_path: Path) -> Project:
    """The finished study elsewhere, to be disturbed."""
    return finished.copy(tmp_path / "copy")


def repair(project: Project, path: Path, *targets: str) -> None:
    """What the error says: delete the file and run again."""
    path.unlink()
    project.run(*targets, "--cores", "2", "--rerun-incomplete")


def test_a_damaged_table_is_refused_each_time_until_it_is_deleted(finished: Project, copy: Project) -> None:
    """Snakemake alone would compute everything that follows from the damaged table, and call it finished."""
    table = copy.folder / SENSITIVITY
    flip(table, keep_time=False)
    for _ in range(2):
        output = copy.run(POLICY, status=1)
        assert f"{SENSITIVITY}: {MADE}" in output and "delete it and run again" in output
        assert "Nothing to be done" not in output
    repair(copy, table, POLICY)
    right(copy, finished)


def test_damage_that_keeps_size_and_time_gets_no_new_checksums(finished: Project, copy: Project) -> None:
    """Snakemake sees nothing; the last stage and `kvstages verify` do."""
    picture = copy.folder / RESULTS / "figures" / "allocation.png"
    flip(picture, keep_time=True)
    assert "Nothing to be done" in copy.run()
    assert [line.split(": ")[1].split()[0] for line in verify(copy.folder / RESULTS)[0]] == ["differs"]
    (copy.folder / SUMS).unlink()
    assert f"results/small/figures/allocation.png: {MADE}" in copy.run(status=1)
    assert not (copy.folder / SUMS).exists()
    repair(copy, picture)
    right(copy, finished)


def test_an_old_input_put_back_with_its_old_time_is_noticed(copy: Project) -> None:
    """A result was made of a table that is no longer there; times and checksums of files say nothing about it."""
    shard = copy.folder / SWEEP
    record = copy.folder / ".ledger" / f"{SENSITIVITY}.json"
    content = json.loads(record.read_text())
    content["inputs"][str(SWEEP)] = "0" * 64
    record.write_text(json.dumps(content))
    (copy.folder / SUMS).unlink()
    message = f"{SENSITIVITY}: was made of another {SWEEP} than the one there is"
    assert message in copy.run(status=1)
    assert shard.exists() and not (copy.folder / SUMS).exists()


def test_a_failed_stage_in_the_middle_is_not_forgotten(copy: Project) -> None:
    """A rerun that fails in the middle leaves the old last files; `rule all` asks for every file, so it goes on."""
    model = copy.folder / "resources" / "small" / "model.safetensors"
    flip(model, keep_time=False)
    first = copy.run(status=1)
    second = copy.run(status=1)
    for output in (first, second):
        assert f"resources/small/model.safetensors: {MADE}" in output
        assert "Nothing to be done" not in output


def test_a_second_workflow_in_the_same_folder_is_refused(project: Project) -> None:
    target = "resources/small/shard/held-out.bin"
    process = start(project, target)
    locks = project.folder / ".snakemake" / "locks"
    deadline = time.monotonic() + 120
    # Snakemake locks inputs first, then outputs, one line each, and holds the folder once the last line is there.
    while not any(path.read_text().endswith("\n") for path in locks.glob("*.output.lock")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # The first one stands still, jobs and all, until the second has been refused, however fast or slow either is.
    os.killpg(process.pid, signal.SIGSTOP)
    try:
        # Without the option Snakemake may first complain of the file that the other one is just making.
        output = project.run(target, "--rerun-incomplete", status=1)
    finally:
        os.killpg(process.pid, signal.SIGCONT)
    assert "cannot be locked" in output and "no other Snakemake process" in output
    first, _ = process.communicate(timeout=300)
    assert process.returncode == 0, first
    assert "Nothing to be done" in project.run(target)


# The long ones.


def topic(rule: str) -> str:
    """The folder of a rule's logs: a rule that is for one study has the study's name behind it."""
    return rule.partition("_small")[0]


def log_times(project: Project) -> dict[Path, int]:
    """When each job's log was written last, by its path below logs."""
    times = {}
    for path in (project.folder / "logs").rglob("*.log"):
        with suppress(FileNotFoundError):  # Snakemake removes it before its job begins
            times[path.relative_to(project.folder / "logs")] = path.stat().st_mtime_ns
    return times


def killed_in(project: Project, rules: set[str], wait: float) -> str | None:
    """Start the workflow, kill it ``wait`` seconds after a job of one of the rules began; which, None if none did."""
    before = log_times(project)
    process = start(project, "--cores", "2", "--rerun-incomplete")
    while process.poll() is None:
        for path, written in log_times(project).items():
            rule = path.parts[0]
            if rule in rules and before.get(path) != written:
                time.sleep(wait)
                kill(process)
                # The table of times comes after the checksums, and is in none of them.
                assert not (project.folder / SUMS).exists() or rule in ("write_manifest", "tabulate_time")
                project.run("--unlock")
                return rule
        time.sleep(0.005)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return None


@pytest.mark.faults
def test_kills_at_every_stage(finished: Project, tmp_path: Path) -> None:
    """SIGKILL to everything, at a random moment of the first job of each rule; then unlock and go on."""
    project = Project(tmp_path / "killed", finished.environment)
    shutil.copytree(finished.folder / "config", project.folder / "config")
    shutil.copytree(finished.folder / "resources" / "bundled", project.folder / "resources" / "bundled")
    left, chance, kills = set(map(topic, project.jobs())), random.Random(11), 0
    while (rule := killed_in(project, left, chance.uniform(0, 1.5))) is not None:
        left.remove(rule)
        kills += 1
    # Short jobs may have come and gone while another one's kill was waited for: once more, without their results.
    outputs = read_json(project.folder / RESULTS / "manifest.json")["outputs"]
    for missed in sorted(left):
        for path, entry in outputs.items():
            if topic(entry["rule"]) == missed:
                (project.folder / path).unlink()
        (project.folder / SUMS).unlink(missing_ok=True)
        assert killed_in(project, {missed}, chance.uniform(0, 0.2)) == missed
        kills += 1
    # And between the start of Snakemake and its first job, and at moments that nothing marks.
    for target in sorted((project.folder / RESULTS).glob("sweep/*/*.csv")):
        target.unlink(missing_ok=True)  # Snakemake removes what it is about to make again
        process = start(project, "--cores", "2", "--rerun-incomplete")
        time.sleep(chance.uniform(0.5, 6))
        if process.poll() is None:
            kill(process)
            kills += 1
            project.run("--unlock")
        else:
            process.stdout.close()
    project.run("--cores", "2", "--rerun-incomplete")
    print(f"{kills} kills")
    assert kills >= 20
    right(project, finished)


DAMAGES = ["flipped", "flipped, old time", "truncated", "empty"]
VICTIMS = [
    "resources/small/shard/held-out.bin",
    "resources/small/model.safetensors",
    "results/small/windows.safetensors",
    "results/small/reference/validation.safetensors",
    str(SWEEP),
    str(SENSITIVITY),
    "results/small/policies/int8/policy.json",
    "results/small/policies/greedy-0.5/steps.csv",
    "results/small/policies/int4/evaluation.json",
    "results/small/policies/int4/positions.csv",
    "results/small/adaptation/noise/seed-1337/model.safetensors",
    "results/small/adaptation/noise/seed-1337/curve.csv",
    "results/small/figures/sensitivity.svg",
    "results/small/tables/results.html",
]


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how.startswith("flipped"):
        flip(path, keep_time="old time" in how)
    else:
        path.write_bytes(data[: len(data) // 2] if how == "truncated" else b"")


@pytest.mark.faults
@pytest.mark.parametrize(("victim", "how"), [(victim, DAMAGES[number % 4]) for number, victim in enumerate(VICTIMS)])
def test_damage_to_any_intermediate_file(finished: Project, copy: Project, victim: str, how: str) -> None:
    """The checksums are asked for again: they are right, or there are none and the error names the file."""
    damage(copy.folder / victim, how)
    (copy.folder / SUMS).unlink()
    output = copy.run("--cores", "2", status=1)
    assert f"{victim}: {MADE}" in output
    assert not (copy.folder / SUMS).exists()
    repair(copy, copy.folder / victim)
    right(copy, finished)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of ``size`` at ``folder``."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.faults
@pytest.mark.parametrize("size", ["16k", "200k", "600k"])
def test_a_full_disk_is_one_line_and_room_is_all_that_it_takes(finished: Project, tmp_path: Path, size: str) -> None:
    project = Project(tmp_path / "project", finished.environment)
    shutil.copytree(finished.folder / "config", project.folder / "config")
    shutil.copytree(finished.folder / "resources" / "bundled", project.folder / "resources" / "bundled")
    with small_disk(project.folder / "results", size) as disk:
        output = project.run("--cores", "2", status=1)
        assert "No space left on device" in output and "Error: " in output
        assert not (project.folder / SUMS).exists()
        assert not list(disk.rglob("*.partial"))
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        project.run("--cores", "2", "--rerun-incomplete")
        right(project, finished)


@pytest.mark.faults
def test_files_that_cannot_grow_are_one_line(finished: Project, copy: Project) -> None:
    """The same without a mount: the kernel's limit on the size of a file, for the jobs alone."""
    shutil.rmtree(copy.folder / RESULTS / "reference")
    # Without the probe of imports, which writes files, too.
    environment = {name: value for name, value in copy.environment.items() if name not in ("PYTHONPATH", "PROBED")}
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "--"]
    done = subprocess.run(
        [*limited, sys.executable, "-m", "kvstages", "reference", "--model", "resources/small/model.safetensors",
         "--windows", "results/small/windows.safetensors", "--window", "validation", "--device", "cpu",
         "--memory-mb", "1024", "--output", "results/small/reference/validation.safetensors"],
        cwd=copy.folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1 and "File too large" in done.stderr
    assert not list((copy.folder / RESULTS / "reference").glob("*"))
    copy.run("--cores", "2")
    right(copy, finished)


@pytest.mark.faults
@pytest.mark.parametrize("name", ["results/small/windows.safetensors", str(SENSITIVITY)])
def test_a_file_that_may_not_be_read_is_one_line(finished: Project, copy: Project, name: str) -> None:
    """And goes on once it may be read again."""
    (copy.folder / name).chmod(0o200)
    shutil.rmtree(copy.folder / RESULTS / "policies")
    for _ in range(2):
        process = start(copy, "--keep-going", before=AS_ANY_USER)
        output, _ = process.communicate()
        assert process.returncode == 1 and "Permission denied" in output and name in output, output
        assert "Nothing to be done" not in output
    if (copy.folder / name).exists():
        (copy.folder / name).chmod(0o644)
    process = start(copy, "--cores", "2", "--rerun-incomplete", before=AS_ANY_USER)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    right(copy, finished)


@pytest.mark.faults
def test_a_hub_that_drops_and_one_that_lies(
    finished: Project, tmp_path: Path, artifacts: tuple[Path, dict[str, str]]
) -> None:
    """A connection that ends in mid-download, then wrong bytes of the right length; then the hub is well again."""
    folder, paths = artifacts
    files = {path: (folder / path).read_bytes() for path in paths.values()}
    repositories = {"owner/small": {REVISION: files}}
    source = {"source": "hub", "location": "owner/small", "revision": REVISION}
    project = Project(tmp_path / "project", {**finished.environment, "HF_HOME": str(tmp_path / "home")})
    project.configure(whole_study_of(source, folder, paths))

    def fetched() -> list[Path]:
        return [path for path in (project.folder / "resources").rglob("*") if path.is_file()]

    target = "resources/small/model.safetensors"
    with hub(repositories, cut=0.5) as address:
        project.environment["HF_ENDPOINT"] = address
        output = project.run(target, status=1)
        assert "is not available" in output and not fetched()
    with hub(repositories, alter=lambda path, body: body[:-1] + bytes([body[-1] ^ 1])) as address:
        project.environment["HF_ENDPOINT"] = address
        output = project.run(target, status=1)
        assert "sha256 is" in output and not fetched()
    with hub(repositories) as address:
        project.environment["HF_ENDPOINT"] = address
        project.run("--cores", "2")
    assert (project.folder / SUMS).read_bytes() == (finished.folder / SUMS).read_bytes()


@pytest.mark.faults
def test_two_workflows_at_once_many_times(finished: Project, tmp_path: Path) -> None:
    """Whoever comes second is refused, at whatever moment; the first one's results are right."""
    project = Project(tmp_path / "twice", finished.environment)
    shutil.copytree(finished.folder / "config", project.folder / "config")
    shutil.copytree(finished.folder / "resources" / "bundled", project.folder / "resources" / "bundled")
    pair = [start(project, "--cores", "1"), start(project, "--cores", "1")]
    outputs = [process.communicate()[0] for process in pair]
    statuses = [process.returncode for process in pair]
    assert 0 in statuses or all("cannot be locked" in output for output in outputs), outputs
    for output, status in zip(outputs, statuses, strict=True):
        assert status == 0 or "cannot be locked" in output, output
    project.run("--cores", "2", "--rerun-incomplete")
    right(project, finished)
