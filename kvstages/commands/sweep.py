"""``kvstages sweep``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options


@click.command("sweep")
@options.model
@options.windows
@click.option("--window", default="calibration", show_default=True, help="Window to measure on.")
@click.option("--layer", type=click.IntRange(min=0), required=True, help="Layer whose heads are quantized in turn.")
@click.option(
    "--precision",
    "precisions",
    type=click.Choice(["int8", "int4"]),
    multiple=True,
    default=("int8", "int4"),
    show_default=True,
    help="Precision to try; may be given more than once.",
)
@options.measuring
@click.option("--output", type=options.OUTPUT, required=True, help="CSV file to write.")
def command(
    model: Path,
    windows: Path,
    window: str,
    layer: int,
    precisions: tuple[str, ...],
    execution: str,
    arithmetic: str,
    dense_storage: str,
    device: str,
    threads: int,
    memory_mb: int,
    output: Path,
) -> None:
    """Quantize one head of a layer at a time, every other head in BF16, and measure the KL to the reference.

    Writes one row for each head, precision and block: the mean KL (nats) over the block's positions. The reference
    runs along in the same batches.

    Example: kvstages sweep --model model.safetensors --windows windows.safetensors --layer 3 --output layer-03.csv
    """
    from kvstages.checkpoints import load_model
    from kvstages.files import write_table
    from kvstages.runtime import Setting, prepare
    from kvstages.sweep import sweep_layer
    from kvstages.sweep_table import sweep_table
    from kvstages.windows import load_window

    setting = Setting(execution, arithmetic, dense_storage)
    place = prepare(device, threads)
    decoder = load_model(model, setting.dtypes[0], place)
    tokens = load_window(windows, window, decoder.config).to(place)
    with options.progress(f"sweep, layer {layer}") as report:
        kl = sweep_layer(decoder, tokens, layer, precisions, setting, memory_mb << 20, report)
    scores = {precision: values.tolist() for precision, values in kl.items()}
    write_table(output, sweep_table(layer, scores, setting.as_dict()))
