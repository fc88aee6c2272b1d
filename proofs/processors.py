"""make processors: the numeric tests and the small study as if on several processors.

Environment variables make the libraries that multiply matrices take other instructions, and other counts of threads
divide the sums otherwise. For each, the tests that measure are run, and the small study of the tests from nothing;
its results are compared with those of the first setting. Writes a table, proofs/results/processors.md: which results
are the same bytes, and which the same numbers within the tolerances of ``kvstages compare``. Exit status 1 where a test
fails or a number lies outside.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))

from conftest import COMPARISON, SHARED, Project, bundle, study_of  # noqa: E402

from kvstages.files.atomic import write_text  # noqa: E402
from kvstages.provenance.environment import processor  # noqa: E402
from kvstages.provenance.reproduction import compare  # noqa: E402

TABLE = REPOSITORY / "proofs" / "results" / "processors.md"

# What each is said to be, its environment, and its threads. The first is the one that the others are compared with.
SETTINGS = {
    "this processor": ({}, 1),
    "again": ({}, 1),
    "two threads": ({}, 2),
    "MKL_ENABLE_INSTRUCTIONS=AVX2": ({"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, 1),
    "MKL_CBWR=COMPATIBLE": ({"MKL_CBWR": "COMPATIBLE"}, 1),
    "ATEN_CPU_CAPABILITY=avx2": ({"ATEN_CPU_CAPABILITY": "avx2"}, 1),
    "ATEN_CPU_CAPABILITY=default": ({"ATEN_CPU_CAPABILITY": "default"}, 1),
    "ONEDNN_MAX_CPU_ISA=AVX2": ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, 1),
}
# The rooms whose tests run a decoder or a cache.
MEASURING = ("analysis", "cache", "commands", "measure", "models", "policies")


def failing_tests(environment: dict[str, str], threads: int) -> int | str:
    """How many of the tests that measure fail."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{room}" for room in MEASURING)],
        cwd=REPOSITORY,
        env={**os.environ, **environment, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print(done.stdout, flush=True)
    failed = sum(line.startswith("FAILED") for line in done.stdout.splitlines())
    return failed if done.returncode in (0, 1) else f"pytest ended with {done.returncode}"


def run_study(folder: Path, artifacts: Path, paths: dict[str, str], environment: dict[str, str], threads: int) -> Path:
    """Results of the small study, run from nothing in ``folder``."""
    project = Project(folder, {**environment, "OMP_NUM_THREADS": str(threads)})
    # Processes that start warm have their libraries already, with the instructions that those chose.
    project.python = Path(sys.executable).parent
    study = study_of({"source": "local", "location": str(artifacts)}, artifacts, paths)
    project.configure({**study, "comparison": COMPARISON}, {**SHARED, "threads": threads})
    project.run("--cores", "2")
    return folder / "results" / "small"


def main() -> int:
    """Run every setting and print its line of the table as it is done."""
    wrong, table = False, []

    def row(*cells: object) -> None:
        table.append(f"| {' | '.join(map(str, cells))} |")
        print(table[-1], flush=True)

    with tempfile.TemporaryDirectory() as work:
        artifacts = Path(work) / "artifacts"
        paths = bundle(artifacts)
        first: Path | None = None
        row("as if", "tests that fail", "same bytes", "same numbers", "by choice", "outside")
        row(*["---"] * 6)
        for number, (name, (environment, threads)) in enumerate(SETTINGS.items()):
            failed = failing_tests(environment, threads)
            results = run_study(Path(work) / str(number), artifacts, paths, environment, threads)
            first = first or results
            found = compare(first, results)
            row(name, failed, *map(len, (found.identical, found.within, found.choices, found.outside)))
            for line in (*found.choices, *found.outside):
                print(f"    {line}", flush=True)
            wrong = wrong or failed != 0 or bool(found.outside)
    about = (
        f"{processor()}, PyTorch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}). Files of the small "
        "study of the tests, compared with those of the first line."
    )
    write_text(TABLE, "\n".join([about, "", *table, ""]))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
