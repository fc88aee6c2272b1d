"""Validation of a crate without internet: the validator's own profiles, and the terms that rocrate ships.

The validator asks the internet for one document, the JSON-LD context of RO-Crate 1.1. In its place stands the
context of RO-Crate 1.3, which rocrate ships, with the terms of workflows as 1.1 has them. Everything else is the
validator's: its profiles for RO-Crate 1.1, Process Run Crate, Workflow RO-Crate and Workflow Run Crate.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

WORKFLOWS = "https://bioschemas.org/"
TERMS_OF_1_1 = {
    "ComputationalWorkflow": f"{WORKFLOWS}ComputationalWorkflow",
    "FormalParameter": f"{WORKFLOWS}FormalParameter",
    "input": f"{WORKFLOWS}ComputationalWorkflow#input",
    "output": f"{WORKFLOWS}ComputationalWorkflow#output",
}


def findings(crate: Path, severity: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the validator says against a crate, from ``severity`` (REQUIRED, RECOMMENDED) up: a line each."""
    pytest.importorskip("rocrate_validator")
    from rdflib.plugins.shared.jsonld import context as loader
    from rdflib.plugins.sparql import processor
    from rocrate.vocabs import RO_CRATE
    from rocrate_validator import services
    from rocrate_validator.models import Severity
    from rocrate_validator.utils import document_loader
    from rocrate_validator.utils.http import HttpRequester

    class Answer:
        """What an HTTP library would have got."""

        status_code = 200

        def __init__(self, content: Any):
            self.content, self.headers = content, {"Content-Type": "application/ld+json"}

        def json(self) -> Any:
            return self.content

    terms = {"@context": {**RO_CRATE["@context"], **TERMS_OF_1_1}}

    def from_shipped(source: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        if str(source).startswith("http"):
            assert str(source) == "https://w3id.org/ro/crate/1.1/context"
            return terms, None
        return document_loader._original_source_to_json(source, *arguments, **options)

    # The validator asks the same questions again and again, and rdflib takes longer to read one than to answer it.
    monkeypatch.setattr(processor, "parseQuery", lambda query: query)
    monkeypatch.setattr(
        processor, "translateQuery", lambda query, base, names: question(query, base, *(names or {}).items())
    )
    monkeypatch.setattr(loader, "source_to_json", from_shipped)
    monkeypatch.setattr(HttpRequester, "get", lambda self, url, **options: Answer(from_shipped(url)[0]), raising=False)
    settings = services.ValidationSettings(
        rocrate_uri=str(crate),
        profile_identifier="workflow-run-crate",
        requirement_severity=Severity[severity],
    )
    result = services.validate(settings)
    return sorted({f"{issue.severity.name}: {issue.message} ({issue.violatingEntity})" for issue in result.issues})


@cache
def question(query: str, base: str | None, *names: tuple[str, Any]) -> Any:
    """A query as rdflib answers it. It is read without memory of its parts, which matplotlib has switched on."""
    from pyparsing import ParserElement
    from rdflib.plugins.sparql.algebra import translateQuery
    from rdflib.plugins.sparql.parser import parseQuery

    ParserElement.disable_memoization()
    try:
        return translateQuery(parseQuery(query), base, dict(names))
    finally:
        ParserElement.enable_packrat()
