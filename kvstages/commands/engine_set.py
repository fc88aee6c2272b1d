"""``kvstages engine-set``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options
from kvstages.export.engines import ENGINES


@click.command("engine-set")
@click.option("--policy", type=options.INPUT, required=True, help="Policy of an allocator, from the stage allocate.")
@click.option("--sensitivity", type=options.INPUT, required=True, help="Scores that the policy was made from.")
@click.option(
    "--engine", "engines", type=click.Choice(list(ENGINES)), multiple=True, required=True, help="Engine. Repeat."
)
@click.option(
    "--engine-scores", type=options.INPUT, required=True, help="Scores of their formats, from the stage score-engines."
)
@options.model
@click.option("--output", type=options.OUTPUT, required=True, help="JSON file to write the set to.")
def command(
    policy: Path, sensitivity: Path, engines: tuple[str, ...], engine_scores: Path, model: Path, output: Path
) -> None:
    """Write the set of policies that tells what the restrictions of engines cost, for evaluate-set to measure.

    The policy itself; what it becomes in each engine (as the stage export makes it); at the bytes of that the best that
    the engine can express, and the best of the policy's own kind; and at the policy's bytes the best that the engine
    can express.

    Example: kvstages engine-set --policy policy.json --sensitivity measured-float32.csv --engine vllm
    --engine-scores scores.csv --model model.safetensors --output policy-set.json
    """
    from kvstages.export.comparison import engine_set
    from kvstages.files.atomic import write_json
    from kvstages.files.ledger import sha256
    from kvstages.models.identity import read_identity
    from kvstages.policies.identity import identity_record
    from kvstages.policies.record import read_policy
    from kvstages.scores.table import read_scores, read_setting, read_source, read_table

    identity = read_identity(model)
    shape, own = identity.shape, read_policy(policy, identity)
    try:
        ladder = [name for name in own["ladder"] if name != "bf16"]
        table = read_scores(sensitivity, shape, own["tokens"], own["unit"], ladder)
        record = engine_set(own, table, [ENGINES[name] for name in engines], engine_scores, shape)
    except KeyError as error:
        raise ValueError(f"{policy}: key {error} is missing, expected a policy of the stage allocate") from None
    sources = {read_source(path, read_table(path)): read_setting(path) for path in (sensitivity, engine_scores)}
    names = ["bf16", *(name for each in record["policies"] for name in each["ladder"])]
    scores = {table.source: sha256(sensitivity), "engines": sha256(engine_scores)}
    write_json(output, {**record, "sources": sources, **identity_record(identity.as_record(), names, scores)})
