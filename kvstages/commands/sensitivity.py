"""``kvstages sensitivity``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options


@click.command("sensitivity")
@click.argument("shards", type=options.INPUT, nargs=-1, required=True)
@click.option("--output", type=options.OUTPUT, required=True, help="CSV file to write.")
def command(shards: tuple[Path, ...], output: Path) -> None:
    """Gather the layers' sweeps SHARDS into one sensitivity table.

    Writes one row for each layer, head and precision: the mean KL (nats) over the blocks, and the standard error
    between blocks. Every layer must be there once, all measured in the same way.

    Example: kvstages sensitivity sweep/layer-*.csv --output sensitivity.csv
    """
    from kvstages.files import write_table
    from kvstages.sensitivity import gather

    write_table(output, gather(shards))
