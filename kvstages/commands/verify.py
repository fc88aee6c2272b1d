"""``kvstages verify``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("verify")
@click.argument("folder", metavar="results/STUDY", type=click.Path(path_type=Path))
@click.option("--strict", is_flag=True, help="Refuse files in the folder that are no part of the study.")
@click.pass_context
def command(context: click.Context, folder: Path, strict: bool) -> None:
    """Read every file of a study again and compare it with what was recorded.

    Recomputes the checksums of the study's results and inputs, of SHA256SUMS and of the manifest itself, and writes a
    line for each file that differs or is missing: exit status 1. Files in the folder that are no part of the study,
    such as a budget that was tried by its path, have a line too; they are wrong with --strict only. Inputs are looked
    for where they were when the manifest was written, seen from the folder (../../resources/STUDY). Nothing is changed.

    Example: kvstages verify results/demo
    """
    from kvstages.provenance.verify import verify

    problems, others, count = verify(folder)
    for line in (*problems, *others):
        click.echo(line)
    if problems or (strict and others):
        context.exit(1)
    click.echo(f"{folder}: {count} files are what was recorded")
