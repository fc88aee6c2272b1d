"""Groups with a command for each figure or table, whose arguments are the inputs that its module names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from kvstages.analysis.entries import Entry, entries, find
from kvstages.commands.options import INPUT


class EntryGroup(click.Group):
    """The entries of ``package`` as commands, each looked up when it is named.

    ``run`` gets the entry's module and the arguments of the command; ``options`` are those that every entry has.
    """

    def __init__(
        self, *args: Any, package: str, run: Callable[..., None], options: Sequence[click.Option] = (), **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.package, self.run, self.options = package, run, options

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(entries(self.package))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        found = find(self.package, name)
        return None if found is None else self.entry_command(name, *found)

    def entry_command(self, name: str, module: ModuleType, entry: Entry) -> click.Command:
        (first, argument), *others = entry.inputs.items()
        parameters: list[click.Parameter] = [
            click.Argument(
                [first],
                metavar=f"{argument.metavar}{'...' * argument.several}",
                type=INPUT,
                nargs=-1 if argument.several else 1,
                required=True,
            )
        ]
        for word, option in others:
            help = f"{option.help}{' Repeat.' * option.several}"
            parameters.append(
                click.Option([option_name(word)], type=INPUT, multiple=option.several, required=True, help=help)
            )
        if entry.published:
            parameters.append(
                click.Option(
                    ["--published"],
                    metavar="NAME|FOLDER",
                    help="Published figures to show beside the measured ones: gpt2-nano, or a folder in its format.",
                )
            )
        return click.Command(
            name,
            params=[*parameters, *self.options],
            help=inspect.getdoc(module),
            callback=lambda **given: self.run(module, **given),
        )


def option_name(word: str) -> str:
    """The option of an input's name."""
    return f"--{word.replace('_', '-')}"


def output(help: str) -> click.Option:
    """The option that says which file to write."""
    return click.Option(["--output"], type=click.Path(path_type=Path), required=True, help=help)
