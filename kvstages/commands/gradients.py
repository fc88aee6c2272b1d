"""``kvstages gradients``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.cache.precisions import QUANTIZED, by_size
from kvstages.commands import options
from kvstages.commands.precision import Precision


@click.command("gradients")
@options.model
@options.windows
@click.option("--window", default="calibration", show_default=True, help="Window that the scores are estimated on.")
@click.option(
    "--source", default="gradients", show_default=True, help="What the table calls its scores; recipes name them so."
)
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
    type=Precision(),
    multiple=True,
    default=QUANTIZED,
    show_default=True,
    help="Precision to score; may be given more than once.",
)
@options.calibration
@click.option(
    "--keep",
    type=options.OUTPUT,
    help="Safetensors file to write the gradients to, from which project scores other precisions: 2 bytes for every "
    "stored element of the window and (probes + 1).",
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
    source: str,
    probes: int,
    precisions: tuple[str, ...],
    calibration: Path | None,
    keep: Path | None,
    device: str,
    threads: int,
    memory_mb: int,
    output_table: Path,
    projections: Path,
) -> None:
    """Estimate all sensitivities at once, from gradients of the unquantized model (in FP32).

    Writes a sensitivity table of the source gradients (heads, and keys and values apart, at every precision): the KL to
    second order, with a standard error over blocks and probes. Writes also the projections behind it, one for each
    probe, block, layer, tensor and precision; the stage predict computes the KL of any policy from them.

    Example: kvstages gradients --model model.safetensors --windows windows.safetensors
    --output-table scores/gradients.csv --projections gradients/projections.safetensors
    """
    from contextlib import nullcontext

    from kvstages.measure.calibration import calibrated
    from kvstages.measure.execution import check_memory
    from kvstages.measure.gradients import SCORE_COPIES, graph_bytes, timings_of, window_projections
    from kvstages.measure.kept_gradients import keeping
    from kvstages.measure.setting import DTYPES, prepare
    from kvstages.models.load import open_decoder
    from kvstages.scores.projections import write_scores
    from kvstages.study.windows import load_window

    wanted = tuple(by_size(precisions))
    place = prepare(device, threads)
    decoder = calibrated(open_decoder(model, DTYPES["float32"], place), calibration)
    tokens = load_window(windows, window, decoder.shape).to(place)
    timings = timings_of(wanted)
    block = graph_bytes(decoder, tokens.shape[1], probes, len(timings))
    check_memory(decoder, block, memory_mb << 20, copies=SCORE_COPIES)
    kept = nullcontext(lambda found: None)
    if keep is not None:
        kept = keeping(keep, decoder.shape, tokens, probes, timings, window)
    with options.progress("gradients") as report, kept as keep_slice:
        values, error = window_projections(decoder, tokens, wanted, probes, memory_mb << 20, report, keep_slice)
    write_scores(output_table, projections, values.numpy(), error, wanted, tokens.shape[1], window, source)
