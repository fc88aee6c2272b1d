from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstages.provenance.code import stage_digest, stage_modules

SOURCES = {
    "__init__.py": "",
    "__main__.py": "from pack.cli import main\n",
    "cli.py": "import os\n",
    "commands/__init__.py": "",
    "commands/one.py": "def command():\n    from pack.shared import x\n    from pack import first\n",
    "commands/two_words.py": "if TYPE_CHECKING:\n    from pack.first import y\nelse:\n    import pack.shared\n",
    "first.py": "import pack.deep.inner\n",
    "shared.py": "x = 1\n",
    "deep/__init__.py": "from pack.deep.other import z\n",
    "deep/inner.py": "",
    "deep/other.py": "z = 1\n",
    "first/numbers.json": "[1]",
    "unused.py": "",
}
FRONT = ["pack", "pack.__main__", "pack.cli", "pack.commands"]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "pack"
    for name, text in SOURCES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_closure_follows_lazy_imports_submodules_and_packages(package: Path) -> None:
    modules = ["pack.commands.one", "pack.deep", "pack.deep.inner", "pack.deep.other", "pack.first", "pack.shared"]
    assert stage_modules("one", package=package) == sorted(FRONT + modules)


def test_closure_leaves_out_imports_for_type_checking(package: Path) -> None:
    assert stage_modules("two-words", package=package) == sorted([*FRONT, "pack.commands.two_words", "pack.shared"])


@pytest.mark.parametrize(
    ("edited", "changed"),
    [
        ("shared.py", {"one", "two-words"}),
        ("first.py", {"one"}),
        ("deep/other.py", {"one"}),
        ("first/numbers.json", {"one"}),
        ("commands/two_words.py", {"two-words"}),
        ("cli.py", {"one", "two-words"}),
        ("unused.py", set()),
    ],
)
def test_edit_changes_exactly_the_stages_that_import_it(package: Path, edited: str, changed: set[str]) -> None:
    from kvstages.provenance.code import imported_modules

    before = {stage: stage_digest(stage, package=package) for stage in ("one", "two-words")}
    with (package / edited).open("a") as file:
        file.write("\n")
    imported_modules.cache_clear()
    assert {stage for stage, digest in before.items() if stage_digest(stage, package=package) != digest} == changed


def test_unknown_stage_is_named(package: Path) -> None:
    with pytest.raises(ValueError, match="stage 'three': pack/commands has no file for it"):
        stage_digest("three", package=package)


def test_relative_import_is_refused(package: Path) -> None:
    (package / "commands" / "one.py").write_text("\nfrom . import x\n")
    with pytest.raises(ValueError, match=r"pack\.commands\.one: line 2 has a relative import"):
        stage_digest("one", package=package)


def test_cheap_stages_do_not_reach_the_quantized_cache() -> None:
    for stage in ("fetch", "gather", "manifest"):
        assert "kvstages.cache.packed" not in stage_modules(stage)


def test_what_the_snakefile_imports_is_free_of_torch() -> None:
    code = (
        "import sys, kvstages.provenance.code, kvstages.study.configuration, kvstages.provenance.manifest;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
