"""``kvstages reference``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options
from kvstages.commands.measuring import Measuring, measuring
from kvstages.commands.opening import opened


@click.command("reference")
@options.model
@options.windows
@options.window
@measuring
@click.option(
    "--exact-cache",
    is_flag=True,
    help="Keys and values as the model computes them, not rounded to BF16: what any cache is further from.",
)
@click.option("--output", type=options.OUTPUT, required=True, help="Safetensors file to write the logits to.")
def command(
    model: Path,
    windows: Path,
    window: str,
    how: Measuring,
    exact_cache: bool,
    output: Path,
) -> None:
    """Compute the reference's logits: every head in BF16, on each block of a window.

    Writes one tensor, logits [blocks, tokens, vocabulary], and a record of how they were computed. Policies must be
    evaluated the same way: then a policy with every head in BF16 measures a KL of exactly 0. With --exact-cache no head
    is rounded: computed in FP32 these are the logits that evaluate-set takes as --truth.

    Example: kvstages reference --model model.safetensors --windows windows.safetensors --window validation
    --output reference/validation.safetensors
    """
    from kvstages.measure.execution import check_memory, state_bytes
    from kvstages.measure.reference import CACHE, write_reference
    from kvstages.study.windows import load_window

    if exact_cache and how.setting.execution != "one-pass":
        raise click.UsageError("--exact-cache needs the execution one-pass: nothing is stored from token to token")
    decoder = opened(how, model)
    tokens = load_window(windows, window, decoder.shape).to(how.place)
    block = state_bytes(decoder, tokens.shape[1], how.setting.execution)
    check_memory(decoder, block, how.memory)
    record = how.record(window)
    if exact_cache:
        record |= CACHE
    with options.progress(f"reference, {window}") as report:
        write_reference(output, decoder, tokens, how.setting, how.memory, record, report)
