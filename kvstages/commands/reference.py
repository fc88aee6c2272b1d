"""``kvstages reference``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options


@click.command("reference")
@options.model
@options.windows
@options.window
@options.measuring
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
    execution: str,
    compute_dtype: str,
    device: str,
    threads: int,
    memory_mb: int,
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
    from kvstages.measure.execution import check_memory, least_bytes, state_bytes
    from kvstages.measure.reference import CACHE, write_reference
    from kvstages.measure.setting import Setting, prepare
    from kvstages.models.load import open_decoder
    from kvstages.study.windows import load_window

    setting = Setting(execution, compute_dtype)
    if exact_cache and execution != "one-pass":
        raise click.UsageError("--exact-cache needs the execution one-pass: nothing is stored from token to token")
    place = prepare(device, threads)
    decoder = open_decoder(model, setting.dtype, place).pack()
    tokens = load_window(windows, window, decoder.shape).to(place)
    block = state_bytes(decoder, tokens.shape[1], execution)
    check_memory(least_bytes(decoder, block), memory_mb << 20)
    record = {**setting.as_dict(), "device": place.type, "threads": threads, "memory_mb": memory_mb, "window": window}
    if exact_cache:
        record |= CACHE
    with options.progress(f"reference, {window}") as report:
        write_reference(output, decoder, tokens, setting, memory_mb << 20, record, report)
