"""Programs that start warm do what Python does with the same words, and end when their caller is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, session_python

PROGRAM = """
import os, sys, time

print(os.getcwd(), os.environ["TOLD"], sys.argv[1:], sys.path[0])
print("said", file=sys.stderr)
if "wait" in sys.argv:
    open("waits", "w").write(str(os.getpid()))
    time.sleep(60)
sys.exit({"none": None, "text": "in words"}.get(sys.argv[1], 3))
"""


@pytest.fixture
def called(tmp_path: Path) -> dict:
    """How a program of our name is called in a folder that holds it."""
    (tmp_path / "kvstages.py").write_text(PROGRAM)
    return {"cwd": tmp_path, "env": {**os.environ, "TOLD": "so", "PYTHONPATH": ""}, "text": True}


@pytest.mark.parametrize("word", ["none", "text", "number"])
def test_words_folder_environment_output_and_status_are_those_of_python(called: dict, word: str) -> None:
    warm, cold = (
        subprocess.run([python, "-m", "kvstages", word, "x y"], capture_output=True, **called)
        for python in (session_python() / "python", sys.executable)
    )
    assert (warm.returncode, warm.stdout, warm.stderr) == (cold.returncode, cold.stdout, cold.stderr)
    assert warm.returncode == {"none": 0, "text": 1, "number": 3}[word]


def test_the_working_directory_is_not_looked_in_where_python_is_told_so(called: dict) -> None:
    called["env"]["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run([session_python() / "python", "-P", "-m", "kvstages", "x"], capture_output=True, **called)
    assert done.returncode == 2 and "No such command 'x'" in done.stderr


def test_a_program_ends_with_its_caller(called: dict, tmp_path: Path) -> None:
    caller = subprocess.Popen(
        [session_python() / "python", "-m", "kvstages", "wait"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        **called,
    )  # fmt: skip
    until = time.monotonic() + 30
    while not (tmp_path / "waits").exists() or not (tmp_path / "waits").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    program = int((tmp_path / "waits").read_text())
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    while Path("/proc", str(program)).exists():
        assert time.monotonic() < until
        time.sleep(0.01)
