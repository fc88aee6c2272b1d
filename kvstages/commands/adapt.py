"""``kvstages adapt``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options


@click.command("adapt")
@options.model
@options.windows
@click.option("--window", default="adaptation", show_default=True, help="Window to train on.")
@click.option(
    "--noise-bits", type=click.IntRange(2, 8), default=None, help="Precision whose rounding the noise imitates."
)
@click.option("--no-noise", is_flag=True, help="The control: the same steps without noise.")
@click.option("--seed", type=int, required=True, help="Seed of the noise.")
@click.option("--steps", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--batch", type=click.IntRange(min=1), default=4, show_default=True, help="Blocks a step.")
@click.option("--learning-rate", type=click.FloatRange(min=0), default=1e-6, show_default=True)
@click.option("--weight-decay", type=click.FloatRange(min=0), default=0.01, show_default=True)
@click.option(
    "--clip", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="Largest gradient norm."
)
@click.option(
    "--beta", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Weight of the KL in the loss."
)
@options.memory
@options.compute_dtype
@options.device
@options.threads
@click.option("--output", type=options.OUTPUT, required=True, help="Safetensors file to write the adapted weights to.")
@click.option("--curve", type=options.OUTPUT, required=True, help="CSV file to write each step's losses to.")
def command(
    model: Path,
    windows: Path,
    window: str,
    noise_bits: int | None,
    no_noise: bool,
    seed: int,
    steps: int,
    batch: int,
    learning_rate: float,
    weight_decay: float,
    clip: float,
    beta: float,
    compute_dtype: str,
    device: str,
    threads: int,
    memory_mb: int,
    output: Path,
    curve: Path,
) -> None:
    """Train a copy of the model for a few steps with noise in its KV cache.

    The loss is cross entropy plus beta times the KL to the frozen original; parameters are kept in the compute
    dtype, as in the study. Blocks are taken in order and round the window.

    Example: kvstages adapt --model model.safetensors --windows windows.safetensors --noise-bits 4 --seed 1337
    --output adapted.safetensors --curve curve.csv
    """
    from kvstages.files.atomic import write_table
    from kvstages.measure.adaptation import LOSS_BYTES, Arm, adapt, training_bytes
    from kvstages.measure.execution import check_memory, least_bytes
    from kvstages.measure.setting import DTYPES, prepare
    from kvstages.models.checkpoints import load_model, save_model
    from kvstages.models.identity import read_identity
    from kvstages.study.windows import load_window

    if no_noise == (noise_bits is not None):
        raise click.UsageError("give either --noise-bits or --no-noise")
    place = prepare(device, threads)
    decoder = load_model(model, DTYPES[compute_dtype], place)
    tokens = load_window(windows, window, decoder.shape).to(place)
    arm = Arm(noise_bits, steps, batch, learning_rate, weight_decay, clip, beta)
    block = training_bytes(decoder, batch, tokens.shape[1])
    least = least_bytes(decoder, block, batch, LOSS_BYTES / decoder.dtype.itemsize)
    check_memory(least, memory_mb << 20)
    with options.progress(f"adapt, seed {seed}") as report:
        records = adapt(decoder, tokens, arm, seed, memory_mb << 20, report)
    identity = read_identity(model)
    save_model(output, decoder.config, decoder.state_dict(), identity.origin or identity.weights)
    columns = {name: [record[name] for record in records] for name in records[0]}
    write_table(curve, {"step": range(steps), **columns})
