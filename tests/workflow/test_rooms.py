"""The rooms of the package: which may import which, and where torch may be imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from kvstages.provenance.code import PACKAGE, running_nodes

# A room imports from its own line and from those above; the rooms of APART not even from each other.
LINES = [
    {"files", "stats"},
    {"cache"},
    {"models"},
    {"scores"},
    {"policies"},
    {"measure", "analysis"},
    {"study", "tables", "figures", "export"},
    {"bundled", "provenance"},
    {"commands"},
]
APART = {"study", "tables", "figures", "export"}
# Modules of no room; what they hold, the version and the names of the stages, every room may know.
SHARED = {"kvstages", "kvstages.stages"}
TORCH = {"models", "cache", "measure", "bundled"}
WITHOUT_TORCH = {"kvstages.cache.precisions", "kvstages.cache.precision_grid"}


def modules() -> dict[str, ast.Module]:
    """The package's modules by their dotted names."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


MODULES = modules()
ROOMS = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
INSIDE = sorted(name for name in MODULES if name.split(".")[1:2] and name.split(".")[1] in ROOMS)


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Dotted names that the nodes import, whether modules or what modules hold."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def when_imported(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: those of no function."""
    later = {inner for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
    return (node for node in running_nodes(tree) if node not in later)


def room(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "kvstages" and len(parts) > 1 and parts[1] in ROOMS else None


def line(name: str) -> int:
    return next(index for index, rooms in enumerate(LINES) if name in rooms)


def test_every_room_has_its_line() -> None:
    assert set().union(*LINES) >= ROOMS


@pytest.mark.parametrize("module", INSIDE)
def test_a_room_imports_from_those_above(module: str) -> None:
    own = room(module)
    for name in imported(running_nodes(MODULES[module])):
        other = room(name)
        if other is None:
            assert not name.startswith("kvstages.") or name.rsplit(".", 1)[0] in SHARED or name in SHARED, name
        elif other != own:
            assert line(other) <= line(own) and not {own, other} <= APART, name


@pytest.mark.parametrize("module", INSIDE)
def test_torch_is_imported_where_tensors_are(module: str) -> None:
    runs = when_imported if room(module) == "commands" else running_nodes
    names = imported(runs(MODULES[module]))
    if room(module) not in TORCH or module in WITHOUT_TORCH:
        assert not [name for name in names if name.split(".")[0] == "torch"]


def test_a_package_holds_only_its_docstring() -> None:
    for path in PACKAGE.glob("*/__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert len(body) == 1 and isinstance(body[0], ast.Expr), path


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by name: two of one name can be told apart only by the order in which they are collected."""
    names = [path.name for path in (PACKAGE.parent / "tests").rglob("*.py")]
    assert not [name for name in set(names) if names.count(name) > 1]
