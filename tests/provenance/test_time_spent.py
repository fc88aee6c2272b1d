"""The table of times: sums by rule, from the files that Snakemake writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstages.provenance.time_spent import time_table

HEADER = "s\th:m:s\tmax_rss\tmax_vms\tmax_uss\tmax_pss\tio_in\tio_out\tmean_load\tcpu_time\n"


def write(path: Path, seconds: float, memory: str, cpu: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEADER + f"{seconds}\t0:00:01\t{memory}\t0\t0\t0\t0\t0\t0\t{cpu}\n")


def test_jobs_are_summed_by_rule_and_other_studies_left_out(tmp_path: Path) -> None:
    write(tmp_path / "evaluate_policy" / "one" / "int8.tsv", 2.0, "300.5", "1.5")
    write(tmp_path / "evaluate_policy" / "one" / "int4.tsv", 3.0, "200", "2.0")
    write(tmp_path / "cut_windows" / "one.tsv", 0.5, "NA", "NA")
    write(tmp_path / "cut_windows" / "two.tsv", 9.0, "1", "1")
    write(tmp_path / "one" / "time.html", 9.0, "1", "1")
    table, page = time_table(tmp_path, "one", "Speeches")
    assert table.to_dict("records") == [
        {"rule": "evaluate_policy", "jobs": 2, "seconds": 5.0, "cpu_seconds": 3.5, "memory_mb": 300.5},
        {"rule": "cut_windows", "jobs": 1, "seconds": 0.5, "cpu_seconds": 0.0, "memory_mb": 0.0},
        {"rule": "all", "jobs": 3, "seconds": 5.5, "cpu_seconds": 3.5, "memory_mb": 300.5},
    ]
    assert "<title>Speeches: time and memory of the jobs</title>" in page


def test_a_study_without_times_and_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no benchmark file of the study one"):
        time_table(tmp_path, "one")
    (tmp_path / "rule").mkdir()
    (tmp_path / "rule" / "one.tsv").write_text("a\tb\n1\t2\n")
    with pytest.raises(ValueError, match=r"one\.tsv: not a benchmark file of Snakemake"):
        time_table(tmp_path, "one")
