"""A study with a comparison finishes on the smallest models that can be measured."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import conftest
import pytest
from click.testing import CliRunner
from conftest import COMPARISON, SHAPE, Project, bundle, study_of

from kvstages.cli import main
from kvstages.provenance.tolerances import kinds

# One unit whose KL is always 0; units whose precisions save no bytes and change nothing.
MODELS = {
    "one head in one layer, vocabulary 1": {"vocab_size": 1, "embedding_dim": 2, "num_layers": 1, "num_heads": 1},
    "head width 1": {"embedding_dim": 2, "num_layers": 1, "num_heads": 2},
}


def commands(project: Project) -> list[list[str]]:
    """Every stage that the workflow would run, in its order, as arguments of the command line."""
    lines = [line.partition("kvstages ") for line in project.run("--dry-run", "--printshellcmds").splitlines()]
    words = [shlex.split(words.partition(" 2> ")[0]) for before, _, words in lines if before in ("", "Shell command: ")]
    return [stage for stage in words if stage and "time" not in stage]  # the times are Snakemake's


@pytest.mark.parametrize("name", MODELS)
def test_every_stage_of_a_comparison_finishes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, without pictures' bytes and with few resampled blocks: what may stop a stage is its numbers."""

    def drawn(figure: Any) -> bytes:
        figure.draw_without_rendering()
        return b"drawn"

    monkeypatch.setattr("kvstages.figures.style.png", drawn)
    monkeypatch.setattr("kvstages.figures.style.svg", lambda figure: b"drawn")
    monkeypatch.setattr("kvstages.stats.bootstrap.RESAMPLES", 100)
    monkeypatch.setattr(conftest, "SHAPE", SHAPE | MODELS[name])
    artifacts = tmp_path / "artifacts"
    paths = bundle(artifacts)
    study = study_of({"source": "local", "location": str(artifacts)}, artifacts, paths)
    project = Project(tmp_path / "project")
    project.configure({**study, "layers": MODELS[name]["num_layers"], "comparison": COMPARISON})
    stages = commands(project)
    assert len(stages) > 20
    monkeypatch.chdir(project.folder)
    for stage in stages:
        result = CliRunner().invoke(main, stage)
        assert result.exit_code == 0, f"{shlex.join(stage)}\n{result.output}{result.exception!r}"
    results = project.folder / "results" / "small"
    assert (results / "SHA256SUMS").exists()
    page = (results / "tables" / "gradients.html").read_text()
    assert "There is nothing to show: too few units or policies" in page
    assert (results / "tables" / "gradients.csv").read_text().count("\n") == 1
    # So that `compare` knows what each number is: only these hold none.
    tables = [path for path in sorted(results.rglob("*")) if path.suffix in (".csv", ".json")]
    names = [path.relative_to(results).as_posix() for path in tables]
    assert {name for name in names if not kinds(name)} <= {"windows.csv", "figures/allocation.csv", "manifest.json"}
