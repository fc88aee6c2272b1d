"""``kvstages manifest``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options


@click.command("manifest")
@click.option("--study", required=True, help="Name of the study.")
@click.option("--settings", type=options.INPUT, required=True, help="Configuration used, a JSON file: {shared, study}.")
@click.option(
    "--artifact",
    "artifacts",
    metavar="NAME=PATH",
    multiple=True,
    help="A pinned input, by its name in the configuration. Repeat.",
)
@click.option(
    "--published",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    help="A file of published figures that the study's tables show. Repeat.",
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="manifest.json, in the results folder.")
@click.option("--checksums", type=click.Path(path_type=Path), required=True, help="SHA256SUMS to write beside it.")
@click.argument("outputs", metavar="RULE=PATH...", nargs=-1, required=True)
def command(
    study: str,
    settings: Path,
    artifacts: tuple[str, ...],
    published: tuple[Path, ...],
    output: Path,
    checksums: Path,
    outputs: tuple[str, ...],
) -> None:
    """Record every file of a study, its checksum and its origin.

    Each RULE=PATH is a file that a rule of the workflow made; those in the folder of --output are results. The manifest
    written holds their sha256 and rule, the pinned inputs with source and revision, a digest of each stage's code and
    the repository's revision, the configuration, the environment, the command and the time; the checksums cover the
    results alone and are the same bytes for each run. A file that changed after it was made is refused. Check all of it
    with: kvstages verify results/STUDY, or the results alone with: cd results/STUDY && sha256sum --check SHA256SUMS

    Example: kvstages manifest --study demo --settings settings.json --output results/demo/manifest.json
    --checksums results/demo/SHA256SUMS gather_sensitivity=results/demo/sensitivity.csv
    """
    import sys
    from datetime import UTC, datetime

    from kvstages.files.atomic import write_json, write_text
    from kvstages.files.read import read_json
    from kvstages.provenance.environment import this_run
    from kvstages.provenance.manifest import manifest

    record, lines = manifest(
        study,
        read_json(settings),
        dict(pair(text, "--artifact", "NAME") for text in artifacts),
        published,
        {path: rule for rule, path in (pair(text, "output", "RULE") for text in outputs)},
        output.parent,
        this_run(sys.argv),
        datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_text(checksums, lines)
    write_json(output, record)


def pair(text: str, what: str, name: str) -> tuple[str, Path]:
    """The two sides of NAME=PATH; ValueError on another form."""
    left, equals, right = text.partition("=")
    if not left or not equals or not right:
        raise ValueError(f"{what} {text!r}: expected {name}=PATH")
    return left, Path(right)
