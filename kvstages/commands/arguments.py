"""What a command line asks for, however it is written: the stage, and a value for each of its arguments."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

# Arguments that name a model or what one is made of.
MODELS = ("--model", "--checkpoint")
# Between the stages of one command line (``several``).
SEPARATOR = "+"


def together(stages: Iterable[Sequence[Any]]) -> list[str]:
    """The words of several stages as one command line."""
    found: list[str] = []
    for words in stages:
        found += [*([SEPARATOR] if found else []), *map(str, words)]
    return found


def lines(words: Iterable[str]) -> list[list[str]]:
    """The words of each stage of such a command line."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == SEPARATOR:
            found.append([])
        else:
            found[-1].append(word)
    return found


def asked(group: click.Group, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The names of the stage that ``words`` ask of ``group``, and the stage's arguments.

    Names are those of which its code has a digest: ``["sweep"]``, ``["figure", "frontier"]``, ``["sweep",
    "huggingface"]``.

    Arguments are a value for each name that a user types, defaults included, as JSON would have them. Paths are as
    seen from the working directory: their spelling does not matter, and nothing needs to be there. Nothing runs.
    click.UsageError where Click would not take the words.
    """
    names: list[str] = []
    command, words = group, list(words)
    while True:
        context = click.Context(command, info_name=command.name, resilient_parsing=True)
        context.allow_interspersed_args = command.allow_interspersed_args
        found, words, _ = command.make_parser(context).parse_args(words)
        if not isinstance(command, click.Group):
            break
        if not words:
            raise click.UsageError("no stage is named")
        name, command, words = command.resolve_command(context, words)
        if command is None:
            raise click.UsageError(f"no such stage: {name}")
        names.append(name)
    arguments = {
        typed(parameter): value(parameter, context, found)
        for parameter in command.get_params(context)
        if parameter.expose_value
    }
    models = [arguments[name] for name in MODELS if arguments.get(name) is not None]
    return names + family(names[0], models), arguments


def family(stage: str, models: Sequence[str]) -> list[str]:
    """The name that a stage has besides its own where it opens models of another family than gpt2-nano."""
    if not models:
        return []
    from kvstages.models.config import is_huggingface
    from kvstages.provenance.code import opens_models

    return ["huggingface"] if any(map(is_huggingface, models)) and opens_models(stage) else []


def typed(parameter: click.Parameter) -> str:
    """An option as a user types it, an argument by its name in the command's usage."""
    return max(parameter.opts, key=len) if isinstance(parameter, click.Option) else parameter.human_readable_name


def value(parameter: click.Parameter, context: click.Context, found: dict[str, Any]) -> Any:
    """What an argument was given, or has as default; a path as seen from the working directory."""
    given, _ = parameter.consume_value(context, found)
    if not isinstance(parameter.type, click.Path):
        given = parameter.process_value(context, given)
    return plain(given, relative if isinstance(parameter.type, click.Path) else str)


def plain(value: Any, text: Callable[[Any], str]) -> Any:
    """A value as JSON would have it, None where none was given; texts and what else JSON does not have by ``text``."""
    if isinstance(value, tuple | list):
        return [plain(part, text) for part in value]
    if isinstance(value, enum.Enum):  # how Click says that there is no value
        return None
    return value if value is None or isinstance(value, bool | int | float) else text(value)


def relative(path: str) -> str:
    """A path as seen from the working directory, as it was given where it lies elsewhere."""
    seen = os.path.relpath(path)
    return os.fspath(path) if seen.split(os.sep)[0] == os.pardir else seen
