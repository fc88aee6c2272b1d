"""``kvstages allocate``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options


@click.command("allocate")
@click.option("--policy", "name", required=True, help="Name of the policy, kept in its record.")
@click.option("--allocator", type=click.Choice(["greedy", "uniform"]), required=True, help="How precisions are chosen.")
@click.option("--budget", type=float, default=None, help="greedy: limit on the proxy, in nats.")
@click.option("--precision", type=click.Choice(["bf16", "int8", "int4"]), default=None, help="uniform: every head's.")
@click.option("--sensitivity", type=options.INPUT, required=True, help="Sensitivity table, from the stage sensitivity.")
@options.model
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Positions of the cache counted in bytes.",
)
@click.option("--output", type=options.OUTPUT, required=True, help="JSON file to write the policy to.")
@click.option("--steps", type=options.OUTPUT, required=True, help="CSV file to write the greedy path to.")
def command(
    name: str,
    allocator: str,
    budget: float | None,
    precision: str | None,
    sensitivity: Path,
    model: Path,
    tokens: int,
    output: Path,
    steps: Path,
) -> None:
    """Give every head a precision: greedily under a budget, or the same everywhere.

    The budget bounds the sum of the heads' single-head KL scores. That sum is a calibration proxy, not a bound on
    what the whole policy does; the stage evaluate measures that. Bytes count payload and scales of one cache.

    Example: kvstages allocate --policy greedy-0.01 --allocator greedy --budget 0.01 --sensitivity sensitivity.csv
    --model model.safetensors --output policy.json --steps steps.csv
    """
    from kvstages.files import write_json, write_table
    from kvstages.model_config import read_config
    from kvstages.policies import greedy_policy, uniform_policy
    from kvstages.sensitivity import read_scores, read_setting

    if (allocator == "greedy") != (budget is not None) or (allocator == "uniform") != (precision is not None):
        raise click.UsageError("--allocator greedy goes with --budget, --allocator uniform with --precision")
    config, scores = read_config(model), read_scores(sensitivity)
    shape = {(len(table), len(table[0])) for table in scores.values()}
    if shape != {(config.num_layers, config.num_heads)}:
        raise ValueError(
            f"{sensitivity}: scores for layers × heads {sorted(shape)}, "
            f"but {model} has {config.num_layers} × {config.num_heads}"
        )
    if allocator == "greedy":
        record, path = greedy_policy(name, budget, scores, config.head_dim, tokens)
    else:
        record, path = uniform_policy(name, precision, scores, config.head_dim, tokens)
    write_table(steps, path)
    write_json(output, {**record, **read_setting(sensitivity)})
