"""``kvstages table NAME``."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import click

from kvstages.commands.entries import EntryGroup, output

WRITTEN = "The table for people, NAME.html; the numbers in full precision, NAME.csv, are written beside it."
TITLE = click.Option(["--title"], help="The study's title, for the title of the page; in HTML, so that &lt; means <.")


def run(module: ModuleType, output: Path, title: str | None, published: str | None = None, **inputs: Any) -> None:
    from kvstages.analysis.published import published_folder
    from kvstages.tables.page import write_page

    if published is not None:
        inputs["published"] = published_folder(published)
    write_page(output, *module.make(**inputs, study=title))


@click.group("table", cls=EntryGroup, package="kvstages.tables", run=run, options=[TITLE, output(WRITTEN)])
def command() -> None:
    """Make one table: HTML for people, CSV in full precision.

    One policy is one folder: where a table asks for an evaluation, it may read the policy.json beside it.

    Example: kvstages table results policies/int8/evaluation.json policies/int4/evaluation.json
    --output tables/results.html
    """
