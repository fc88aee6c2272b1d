"""The pages of the documentation: what the code refers to is there."""

from __future__ import annotations

import re

import pytest
from conftest import REPOSITORY

METHOD = REPOSITORY / "docs" / "method.md"
REFERENCE = re.compile(r'docs/method\.md,?\s+"([^"]+)"')
FOLDERS = ("kvstages", "tests", "benchmarks", "workflow", "report", "docs")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (REPOSITORY / folder).rglob("*")
    if path.suffix in {".py", ".smk", ".yaml", ".rst", ".md"}
)


def references() -> dict[str, list[str]]:
    """Sections of docs/method.md that the sources name, and where."""
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        for section in REFERENCE.findall(path.read_text(encoding="utf-8")):
            found.setdefault(" ".join(section.split()), []).append(str(path.relative_to(REPOSITORY)))
    return found


@pytest.mark.parametrize("section", references())
def test_a_section_that_the_code_names_is_a_heading_of_the_method(section: str) -> None:
    headings = re.findall(r"^#+ (.+)$", METHOD.read_text(encoding="utf-8"), re.MULTILINE)
    assert section in headings, f"named by {', '.join(references()[section])}"
