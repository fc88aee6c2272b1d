"""Which modules a stage imports, and a digest of them: how Snakemake learns that an edit affects a stage.

The modules are found by reading the source, never by importing it, so this costs milliseconds and no torch. Imports
inside functions count, for commands import their work when run; those under ``if TYPE_CHECKING:`` do not, for they
never run.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
# Stages that make one of many things, and the package that holds a module for each of these.
FAMILIES = {"figure": "figures", "table": "tables"}


def module_path(module: str, package: Path) -> Path | None:
    """File of a dotted module of ``package``; None if the package has no such module."""
    base = package.parent.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def data_files(module: str, package: Path) -> list[Path]:
    """Sorted data files of a module: those in a folder beside it that has its name and is no package."""
    folder = module_path(module, package).with_suffix("")
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.rglob("*") if path.is_file())


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and every node under it that may run: all but the bodies of ``if TYPE_CHECKING:``."""
    yield node
    typing_only = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    for child in node.orelse if typing_only else ast.iter_child_nodes(node):
        yield from running_nodes(child)


@cache
def imported_modules(module: str, package: Path) -> frozenset[str]:
    """Modules of ``package`` that the source of ``module`` imports by name, and the packages that hold them."""
    found = set()
    for node in running_nodes(ast.parse(module_path(module, package).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{module}: line {node.lineno} has a relative import, which digests do not follow")
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    parents = {name.rsplit(".", count)[0] for name in (*found, module) for count in range(name.count(".") + 1)}
    return frozenset(
        name for name in parents if name.split(".")[0] == package.name and module_path(name, package) is not None
    )


def stage_modules(stage: str, member: str | None = None, package: Path = PACKAGE) -> list[str]:
    """Sorted names of the modules that ``python -m kvstages STAGE`` imports; ValueError on an unknown stage.

    ``member`` names what a stage of a family makes: ``stage_modules("figure", "storage-kl")``. Without it the modules
    are those of the command alone.
    """
    command = f"{package.name}.commands.{stage.replace('-', '_')}"
    if module_path(command, package) is None:
        raise ValueError(f"stage {stage!r}: {package.name}/commands has no file for it")
    modules: set[str] = set()
    waiting = {f"{package.name}.__main__", command}
    if member is not None:
        waiting.add(f"{package.name}.{FAMILIES[stage]}.{member.replace('-', '_')}")
    while waiting:
        module = waiting.pop()
        modules.add(module)
        waiting |= imported_modules(module, package) - modules
    return sorted(modules)


def stage_digest(stage: str, member: str | None = None, package: Path = PACKAGE) -> str:
    """First 16 hexadecimal digits of the sha256 over names and contents of a stage's modules and their data files."""
    digest = hashlib.sha256()
    for module in stage_modules(stage, member, package):
        for path in (module_path(module, package), *data_files(module, package)):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
