"""The command line: one Click command a stage, each in its own file of ``kvstages/commands``.

Commands parse, call and write. They are imported when named, and import their work when run, so that ``--help`` and
the cheap stages start without torch. Whatever is wrong with an input ends in one line and exit status 1.
"""

from __future__ import annotations

import errno
import importlib
import os
from typing import Any

import click

from kvstages import __version__
from kvstages.files import ledger
from kvstages.stages import GROUPS, STAGES

LONGEST_MESSAGE = 1000
# Where a context keeps the words of the command line.
WORDS = "kvstages.words"
NO_MEMORY = "memory ran out; give a smaller --memory-mb (memory_mb in config/config.yaml), to adapt a smaller --batch"


# What libraries say, in errors of kinds that say nothing, when memory ran out: PyTorch's allocator for the CPU, the C++
# library, the system (in a map of a file), oneDNN (whose kernels are chosen by then, so nothing but memory can be
# lacking), and Python's bindings of Rust.
OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "std::bad_alloc",
    os.strerror(errno.ENOMEM),
    "could not create a primitive",
    "could not execute a primitive",
    "PyObject pointer is null",
)
# oneDNN's words for a product that it has no kernel for begin alike.
NO_KERNEL = "could not create a primitive descriptor"


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: in Python, on a GPU, or in a library (``OUT_OF_MEMORY``).

    Errors are told by name and text, so that no stage imports torch for this alone.
    """
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (any(words in text for words in OUT_OF_MEMORY) and NO_KERNEL not in text)
    )


def one_line(error: Exception) -> str:
    """An error's text in one line that a screen can hold, whatever a wrong file put into it."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}..."


class StageGroup(click.Group):
    """The group of stages: it finds commands in ``STAGES`` and turns errors about the input into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(STAGES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"kvstages.commands.{name.replace('-', '_')}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, stages in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl(list(stages.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        # Where memory ran out, safetensors would need more of it for a list of calls, and then wait for its own lock.
        os.environ["RUST_BACKTRACE"] = "0"
        try:
            ledger.begin(stage_record(self, ctx.meta[WORDS], ctx.params["code"]))
            return super().invoke(ctx)
        except BaseException as error:  # a panic of Rust is no Exception
            if out_of_memory(error):
                raise click.ClickException(NO_MEMORY) from error
            if isinstance(error, ValueError | OSError):
                raise click.ClickException(one_line(error)) from error
            raise


def stage_record(group: click.Group, words: list[str], planned: str | None) -> dict[str, Any] | None:
    """What the records of this command's files will say of it (kvstages/files/ledger.py); None where none is kept.

    ``planned`` is the digest of the stage's code that a workflow expects; ValueError if this code has another one.
    """
    if planned is None and not os.path.isdir(ledger.FOLDER):
        return None
    from kvstages.commands.arguments import asked
    from kvstages.provenance.code import PACKAGE, stage_digest, stage_packages

    try:
        names, arguments = asked(group, words)
    except click.UsageError:
        return None  # which Click itself is about to say
    code = stage_digest(*names)
    if planned is not None and planned != code:
        raise ValueError(
            f"{' '.join(names)}: the workflow was planned with the code {planned}, the code in {PACKAGE} is {code}: "
            "it was edited while the workflow ran, or is not the workflow's own: run the workflow again"
        )
    if planned is not None and not os.path.isdir(ledger.FOLDER):
        raise ValueError(
            f"no folder {ledger.FOLDER} here, which a workflow makes when it starts: run without --no-hooks"
        )
    return {
        "stage": " ".join(names),
        "arguments": arguments,
        "code": code,
        "packages": stage_packages(*names),
        "planned": planned is not None,
    }


@click.group(cls=StageGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
@click.option(
    "--code", metavar="DIGEST", help="Digest of the stage's code that a workflow was planned with: no other code runs."
)
def main(code: str | None) -> None:
    """Measure how far each attention head's KV cache can be quantized, and what it does to the output.

    Every stage reads files and writes files; Snakemake chains them, and each can be run by hand.
    """
