"""What a figure or a table says of itself: its number and title, and the files of a study that it is made of.

Each module of ``kvstages.figures`` and ``kvstages.tables`` that holds an ``Entry`` is one; nothing else lists them. The
files are named by what class ``Study`` calls them (kvstages/study/layout.py), so that neither has to know the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Input:
    """Files that a figure or table reads: an argument of its function, and of its command.

    ``files``: the property of class ``Study`` that lists them; ``metavar`` and ``help``: what the command's help says;
    ``several``: any number of files, or exactly one.
    """

    files: str
    metavar: str
    help: str = ""
    several: bool = False


@dataclass(frozen=True)
class Entry:
    """A figure or table.

    ``inputs`` by the names of its function's arguments: the command takes the files of the first one as they are, those
    of the others after an option of that name. ``beside`` are files of the study that lie beside these and are read
    too. A table that shows published figures (``published``) also takes the folder that holds them.
    """

    number: int
    title: str
    inputs: Mapping[str, Input]
    beside: tuple[str, ...] = ()
    published: bool = False

    @property
    def label(self) -> str:
        """Number and title, as the report lists it."""
        return f"{self.number} {self.title}"


def find(package: str, name: str) -> tuple[ModuleType, Entry] | None:
    """The module of ``package`` that is called ``name``, hyphens as underscores, with its entry; None where none is."""
    module = f"{package}.{name.replace('-', '_')}"
    if "." in name or "_" in name or importlib.util.find_spec(module) is None:
        return None
    found = importlib.import_module(module)
    entries = [value for value in vars(found).values() if isinstance(value, Entry)]
    return (found, entries[0]) if entries else None


def entries(package: str) -> dict[str, Entry]:
    """The entries of a package by name, in the order of their numbers; ValueError where two have the same number."""
    path = importlib.import_module(package).__path__
    names = [module.name.replace("_", "-") for module in pkgutil.iter_modules(path)]
    found = {name: pair[1] for name in names if (pair := find(package, name)) is not None}
    numbers = [entry.number for entry in found.values()]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise ValueError(f"{package}: two entries have the number {twice[0]}")
    return dict(sorted(found.items(), key=lambda item: item[1].number))
