"""``kvstages sweep``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.cache.precision_grid import LAYER
from kvstages.commands import options
from kvstages.commands.measuring import Measuring, measuring
from kvstages.commands.opening import opened
from kvstages.commands.precision import Precision
from kvstages.scores.columns import CONTROLS, SCORED, changes, sweep_table


@click.command("sweep")
@options.model
@options.windows
@click.option("--window", default="calibration", show_default=True, help="Window to measure on.")
@click.option("--layer", type=click.IntRange(min=0), required=True, help="Layer whose heads are quantized in turn.")
@click.option(
    "--head",
    "heads",
    type=click.IntRange(min=0),
    multiple=True,
    help="Head to change; may be given more than once.  [default: every head]",
)
@click.option(
    "--part",
    "parts",
    type=click.Choice(SCORED),
    multiple=True,
    default=("kv",),
    show_default=True,
    help="Part of a head to change: keys and values together, keys, or values; or the layer, all heads at once. May be "
    "given more than once.",
)
@click.option(
    "--precision",
    "precisions",
    type=Precision("bf16", *CONTROLS),
    multiple=True,
    default=("int8", "int4"),
    show_default=True,
    help="Precision to try; may be given more than once. compute-step and bf16-step move every value to its neighbour "
    "in the compute dtype, or in BF16: what they measure is the floor.",
)
@click.option("--base", type=options.INPUT, help="Policy around which to measure, from the stage allocate.")
@options.calibration
@measuring
@click.option("--output", type=options.OUTPUT, required=True, help="CSV file to write.")
def command(
    model: Path,
    windows: Path,
    window: str,
    layer: int,
    heads: tuple[int, ...],
    parts: tuple[str, ...],
    precisions: tuple[str, ...],
    base: Path | None,
    calibration: Path | None,
    how: Measuring,
    output: Path,
) -> None:
    """Change one head of a layer at a time, every other head as in the base, and measure the KL to the reference.

    The base has every head in BF16, or is the policy --base. Writes one row for each head, part, precision and block:
    the mean KL (nats) over the block's positions, that of the base, and the relative squared error of the head's keys
    and values themselves. The layer as a whole is one row, under head 0. The base runs along in the same batches.

    Example: kvstages sweep --model model.safetensors --windows windows.safetensors --layer 3 --output layer-03.csv
    """
    from kvstages.cache.precision_grid import PrecisionGrid
    from kvstages.files.atomic import write_table
    from kvstages.measure.execution import check_memory
    from kvstages.measure.sweep import sweep_bytes, sweep_layer
    from kvstages.models.identity import read_identity
    from kvstages.policies.record import read_policy
    from kvstages.study.windows import load_window

    decoder = opened(how, model, calibration)
    tokens = load_window(windows, window, decoder.shape).to(how.place)
    around = None if base is None else PrecisionGrid.of_record(read_policy(base, read_identity(model))["precisions"])
    wanted = changes(parts, precisions)
    if heads and LAYER in parts:
        raise click.UsageError("--head goes with a part of a head: a layer is changed as a whole")
    if heads and max(heads) >= decoder.shape.heads:
        raise ValueError(f"head {max(heads)}: the model has KV heads 0 to {decoder.shape.heads - 1}")
    only = {(head, change) for head in heads for change in wanted} or None
    block = sweep_bytes(decoder, tokens.shape[1], how.setting.execution, len(wanted))
    check_memory(decoder, block, how.memory)
    with options.progress(f"sweep, layer {layer}") as report:
        found = sweep_layer(decoder, tokens, layer, wanted, how.setting, how.memory, report, around, only)
    kl, error = ({change: values.tolist() for change, values in each.items()} for each in (found.kl, found.error))
    write_table(output, sweep_table(layer, kl, found.base_kl.tolist(), error, how.setting.as_dict(), heads or None))
