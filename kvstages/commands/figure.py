"""``kvstages figure NAME``."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import click

from kvstages.commands.entries import EntryGroup, output

WRITTEN = "The figure, NAME.svg; NAME.png and the plotted numbers, NAME.csv, are written beside it."


def run(module: ModuleType, output: Path, **inputs: Any) -> None:
    from kvstages.figures.style import write_figure

    write_figure(output, module.numbers(**inputs), module.draw)


@click.group("figure", cls=EntryGroup, package="kvstages.figures", run=run, options=[output(WRITTEN)])
def command() -> None:
    """Draw one figure: SVG, PNG and the plotted numbers as CSV.

    The same inputs give the same bytes. One policy is one folder: where a figure asks for a policy's record, it also
    reads the table that lies beside it.

    Example: kvstages figure sensitivity scores/measured-float32.csv --output figures/sensitivity.svg
    """
