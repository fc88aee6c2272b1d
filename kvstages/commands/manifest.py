"""``kvstages manifest``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("manifest")
@click.option("--study", required=True, help="Name of the study.")
@click.option("--settings", default="{}", show_default=True, help="Configuration used, as JSON.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="manifest.json, in the results folder.")
@click.option("--checksums", type=click.Path(path_type=Path), required=True, help="SHA256SUMS to write beside it.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), required=True)
def command(study: str, settings: str, output: Path, checksums: Path, files: tuple[Path, ...]) -> None:
    """Record what a study's FILES are and came from.

    FILES in the folder of --output are results, all others are inputs. The manifest holds their sha256, a digest of
    each stage's code, the configuration, the environment and the time; the checksums cover results alone and are the
    same bytes for each run. Check them with: cd results/STUDY && sha256sum --check SHA256SUMS

    Example: kvstages manifest --study embedded --output results/embedded/manifest.json
    --checksums results/embedded/SHA256SUMS resources/embedded/model.safetensors results/embedded/sensitivity.csv
    """
    import json
    from datetime import UTC, datetime

    from kvstages.files import write_json, write_text
    from kvstages.manifest import manifest

    try:
        configuration = json.loads(settings)
    except json.JSONDecodeError as error:
        raise ValueError(f"--settings: not JSON ({error})") from error
    created = datetime.now(UTC).isoformat(timespec="seconds")
    record, lines = manifest(study, configuration, files, output.parent, created)
    write_text(checksums, lines)
    write_json(output, record)
