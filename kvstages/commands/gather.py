"""``kvstages gather``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options


@click.command("sensitivity")
@click.argument("shards", type=options.INPUT, nargs=-1, required=True)
@click.option("--source", required=True, help="Name of the table, such as measured-float32.")
@click.option("--sample", is_flag=True, help="The sweeps are of some layers and heads only.")
@click.option("--output", type=options.OUTPUT, required=True, help="CSV file to write.")
def command(shards: tuple[Path, ...], source: str, sample: bool, output: Path) -> None:
    """Gather the layers' sweeps SHARDS into one sensitivity table.

    Writes one row for each layer, head, part and precision: the mean KL (nats) over the blocks, the standard error
    between blocks, and the floor that control interventions of the same head measure. Every layer must be there once,
    but for a sample, and all measured in the same way.

    Example: kvstages gather sweep/float32/layer-*.csv --source measured-float32
    --output scores/measured-float32.csv
    """
    from kvstages.files.atomic import write_table
    from kvstages.scores.gather import gather

    write_table(output, gather(shards, source, sample), ["standard_error", "floor_kl", "bf16_step_kl"])
