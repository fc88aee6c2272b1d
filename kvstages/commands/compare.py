"""``kvstages compare``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("compare")
@click.argument("first", metavar="results/A", type=click.Path(path_type=Path))
@click.argument("second", metavar="results/B", type=click.Path(path_type=Path))
def command(first: Path, second: Path) -> None:
    """Compare the results of two runs of a study.

    Two runs of the same code on one machine with one thread count give the same bytes. Another machine, thread count
    or device (a CPU and a GPU) may differ in the last digits. It writes no file and prints a line for each file:
    `identical` (the same bytes), `within` (every number within the tolerance of its kind, with the part of it that
    the worst one takes up) or `outside` (a number beyond it, or anything else that is not equal: policies, tokens,
    texts, files that are missing). Before them stands `choice` for each policy that differs, but only in moves whose
    scores are as near to each other as scores may be between two runs: what is measured with it is not compared. Exit
    status 1 if anything is outside. kvstages/provenance/tolerances.py holds the tolerances, workflow/schemas the kind
    of each number.

    Example: kvstages compare results/demo ../on-a-gpu/results/demo
    """
    from kvstages.provenance.reproduction import compare

    comparison = compare(first, second)
    for line in comparison.choices:
        click.echo(f"choice     {line}")
    for name in comparison.identical:
        click.echo(f"identical  {name}")
    for name, (part, where) in comparison.within.items():
        click.echo(f"within     {name}" + (f" ({part:.0%} of the tolerance at {where})" if where else ""))
    for line in comparison.outside:
        click.echo(f"outside    {line}")
    if comparison.outside:
        click.get_current_context().exit(1)
