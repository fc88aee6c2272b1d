"""``kvstages export``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options
from kvstages.export.engines import ENGINES


@click.command("export")
@click.argument("policy", metavar="POLICY", type=options.INPUT)
@click.option("--engine", type=click.Choice(list(ENGINES)), required=True, help="The engine that is to run the policy.")
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder to write the files to."
)
def command(policy: Path, engine: str, output: Path) -> None:
    """Write what makes an engine run a policy, as far as the engine can express it.

    Writes into OUTPUT: the engine's flags or file (flags.txt, hf_quant_config.json, kvtuner.yaml); policy.json, the
    policy that the engine then runs, with the engine's own quantizer, which the stage evaluate measures; and
    export.json, which says what became of each precision and layer, bytes in the engine's layout, and what to beware
    of. No unit gets fewer bits than the policy gave it (docs/engines.md).

    Example: kvstages export policy.json --engine vllm --output vllm
    """
    from kvstages.export.record import export
    from kvstages.files.atomic import write_json, write_text
    from kvstages.policies.record import read_policy

    target = ENGINES[engine]
    try:
        made, record, text = export(read_policy(policy, None), target)
    except ValueError as error:
        raise ValueError(f"{policy}: {error}") from None
    for warning in record["warnings"]:
        click.echo(warning, err=True)
    write_text(output / target.file, text)
    write_json(output / "policy.json", made)
    write_json(output / "export.json", record)
