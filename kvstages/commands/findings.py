"""``kvstages findings``."""

from __future__ import annotations

from pathlib import Path

import click

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("findings")
@click.argument("study", type=FOLDER, required=False)
@click.option(
    "--adaptation", type=FOLDER, help="Folder of the finished study of adaptation: its numbers replace those of RECORD."
)
@click.option(
    "--decoder",
    "decoders",
    type=FOLDER,
    multiple=True,
    help="Folder of a finished study of a Hugging Face decoder: its numbers replace those of RECORD. Repeat.",
)
@click.option("--machine", help="Name of the machine that measured it; the processor's by default.")
@click.option("--record", type=FILE, default=Path("docs/findings.json"), show_default=True, help="Numbers by machine.")
@click.option("--page", type=FILE, default=Path("docs/results.md"), show_default=True, help="The page to write.")
@click.option(
    "--readme",
    type=FILE,
    default=Path("README.md"),
    show_default=True,
    help="The page whose block of findings, between its marks, is replaced.",
)
@click.option(
    "--figure",
    type=FILE,
    default=Path("docs/storage-kl.png"),
    show_default=True,
    help="The README's figure, written from the study's.",
)
def command(
    study: Path | None,
    adaptation: Path | None,
    decoders: tuple[Path, ...],
    machine: str | None,
    record: Path,
    page: Path,
    readme: Path,
    figure: Path,
) -> None:
    """Write docs/results.md, docs/adaptation.md, and the README's findings and figure, from result files.

    STUDY is its folder, such as results/demo. Its numbers are put first into RECORD, which keeps those of other
    machines beside them. Without STUDY the pages are written from RECORD alone, and the figure stays. The workflow does
    not run this stage, because it changes files of the repository.

    Example: kvstages findings results/demo
    """
    from kvstages.analysis.adaptation_page import page as adaptation_page
    from kvstages.analysis.adaptation_page import read_adaptation
    from kvstages.analysis.decoder_page import read_decoder
    from kvstages.analysis.findings import add_machine, read_findings
    from kvstages.analysis.results_page import page as results_page
    from kvstages.analysis.results_page import put_block, readme_block
    from kvstages.files.atomic import write_bytes, write_json, write_text
    from kvstages.files.read import read_json, read_record

    if study is not None:
        found = read_findings(study)
        known = read_json(record) if record.exists() else {}
        write_json(record, add_machine(known, machine or found["machine"]["processor"], found))
        write_bytes(figure, (study / "figures" / "storage-kl.png").read_bytes())
    if adaptation is not None:
        write_json(record, {**read_json(record), "adaptation": read_adaptation(adaptation)})
    if decoders:
        known = read_json(record)
        read = {folder.name: read_decoder(folder) for folder in decoders}
        write_json(record, {**known, "decoders": {**known.get("decoders", {}), **read}})
    numbers = read_record(record, ["first", "machines"])
    text = readme.read_text(encoding="utf-8")
    write_text(readme, put_block(text, readme_block(numbers), str(readme)))
    write_text(page, results_page(numbers))
    if "adaptation" in numbers:
        write_text(page.with_name("adaptation.md"), adaptation_page(numbers["adaptation"]))
