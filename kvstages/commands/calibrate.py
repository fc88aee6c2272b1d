"""``kvstages calibrate``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options


@click.command("calibrate")
@options.model
@options.windows
@click.option("--window", default="calibration", show_default=True, help="Window to calibrate on.")
@options.memory
@options.threads
@options.device
@click.option("--output", type=options.OUTPUT, required=True, help="Safetensors file to write.")
def command(model: Path, windows: Path, window: str, memory_mb: int, threads: int, device: str, output: Path) -> None:
    """Write what quantizer schemes need to know of a model's keys and values before any is stored.

    The means of every head's keys (before their rotary embedding) and values over a window, their largest magnitudes,
    and the model's own key biases and rotary embedding (docs/schemes.md). One pass over the window, in FP32.

    Example: kvstages calibrate --model model.safetensors --windows windows.safetensors
    --output calibration.safetensors
    """
    from kvstages.measure.calibration import calibrate, write_contexts
    from kvstages.measure.setting import DTYPES, prepare
    from kvstages.models.load import open_decoder
    from kvstages.study.windows import load_window

    place = prepare(device, threads)
    decoder = open_decoder(model, DTYPES["float32"], place)
    tokens = load_window(windows, window, decoder.shape).to(place)
    with options.progress("calibrate") as report:
        contexts = calibrate(decoder, tokens, memory_mb << 20, report)
    write_contexts(output, contexts, window)
