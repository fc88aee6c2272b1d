"""Where the time of a study's jobs went, from the benchmark files that Snakemake writes of each job."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.tables.notes import page_title
from kvstages.tables.page import Column, Section, count, decimal, page

if TYPE_CHECKING:
    import pandas as pd

# Columns of Snakemake's files: seconds by the clock, seconds of CPU, largest resident memory in MB.
MEASURED = {"seconds": "s", "cpu_seconds": "cpu_time", "memory_mb": "max_rss"}
NOTES = [
    "Each job as it last ran: one that was not run again counts with its time of then. Seconds are by the clock; those "
    "of jobs that ran at the same time add up.",
    "Starting the interpreter and importing packages is part of each job. A very short job ends before its CPU time "
    "and memory are sampled; these count as nothing.",
]


def benchmark_files(folder: Path, study: str) -> dict[Path, str]:
    """The benchmark files of a study in ``folder``, {rule}/{study}.tsv and {rule}/{study}/..., each with its rule."""
    paths = [*folder.glob(f"*/{study}.tsv"), *folder.glob(f"*/{study}/**/*.tsv")]
    return {path: path.relative_to(folder).parts[0] for path in sorted(paths)}


def read_benchmark(path: Path) -> dict[str, float]:
    """One job's seconds, CPU seconds and memory; 0 for what was not sampled. ValueError names a file that is none."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    try:
        return {name: number(rows[-1][column]) for name, column in MEASURED.items()}
    except (IndexError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: not a benchmark file of Snakemake") from None


def number(text: str) -> float:
    """A number, or 0 where nothing was measured."""
    return 0.0 if text in ("NA", "-") else float(text)


def time_table(folder: Path, study: str, title: str | None = None) -> tuple[pd.DataFrame, str]:
    """(table, page): jobs, seconds, CPU seconds and largest memory of each rule, most time first, and of all.

    ValueError where there is no benchmark file of the study.
    """
    import pandas as pd

    jobs = [{"rule": rule, **read_benchmark(path)} for path, rule in benchmark_files(folder, study).items()]
    if not jobs:
        raise ValueError(f"{folder}: no benchmark file of the study {study}")
    rules = sorted({job["rule"] for job in jobs})
    rows = [summed(rule, (job for job in jobs if job["rule"] == rule)) for rule in rules]
    rows.sort(key=lambda row: (-row["seconds"], row["rule"]))
    table = pd.DataFrame([*rows, summed("all", jobs)])
    columns = [
        Column("rule", "rule", str),
        Column("jobs", "jobs", count),
        Column("seconds", "seconds", decimal(1)),
        Column("seconds of CPU", "cpu_seconds", decimal(1)),
        Column("largest memory (MB)", "memory_mb", decimal(0)),
    ]
    section = Section("Jobs by rule", columns, table, ("rule", "all"))
    return table, page(page_title(title, "time and memory of the jobs"), [section], NOTES)


def summed(rule: str, jobs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A row: the sums of times, and the largest memory, of some jobs."""
    jobs = list(jobs)
    return {
        "rule": rule,
        "jobs": len(jobs),
        **{name: sum(job[name] for job in jobs) for name in ("seconds", "cpu_seconds")},
        "memory_mb": max(job["memory_mb"] for job in jobs),
    }
