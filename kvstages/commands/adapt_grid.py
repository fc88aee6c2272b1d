"""``kvstages adapt-grid``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options, training_options
from kvstages.commands.measuring import Measuring, measuring


@click.command("adapt-grid")
@options.model
@options.windows
@training_options.training
@click.option("--steps", type=click.IntRange(min=1), multiple=True, required=True, help="Training steps. Repeat.")
@click.option("--learning-rate", type=click.FloatRange(min=0), multiple=True, required=True, help="Repeat.")
@click.option("--beta", type=click.FloatRange(min=0), multiple=True, required=True, help="Weight of the KL. Repeat.")
@click.option("--weights", type=click.Choice(["float32", "bfloat16", "float64"]), required=True, help="Of training.")
@click.option("--measured-on", default="reserved", show_default=True, help="Window that settings are chosen on.")
@options.calibration
@measuring
@click.option("--output", type=options.OUTPUT, required=True, help="CSV file to write the grid to.")
def command(
    model: Path,
    windows: Path,
    window: str,
    noise: str | None,
    straight_through: str | None,
    order: str,
    seed: int,
    batch: int,
    weight_decay: float,
    clip: float,
    steps: tuple[int, ...],
    learning_rate: tuple[float, ...],
    beta: tuple[float, ...],
    weights: str,
    measured_on: str,
    calibration: Path | None,
    how: Measuring,
    output: Path,
) -> None:
    """Train with every combination of settings, and measure each on the reserved window.

    One row for each learning rate, beta and number of steps: KL to the original model under the policy of training and
    with a BF16 cache, KL to the model's own BF16 cache, cross entropies. The first row is the model before training.
    The row with the least KL to the original under the policy is marked as chosen. No other window is measured.

    Example: kvstages adapt-grid --model model.safetensors --windows windows.safetensors --straight-through int3
    --seed 1337 --weights float32 --steps 14 --steps 50 --learning-rate 1e-4 --beta 1 --beta 10 --output settings.csv
    """
    from kvstages.analysis.settings_grid import choose
    from kvstages.files.atomic import write_table
    from kvstages.measure.adaptation import NOISE, STRAIGHT_THROUGH
    from kvstages.measure.setting import DTYPES
    from kvstages.measure.settings_grid import Grid, run_grid
    from kvstages.measure.training_jobs import Training
    from kvstages.models.identity import read_identity
    from kvstages.study.arms import SHUFFLED
    from kvstages.study.windows import load_window

    if (noise is None) == (straight_through is None):
        raise click.UsageError("give either --noise or --straight-through: settings are chosen under its policy")
    cache, policy = (NOISE, noise) if noise is not None else (STRAIGHT_THROUGH, straight_through)
    identity = read_identity(model)
    tokens, reserved = (load_window(windows, name, identity.shape).to(how.place) for name in (window, measured_on))
    called, precisions = training_options.named_grid(policy, identity)
    training = Training(model, DTYPES[weights], how.place, tokens, how.memory, calibration)
    tried = tuple(steps), tuple(learning_rate), tuple(beta)
    grid = Grid(cache, precisions, *tried, batch, weight_decay, clip, order == SHUFFLED, seed)
    with options.progress("adapt-grid") as report:
        rows = run_grid(training, grid, reserved, how.setting, report)
    known = {"policy": called, "window": measured_on, "seed": seed}
    write_table(output, choose([{**row, **known} for row in rows]))
