"""``kvstages time``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("time")
@click.argument("folder", metavar="benchmarks", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--study", required=True, help="Name of the study.")
@click.option("--title", help="The study's title, for the title of the page; in HTML, so that &lt; means <.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The table for people, NAME.html; the numbers, NAME.csv, are written beside it.",
)
def command(folder: Path, study: str, title: str | None, output: Path) -> None:
    """Tabulate what the jobs of a study took, from the benchmark files of a workflow.

    Writes a row for each rule: its jobs, their seconds, their seconds of CPU, and the largest memory of one of them.

    Example: kvstages time benchmarks --study demo --output benchmarks/demo/time.html
    """
    from kvstages.provenance.time_spent import time_table
    from kvstages.tables.page import write_page

    write_page(output, *time_table(folder, study, title))
