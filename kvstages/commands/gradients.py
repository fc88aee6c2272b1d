"""``kvstages gradients``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.cache.precisions import QUANTIZED
from kvstages.commands import options


@click.command("gradients")
@options.model
@options.windows
@click.option("--window", default="calibration", show_default=True, help="Window to estimate on.")
@click.option(
    "--probes",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Backward passes over the window, each with random labels and signs of its own.",
)
@click.option(
    "--precision",
    "precisions",
    type=click.Choice(QUANTIZED),
    multiple=True,
    default=QUANTIZED,
    show_default=True,
    help="Precision to score; may be given more than once.",
)
@options.memory
@options.threads
@options.device
@click.option("--output-table", type=options.OUTPUT, required=True, help="Sensitivity table to write, CSV.")
@click.option("--projections", type=options.OUTPUT, required=True, help="Safetensors file to write, for predict.")
def command(
    model: Path,
    windows: Path,
    window: str,
    probes: int,
    precisions: tuple[str, ...],
    device: str,
    threads: int,
    memory_mb: int,
    output_table: Path,
    projections: Path,
) -> None:
    """Estimate all sensitivities at once, from gradients of the unquantized model (in FP32).

    Writes a sensitivity table of the source gradients (heads, and keys and values apart, at every precision): the KL to
    second order, with a standard error over blocks and probes. And the projections that it was made of, one for each
    probe, block, layer, tensor and precision, from which the stage predict foretells the KL of any policy.

    Example: kvstages gradients --model model.safetensors --windows windows.safetensors
    --output-table scores/gradients.csv --projections gradients/projections.safetensors
    """
    from kvstages.files.atomic import write_table, write_tensors
    from kvstages.measure.gradients import window_projections
    from kvstages.measure.setting import DTYPES, prepare
    from kvstages.models.checkpoints import load_model
    from kvstages.scores.projections import TENSOR, Projections, record_of, sensitivity_columns
    from kvstages.study.windows import load_window

    wanted = tuple(precision for precision in QUANTIZED if precision in precisions)
    place = prepare(device, threads)
    decoder = load_model(model, DTYPES["float32"], place)
    tokens = load_window(windows, window, decoder.config).to(place)
    with options.progress("gradients") as report:
        values, error = window_projections(decoder, tokens, wanted, probes, memory_mb << 20, report)
    length = tokens.shape[1]
    found = Projections(values.numpy(), wanted, length)
    table = sensitivity_columns(found, {trial: each.numpy() for trial, each in error.items()})
    write_tensors(projections, {TENSOR: values}, record_of(wanted, length, window))
    write_table(output_table, table)
