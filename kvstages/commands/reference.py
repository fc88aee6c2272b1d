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
    output: Path,
) -> None:
    """Compute the reference's logits: every head in BF16, on each block of a window.

    Writes one tensor, logits [blocks, tokens, vocabulary], and a record of how they were computed. Policies must be
    evaluated the same way: then a policy with every head in BF16 measures a KL of exactly 0.

    Example: kvstages reference --model model.safetensors --windows windows.safetensors --window validation
    --output reference/validation.safetensors
    """
    import torch

    from kvstages.files.atomic import write_tensors
    from kvstages.measure.execution import dense_grid, window_logits
    from kvstages.measure.setting import Setting, prepare
    from kvstages.models.checkpoints import load_model
    from kvstages.study.windows import load_window

    setting = Setting(execution, compute_dtype)
    place = prepare(device, threads)
    decoder = load_model(model, setting.dtype, place).pack()
    tokens = load_window(windows, window, decoder.config).to(place)
    with options.progress(f"reference, {window}") as report:
        logits = torch.empty(*tokens.shape, decoder.config.vocab_size, dtype=setting.dtype)
        for blocks, part in window_logits(decoder, tokens, dense_grid(decoder), setting, memory_mb << 20, report):
            logits[blocks] = part
    record = {**setting.as_dict(), "device": place.type, "threads": threads, "memory_mb": memory_mb, "window": window}
    write_tensors(output, {"logits": logits}, record)
