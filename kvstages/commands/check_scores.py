"""``kvstages check-scores``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options
from kvstages.commands.measuring import Measuring, measuring
from kvstages.commands.opening import opened
from kvstages.commands.precision import Precision

NUMBERS = ["layer", "head", "mean_kl", "blocks", "below_floor", "reconstruction_error"]
TEXTS = ["part", "precision", "source", "execution", "compute_dtype"]
MAY_BE_EMPTY = ["standard_error", "floor_kl", "bf16_step_kl"]


@click.command("check-scores")
@click.option("--sensitivity", type=options.INPUT, required=True, help="Scores from gradients.")
@options.model
@options.windows
@click.option("--window", default="calibration", show_default=True, help="Window to measure on: that of the scores.")
@click.option(
    "--precision",
    "precisions",
    type=Precision(),
    multiple=True,
    help="Precision whose scores are checked. Repeat.  [default: all that have scores]",
)
@click.option("--sample", type=click.IntRange(min=2), default=24, show_default=True, help="Units to measure first.")
@click.option(
    "--most",
    type=click.IntRange(min=0),
    default=48,
    show_default=True,
    help="Units beyond second order to measure then; the largest scores first.",
)
@options.calibration
@measuring
@click.option("--output", type=options.OUTPUT, required=True, help="CSV file to write the scores to.")
@click.option("--checks", type=options.OUTPUT, required=True, help="CSV file to write what was checked to.")
def command(
    sensitivity: Path,
    model: Path,
    windows: Path,
    window: str,
    precisions: tuple[str, ...],
    sample: int,
    most: int,
    calibration: Path | None,
    how: Measuring,
    output: Path,
    checks: Path,
) -> None:
    """Measure a sample of scores from gradients, and replace those that are beyond second order.

    A score from gradients is a KL to second order. A sample of units over the range of the scores is measured as a
    sweep measures them, apart for schemes that keep the first token exact and those that do not. Where the sample says
    that scores above some size are off, all above it are marked, and the largest are measured. Writes the table of
    scores with what was measured in it (source gradients-checked), and a row for each unit that was checked.

    Example: kvstages check-scores --sensitivity screening/gradients.csv --model model.safetensors
    --windows windows.safetensors --output screening/scores.csv --checks screening/checks.csv
    """
    from kvstages.files.atomic import write_table
    from kvstages.files.read import read_columns
    from kvstages.measure.execution import check_memory
    from kvstages.measure.second_order import measure_units
    from kvstages.measure.sweep import sweep_bytes
    from kvstages.scores.columns import SENSITIVITY_COLUMNS
    from kvstages.scores.second_order import check
    from kvstages.study.windows import load_window

    table = read_columns(sensitivity, NUMBERS, TEXTS, MAY_BE_EMPTY)[SENSITIVITY_COLUMNS]
    held = list(dict.fromkeys(table["precision"]))
    for name in precisions:
        if name not in held:
            raise ValueError(f"{sensitivity}: no {name} scores; it holds {', '.join(held)}")
    decoder = opened(how, model, calibration)
    tokens = load_window(windows, window, decoder.shape).to(how.place)
    block = sweep_bytes(decoder, tokens.shape[1], how.setting.execution, len(precisions or held))
    check_memory(decoder, block, how.memory)
    with options.progress("check-scores") as report:
        scores, found = check(
            table,
            precisions or held,
            sample,
            most,
            lambda keys: measure_units(decoder, tokens, keys, how.setting, how.memory, report),
        )
    write_table(
        checks, found, ["measured_kl", "measured_standard_error", "ratio", "is_off", "threshold", "standard_error"]
    )
    write_table(output, scores, MAY_BE_EMPTY)
