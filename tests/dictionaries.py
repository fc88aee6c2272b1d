"""The data dictionaries of the workflow's files, each read and checked once, for tests that change none of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

SCHEMAS = Path(__file__).parents[1] / "workflow" / "schemas"


@cache
def schema(name: str) -> dict[str, Any]:
    """What ``workflow/schemas/NAME.schema.yaml`` says."""
    return yaml.safe_load((SCHEMAS / f"{name}.schema.yaml").read_text())


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """What validates a record, or a row, against it."""
    jsonschema.Draft202012Validator.check_schema(schema(name))
    return jsonschema.Draft202012Validator(schema(name))
