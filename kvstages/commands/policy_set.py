"""``kvstages policy-set``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options


@click.command("policy-set")
@click.option(
    "--sensitivity",
    "sensitivities",
    type=options.INPUT,
    multiple=True,
    required=True,
    help="Sensitivity table, one for each source that a recipe names. Repeat.",
)
@options.model
@options.tokens
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    required=True,
    metavar="NAME=ALLOCATOR:SOURCE:UNIT:PRECISIONS",
    help="How a policy is made: allocator, source of the scores, unit, quantized precisions. Repeat.",
)
@click.option(
    "--budget", default=None, help="Equal bytes: those of the first recipe at this budget (0.01, 400000B, 4.25bits)."
)
@click.option(
    "--points", type=click.IntRange(min=2), default=None, help="A frontier: number of byte totals of each recipe."
)
@click.option(
    "--random",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Equal bytes: policies of each random recipe.",
)
@click.option(
    "--draws",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="Equal bytes: random policies whose proxies are recorded, those of --random included.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of random recipes.")
@click.option("--output", type=options.OUTPUT, required=True, help="JSON file to write the set to.")
def command(
    sensitivities: tuple[Path, ...],
    model: Path,
    tokens: int,
    recipes: tuple[str, ...],
    budget: str | None,
    points: int | None,
    random: int,
    draws: int,
    seed: int,
    output: Path,
) -> None:
    """Write a set of policies that are to be measured together, as one JSON record.

    With --budget the set has one policy of every recipe, and many of random ones. They take the bytes of the first
    recipe's policy at that budget, or less by less than one unit's move saves. With --points it has policies of every
    recipe from all BF16 to all at its last precision, and the uniform ones. A set knows proxies and bytes; no KL is
    measured here.

    Example: kvstages policy-set --sensitivity measured-float32.csv --sensitivity measured-bfloat16.csv
    --model model.safetensors --recipe published=greedy:measured-bfloat16:head:int8,int4
    --recipe exact=exact:measured-float32:head:int8,int4 --recipe random=random:measured-float32:head:int8,int4
    --budget 0.01 --output policy-set.json
    """
    from kvstages.files.atomic import write_json
    from kvstages.files.ledger import sha256
    from kvstages.models.identity import read_identity
    from kvstages.policies.budgets import Budget
    from kvstages.policies.identity import identity_record
    from kvstages.policies.recipes import Recipe, equal_bytes, frontier_policies, parse_recipe
    from kvstages.scores.table import read_scores, read_setting, read_source, read_table

    if (budget is None) == (points is None):
        raise click.UsageError("give either --budget (equal bytes) or --points (a frontier)")
    identity = read_identity(model)
    sources: dict[str, Path] = {}
    for path in sensitivities:
        source = read_source(path, read_table(path))
        if source in sources:
            raise ValueError(f"{path}: scores of the source {source}, as in {sources[source]}")
        sources[source] = path
    made = []
    for text in map(parse_recipe, recipes):
        if text.source not in sources:
            raise ValueError(f"recipe {text.name}: no --sensitivity of the source {text.source}; {', '.join(sources)}")
        table = read_scores(sources[text.source], identity.shape, tokens, text.unit, text.precisions)
        made.append(Recipe(text.name, text.allocator, table))
    limit = None if budget is None else Budget.parse(budget)
    record = frontier_policies(made, points) if limit is None else equal_bytes(made, limit, random, draws, seed)
    settings = {source: read_setting(path) for source, path in sources.items()}
    names = ["bf16", *(name for recipe in made for name in recipe.table.precisions)]
    scores = {source: sha256(path) for source, path in sources.items()}
    identified = identity_record(identity.as_record(), names, scores)
    write_json(output, {**record, "budget": budget, "tokens": tokens, "sources": settings, **identified})
