"""The command line: one Click command a stage, each in its own file of ``kvstages/commands``.

Commands parse, call and write. They are imported when named, and import their work when run, so that ``--help`` and
the cheap stages start without torch. Whatever is wrong with an input ends in one line and exit status 1.
"""

from __future__ import annotations

import importlib

import click

from kvstages import __version__
from kvstages.files import ledger
from kvstages.stages import GROUPS, STAGES

LONGEST_MESSAGE = 1000
NO_MEMORY = "memory ran out; give a smaller --memory-mb (memory_mb in config/config.yaml), to adapt a smaller --batch"


def out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: in Python, on a GPU, or in PyTorch's allocator for the CPU.

    PyTorch's errors are told by name and text, so that no stage imports torch for this alone. The CPU's is a plain
    RuntimeError: "DefaultCPUAllocator: can't allocate memory" or, on Windows, "not enough memory".
    """
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator" in str(error)
    )


def one_line(error: Exception) -> str:
    """What an error says, in one line that a screen can hold: a wrong file may have put anything into it."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}..."


class StageGroup(click.Group):
    """Looks commands up in ``STAGES`` and turns errors about the input into one line."""

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

    def invoke(self, ctx: click.Context) -> object:
        ledger.forget()
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            raise click.ClickException(one_line(error)) from error
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise click.ClickException(NO_MEMORY) from error


@click.group(cls=StageGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Measure how far each attention head's KV cache can be quantized, and what it does to the output.

    Every stage reads files and writes files; Snakemake chains them, and each can be run by hand.
    """
