"""``kvstages adapt``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options, training_options


@click.command("adapt")
@options.model
@options.windows
@training_options.training
@click.option("--arm", "name", default="", help="Name of the arm, kept in the record.")
@click.option("--control", default="", help="Name of the arm that it is compared with, kept in the record.")
@click.option("--steps", type=click.IntRange(min=1), default=None, help="Training steps.")
@click.option("--learning-rate", type=click.FloatRange(min=0), default=None)
@click.option("--beta", type=click.FloatRange(min=0), default=None, help="Weight of the KL in the loss.")
@click.option(
    "--settings",
    type=options.INPUT,
    default=None,
    help="Steps, learning rate and beta that the stage adapt-grid chose, in the place of these three.",
)
@options.calibration
@options.memory
@options.compute_dtype
@options.device
@options.threads
@click.option("--output", type=options.OUTPUT, required=True, help="Safetensors file to write the adapted weights to.")
@click.option("--curve", type=options.OUTPUT, required=True, help="CSV file to write each step's losses to.")
@click.option("--record", type=options.OUTPUT, required=True, help="JSON file to write settings and change to.")
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
    name: str,
    control: str,
    steps: int | None,
    learning_rate: float | None,
    beta: float | None,
    settings: Path | None,
    calibration: Path | None,
    compute_dtype: str,
    device: str,
    threads: int,
    memory_mb: int,
    output: Path,
    curve: Path,
    record: Path,
) -> None:
    """Train a copy of the model for a few steps with a noisy or quantized KV cache, or with neither (a control).

    The loss is cross entropy plus beta times the KL to the frozen original; parameters are kept in the compute
    dtype. Blocks are taken in order and round the window, or each round in an order that the seed draws. Writes the
    weights, the losses of each step, and a record of the settings, the tokens seen and how far the weights have moved.
    A loss that is not finite is an error.

    Example: kvstages adapt --model model.safetensors --windows windows.safetensors --noise int4 --seed 1337 --steps 50
    --learning-rate 1e-6 --beta 1 --output adapted.safetensors --curve curve.csv --record training.json
    """
    from kvstages.analysis.settings_grid import read_chosen
    from kvstages.files.atomic import write_json, write_table
    from kvstages.measure.adaptation import NOISE, STRAIGHT_THROUGH, Arm, change
    from kvstages.measure.setting import DTYPES, prepare
    from kvstages.measure.training_jobs import Training
    from kvstages.models.checkpoints import save_model
    from kvstages.models.identity import read_identity
    from kvstages.study.arms import SHUFFLED
    from kvstages.study.windows import load_window

    if noise is not None and straight_through is not None:
        raise click.UsageError("give --noise or --straight-through, or neither, and not both")
    given = {"--steps": steps, "--learning-rate": learning_rate, "--beta": beta}
    missing = [option for option, value in given.items() if value is None]
    if len(missing) != (0 if settings is None else len(given)):
        raise click.UsageError("give either --settings, or --steps, --learning-rate and --beta")
    if settings is not None:
        steps, learning_rate, beta = read_chosen(settings)
    place = prepare(device, threads)
    identity = read_identity(model)
    tokens = load_window(windows, window, identity.shape).to(place)
    cache, policy = (NOISE, noise) if noise is not None else (STRAIGHT_THROUGH, straight_through)
    called, grid = ("", None) if policy is None else training_options.named_grid(policy, identity)
    cache = None if grid is None else cache
    arm = Arm(cache, grid, steps, batch, learning_rate, weight_decay, clip, beta, order == SHUFFLED)
    training = Training(model, DTYPES[compute_dtype], place, tokens, memory_mb << 20, calibration)
    with options.progress(f"adapt, seed {seed}") as report:
        decoder, records = training.run(arm, seed, report)
    settled = {
        "arm": name,
        "control": control,
        "weights_dtype": compute_dtype,
        "cache": cache or "exact",
        "policy": called,
        "steps": steps,
        "learning_rate": learning_rate,
        "beta": beta,
        "weight_decay": weight_decay,
        "clip": clip,
        "batch": batch,
        "order": order,
        "seed": seed,
        "window": window,
        "tokens_seen": steps * batch * tokens.shape[1],
    }
    moved = change(decoder, training.original)
    save_model(output, decoder.config, decoder.state_dict(), identity.origin or identity.weights)
    columns = {name: [row[name] for row in records] for name in records[0]}
    write_table(curve, {"step": range(steps), **columns})
    write_json(record, settled | moved)
