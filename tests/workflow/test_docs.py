"""The pages of the documentation: their commands are taken, their links and files are there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from command_lines import check_call
from conftest import REPOSITORY, Project

from benchmarks.summary import page as page_of_ratios

README = REPOSITORY / "README.md"
METHOD = REPOSITORY / "docs" / "method.md"
PAGES = [README, *sorted((REPOSITORY / "docs").glob("*.md"))]
PAGES += [REPOSITORY / folder / "README.md" for folder in ("config", "envs", "workflow/profiles", "benchmarks")]
REFERENCE = re.compile(r'docs/method\.md,?\s+"([^"]+)"')
FOLDERS = ("kvstages", "tests", "benchmarks", "workflow", "report", "docs")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (REPOSITORY / folder).rglob("*")
    if path.suffix in {".py", ".smk", ".yaml", ".rst", ".md"}
)


def page_name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def commands(program: str) -> list[list[str]]:
    """The words of every command of the pages that calls a program; what follows two spaces is a remark."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", "")
        for line in re.findall(rf"^    +({program}\b.*)$", text, re.MULTILINE):
            found[re.split(r" {2,}(?=[#A-Za-z])", re.sub(r" +(?=-|\")", " ", line))[0]] = page
    return [shlex.split(command) for command in found]


def references() -> dict[str, list[str]]:
    """Sections of docs/method.md that the sources name, and where."""
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        for section in REFERENCE.findall(path.read_text(encoding="utf-8")):
            found.setdefault(" ".join(section.split()), []).append(page_name(path))
    return found


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("section", references())
def test_a_section_that_the_code_names_is_a_heading_of_the_method(section: str) -> None:
    assert section in headings(METHOD), f"named by {', '.join(references()[section])}"


def test_the_page_of_ratios_is_what_its_tables_say() -> None:
    """The page on speed quotes no other."""
    results = REPOSITORY / "benchmarks" / "results"
    assert (results / "ratios.md").read_text(encoding="utf-8") == page_of_ratios(results)


def test_the_readme_has_at_most_900_words() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= 900


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        slugs = (
            [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings(file)] if anchor else []
        )
        assert not anchor or anchor in slugs, target


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """Those of the repository; a name in capitals or braces (`NAME.rst`, `{study}`) stands for many and is left out."""
    for name in re.findall(
        r"`((?:kvstages|workflow|config|tests|report|envs|proofs|docs)/[\w./-]+)`", page.read_text()
    ):
        if not re.search(r"[A-Z]{2,}(?!ME\b)", name.replace("README", "")) and "studies/" not in name:
            assert (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("words", commands("kvstages"), ids=" ".join)
def test_calls_of_stages_are_taken(words: list[str]) -> None:
    if words[1] != "--help" and words[1] != "STAGE":
        check_call(words[1:])


@pytest.mark.parametrize("words", commands("make"), ids=" ".join)
def test_targets_of_make_are_there(words: list[str]) -> None:
    done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", commands("snakemake"), ids=" ".join)
def test_command_lines_of_snakemake_are_taken(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from snakemake.cli import parse_args

    monkeypatch.chdir(REPOSITORY)
    _, arguments = parse_args(words[1:])
    assert all("/" in target for target in arguments.targets)


def test_what_the_pages_ask_of_snakemake_is_planned(tmp_path: Path) -> None:
    """Every file that a command asks for, and every rule that one runs again, in one plan."""
    from snakemake.cli import parse_args

    found = [parse_args(words[1:])[1] for words in commands("snakemake") if "--snakefile" not in words]
    targets = sorted({target for arguments in found for target in arguments.targets})
    again = sorted({rule for arguments in found for rule in arguments.forcerun or []})
    assert targets and again
    shutil.copytree(REPOSITORY / "config", tmp_path / "config")
    output = Project(tmp_path).run(*targets, "--dry-run", "--forcerun", *again)
    assert all(rule in output for rule in again)
