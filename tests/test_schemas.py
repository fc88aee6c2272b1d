"""The configuration's schemas say the same as the checks that the Snakefile runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvstages.configuration import check_shared, check_study, load_study

REPOSITORY = Path(__file__).parents[1]
STUDIES = {path.stem: load_study(path) for path in sorted((REPOSITORY / "config" / "studies").glob("*.yaml"))}
SHARED = yaml.safe_load((REPOSITORY / "config" / "config.yaml").read_text())
SCHEMAS = {
    name: yaml.safe_load((REPOSITORY / "workflow" / "schemas" / f"{name}.schema.yaml").read_text())
    for name in ("config", "study")
}
OPTIONAL = {"published", "adaptation.arms.noise", "adaptation.arms.control"}


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
            if name not in OPTIONAL:
                fewer = copy.deepcopy(config)
                del at(fewer, path)[key]
                yield name, fewer


def wrong_values() -> Iterator[tuple[str, dict[str, Any]]]:
    """Copies of a right study with one value that is wrong by itself."""
    values = {
        "layers": [0, "12", True],
        "budgets": [[], [-0.1], [0.1, 0.1], ["0.1"]],
        "precisions": [["int8"], ["int8", "int8"], ["int8", "fp8"]],
        "execution": ["fast"],
        "title": [" ", 3],
        "block": [0],
    }
    for key, wrongs in values.items():
        for wrong in wrongs:
            yield f"{key}={wrong}", {**STUDIES["embedded"], key: wrong}


WRONG = [*broken(STUDIES["embedded"]), *broken(STUDIES["gpt2-nano"]), *wrong_values()]


@pytest.mark.parametrize("name", STUDIES)
def test_shipped_studies_are_right(name: str) -> None:
    jsonschema.validate(STUDIES[name], SCHEMAS["study"])
    check_study(name, STUDIES[name])


def test_shipped_configuration_is_right() -> None:
    jsonschema.validate(SHARED, SCHEMAS["config"])
    check_shared(SHARED)


@pytest.mark.parametrize(("name", "study"), WRONG, ids=[name for name, _ in WRONG])
def test_schema_and_checks_refuse_the_same_studies(name: str, study: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^config/studies/embedded\.yaml: "):
        check_study("embedded", study)
    assert list(jsonschema.Draft202012Validator(SCHEMAS["study"]).iter_errors(study)), name


@pytest.mark.parametrize("key", [*SHARED, "unknown"])
def test_schema_and_checks_refuse_the_same_shared_keys(key: str) -> None:
    config = {name: value for name, value in SHARED.items() if name != key}
    if key == "unknown":
        config[key] = 1
    with pytest.raises(ValueError, match=rf"^config/config\.yaml: {key}: "):
        check_shared(config)
    assert list(jsonschema.Draft202012Validator(SCHEMAS["config"]).iter_errors(config))
