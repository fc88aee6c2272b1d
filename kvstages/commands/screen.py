"""``kvstages screen``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import click

from kvstages.commands import options
from kvstages.commands.precision import Precision


@click.command("screen")
@click.option(
    "--sensitivity", type=options.INPUT, required=True, help="Scores of every scheme at every number of bits."
)
@options.model
@options.tokens
@click.option(
    "--scheme",
    "schemes",
    type=Precision(),
    multiple=True,
    required=True,
    help="Quantizer scheme, as its precision at some number of bits, such as centred4. Repeat.",
)
@click.option(
    "--bits",
    type=click.Choice(["8", "6", "5", "4", "3", "2"]),
    multiple=True,
    default=["8", "6", "5", "4", "3", "2"],
    show_default=True,
    help="Bits of the ladders that are allocated. Repeat.",
)
@click.option(
    "--measured",
    type=click.Choice(["8", "6", "5", "4", "3", "2"]),
    multiple=True,
    default=["4"],
    show_default=True,
    help="Bits at which each scheme is to be measured. Repeat.",
)
@click.option("--budget", "budgets", multiple=True, help="Budget of the recipes, such as 4.25bits. Repeat.")
@click.option("--output", type=options.OUTPUT, required=True, help="JSON file to write the policies to.")
def command(
    sensitivity: Path,
    model: Path,
    tokens: int,
    schemes: tuple[str, ...],
    bits: tuple[str, ...],
    measured: tuple[str, ...],
    budgets: tuple[str, ...],
    output: Path,
) -> None:
    """Write the policies of a screening, to be measured together by the stage evaluate-set.

    Each scheme everywhere, on keys alone and on values alone, at each number of bits in --measured. At each budget the
    published recipe, the exact allocator on the published quantizer, and the recommended recipe: the exact allocator,
    keys and values apart, on the scheme whose policy has the least proxy. The record says which scheme that is, and the
    proxies of the others.

    Example: kvstages screen --sensitivity screening/scores.csv --model model.safetensors --scheme int4
    --scheme rotated4 --scheme centred4 --budget 4.25bits --output screening/policies.json
    """
    from kvstages.files.atomic import write_json
    from kvstages.files.ledger import sha256
    from kvstages.models.identity import read_identity
    from kvstages.policies.identity import identity_record
    from kvstages.policies.screening import precisions_of, screening_set
    from kvstages.scores.table import ScoreTable, read_scores, read_setting, read_source, read_table

    identity = read_identity(model)

    @cache
    def read(unit: str, precisions: tuple[str, ...]) -> ScoreTable:
        return read_scores(sensitivity, identity.shape, tokens, unit, precisions)

    def scores(unit: str, precisions: Sequence[str]) -> ScoreTable:
        return read(unit, tuple(precisions))

    wanted, tried = list(map(int, bits)), list(map(int, measured))
    record = screening_set(schemes, wanted, tried, budgets, scores)
    source = {read_source(sensitivity, read_table(sensitivity)): sha256(sensitivity)}
    identified = identity_record(identity.as_record(), ["bf16", *precisions_of(schemes, wanted, tried)], source)
    write_json(output, {**record, **identified, "tokens": tokens, **read_setting(sensitivity)})
