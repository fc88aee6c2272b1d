"""The workflow on a small study: whole runs, and what Snakemake would do after each kind of change."""

from __future__ import annotations

import base64
import csv
import html
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
from conftest import REPOSITORY, REVISION, SHARED, TITLE, Project, published_bundle, study_of
from warm import warm

from kvstages.analysis.published import SHIPPED, published_validation
from kvstages.cli import main
from kvstages.provenance.code import FRONT, stage_modules
from kvstages.provenance.reproduction import compare
from kvstages.provenance.tolerances import read_schema
from kvstages.provenance.verify import verify

SCHEMAS = REPOSITORY / "workflow" / "schemas"
TABLES = {
    "sweep": "**/layer-*.csv",
    "sensitivity": "s*/[!cj]*.csv",
    "checks": "screening/checks.csv",
    "joint": "**/joint.csv",
    "windows": "**/windows.csv",
    "steps": "policies/*/steps.csv",
    "positions": "**/positions.csv",
    "curve": "**/curve.csv",
}
# The rules that compute; figures, tables and the manifest follow what these make.
CORE = {
    "fetch_artifact",
    "convert_checkpoint",
    "cut_windows",
    "sweep_layers_small",
    "gather_sensitivity",
    "allocate_policy",
    "compute_references_small",
    "evaluate_policy",
    "evaluate_uniform_small",
    "adapt_models_small",
    "evaluate_adapted_small",
}
PUBLISHED_WAY = {"execution": "token-by-token", "compute_dtype": "bfloat16"}
# In front of every stage, and what keeps the ledger: no part of what a stage does.
LEDGER = (".commands.arguments", ".commands.several", ".files.finished", ".provenance", ".provenance.code")
OUTSIDE = {f"kvstages{name}" for name in (*FRONT, *LEDGER)}
RECORDS = {
    "policy": "**/policy.json",
    "evaluation": "**/evaluation.json",
    "export": "**/export.json",
    "screening": "screening/policies.json",
}


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory, probe: dict[str, str]) -> Project:
    """The small study in the published way: published formats from a hub, BF16 token by token, noise only.

    The published figures stand beside its own, as for gpt2-nano.
    """
    from hub import hub

    files = tmp_path_factory.mktemp("published-files")
    paths = published_bundle(files)
    project = Project(tmp_path_factory.mktemp("published"), probe)
    study = study_of({"source": "hub", "location": "owner/small", "revision": REVISION}, files, paths)
    training = {"weights": "bfloat16", "steps": 2, "learning_rate": 1e-3, "beta": 1.0}
    recipe = {**training, "order": "sequential", "noise": "int4", "seeds": [1337, 2026]}
    adaptation = {**study["adaptation"], "arms": {"published": recipe}}
    project.configure({**study, **PUBLISHED_WAY, "adaptation": adaptation, "published": "gpt2-nano"})
    with hub({"owner/small": {REVISION: {path: (files / path).read_bytes() for path in paths.values()}}}) as address:
        project.environment["HF_ENDPOINT"] = address
        project.run("--cores", "2")
    return project


def columns(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return next(csv.reader(file))


def typed(text: str) -> Any:
    """A cell of a table as JSON would have it: null, a whole number, a number or a text."""
    if text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def dictionary(name: str) -> dict[str, Any]:
    return read_schema(SCHEMAS / f"{name}.schema.yaml")


def test_dry_run_plans_every_stage(project: Project, artifacts: tuple[Path, dict[str, str]]) -> None:
    """With two seeds for the noise; the other arms run once."""
    study = study_of({"source": "local", "location": str(artifacts[0])}, *artifacts)
    arms = study["adaptation"]["arms"]
    several = {**arms, "noise": {**arms["noise"], "seeds": [1337, 2026]}}
    project.configure({**study, "adaptation": {**study["adaptation"], "arms": several}})
    jobs = project.jobs()
    expected = {
        "fetch_artifact": 3,
        "convert_checkpoint": 1,
        "cut_windows": 1,
        "sweep_layers_small": 1,
        "gather_sensitivity": 1,
        "allocate_policy": 5,
        "compute_references_small": 1,
        "evaluate_policy": 2,
        "evaluate_uniform_small": 1,
        "try_settings_small": 1,
        "adapt_models_small": 1,
        "evaluate_adapted_small": 1,
        "draw_figures_small": 1,
        "make_tables_small": 1,
        "write_manifest": 1,
    }
    assert {rule: jobs.get(rule) for rule in expected} == expected
    one_a_job = project.jobs("--config", "runs_a_job=1")
    apart = ("evaluate_uniform", "sweep_layers", "adapt_models", "evaluate_adapted")
    assert {rule: one_a_job.get(rule) for rule in apart} == {
        "evaluate_uniform": 3,
        "sweep_layers": 2,
        "adapt_models": 5,
        "evaluate_adapted": 6,
    }
    assert project.jobs("--config", "runs_a_job=4")["evaluate_adapted_small.1"] == 1


def test_shipped_studies_are_planned(tmp_path: Path) -> None:
    project = Project(tmp_path)
    shutil.copytree(REPOSITORY / "config", tmp_path / "config")
    jobs = project.jobs("--config", "studies=[demo,gpt2-nano]")
    # In FP32, and in BF16 for the comparison.
    assert (jobs["sweep_layers_demo"], jobs["adapt_models_gpt2_nano"], jobs["write_manifest"]) == (2, 1, 2)
    assert project.jobs("results/gpt2-nano/manifest.json")["write_manifest"] == 1


def test_the_profile_for_clusters_is_one_that_snakemake_takes(project: Project) -> None:
    """Every key is an option of Snakemake or of the plugin; what they do is for make proof-slurm."""
    profile = REPOSITORY / "workflow" / "profiles" / "slurm"
    assert project.jobs("--workflow-profile", str(profile))["sweep_layers"] == 2
    shutil.copytree(profile, project.folder / "profile")
    with (project.folder / "profile" / "config.yaml").open("a") as file:
        file.write("slurm-does-not-exist: true\n")
    assert "slurm-does-not-exist" in project.run("--dry-run", "--workflow-profile", "profile", status=2)


def rules() -> dict[str, str]:
    """The text of every rule that calls a stage, by its file and its number there."""
    found = {}
    for path in sorted((REPOSITORY / "workflow" / "rules").glob("*.smk")):
        texts = re.split(r"^\s*(?:use )?rule\b", path.read_text(), flags=re.MULTILINE)[1:]
        found |= {f"{path.stem} {number}": text for number, text in enumerate(texts, 1) if "kvstages " in text}
    return found


def loads_a_decoder(text: str) -> bool:
    """Whether a rule calls a stage that has a --device; one that calls several names theirs for its packages."""
    name = re.search(r"kvstages (?:--code \S+ )?([a-z-]+)", text)[1]
    if name == "several":
        name = re.search(r"packages\(\"([a-z-]+)\"", text)[1]
    stage = main.get_command(click.Context(main), name)
    return any("--device" in parameter.opts for parameter in stage.params)


@pytest.mark.parametrize("name", rules())
def test_a_rule_that_loads_a_decoder_declares_a_gpu_and_threads_and_no_other_does(name: str) -> None:
    """A job that runs no decoder may not keep another one from the GPU."""
    text = rules()[name]
    decodes = loads_a_decoder(text)
    assert bool(re.search(r"^\s+gpu=", text, re.MULTILINE)) == decodes
    assert bool(re.search(r"^\s+threads: .*threads", text, re.MULTILINE)) == decodes


@pytest.mark.parametrize("name", rules())
def test_every_rule_keeps_a_log_and_beside_it_its_time_and_memory(name: str) -> None:
    log = re.search(r'log:\s+f?"logs/(.+)\.log"', rules()[name])
    kept = re.search(r'benchmark:\s+f?"benchmarks/(.+)\.tsv"', rules()[name])
    assert log and kept and log[1] == kept[1]


def test_rules_of_both_kinds_are_found() -> None:
    kinds = {
        stage: {loads_a_decoder(text) for text in rules().values() if f" {stage} " in text}
        for stage in ("evaluate", "gradients", "several", "allocate", "manifest")
    }
    assert kinds == {"evaluate": {True}, "gradients": {True}, "several": {True, False},
                     "allocate": {False}, "manifest": {False}}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "seed=3"], "config/config.yaml: seed: unknown key"),
        (["--config", "studies=[absent]"], "config/config.yaml: studies: no file config/studies/absent.yaml"),
        (["--config", "threads=0"], "config/config.yaml: threads: 0, expected at least 1"),
    ],
)
def test_wrong_shared_key_is_one_line(project: Project, arguments: list[str], message: str) -> None:
    lines = project.run(*arguments, status=1).splitlines()
    assert len([line for line in lines if line.startswith(message)]) == 1
    assert not any("Traceback" in line for line in lines)
    assert not (project.folder / "results").exists()


def test_wrong_study_key_is_one_line(project: Project, artifacts: tuple[Path, dict[str, str]]) -> None:
    study = study_of({"source": "local", "location": str(artifacts[0])}, *artifacts)
    project.configure({**study, "budget": [0.01]})
    lines = project.run("--dry-run", status=1).splitlines()
    assert "config/studies/small.yaml: budget: unknown key; did you mean budgets?" in lines
    assert not any("Traceback" in line for line in lines)


def test_wrong_sha256_leaves_nothing_and_shows_why(project: Project, artifacts: tuple[Path, dict[str, str]]) -> None:
    study = study_of({"source": "local", "location": str(artifacts[0])}, *artifacts)
    study["artifacts"]["files"]["shard"]["sha256"] = "0" * 64
    project.configure(study)
    target = "resources/small/shard/held-out.bin"
    output = project.run(target, status=1)
    assert f"expected {'0' * 64}" in output  # the failed job's log, shown by profiles/default
    assert not [path for path in (project.folder / "resources").rglob("*") if path.is_file()]


def test_whole_run_writes_every_file_and_its_checksum(finished: Project) -> None:
    results = finished.folder / "results" / "small"
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=results, check=True, capture_output=True)
    listed = {line[66:] for line in (results / "SHA256SUMS").read_text().splitlines()}
    found = {path.relative_to(results).as_posix() for path in results.rglob("*") if path.is_file()}
    assert found - listed == {"manifest.json", "SHA256SUMS"}


def test_manifest_names_inputs_configuration_and_environment(finished: Project) -> None:
    record = json.loads((finished.folder / "results" / "small" / "manifest.json").read_text())
    assert "resources/small/checkpoint/model.safetensors" in record["inputs"]
    assert record["configuration"]["shared"] == {key: SHARED[key] for key in SHARED if key != "studies"}
    assert record["configuration"]["study"]["budgets"] == [1e-6, 0.5]
    assert record["environment"]["devices"] == ["cpu"]
    assert record["environment"]["packages"]["torch"]
    rules = {path: output["rule"] for path, output in record["outputs"].items()}
    assert rules["results/small/scores/measured-float32.csv"] == "gather_sensitivity"
    assert rules["results/small/adaptation/noise/seed-1337/evaluation.csv"] == "evaluate_adapted_small"
    assert rules["resources/small/model.safetensors"] == "convert_checkpoint"
    assert CORE - {"fetch_artifact"} < set(rules.values())
    assert record["command"].startswith("snakemake --snakefile ") and record["command"].endswith(" --cores 2")


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_what_their_dictionary_says(finished: Project, name: str) -> None:
    schema = dictionary(name)
    assert list(schema["properties"]) == schema["required"]
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    paths = sorted((finished.folder / "results" / "small").glob(TABLES[name]))
    assert paths
    rows = 0
    for path in paths:
        assert columns(path) == schema["required"], path
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                validator.validate({key: typed(value) for key, value in row.items()})
                rows += 1
    assert rows


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_what_their_dictionary_says(finished: Project, name: str) -> None:
    schema = dictionary(name)
    assert list(schema["properties"]) == schema["required"]
    paths = sorted((finished.folder / "results" / "small").glob(RECORDS[name]))
    assert paths
    for path in paths:
        jsonschema.validate(json.loads(path.read_text()), schema)


def test_sets_of_policies_are_what_their_dictionary_says(finished: Project) -> None:
    results = finished.folder / "results" / "small"
    paths = [*results.glob("**/policy-set.json")]
    assert {path.relative_to(results).parts[0] for path in paths} == {"comparison", "frontier", "export", "domains"}
    for path in paths:
        jsonschema.validate(json.loads(path.read_text()), dictionary("policy-set"))


@pytest.mark.parametrize("name", [path.name.split(".")[0] for path in sorted(SCHEMAS.iterdir())])
def test_every_column_and_key_is_explained(name: str) -> None:
    for key, value in dictionary(name)["properties"].items():
        assert value.get("description"), f"{name}: {key}"


def test_nothing_of_a_title_is_run(finished: Project) -> None:
    assert TITLE in json.loads((finished.folder / "config" / "studies" / "small.yaml").read_text())["title"]
    page = (finished.folder / "results" / "small" / "tables" / "results.html").read_text()
    assert "$(touch ran) `touch ran`" in page and "{input} &amp; &gt; ran" in page
    assert not list(finished.folder.rglob("ran"))


def test_second_run_does_nothing(finished: Project) -> None:
    assert "Nothing to be done" in finished.run("--resources", "gpu=1")


def test_two_runs_from_scratch_give_the_same_checksums(finished: Project, tmp_path: Path) -> None:
    copy = finished.copy(tmp_path / "copy")
    for made in ("results", "logs", "resources/small", ".snakemake"):
        shutil.rmtree(copy.folder / made)
    # With --cores 1, where the first had 2; by another server, whose children hash texts otherwise.
    with warm(tmp_path / "warm") as copy.python:
        copy.run()
    first, second = (project.folder / "results" / "small" / "SHA256SUMS" for project in (finished, copy))
    assert first.read_bytes() == second.read_bytes()
    comparison = compare(first.parent, second.parent)
    assert not comparison.outside and not comparison.within
    assert len(comparison.identical) == len(first.read_text().splitlines())
    assert verify(second.parent)[0] == []


def test_no_date_and_no_version_in_pictures_of_pixels(finished: Project) -> None:
    pictures = list((finished.folder / "results" / "small" / "figures").glob("*.png"))
    assert len(pictures) > 10
    for picture in pictures:
        written = picture.read_bytes()
        assert written.startswith(b"\x89PNG") and b"tEXt" not in written and b"tIME" not in written, picture


def test_another_thread_count_is_within_the_documented_tolerance(finished: Project, tmp_path: Path) -> None:
    """Of a sweep, gradients, an adaptation and an evaluation, whose sums then add up in another order."""
    copy = finished.copy(tmp_path / "copy")
    made = ["policies/greedy-0.5/evaluation.json", "scores/gradients.csv", "adaptation/noise/seed-1337/curve.csv"]
    copy.run(*(f"results/small/{name}" for name in made), "--config", "threads=2", "--cores", "2")
    first, second = (project.folder / "results" / "small" for project in (finished, copy))
    for folder, threads in ((first, 1), (second, 2)):
        assert json.loads((folder / made[0]).read_text())["threads"] == threads
    comparison = compare(first, second)
    assert not comparison.outside and made[0] in comparison.within


def test_every_file_that_a_rule_reads_is_in_the_record_of_what_it_made(finished: Project) -> None:
    """So that a reader that forgets `ledger.note` is found: what Snakemake calls inputs, the stage has noted."""
    lines = finished.run("--detailed-summary").splitlines()
    header = next(line for line in lines if line.startswith("output_file")).split("\t")
    rows = [dict(zip(header, line.split("\t"), strict=True)) for line in lines if line.count("\t") == len(header) - 1]
    checked = 0
    for row in rows:
        if row["rule"] in CORE - {"fetch_artifact"}:
            record = json.loads((finished.folder / ".ledger" / f"{row['output_file']}.json").read_text())
            noted, inputs = set(record["inputs"]), set(row["input-file(s)"].split(","))
            # A job of several stages has the inputs of all of them.
            several = row["rule"].endswith("_small")
            assert noted and (noted < inputs or noted == inputs if several else noted == inputs), row["output_file"]
            checked += 1
    assert checked > 30


def test_published_study_is_measured_the_published_way(published: Project) -> None:
    results = published.folder / "results" / "small"
    records = [json.loads(path.read_text()) for path in results.rglob("evaluation.json")]
    # Two uniform policies and BF16, and two budgets.
    assert len(records) == 3 + 2
    for record in records:
        assert {key: record[key] for key in PUBLISHED_WAY} == PUBLISHED_WAY
    dense = json.loads((results / "policies" / "bf16" / "evaluation.json").read_text())
    assert (dense["mean_kl"], dense["agreement"]) == (0, 1)
    assert sorted(path.name for path in (results / "adaptation").iterdir()) == ["original", "published"]


def test_published_figures_stand_beside_the_measured_ones(finished: Project, published: Project) -> None:
    with (published.folder / "results" / "small" / "tables" / "results.csv").open(newline="") as file:
        rows = {row["policy"]: row for row in csv.DictReader(file)}
    figures = published_validation(SHIPPED / "gpt2-nano")
    for policy in ("bf16", "int8", "int4"):
        for key in ("mean_kl", "agreement", "cross_entropy", "total_bytes"):
            assert float(rows[policy][f"published_{key}"]) == figures[policy][key]
    assert rows["greedy-1e-06"]["published_mean_kl"] == ""
    own = columns(finished.folder / "results" / "small" / "tables" / "results.csv")
    assert not [name for name in own if "published" in name]


def test_stages_import_exactly_what_their_digest_covers(finished: Project, published: Project, probed: Path) -> None:
    imported: dict[str, set[str]] = {}
    for path in probed.iterdir():
        imported.setdefault(path.name.split(".")[0], set()).update(path.read_text().splitlines())
    assert imported
    for stage, modules in imported.items():
        expected = {module for each in stage.split("+") for module in stage_modules(*each.split())}
        assert modules - OUTSIDE == expected - OUTSIDE, stage


def test_added_budget_runs_only_its_jobs(finished: Project, tmp_path: Path) -> None:
    copy = finished.copy(tmp_path / "copy")
    study = json.loads((copy.folder / "config" / "studies" / "small.yaml").read_text())
    copy.configure({**study, "budgets": [*study["budgets"], 0.25]})
    jobs = copy.jobs()
    assert (jobs.pop("allocate_policy"), jobs.pop("evaluate_policy"), jobs.pop("write_manifest")) == (1, 1, 1)
    assert not CORE & set(jobs)


def test_deleted_policy_reruns_only_what_depends_on_it(finished: Project, tmp_path: Path) -> None:
    copy = finished.copy(tmp_path / "copy")
    shutil.rmtree(copy.folder / "results" / "small" / "policies" / "greedy-1e-06")
    jobs = copy.jobs()
    assert (jobs.pop("allocate_policy"), jobs.pop("evaluate_policy"), jobs.pop("evaluate_adapted_small")) == (1, 1, 1)
    assert jobs.pop("write_manifest") == 1
    assert not CORE & set(jobs)


def test_edited_module_reruns_the_stages_that_import_it(finished: Project, tmp_path: Path) -> None:
    copy = finished.copy(tmp_path / "copy", tmp_path / "repository" / "Snakefile")
    for name in ("kvstages", "workflow", "report"):
        shutil.copytree(REPOSITORY / name, tmp_path / "repository" / name)
    shutil.copy(REPOSITORY / "Snakefile", tmp_path / "repository")
    assert copy.jobs() == {}
    with (tmp_path / "repository" / "kvstages" / "measure" / "adaptation.py").open("a") as file:
        file.write("EDITED = True\n")
    jobs = copy.jobs()
    assert jobs["adapt_models_small"] == 1
    assert not {"fetch_artifact", "sweep_layers_small", "evaluate_policy", "allocate_policy"} & set(jobs)


def test_of_a_job_that_makes_several_files_only_those_are_made_that_are_not_current(
    finished: Project, tmp_path: Path
) -> None:
    """A layer's sweep was deleted, and a figure's module was edited. Records tell when a file was made.

    Stages with a job of their own run again where an input was made again, though it has the same bytes.
    """
    copy = finished.copy(tmp_path / "copy", tmp_path / "repository" / "Snakefile")
    for name in ("kvstages", "workflow", "report"):
        shutil.copytree(REPOSITORY / name, tmp_path / "repository" / name)
    shutil.copy(REPOSITORY / "Snakefile", tmp_path / "repository")
    with (tmp_path / "repository" / "kvstages" / "figures" / "floor.py").open("a") as file:
        file.write("EDITED = True\n")
    (copy.folder / "results" / "small" / "sweep" / "float32" / "layer-00.csv").unlink()
    records = copy.folder / ".ledger" / "results" / "small"
    before = {path: path.stat().st_mtime_ns for path in records.rglob("*.json")}
    copy.run()
    made = {path.relative_to(records).as_posix() for path in before if path.stat().st_mtime_ns != before[path]}
    together = ("sweep/", "figures/", "tables/", "adaptation/", "comparison/0.0003/moves/")
    assert {name for name in made if name.startswith(together)} == {
        "sweep/float32/layer-00.csv.json",
        *(f"figures/floor{suffix}.json" for suffix in (".svg", ".png", ".csv")),
    }
    assert compare(finished.folder / "results" / "small", copy.folder / "results" / "small").outside == []


@pytest.fixture(scope="module")
def report(finished: Project) -> tuple[str, dict[str, Any]]:
    """The page of the finished study's report, and what it shows: path to caption, labels and the file itself."""
    (finished.folder / "secret.txt").write_text("for nobody else")
    finished.run("--report", "report.html")
    page = (finished.folder / "report.html").read_text()
    # Snakemake keeps it as one JavaScript object.
    shown, _ = json.JSONDecoder().raw_decode(page.partition('<script id="results">')[2].partition("=")[2].lstrip())
    return page, shown


def test_report_is_one_file_with_every_figure_and_table_and_its_caption(
    finished: Project, report: tuple[str, dict[str, Any]]
) -> None:
    page, shown = report
    results = finished.folder / "results" / "small"
    expected = [*results.glob("figures/*.svg"), *results.glob("tables/*.html")]
    for group, kind in (("figure", "figures"), ("table", "tables")):
        known = main.get_command(click.Context(main), group).list_commands(click.Context(main))
        assert {path.stem for path in expected if path.parent.name == kind} == set(known)
    expected.append(finished.folder / "benchmarks" / "small" / "time.html")
    assert sorted(shown) == sorted(path.relative_to(finished.folder).as_posix() for path in expected)
    for name, entry in shown.items():
        content = base64.b64decode(entry["data_uri"].partition("base64,")[2])
        assert content == (finished.folder / name).read_bytes()
    captions = " ".join(entry["caption"] for entry in shown.values())
    texts = [path.read_text() for path in (REPOSITORY / "report").glob("*.rst") if path.name != "workflow.rst"]
    for title in (text.split("**")[1] for text in texts):
        assert f"<strong>{title}</strong> (small)" in captions
    question = (REPOSITORY / "report" / "workflow.rst").read_text().splitlines()[1]
    assert question in page.replace("\\'", "'")


def test_a_title_is_shown_in_the_report_as_it_is_typed(report: tuple[str, dict[str, Any]]) -> None:
    """It is text: no markup, no file is included, no script runs."""
    page, shown = report
    assert "alert(1)</script>" not in page and "<script>alert" not in page and "nobody else" not in page
    text, _ = json.JSONDecoder().raw_decode(page.partition("var workflow_desc = ")[2])
    table = base64.b64decode(shown["results/small/tables/results.html"]["data_uri"].partition("base64,")[2]).decode()
    (heading,) = re.findall(r"<h1>Results of the study (small: .*)</h1>", text)
    (title,) = re.findall(r"<h1>(.*)</h1>", table)
    assert html.unescape(heading) == f"small: {TITLE}" and html.unescape(title) == f"{TITLE}: results of every policy"
    assert not {"<", ">"} & {*heading, *title}


def test_killed_run_is_repaired(project: Project, tmp_path: Path) -> None:
    target = "results/small/sweep/float32/layer-00.csv"
    log = project.folder / "logs" / "sweep_layers" / "small" / "float32.log"
    project.run("results/small/windows.safetensors")  # all that the sweep needs, by processes that start warm
    process = subprocess.Popen(
        project.command(target),
        cwd=project.folder,
        env=project.environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    # A write that was cut off, as a kill leaves it: a part of the file under its temporary name.
    partial = project.folder / "results" / "small" / "sweep" / "float32" / ".layer-00.csv.k1lled_0.partial"
    partial.write_text("layer,head")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (project.folder / target).exists()
    assert "--unlock" in project.run(target, status=1)
    project.run("--unlock")
    project.run(target, "--rerun-incomplete")
    assert sorted(path.name for path in (project.folder / target).parent.iterdir()) == ["layer-00.csv", "layer-01.csv"]
