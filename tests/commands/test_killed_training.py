"""A training that is killed half way: nothing of it is left, and the next run gives the bytes of an undisturbed one."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from models import random_model, random_tokens

from kvstages.cli import main
from kvstages.commands.arguments import together
from kvstages.commands.planning import plan
from kvstages.commands.several import AGAIN
from kvstages.files import ledger
from kvstages.files.atomic import write_tensors
from kvstages.models.checkpoints import save_model
from kvstages.provenance.code import stage_digest

# The same command, which is killed after the fifth step of all its trainings.
KILLED = """
import os, signal, sys
from kvstages.cli import main
from kvstages.measure import adaptation

taken = 0

class Killed(adaptation.AdamW):
    def step(self):
        global taken
        super().step()
        taken += 1
        if taken == 5:
            os.kill(os.getpid(), signal.SIGKILL)

adaptation.AdamW = Killed
main(sys.argv[1:])
"""
ARMS = {"noise": ["--noise", "int4"], "straight": ["--straight-through", "int2", "--order", "shuffled"]}
FILES = ("model.safetensors", "curve.csv", "training.json")


def job() -> list[str]:
    """Two arms of three steps each in one process, as a workflow runs them."""
    found = []
    for arm, cache in ARMS.items():
        files = [f"results/s/{arm}/{name}" for name in FILES]
        words = ["--code", stage_digest("adapt"), "adapt", "--model", "model.safetensors", "--arm", arm, *cache]
        words += ["--windows", "windows.safetensors", "--device", "cpu", "--seed", "3", "--steps", "3", "--batch", "2"]
        words += ["--learning-rate", "1e-3", "--beta", "1"]
        found.append([*words, "--output", files[0], "--curve", files[1], "--record", files[2]])
    return ["several", *together(found)]


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory of a workflow that has just been started."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    model = random_model()
    save_model(Path("model.safetensors"), model.config, model.state_dict())
    write_tensors(Path("windows.safetensors"), {"adaptation": random_tokens(4)})
    Path(".ledger").mkdir()
    outputs = [f"results/s/{arm}/{name}" for arm in ARMS for name in FILES]
    ledger.write_plan(plan(main, [(outputs, shlex.join(["kvstages", *job()]) + " 2> log")]), {"s": {}})


def made() -> dict[str, bytes]:
    return {path.as_posix(): path.read_bytes() for path in sorted(Path("results").rglob("*")) if path.is_file()}


def test_a_killed_training_starts_again_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGAIN, raising=False)
    prepare(tmp_path / "undisturbed", monkeypatch)
    assert CliRunner().invoke(main, job()).exit_code == 0
    expected = made()

    prepare(tmp_path / "killed", monkeypatch)
    done = subprocess.run([sys.executable, "-c", KILLED, *job()], check=False)
    assert done.returncode == -signal.SIGKILL
    # The first arm is finished, of the second there is nothing, not even in part.
    assert set(made()) == {f"results/s/noise/{name}" for name in FILES}
    written = {name: Path(name).stat().st_ino for name in made()}
    for name in written:
        Path(name).unlink()  # as Snakemake does of a job that failed
    assert CliRunner().invoke(main, job()).exit_code == 0
    assert made() == expected
    assert {name: Path(name).stat().st_ino for name in written} == written
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".") and path.is_file()]
    assert not [path for path in Path(".ledger/finished").rglob("*") if path.is_file()]
