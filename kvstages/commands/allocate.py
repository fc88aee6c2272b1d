"""``kvstages allocate``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.cache.precision_grid import UNITS
from kvstages.commands import options
from kvstages.commands.precision import Precision
from kvstages.policies.names import ALLOCATORS


@click.command("allocate")
@click.option("--policy", "name", required=True, help="Name of the policy, kept in its record.")
@click.option(
    "--allocator", type=click.Choice([*ALLOCATORS, "uniform"]), required=True, help="Rule that chooses the precisions."
)
@click.option(
    "--budget",
    default=None,
    help="Limit on the proxy in nats (0.01), on the bytes of a cache (400000B), or on its bits an element (4.25bits).",
)
@click.option("--bytes-of", type=options.INPUT, default=None, help="Another policy, whose bytes are the budget.")
@click.option("--precision", type=Precision("bf16"), default=None, help="uniform: the precision everywhere.")
@click.option(
    "--unit",
    type=click.Choice(list(UNITS)),
    default="head",
    show_default=True,
    help="What has a precision of its own: a head, its keys and its values apart, or a layer.",
)
@click.option(
    "--precisions",
    default=None,
    help="Quantized precisions to choose from, such as int8,int4.  [default: all that have scores]",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="at-random: the seed of the draw."
)
@click.option("--sensitivity", type=options.INPUT, required=True, help="Sensitivity table, from the stage gather.")
@options.model
@options.tokens
@click.option("--output", type=options.OUTPUT, required=True, help="JSON file to write the policy to.")
@click.option("--steps", type=options.OUTPUT, required=True, help="CSV file to write the path to.")
def command(
    name: str,
    allocator: str,
    budget: str | None,
    bytes_of: Path | None,
    precision: str | None,
    unit: str,
    precisions: str | None,
    seed: int,
    sensitivity: Path,
    model: Path,
    tokens: int,
    output: Path,
    steps: Path,
) -> None:
    """Write a policy: a precision for every head, by an allocator under a budget, or the same everywhere.

    \b
    greedy          least added KL per byte saved first (as published)
    exact           the least proxy for the bytes, or the fewest bytes for the proxy
    by-layer        greedy, all heads of a layer alike
    by-depth        first layers higher, whatever the scores
    reconstruction  least added error of keys and values per byte saved first
    at-random       a random policy of the budget in bytes

    A budget in nats bounds the sum of single-head KL scores. That sum is a calibration proxy, not a bound on what the
    whole policy does; the stage evaluate measures that. Bytes count payload and scales of one cache.

    Example: kvstages allocate --policy greedy-0.01 --allocator greedy --budget 0.01 --sensitivity measured-float32.csv
    --model model.safetensors --output policy.json --steps steps.csv
    """
    from kvstages.files.atomic import write_json, write_table
    from kvstages.files.ledger import sha256
    from kvstages.models.identity import read_identity
    from kvstages.policies.budgets import Budget
    from kvstages.policies.identity import identity_record
    from kvstages.policies.making import allocated_policy, uniform_policy
    from kvstages.policies.record import read_policy
    from kvstages.scores.table import read_scores, read_setting

    given = (budget is not None) + (bytes_of is not None)
    if (allocator == "uniform") != (precision is not None) or given != (allocator != "uniform"):
        raise click.UsageError(
            "--allocator uniform goes with --precision, every other allocator with --budget or --bytes-of"
        )
    chosen = None if precisions is None else precisions.split(",")
    if precision not in (None, "bf16"):
        chosen = [precision]
    identity = read_identity(model)
    table = read_scores(sensitivity, identity.shape, tokens, unit, chosen)
    if precision is not None:
        record, path = uniform_policy(name, precision, table)
    else:
        taken = None if bytes_of is None else read_policy(bytes_of, identity)["bytes"]["total"]
        limit = Budget.parse(budget) if taken is None else Budget(taken, "bytes")
        record, path = allocated_policy(name, allocator, limit, table, seed)
    write_table(steps, path)
    names = ["bf16", *table.precisions]
    identified = identity_record(identity.as_record(), names, {table.source: sha256(sensitivity)})
    write_json(output, {**record, **read_setting(sensitivity), **identified})
