"""``kvstages import-policy``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options
from kvstages.export.kvtuner import QUANTIZERS


@click.command("import-policy")
@click.argument("preset", metavar="PRESET", type=options.INPUT)
@click.option(
    "--quantizer",
    type=click.Choice(list(QUANTIZERS)),
    required=True,
    help="KVTuner's quantizer that the preset was made for; presets say it in their file's name (kivi, pertoken).",
)
@options.model
@options.tokens
@click.option("--policy", "name", required=True, help="Name of the policy, kept in its record.")
@click.option("--output", type=options.OUTPUT, required=True, help="JSON file to write the policy to.")
def command(preset: Path, quantizer: str, model: Path, tokens: int, name: str, output: Path) -> None:
    """Write the policy of a preset of KVTuner: bits of each layer's keys and values.

    PRESET is YAML, {layer: {nbits_key: 8, nbits_value: 4}}. The stage evaluate measures the policy, allocate
    --bytes-of makes others of as many bytes.

    Example: kvstages import-policy Qwen2.5-3B-Instruct_pertoken_KVTuner4_0.yaml --quantizer per-token
    --model model --policy kvtuner4 --output policy.json
    """
    from kvstages.export.kvtuner import read_preset
    from kvstages.export.record import imported
    from kvstages.files.atomic import write_json
    from kvstages.models.identity import read_identity
    from kvstages.policies.identity import identity_record
    from kvstages.policies.record import check_policy

    identity = read_identity(model)
    shape = identity.shape
    record = imported(name, read_preset(preset, shape.heads, quantizer), shape.widths, tokens)
    try:
        check_policy(record, shape)
    except ValueError as error:
        raise ValueError(f"{preset}: {error}") from None
    write_json(output, {**record, **identity_record(identity.as_record(), ["bf16", *record["ladder"]], {})})
