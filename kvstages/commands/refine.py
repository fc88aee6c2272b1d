"""``kvstages refine``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options


@click.command("refine")
@click.option("--base", type=options.INPUT, required=True, help="The policy around which --moves was measured.")
@click.option("--moves", type=options.INPUT, required=True, help="Sensitivity table of sweeps with --base.")
@click.option("--sensitivity", type=options.INPUT, required=True, help="Sensitivity table that the base came from.")
@options.model
@click.option("--policy", "name", default="refined", show_default=True, help="Name of the new policy.")
@click.option("--output", type=options.OUTPUT, required=True, help="JSON file to write a set of this one policy to.")
def command(base: Path, moves: Path, sensitivity: Path, model: Path, name: str, output: Path) -> None:
    """Reallocate at the bytes of a policy, by what each move adds around it.

    The new policy has the least sum of added KL that its base's bytes allow. That sum is a proxy, as the first one was;
    the stage evaluate-set says whether the second step helps.

    Example: kvstages refine --base exact/policy.json --moves refined.csv --sensitivity measured-float32.csv
    --model model.safetensors --output refined.json
    """
    from kvstages.files.atomic import write_json
    from kvstages.files.ledger import sha256
    from kvstages.models.identity import read_identity
    from kvstages.policies.identity import identity_record
    from kvstages.policies.record import read_policy
    from kvstages.policies.refinement import read_moves, refined_policy
    from kvstages.scores.table import read_scores

    identity = read_identity(model)
    record = read_policy(base, identity)
    # A base that can have nothing but BF16 (no precision saves bytes) has no rung: nor has the table of all its scores.
    rungs = record["ladder"][1:] or None
    table = read_scores(sensitivity, identity.shape, record["tokens"], record["unit"], rungs)
    refined = refined_policy(name, record, read_moves(moves, table), table)
    scores = {table.source: sha256(sensitivity), "moves": sha256(moves)}
    identified = identity_record(identity.as_record(), ["bf16", *table.precisions], scores)
    write_json(output, {**identified, "policies": [refined]})
