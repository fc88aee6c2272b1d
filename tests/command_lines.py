"""Whether the command line takes a call, without running it."""

from __future__ import annotations

from collections.abc import Sequence

import click

from kvstages.cli import main


def stage(name: str) -> click.Command:
    """A stage by its name; None where there is no such stage."""
    return main.get_command(click.Context(main), name)


def check_call(words: Sequence[str]) -> None:
    """Fails unless ``words`` are a stage and options that it knows, none that is required missing."""
    command, given = stage(words[0]), list(words[1:])
    assert command is not None, f"no stage {words[0]}"
    if isinstance(command, click.Group) and given and not given[0].startswith("-"):
        command, given = command.get_command(click.Context(command), given[0]), given[1:]
        assert command is not None, f"no {words[0]} {words[1]}"
    options, arguments, _ = command.make_parser(click.Context(command)).parse_args(given)
    if options.get("help"):
        return
    missing = [parameter.name for parameter in command.params if parameter.required and not options[parameter.name]]
    assert not missing and not arguments, (missing, arguments)
