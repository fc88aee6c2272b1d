"""``kvstages score-engines``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options
from kvstages.commands.precision import Precision
from kvstages.export.engines import ENGINES


@click.command("score-engines")
@options.model
@options.windows
@click.option("--window", default="calibration", show_default=True, help="Window that the scores are estimated on.")
@click.option(
    "--probes", type=click.IntRange(min=1), default=32, show_default=True, help="Backward passes over the window."
)
@click.option(
    "--engine",
    "engines",
    type=click.Choice(list(ENGINES)),
    multiple=True,
    required=True,
    help="Engine whose formats are scored; may be given more than once.",
)
@click.option(
    "--precision",
    "precisions",
    type=Precision(),
    multiple=True,
    help="Another precision to score from the same gradients; may be given more than once.",
)
@options.calibration
@options.memory
@options.threads
@options.device
@click.option("--output-table", type=options.OUTPUT, required=True, help="Sensitivity table to write, CSV.")
@click.option("--projections", type=options.OUTPUT, required=True, help="Safetensors file to write.")
def command(
    model: Path,
    windows: Path,
    window: str,
    probes: int,
    engines: tuple[str, ...],
    precisions: tuple[str, ...],
    calibration: Path | None,
    memory_mb: int,
    threads: int,
    device: str,
    output_table: Path,
    projections: Path,
) -> None:
    """Score every unit at every format of some engines, from gradients.

    Writes what the stage gradients writes, of the formats that the model's heads can have and of each --precision.
    Formats with a static scale need --calibration.

    Example: kvstages score-engines --model model.safetensors --windows windows.safetensors --engine vllm
    --calibration calibration.safetensors --output-table scores.csv --projections projections.safetensors
    """
    from kvstages.cache.precisions import by_size
    from kvstages.measure.calibration import calibrated
    from kvstages.measure.execution import check_memory
    from kvstages.measure.gradients import SCORE_COPIES, graph_bytes, timings_of, window_projections
    from kvstages.measure.setting import DTYPES, prepare
    from kvstages.models.load import open_decoder
    from kvstages.scores.projections import write_scores
    from kvstages.study.windows import load_window

    place = prepare(device, threads)
    decoder = calibrated(open_decoder(model, DTYPES["float32"], place), calibration)
    tokens = load_window(windows, window, decoder.shape).to(place)
    formats = [form.precision for engine in engines for form in ENGINES[engine].fitting(decoder.shape.widths)]
    wanted = tuple(by_size(name for name in (*formats, *precisions) if name != "bf16"))
    timings = timings_of(wanted)
    block = graph_bytes(decoder, tokens.shape[1], probes, len(timings))
    check_memory(decoder, block, memory_mb << 20, copies=SCORE_COPIES)
    with options.progress("score-engines") as report:
        values, error = window_projections(decoder, tokens, wanted, probes, memory_mb << 20, report, lambda found: None)
    write_scores(output_table, projections, values.numpy(), error, wanted, tokens.shape[1], window)
