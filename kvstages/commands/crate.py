"""``kvstages crate``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("crate")
@click.argument("folder", metavar="results/STUDY", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), required=True, help="A new folder, or a new .zip file.")
def command(folder: Path, output: Path) -> None:
    """Pack a study as a Workflow Run RO-Crate, to archive or publish it.

    Verifies the study first. Writes OUTPUT: results, pinned inputs, weights, code and configuration, and
    ro-crate-metadata.json, which says what each is, where it came from and which rule made it. The code must be the one
    that ran. Needs the package rocrate (pip install 'kvstages[crate]').

    Example: kvstages crate results/demo --output demo.zip
    """
    from kvstages.provenance.crate import write_crate

    write_crate(folder, output)
