"""``kvstages project``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options
from kvstages.commands.precision import Precision


@click.command("project")
@click.argument("gradients", type=options.INPUT)
@click.option(
    "--precision",
    "precisions",
    type=Precision(),
    multiple=True,
    required=True,
    help="Precision to score, of any quantizer scheme; may be given more than once.",
)
@options.calibration
@options.threads
@click.option("--output-table", type=options.OUTPUT, required=True, help="Sensitivity table to write, CSV.")
@click.option("--projections", type=options.OUTPUT, required=True, help="Safetensors file to write, for predict.")
def command(
    gradients: Path,
    precisions: tuple[str, ...],
    calibration: Path | None,
    threads: int,
    output_table: Path,
    projections: Path,
) -> None:
    """Score precisions from GRADIENTS that the stage gradients has kept, without running the model.

    Writes what the stage gradients writes: a sensitivity table and the projections that it was made of. A precision
    costs a reconstruction of the stored keys and values, and a product with each gradient.

    Example: kvstages project kept.safetensors --precision int4 --precision centred4
    --calibration calibration.safetensors --output-table gradients.csv --projections projections.safetensors
    """
    from kvstages.cache.precisions import by_size
    from kvstages.measure.calibration import read_contexts
    from kvstages.measure.gradients import joined, project
    from kvstages.measure.kept_gradients import read_kept
    from kvstages.measure.setting import prepare
    from kvstages.scores.projections import write_scores

    prepare("cpu", threads)
    wanted = by_size(precisions)
    contexts = None if calibration is None else read_contexts(calibration)
    kept = read_kept(gradients)
    with options.progress("project") as report:

        def parts():
            for found in kept.slices():
                yield project(found, kept.timings, wanted, contexts)
                report((found.first + 1) / kept.blocks)

        values, error = joined(parts())
    write_scores(output_table, projections, values.numpy(), error, wanted, kept.tokens, kept.window)
