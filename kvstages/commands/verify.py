"""``kvstages verify``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("verify")
@click.argument("folder", metavar="results/STUDY", type=click.Path(path_type=Path))
@click.pass_context
def command(context: click.Context, folder: Path) -> None:
    """Read every file of a study again and compare it with what was recorded.

    Recomputes the checksums of the study's results and inputs, of SHA256SUMS and of the manifest itself, and writes a
    line for each file that differs, is missing, or is in the folder without being recorded: exit status 1. Inputs are
    looked for where they were when the manifest was written, seen from the folder (../../resources/STUDY). Nothing is
    changed.

    Example: kvstages verify results/demo
    """
    from kvstages.provenance.verify import verify

    problems, count = verify(folder)
    for line in problems:
        click.echo(line)
    if problems:
        context.exit(1)
    click.echo(f"{folder}: {count} files are what was recorded")
