"""Nothing stale or foreign is signed: results of other settings, other code or another stage than the workflow's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import REPOSITORY, Project, session_python

from kvstages.analysis.published import SHIPPED
from kvstages.cli import main
from kvstages.files import ledger

MADE_OTHERWISE = 'was made with --noise "int4", where the workflow says "int2"'
ADAPTED = "results/small/adaptation/noise/seed-1337"
MODEL = f"{ADAPTED}/model.safetensors"
MANIFEST = Path("results", "small", "manifest.json")


@pytest.fixture
def study(finished: Project, tmp_path: Path) -> Project:
    """A copy of the finished study."""
    return finished.copy(tmp_path / "study")


def edit(project: Project, precision: str) -> None:
    """Train with the noise of another quantizer, one that is measured."""
    path = project.folder / "config" / "studies" / "small.yaml"
    settings = json.loads(path.read_text())
    settings["adaptation"]["arms"]["noise"]["noise"] = precision
    project.configure(settings)


def refusal(project: Project, *arguments: str) -> str:
    """The one line in which a run is refused; nothing was signed by it."""
    signed = (project.folder / MANIFEST).read_bytes()
    output = project.run(*arguments, status=1)
    lines = [line for line in output.splitlines() if "run again" in line]
    assert len(lines) == 1 and "Traceback" not in output, output
    assert (project.folder / MANIFEST).read_bytes() == signed
    return lines[0]


def test_results_of_former_settings_are_not_signed_when_snakemake_forgot_them(study: Project) -> None:
    shutil.rmtree(study.folder / ".snakemake")
    edit(study, "int2")
    line = refusal(study)
    assert line.startswith(f"{ADAPTED}/curve.csv: {MADE_OTHERWISE} (and 2 more")
    # The list of such files is what the line says to remove; what follows is made again.
    subprocess.run(["xargs", "rm"], stdin=(study.folder / ".ledger" / "foreign").open(), cwd=study.folder, check=True)
    jobs = study.jobs()
    assert (jobs["adapt_models_small"], jobs["write_manifest"]) == (1, 1)


def test_touch_does_not_make_results_those_of_other_settings(study: Project) -> None:
    edit(study, "int2")
    assert f"curve.csv: {MADE_OTHERWISE}" in refusal(study, "--touch")


def test_touch_of_what_is_current_is_no_wrong(study: Project) -> None:
    for path in (study.folder / "results").rglob("windows.safetensors"):
        path.touch()
    study.run("--touch")
    assert study.jobs() == {}


def test_old_results_put_back_with_their_records_are_not_signed(finished: Project, study: Project) -> None:
    edit(study, "int2")
    study.run(MODEL)
    for name in ("model.safetensors", "curve.csv", "training.json"):
        for path in (f"{ADAPTED}/{name}", f".ledger/{ADAPTED}/{name}.json"):
            shutil.copyfile(finished.folder / path, study.folder / path)
    assert MADE_OTHERWISE in refusal(study)


def test_a_stage_by_hand_with_other_arguments_is_not_signed(study: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(study.folder)
    words = ["adapt", "--model", "resources/small/model.safetensors", "--windows", "results/small/windows.safetensors"]
    words += ["--noise", "int2", "--seed", "99", "--steps", "1", "--batch", "2", "--learning-rate", "1", "--beta", "1"]
    words += ["--output", MODEL, "--curve", f"{ADAPTED}/curve.csv", "--record", f"{ADAPTED}/training.json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert json.loads(Path(f".ledger/{MODEL}.json").read_text())["made"]["planned"] is False
    assert f"{ADAPTED}/curve.csv: was made with --" in refusal(study)


def test_a_stage_by_hand_as_the_workflow_would_run_it_is_signed_and_told(
    study: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(study.folder)
    made = ledger.recorded(Path("results/small/scores/measured-float32.csv"))["made"]
    files = [f"./results/../{path}" for path in made["arguments"]["SHARDS"]]
    output = ["--output", f"{study.folder}/results/small/scores/measured-float32.csv"]
    result = CliRunner().invoke(main, ["gather", *files, "--source", "measured-float32", *output])
    assert result.exit_code == 0, result.output
    study.run("results/small/manifest.json", "--forcerun", "write_manifest")
    outputs = json.loads(MANIFEST.read_text())["outputs"]
    by_hand = [path for path, output in outputs.items() if not output["made"]["planned"]]
    assert by_hand == ["results/small/scores/measured-float32.csv"]


def test_another_version_of_a_package_reruns_the_stages_that_import_it(finished: Project, tmp_path: Path) -> None:
    fake = tmp_path / "packages" / "matplotlib-99.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: matplotlib\nVersion: 99\n")
    paths = os.pathsep.join([str(fake.parent), finished.environment["PYTHONPATH"]])
    jobs = Project(finished.folder, {**finished.environment, "PYTHONPATH": paths}).jobs()
    assert jobs["draw_figures_small"] == 1
    assert not {"sweep_layers_small", "evaluate_policy", "adapt_models_small", "make_tables_small"} & set(jobs)


def test_jobs_run_the_package_of_the_snakefile(study: Project) -> None:
    """The working directory holds another clone, and modules that go by the names of libraries."""
    clone = study.folder / "kvstages"
    clone.mkdir()
    for path in (clone / "__init__.py", clone / "__main__.py", study.folder / "random.py", study.folder / "numpy.py"):
        path.write_text("raise SystemExit('the code of the working directory')")
    # As a user calls it: python -m would look for Snakemake's own modules in the working directory first.
    command = [str(Path(sys.executable).parent / "snakemake"), *study.command()[3:]]
    target = "results/small/scores/measured-float32.csv"
    done = subprocess.run(
        [*command, target, "--forcerun", "gather_sensitivity"],
        cwd=study.folder,
        env=study.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("digest", ["0" * 16, ""])
def test_a_stage_refuses_other_code_than_it_was_planned_with(
    digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["--code", digest, "gather", __file__, "--source", "s", "--output", "x.csv"])
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert result.output.startswith(f"Error: gather: the workflow was planned with the code {digest}, the code in ")
    assert not Path("x.csv").exists()


def test_a_job_without_a_ledger_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstages.provenance.code import stage_digest

    monkeypatch.chdir(tmp_path)
    words = ["--code", stage_digest("gather"), "gather", __file__, "--source", "s", "--output", "x.csv"]
    assert "run without --no-hooks" in CliRunner().invoke(main, words).output


def shown(project: Project) -> set[str]:
    """Paths of what the report shows."""
    output = project.run("--report", "report.html")
    assert "does not exist" not in output and output.count("Missing metadata") == 0, output
    page = (project.folder / "report.html").read_text()
    found, _ = json.JSONDecoder().raw_decode(page.partition('<script id="results">')[2].partition("=")[2].lstrip())
    return set(found)


def test_a_report_of_an_unfinished_study_shows_what_is_there(study: Project) -> None:
    (study.folder / "results" / "small" / "figures" / "frontier.svg").unlink()
    (study.folder / "results" / "small" / "manifest.json").unlink()
    found = shown(study)
    assert "results/small/figures/storage-kl.svg" in found and "results/small/tables/results.html" in found
    assert "results/small/figures/frontier.svg" not in found


def test_a_report_after_a_failed_run_leaves_out_what_is_of_former_settings(study: Project) -> None:
    """Another noise, whose training fails: all that follows from the adapted models is of the former one."""
    edit(study, "int2")
    (study.folder / MODEL).unlink()
    (study.folder / MODEL).mkdir()
    (study.folder / MODEL / "in the way").touch()
    study.run(status=1)
    found = shown(study)
    assert "results/small/figures/storage-kl.svg" in found
    assert not {"results/small/figures/adaptation.svg", "results/small/tables/adaptation.html"} & found


def test_a_report_shows_nothing_of_a_configuration_that_did_not_run(study: Project) -> None:
    edit(study, "int2")
    assert shown(study) == set()


def test_published_figures_of_a_folder_are_an_input(study: Project) -> None:
    """Listed in the manifest, and an edit makes the tables that show them again."""
    shutil.copytree(SHIPPED / "gpt2-nano", study.folder / "published")
    path = study.folder / "config" / "studies" / "small.yaml"
    study.configure({**json.loads(path.read_text()), "published": "published"})
    study.run()
    inputs = json.loads((study.folder / MANIFEST).read_text())["inputs"]
    edited = study.folder / "published" / "validation.json"
    assert inputs["published/validation.json"]["sha256"] == ledger.sha256(edited)
    assert study.jobs() == {}
    edited.write_text(edited.read_text() + "\n")
    jobs = study.jobs()
    assert jobs["make_tables_small"] == 1 and "evaluate_policy" not in jobs


def test_use_as_a_module_is_refused_in_one_line(project: Project) -> None:
    outer = project.folder / "Snakefile"
    text = f"module inner:\n    snakefile: {str(REPOSITORY / 'Snakefile')!r}\n\nuse rule * from inner as inner_*\n"
    outer.write_text(text)
    lines = Project(project.folder, project.environment, outer).run("--dry-run", status=1).splitlines()
    assert [line for line in lines if line.startswith("kvstages is not used as a module")]
    assert not any("Traceback" in line for line in lines)


def test_the_snakefile_runs_from_elsewhere(project: Project, tmp_path: Path) -> None:
    """``snakemake --snakefile PATH/Snakefile --directory FOLDER``, from a third folder that holds a kvstages.

    Snakemake is started as a user does; its jobs start warm, and look for modules where Python would.
    """
    (tmp_path / "third" / "kvstages").mkdir(parents=True)
    (tmp_path / "third" / "kvstages" / "__init__.py").write_text("raise SystemExit('the code of the third folder')")
    command = [str(Path(sys.executable).parent / "snakemake"), *project.command()[3:]]
    target = "results/small/windows.safetensors"
    done = subprocess.run(
        [*command, "--directory", str(project.folder), target],
        cwd=tmp_path / "third",
        env={**project.environment, "PATH": f"{session_python()}{os.pathsep}{project.environment['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (project.folder / target).is_file()
    assert sorted(path.name for path in (tmp_path / "third").iterdir()) == ["kvstages"]
