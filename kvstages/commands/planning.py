"""What a workflow's jobs will make and how, and whether the files that are already there were made that way."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from kvstages.commands.arguments import MODELS, asked, family, lines, together
from kvstages.commands.several import AGAIN
from kvstages.files import ledger
from kvstages.provenance.code import FAMILIES, stage_digest

# The files that a refused start names, one a line.
FOREIGN = Path(ledger.FOLDER, "foreign")


def plan(group: click.Group, jobs: Iterable[tuple[Iterable[str], str]]) -> dict[str, dict[str, Any]]:
    """What makes each file: path from the working directory to stage, arguments and digest of the code.

    ``jobs`` are the outputs of each job of a workflow and its shell command, ``kvstages --code X STAGE ... 2> LOG``;
    ``group`` is the command line that this calls.
    """
    made: dict[str, dict[str, Any]] = {}
    for outputs, command in jobs:
        words = shlex.split(command)
        if words[:1] != ["kvstages"]:
            continue
        words = words[1 : words.index("2>") if "2>" in words else None]
        left = list(outputs)
        for line in lines(words[1:]) if words[0] == "several" else [words]:
            names, arguments = asked(group, line)
            record = {"stage": " ".join(names), "arguments": arguments, "code": stage_digest(*names)}
            # The first stage of a job that names a file makes it; the others read it.
            written = [path for path in left if words is line or writes(line, path)]
            left = [path for path in left if path not in written]
            made.update((os.path.relpath(path), record) for path in written)
    return made


def writes(line: Iterable[str], path: str) -> bool:
    """Whether a stage with these words makes an output of its job: one that it names, or one beside it (.svg, .png)."""
    return os.path.splitext(path)[0] in {os.path.splitext(word)[0] for word in line}


def several(ask: Callable[[Any], Iterable[Sequence[Any]]]) -> Callable[[Any], list[str]]:
    """Params function: the arguments of ``kvstages several`` for the stages that ``ask`` names for a job's wildcards,
    each with the digest of its code.
    """

    def words(wildcards: Any) -> list[str]:
        return together(["--code", stage_digest(*stage_names(stage)), *stage] for stage in ask(wildcards))

    return words


def of_decoder(studies: Mapping[str, Any], ask: Callable[..., Any]) -> Callable[[str], Callable[[Any], Any]]:
    """A params function of a stage: what ``ask`` (``stage_digest``, ``stage_packages``) says of it for a job's study,
    whose decoder may be of another family than gpt2-nano."""
    return lambda stage: lambda wildcards: ask(stage, studies[wildcards.study].family)


def make_again(asked: Any) -> None:
    """Tell jobs of several stages to make current files again too, where Snakemake was told to: -f, -F or -R.

    ``asked`` are the workflow's settings of its graph of jobs.
    """
    if asked.forceall or asked.forcetargets or asked.forcerun:
        os.environ[AGAIN] = "1"


def stage_names(words: Sequence[str]) -> Sequence[str]:
    """The names of the stage with these words: one, or that of a figure, table or family of models too."""
    models = [value for name, value in pairwise(words) if name in MODELS]
    return [*words[: 2 if words[0] in FAMILIES else 1], *family(words[0], models)]


def check_start(kept: Iterable[str], plan: Mapping[str, Mapping[str, Any]]) -> None:
    """ValueError, in one line, if a file that a workflow means to keep was made otherwise than its ``plan`` says.

    It names the first such file and what differs, and lists all of them in ``FOREIGN``.
    """
    # Records of a study are last: they differ only because something else does.
    paths = sorted(map(Path, kept), key=lambda path: (plan.get(str(path), {}).get("stage") == "manifest", path))
    found = ledger.check_plan(paths, plan)
    FOREIGN.unlink(missing_ok=True)
    if not found:
        return
    FOREIGN.write_text("".join(f"{path}\n" for path, _ in found), encoding="utf-8")
    path, difference = found[0]
    more = f" (and {len(found) - 1} more: {FOREIGN})" if found[1:] else ""
    raise ValueError(f"{path}: {difference}{more}: delete it and run again: xargs -d '\\n' rm -f < {FOREIGN}")


def current_files(paths: Iterable[str], study: str, settings: Any) -> list[str]:
    """Of a study's files those that are there and are what the workflow would make now, as far as was recorded.

    ``settings`` is the study's configuration of now: if it is another than the one that was planned last, nobody can
    say what is current, and nothing is. Where nothing is recorded (no folder ``.ledger``) every file is current.
    """
    there = [path for path in paths if Path(path).is_file()]
    if not os.path.isdir(ledger.FOLDER):
        return there
    if ledger.read_settings().get(study) != settings:
        return []
    planned = ledger.read_plan()
    now = {name: {**record, "code": code_of(record["stage"])} for name, record in planned.items()}
    known: dict[str, bool] = {}
    return [path for path in there if ledger.current(Path(path), now, known)]


@cache
def code_of(stage: str) -> str | None:
    """Digest of a stage's code as it is now; None if there is no such stage any more."""
    try:
        return stage_digest(*stage.split())
    except ValueError:
        return None
