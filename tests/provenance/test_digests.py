from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstages.cli import main
from kvstages.commands.arguments import asked, family
from kvstages.commands.planning import stage_names
from kvstages.provenance import code
from kvstages.provenance.code import PACKAGE, stage_digest, stage_modules, stage_packages
from kvstages.stages import STAGES

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


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "pack"
    for name, text in SOURCES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_closure_follows_lazy_imports_submodules_and_packages(package: Path) -> None:
    modules = ("pack.commands.one", "pack.deep", "pack.deep.inner", "pack.deep.other", "pack.first", "pack.shared")
    assert stage_modules("one", package=package) == modules


def test_closure_leaves_out_imports_for_type_checking(package: Path) -> None:
    assert stage_modules("two-words", package=package) == ("pack.commands.two_words", "pack.shared")


def edit(path: Path, text: str) -> None:
    """Add a line to a file, and forget what was known of it."""
    with path.open("a") as file:
        file.write(text)
    forget()


def forget() -> None:
    """What another process knows of the code: what is kept on disk."""
    for known in vars(code).values():
        if hasattr(known, "cache_clear"):
            known.cache_clear()


@pytest.mark.parametrize(
    ("edited", "changed"),
    [
        ("shared.py", {"one", "two-words"}),
        ("first.py", {"one"}),
        ("deep/other.py", {"one"}),
        ("first/numbers.json", {"one"}),
        ("commands/two_words.py", {"two-words"}),
        ("cli.py", set()),
        ("unused.py", set()),
    ],
)
def test_edit_changes_exactly_the_stages_that_import_it(package: Path, edited: str, changed: set[str]) -> None:
    before = {stage: stage_digest(stage, package=package) for stage in ("one", "two-words")}
    edit(package / edited, "1\n")
    assert {stage for stage, digest in before.items() if stage_digest(stage, package=package) != digest} == changed


def test_what_was_read_before_is_kept_and_damage_of_it_changes_no_digest(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = stage_digest("one", package=package)
    forget()
    with monkeypatch.context() as patched:
        patched.setattr(code, "substance", None)  # nothing is parsed again
        assert stage_digest("one", package=package) == digest
    for damaged in ("{", "[]", '{"pack.one": 1}', code.kept_at(package).read_text().replace('"]', '0"]')):
        code.kept_at(package).write_text(damaged)
        forget()
        assert stage_digest("one", package=package) == digest
    forget()
    code.kept_at(package).unlink()
    code.kept_at(package).mkdir()  # cannot be written
    assert stage_digest("one", package=package) == digest


TEXT = """
@click.command(epilog="See elsewhere.")
@click.option("--x", default=3, help="What x is.")
def command(x):
    '''Do it.'''
    # The whole of it.
    return x + 1
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("Do it.", "Do all of it.", True),
        ("    '''Do it.'''\n", "", True),
        ("# The whole of it.", "# A part of it.", True),
        ("What x is.", "The number x.", True),
        (', help="What x is."', "", True),
        ("See elsewhere.", "Nothing else.", True),
        ("    return x + 1", "    return (\n        x + 1\n    )", True),
        ("x + 1", "x + 2", False),
        ("default=3", "default=4", False),
        ("return x + 1", "return 'x + 1'", False),
        ("x + 1", "x - 1", False),
        ("return x + 1", "return -x + 1", False),
    ],
)
def test_a_digest_is_of_what_a_module_does(package: Path, old: str, new: str, same: bool) -> None:
    path = package / "commands" / "one.py"
    path.write_text(TEXT)
    edit(path, "")
    before = stage_digest("one", package=package)
    assert TEXT.count(old) == 1
    path.write_text(TEXT.replace(old, new))
    edit(path, "")
    assert (stage_digest("one", package=package) == before) is same


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


# What the stages of the workflow do: members of families each on its own.
FIGURES = [("figure", name) for name in ("floor", "frontier", "sensitivity", "storage-kl")]
TABLES = [("table", name) for name in ("frontier", "results")]
MEMBERS = [*((stage,) for stage in STAGES if stage not in code.FAMILIES), *FIGURES, *TABLES]
MEASURING = {
    ("reference",),
    ("sweep",),
    ("gradients",),
    ("evaluate",),
    ("evaluate-set",),
    ("adapt",),
    ("adapt-grid",),
    ("evaluate-adapted",),
}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """This package, to be edited, with what was kept of reading its modules."""
    for names in MEMBERS:
        stage_digest(*names)
    return Path(shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("*.pyc")))


def changed(copied: Path) -> set[tuple[str, ...]]:
    """The stages that an edit of the copy concerns."""
    return {names for names in MEMBERS if stage_digest(*names, package=copied) != stage_digest(*names)}


def test_an_edit_of_an_allocator_concerns_allocation_only(copied: Path) -> None:
    edit(copied / "policies" / "allocators.py", "LIMIT = 1\n")
    assert {("allocate",), ("policy-set",)} <= changed(copied) and not MEASURING & changed(copied)


def test_an_edit_of_a_figure_concerns_this_figure_only(copied: Path) -> None:
    edit(copied / "figures" / "frontier.py", "LIMIT = 1\n")
    assert changed(copied) == {("figure", "frontier")}


def test_an_edit_of_texts_for_people_concerns_nothing(copied: Path) -> None:
    """Of every docstring and help text of the package at once."""
    for path in copied.rglob("*.py"):
        text = re.sub(r'(?m)^( *)"""(?=[A-Z])', r'\1"""Otherwise said: ', path.read_text())
        path.write_text(re.sub(r'help="(?=[A-Z])', 'help="Otherwise said: ', text))
    edit(copied / "cli.py", "# A comment.\n")
    assert "Otherwise said" in (copied / "cache" / "quantizer.py").read_text()
    assert "Otherwise said" in (copied / "commands" / "options.py").read_text()
    assert changed(copied) == set()


def test_packages_are_those_that_a_stage_imports() -> None:
    assert list(stage_packages("gather")) == ["python", "numpy", "pandas", "safetensors"]
    assert "torch" in stage_packages("sweep") and "matplotlib" not in stage_packages("sweep")
    assert stage_packages("figure", "frontier")["matplotlib"].startswith("3.")


def test_what_the_snakefile_imports_is_free_of_torch() -> None:
    program = (
        "import sys, kvstages.provenance.code, kvstages.study.configuration, kvstages.provenance.manifest;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_a_family_of_models_is_part_of_the_code_of_stages_that_open_one():
    opened = {"kvstages.models.huggingface", "kvstages.models.huggingface_files"}
    assert not opened & set(stage_modules("sweep"))
    assert opened <= set(stage_modules("sweep", "huggingface"))
    assert stage_digest("sweep", "huggingface") != stage_digest("sweep")
    assert stage_digest("allocate", "huggingface") == stage_digest("allocate")
    assert "transformers" in stage_packages("sweep", "huggingface")
    assert "transformers" not in stage_packages("sweep")


@pytest.mark.parametrize(
    ("model", "names"),
    [("a/model.safetensors", []), ("a/model", ["huggingface"]), ("a/b.gguf", ["huggingface"]), ("a.pt", [])],
)
def test_a_model_tells_its_family_by_its_name(model, names):
    assert family("sweep", [model]) == names
    assert family("allocate", [model]) == []
    words = ["sweep", "--model", model, "--windows", "w", "--layer", "1", "--output", "o.csv"]
    assert asked(main, words)[0] == ["sweep", *names] == list(stage_names(words))
