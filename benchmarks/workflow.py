"""Where the processor time of a whole study goes: Snakemake, starting processes, and what the stages do.

The default study is made by Snakemake in a temporary folder, one job after the other. Every process of Python notes
how much of its time passed before it could work: until the interpreter stood, and in import statements.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstages.provenance.environment import processor

REPOSITORY = Path(__file__).parents[1]
# Python imports a module of this name when it starts. Imports inside of an import are part of it.
NOTES = """
import atexit, builtins, json, os, sys, time

spent, inside, original = time.process_time(), False, builtins.__import__

def counted(*given, **named):
    global spent, inside
    if inside:
        return original(*given, **named)
    inside, before = True, time.process_time()
    try:
        return original(*given, **named)
    finally:
        inside = False
        spent += time.process_time() - before

def note():
    times = os.times()
    found = {"words": sys.orig_argv, "start": spent, "all": times.user + times.system}
    with open(os.path.join(os.environ["KVSTAGES_NOTES"], str(os.getpid())), "w") as file:
        json.dump(found, file)

builtins.__import__ = counted
atexit.register(note)
"""


def rows() -> Iterator[dict[str, Any]]:
    """A row for each part: its processes, its processor time, and that over the whole's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("config", "resources/bundled"):
            shutil.copytree(REPOSITORY / part, folder / part)
        (folder / "notes").mkdir()
        (folder / "start").mkdir()
        (folder / "start" / "sitecustomize.py").write_text(NOTES, encoding="utf-8")
        environment = {
            **os.environ,
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": str(folder / "start"),
            "KVSTAGES_NOTES": str(folder / "notes"),
        }
        command = [sys.executable, "-m", "snakemake", "--cores", "1", "--resources", "gpu=1"]
        command += ["--snakefile", str(REPOSITORY / "Snakefile"), "--directory", name]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        notes = [json.loads(path.read_text()) for path in (folder / "notes").iterdir()]
    whole = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    stages = [note for note in notes if "kvstages" in note["words"]]
    others = sum(note["all"] for note in notes if note not in stages)
    start, all_of_stages = (sum(note[key] for note in stages) for key in ("start", "all"))
    parts = {
        "stages, at work": (len(stages), all_of_stages - start),
        "stages, starting": (len(stages), start),
        "Snakemake": (len(notes) - len(stages), others),
        "shells": (None, whole - others - all_of_stages),
        "all": (None, whole),
    }
    for part, (processes, seconds) in parts.items():
        row = {"part": part, "processes": processes, "processor_seconds": seconds, "share": seconds / whole}
        print(*row.values(), flush=True)
        yield {**row, "processor": processor()}
