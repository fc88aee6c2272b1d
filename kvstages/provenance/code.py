"""The code of a stage: its digest, and the versions of the packages that it imports.

The modules are found by reading the source, never by importing it, so this costs milliseconds and no torch. Imports
inside functions count, for commands import their work when run; those under ``if TYPE_CHECKING:`` do not, for they
never run. A module counts by what it does: comments, docstrings, help texts and layout are no part of its digest.

Some stages make one of many things: ``figure storage-kl`` draws one figure. Their digest is that of the command and of
that one's module (``FAMILIES``), so that an edit of a figure concerns this figure only. The modules in front of every
stage (``FRONT``: finding a command, turning errors into lines) are no part of any digest: they change no result.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from kvstages.files import ledger

PACKAGE = Path(__file__).parents[1]
# Stages that make one of many things, and the package that holds a module for each of these.
FAMILIES = {"figure": "figures", "table": "tables"}
# Families of models that a stage imports only where it opens one: the module that does, and the one that asks for it.
MODELS = {"huggingface": ".models.huggingface_files"}
LOADER = ".models.load"
FRONT = ("", ".__main__", ".cli", ".commands", ".stages")
# Keywords of Click whose texts only people read.
HELP = {"help", "short_help", "epilog"}
# What an import is called that does not have its package's name.
DISTRIBUTIONS = {"yaml": "PyYAML"}


@cache
def module_path(module: str, package: Path) -> Path | None:
    """File of a dotted module of ``package``; None if the package has no such module."""
    base = package.parent.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def data_files(module: str, package: Path) -> tuple[Path, ...]:
    """Sorted data files of a module: those in a folder beside it that has its name and is no package."""
    folder = module_path(module, package).with_suffix("")
    if not folder.is_dir():
        return ()
    return tuple(sorted(path for path in folder.rglob("*") if path.is_file()))


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and every node under it that may run: all but the bodies of ``if TYPE_CHECKING:``."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        typing_only = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        waiting += node.orelse if typing_only else ast.iter_child_nodes(node)


@cache
def read_module(module: str, package: Path) -> tuple[frozenset[str], bytes]:
    """Every dotted name that the source of ``module`` imports, and the digest of what it does.

    Kept beside the files that Python compiles, under the sha256 of the source and of this file, which says how it is
    read: to parse all modules takes longer than a small stage.
    """
    path = module_path(module, package)
    source = path.read_bytes()
    key = hashlib.sha256(_own_source() + source).hexdigest()
    known = kept(package)
    if known.get(module, [None])[0] != key:
        tree = ast.parse(source)
        names = set()
        for node in running_nodes(tree):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                if node.level:
                    raise ValueError(f"{module}: line {node.lineno} has a relative import, which digests do not follow")
                names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
        digest = hashlib.sha256(json.dumps(substance(tree)).encode()).hexdigest()
        known[module] = [key, sorted(names), digest]
        with suppress(OSError):  # a package that may not be written to
            ledger.write_json(kept_at(package), known)
    _, names, digest = known[module]
    return frozenset(names), bytes.fromhex(digest)


def kept_at(package: Path) -> Path:
    """Where it is kept what reading the modules of a package gave."""
    return package / "__pycache__" / "digests.json"


@cache
def kept(package: Path) -> dict[str, list[Any]]:
    """What is kept of a package: module to key, imported names and digest; {} where nothing is that can be read."""
    try:
        found = json.loads(kept_at(package).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and all(map(_is_kept, found.values())) else {}


def _is_kept(entry: Any) -> bool:
    """Whether an entry is a key, names and a digest; a damaged file is read anew."""
    return (
        isinstance(entry, list)
        and list(map(type, entry)) == [str, list, str]
        and re.fullmatch("[0-9a-f]{64}", entry[2]) is not None
    )


@cache
def _own_source() -> bytes:
    return Path(__file__).read_bytes()


@cache
def imported_names(module: str, package: Path) -> frozenset[str]:
    """Every dotted name that the source of ``module`` imports, and the packages that hold each."""
    found = {module, *read_module(module, package)[0]}
    return frozenset(name.rsplit(".", count)[0] for name in found for count in range(name.count(".") + 1))


@cache
def imported_modules(module: str, package: Path) -> frozenset[str]:
    """Modules of ``package`` that the source of ``module`` imports, without those in front of every stage."""
    front = {package.name + name for name in FRONT}
    return frozenset(
        name
        for name in imported_names(module, package)
        if name.split(".")[0] == package.name and name not in front and module_path(name, package) is not None
    )


def opens_models(stage: str, package: Path = PACKAGE) -> bool:
    """Whether a stage opens a decoder, of whatever family."""
    return package.name + LOADER in stage_modules(stage, package=package)


@cache
def stage_modules(stage: str, member: str | None = None, package: Path = PACKAGE) -> tuple[str, ...]:
    """Sorted names of the modules that ``kvstages STAGE`` imports, FRONT left out; ValueError on an unknown stage.

    ``member`` names what a stage of a family makes, ``stage_modules("figure", "storage-kl")``, or the family of the
    model that a stage opens, ``stage_modules("sweep", "huggingface")``. Without it the modules are those of the command
    alone, and of gpt2-nano.
    """
    command = f"{package.name}.commands.{stage.replace('-', '_')}"
    if module_path(command, package) is None:
        raise ValueError(f"stage {stage!r}: {package.name}/commands has no file for it")
    waiting = {command}
    if member in MODELS:
        if opens_models(stage, package):
            waiting.add(package.name + MODELS[member])
    elif member is not None:
        module = f"{package.name}.{FAMILIES[stage]}.{member.replace('-', '_')}"
        if module_path(module, package) is None:
            raise ValueError(f"stage {stage!r}: {package.name}/{FAMILIES[stage]} has no file for {member!r}")
        waiting.add(module)
    modules: set[str] = set()
    while waiting:
        module = waiting.pop()
        modules.add(module)
        waiting |= imported_modules(module, package) - modules
    return tuple(sorted(modules))


def substance(node: Any) -> Any:
    """A syntax tree as lists and texts, without what only people read; the same for each version of Python.

    Left out are docstrings, the keywords ``HELP`` of calls, and fields that are empty or that the parser fills in its
    own way from one version to the next.
    """
    if isinstance(node, list):
        return [substance(part) for part in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment")}
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
        fields["body"] = node.body[1:]
    if isinstance(node, ast.Call):
        fields["keywords"] = [keyword for keyword in node.keywords if keyword.arg not in HELP]
    return [
        type(node).__name__,
        *([name, substance(value)] for name, value in fields.items() if value not in (None, [])),
    ]


def stage_digest(stage: str, member: str | None = None, package: Path = PACKAGE) -> str:
    """First 16 hexadecimal digits of the sha256 over what a stage's modules do, and over their data files."""
    digest = hashlib.sha256()
    for module in stage_modules(stage, member, package):
        digest.update(f"{module}\n".encode() + read_module(module, package)[1])
        for data in data_files(module, package):
            digest.update(
                f"{data.relative_to(package).as_posix()}\n".encode() + hashlib.sha256(data.read_bytes()).digest()
            )
    return digest.hexdigest()[:16]


def stage_packages(stage: str, member: str | None = None, package: Path = PACKAGE) -> dict[str, str | None]:
    """Version of Python and of each package that a stage's modules import, sorted; None where it is not installed.

    What these packages need in turn is not listed; neither is Click, which only parses.
    """
    names = {
        name.split(".")[0]
        for module in stage_modules(stage, member, package)
        for name in imported_names(module, package)
    }
    names -= {package.name, "click", *sys.stdlib_module_names}
    return {"python": platform.python_version(), **{name: version(name) for name in sorted(names)}}


@cache
def version(name: str) -> str | None:
    """Version of the package that is imported by this name; None where it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return None
