"""The schemas say the same as the checks of the configuration, and as the figures', tables' and manifest's files."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pandas as pd
import pytest
import yaml
from click.testing import CliRunner
from conftest import DOMAINS
from gappy import write_gappy
from made_up import sensitivity_table
from published_study import PUBLISHED, SENSITIVITY, figure_arguments, table_arguments, write_study

from kvstages.cache.precisions import QUANTIZED
from kvstages.cli import main
from kvstages.files.ledger import sha256
from kvstages.provenance.manifest import KEYS, manifest
from kvstages.provenance.tolerances import read_schema
from kvstages.study.configuration import check_shared, check_study, load_study

REPOSITORY = Path(__file__).parents[2]
STUDIES = {path.stem: load_study(path) for path in sorted((REPOSITORY / "config" / "studies").glob("*.yaml"))}
SHARED = yaml.safe_load((REPOSITORY / "config" / "config.yaml").read_text())
SCHEMAS = {
    path.name.removesuffix(".schema.yaml"): read_schema(path)
    for path in sorted((REPOSITORY / "workflow" / "schemas").iterdir())
}
FIGURES = [name.removeprefix("figure-") for name in SCHEMAS if name.startswith("figure-")]
TABLES = [name.removeprefix("table-") for name in SCHEMAS if name.startswith("table-")]
# Which arms and domains there are, and whether arms have a control, is up to a study.
OPTIONAL = re.compile(
    r"published|comparison|comparison\.recipes|screening|export|generation|generation\.prompt|sample|text\.parts"
    r"|windows\.calibration\.block|domains|domains\.texts\.[^.]+"
    r"|adaptation\.arms\.[^.]+(\.(control|noise|straight-through))?"
)


def mappings(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all mappings inside a configuration."""
    if isinstance(value, dict):
        yield path
        for key, inner in value.items():
            yield from mappings(inner, (*path, key))


def at(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The mapping at a path."""
    for key in path:
        config = config[key]
    return config


def broken(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Copies of a configuration with one key too many, or one required key too few, at every level."""
    for path in mappings(config):
        more = copy.deepcopy(config)
        at(more, path)["unknown"] = 1
        yield ".".join((*path, "unknown")), more
        for key in at(config, path):
            name = ".".join((*path, key))
            if not OPTIONAL.fullmatch(name):
                fewer = copy.deepcopy(config)
                del at(fewer, path)[key]
                yield name, fewer


def wrong_values() -> Iterator[tuple[str, dict[str, Any]]]:
    """Copies of a right study with one value that is wrong by itself."""
    values = {
        "layers": [0, "12", True, 10**9],
        "budgets": [[], [-0.1], [0.1, 0.1], ["0.1"], [f"{10**300}B"]],
        "precisions": [[], ["int8", "int8"], ["int8", "INT4"]],
        "execution": ["fast"],
        "title": [" ", 3, "two\nlines", "line end\n", "bell\a", "next\x85line", "para\u2029graph"],
        "block": [0, 10**30],
        "sensitivity": ["fisher", None],
        "probes": [0, 1.5],
    }
    for key, wrongs in values.items():
        for wrong in wrongs:
            yield f"{key}={wrong}", {**STUDIES["demo"], key: wrong}
    huggingface = STUDIES["smollm2"]
    for name, changed in {
        "gpt2-nano's keys": {"adaptation": STUDIES["demo"]["adaptation"]},
        "a sample of what is measured": {"sensitivity": "measured"},
        "positions of texts": {"windows": {"calibration": [0, 512], "validation": [512, 1024]}},
        "a window more": {"windows": {**huggingface["windows"], "reserved": {"documents": 1, "blocks": 1, "seed": 0}}},
        "a hub without revision": {"model": {**huggingface["model"], "source": "hub"}},
        "a text of two names": {"domains": {**DOMAINS, "texts": {"a": ["18*|19*"]}}},
        "a text with a mark-up": {"domains": {**DOMAINS, "texts": {"a": ["1*<"]}}},
        "a domain in capitals": {"domains": {**DOMAINS, "texts": {"A": ["1*"]}}},
        "domains at nats": {"domains": {**DOMAINS, "texts": {"a": ["18*"]}, "budgets": [0.01]}},
        "a version of a folder": {"text": {**huggingface["text"], "source": "local"}},
    }.items():
        yield name, {**huggingface, **changed}


WRONG = [*(study for name in STUDIES for study in broken(STUDIES[name])), *wrong_values()]


@pytest.mark.parametrize("name", STUDIES)
def test_shipped_studies_are_right(name: str) -> None:
    jsonschema.validate(STUDIES[name], SCHEMAS["study"])
    check_study(name, STUDIES[name])


def test_shipped_configuration_is_right() -> None:
    jsonschema.validate(SHARED, SCHEMAS["config"])
    check_shared(SHARED)


@pytest.mark.parametrize(("name", "study"), WRONG, ids=[name for name, _ in WRONG])
def test_schema_and_checks_refuse_the_same_studies(name: str, study: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^config/studies/demo\.yaml: "):
        check_study("demo", study)
    assert list(jsonschema.Draft202012Validator(SCHEMAS["study"]).iter_errors(study)), name


@pytest.mark.parametrize("image", ["", "docker://ada:secret@example.org/image", "https://token@example.org/x.sif"])
def test_schema_and_checks_refuse_the_same_images(image: str) -> None:
    with pytest.raises(ValueError, match=r"^config/config\.yaml: container: ") as caught:
        check_shared(SHARED | {"container": image})
    assert "secret" not in str(caught.value) and "token" not in str(caught.value)
    assert list(jsonschema.Draft202012Validator(SCHEMAS["config"]).iter_errors(SHARED | {"container": image}))
    check_shared(SHARED | {"container": "docker://localhost:5000/image@sha256:" + 64 * "0"})


@pytest.mark.parametrize("key", [*SHARED, "unknown"])
def test_schema_and_checks_refuse_the_same_shared_keys(key: str) -> None:
    config = {name: value for name, value in SHARED.items() if name != key}
    if key == "unknown":
        config[key] = 1
    with pytest.raises(ValueError, match=rf"^config/config\.yaml: {key}: "):
        check_shared(config)
    assert list(jsonschema.Draft202012Validator(SCHEMAS["config"]).iter_errors(config))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a study that are made of published figures."""
    return write_study(tmp_path_factory.mktemp("study"), layers=2, heads=2, budgets=("0.01",))


def run(*words: object) -> None:
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == 0, result.output


def check_table(path: Path, schema: dict[str, Any]) -> list[str]:
    """Check columns and rows of a CSV file; its columns with published values, which must follow measured ones."""
    table = pd.read_csv(path)
    published = [name for name in table if name.startswith("published_")]
    measured = [name for name in table if name not in published]
    assert measured == [name for name in schema["properties"] if name in measured or name in schema["required"]]
    assert {name.removeprefix("published_") for name in published} <= set(schema["required"])
    # One validator for all rows: `validate` would make one, and check the schema itself, for each.
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for row in json.loads(table.to_json(orient="records")):
        validator.validate(row)
    return published


def test_every_figure_and_table_has_a_schema() -> None:
    assert set(FIGURES) == set(main.get_command(None, "figure").list_commands(None))
    assert set(TABLES) == set(main.get_command(None, "table").list_commands(None))


@pytest.mark.parametrize("name", FIGURES)
def test_figure_numbers_are_what_their_schema_says(
    name: str, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The numbers alone: test_figures.py draws them, and checks that drawing leaves them as they are.
    monkeypatch.setattr(
        "kvstages.figures.style.write_figure",
        lambda output, table, draw: write_gappy(output.with_suffix(".csv"), table),
    )
    run("figure", name, *figure_arguments(name, results), "--output", tmp_path / "figure.svg")
    assert not check_table(tmp_path / "figure.csv", SCHEMAS[f"figure-{name}"])


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_what_their_schema_says(name: str, results: Path, tmp_path: Path) -> None:
    words = ["table", name, *table_arguments(name, results), "--output", tmp_path / "table.html"]
    run(*words)
    assert not check_table(tmp_path / "table.csv", SCHEMAS[f"table-{name}"])
    if "published" in [option.name for option in main.get_command(None, "table").get_command(None, name).params]:
        run(*words, "--published", PUBLISHED)
        assert check_table(tmp_path / "table.csv", SCHEMAS[f"table-{name}"])


def test_made_up_tables_are_what_the_schemas_say(results: Path, tmp_path: Path) -> None:
    # So that what the tests of figures and tables read is what the stages write.
    for path in [*results.glob("comparison/*/joint.csv"), results / "frontier" / "joint.csv"]:
        assert not check_table(path, SCHEMAS["joint"])
    write_gappy(tmp_path / "s.csv", sensitivity_table(parts=("kv", "k", "v"), precisions=QUANTIZED, floor=None))
    for path in (results / SENSITIVITY, tmp_path / "s.csv"):
        assert not check_table(path, SCHEMAS["sensitivity"])


def test_the_table_of_divergence_explains_its_columns_as_the_evaluation_does() -> None:
    table, record = (SCHEMAS[name]["properties"] for name in ("table-divergence", "evaluation"))
    for name, column in table.items():
        assert column["description"] == record[name]["description"].replace("; null where", "; empty where")


def test_manifest_is_what_its_schema_says(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Away from a working directory in which a study has left its records of made files.
    monkeypatch.chdir(results)
    files = {path: "a_rule" for path in results.rglob("*") if path.is_file()}
    pinned = {"path": "test_schemas.py", "sha256": sha256(Path(__file__))}
    settings = {"shared": {}, "study": {"artifacts": {"source": "local", "location": "x", "files": {"shard": pinned}}}}
    run = {"command": "snakemake", "revision": "a" * 40, "dirty": False}
    record, _ = manifest("s", settings, {"shard": Path(__file__)}, (), files, results, run, "2026-01-01T00:00:00+00:00")
    assert list(record) == list(KEYS) == list(SCHEMAS["manifest"]["properties"]) == SCHEMAS["manifest"]["required"]
    jsonschema.validate(record, SCHEMAS["manifest"])
    assert record["inputs"] and record["outputs"] and record["code"]
