"""``kvstages table NAME``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import pandas as pd

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
output_option = click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The table for people, NAME.html; the numbers in full precision, NAME.csv, are written beside it.",
)
published_option = click.option(
    "--published",
    metavar="NAME|FOLDER",
    help="Published figures to show beside the measured ones: gpt2-nano, or a folder in its format.",
)
title_option = click.option("--title", help="The study's title, to stand in that of the page.")


@click.group("table")
def command() -> None:
    """Make one table: HTML for people, CSV in full precision.

    One policy is one folder: where a table asks for an evaluation, it may read the policy.json beside it.

    Example: kvstages table results policies/int8/evaluation.json policies/int4/evaluation.json
    --output tables/results.html
    """


@command.command("results")
@click.argument("evaluations", metavar="EVALUATION.json...", type=FILE, nargs=-1, required=True)
@published_option
@title_option
@output_option
def results_command(evaluations: tuple[Path, ...], published: str | None, title: str | None, output: Path) -> None:
    """Every metric of every policy. One row for each policy given; reads the policy.json beside each."""
    from kvstages.tables.results import results

    _write(output, *results(evaluations, _folder(published), title))


@command.command("divergence")
@click.argument("evaluations", metavar="EVALUATION.json...", type=FILE, nargs=-1, required=True)
@title_option
@output_option
def divergence_command(evaluations: tuple[Path, ...], title: str | None, output: Path) -> None:
    """How far each policy is from the reference. KL both ways, perplexity, Δp and agreement, with errors and spread."""
    from kvstages.tables.divergence import divergence_table

    _write(output, *divergence_table(evaluations, title))


@command.command("adaptation")
@click.argument("adapted", metavar="ARM/seed-SEED/POLICY/evaluation.json...", type=FILE, nargs=-1, required=True)
@click.option("--original", type=FILE, multiple=True, required=True, help="The same policy, original model. Repeat.")
@published_option
@title_option
@output_option
def adaptation_command(
    adapted: tuple[Path, ...], original: tuple[Path, ...], published: str | None, title: str | None, output: Path
) -> None:
    """KL and agreement by arm and seed. The folder of each evaluation tells its arm and seed."""
    from kvstages.tables.adaptation import adaptation

    _write(output, *adaptation(original, adapted, _folder(published), title))


@command.command("sensitivity-summary")
@click.argument("evaluations", metavar="UNIFORM/evaluation.json...", type=FILE, nargs=-1, required=True)
@click.option(
    "--sensitivity", type=FILE, multiple=True, required=True, help="A gathered sensitivity table. Repeat for sources."
)
@published_option
@title_option
@output_option
def sensitivity_summary_command(
    evaluations: tuple[Path, ...], sensitivity: tuple[Path, ...], published: str | None, title: str | None, output: Path
) -> None:
    """The scores in numbers. Spread, floor, trend over layers, and sum against the KL of the uniform policies."""
    from kvstages.tables.sensitivity_summary import sensitivity_summary

    _write(output, *sensitivity_summary(sensitivity, evaluations, _folder(published), title))


@command.command("equal-bytes")
@click.argument("comparisons", metavar="BUDGET/joint.csv...", type=FILE, nargs=-1, required=True)
@title_option
@output_option
def equal_bytes_command(comparisons: tuple[Path, ...], title: str | None, output: Path) -> None:
    """Recipes at equal bytes, against the published one. A section for each comparison given; its folder tells the
    budget, and the policy-set.json beside it where the random policies lie.
    """
    from kvstages.tables.equal_bytes import equal_bytes_table

    _write(output, *equal_bytes_table(comparisons, title))


@command.command("frontier")
@click.argument("frontier", metavar="joint.csv", type=FILE)
@title_option
@output_option
def frontier_command(frontier: Path, title: str | None, output: Path) -> None:
    """Bytes and joint KL of every policy along the frontier. A section for each family."""
    from kvstages.tables.frontier import frontier_table

    _write(output, *frontier_table(frontier, title))


@command.command("proxy-joint")
@click.argument("tables", metavar="joint.csv...", type=FILE, nargs=-1, required=True)
@title_option
@output_option
def proxy_joint_command(tables: tuple[Path, ...], title: str | None, output: Path) -> None:
    """How the proxy orders policies, and its ratio to the joint KL. By source of the scores and size of the proxy."""
    from kvstages.tables.proxy_joint import proxy_joint_table

    _write(output, *proxy_joint_table(tables, title))


@command.command("gradients")
@click.option("--measured", type=FILE, required=True, help="Sensitivity table of measured scores.")
@click.option("--projections", type=FILE, required=True, help="Projections of the stage gradients.")
@title_option
@output_option
def gradients_command(measured: Path, projections: Path, title: str | None, output: Path) -> None:
    """How near scores from gradients come to measured ones. By part, precision and number of probes."""
    from kvstages.tables.gradients import gradients_table

    _write(output, *gradients_table(measured, projections, title))


@command.command("prediction")
@click.argument("predictions", metavar="predictions.csv", type=FILE)
@click.option("--held-out", type=FILE, multiple=True, required=True, help="joint.csv of the same policies. Repeat.")
@title_option
@output_option
def prediction_command(predictions: Path, held_out: tuple[Path, ...], title: str | None, output: Path) -> None:
    """Predicted against measured joint KL. With the interactions of units and without, on both windows."""
    from kvstages.tables.prediction import prediction_table

    _write(output, *prediction_table(predictions, held_out, title))


def _folder(published: str | None) -> Path | None:
    from kvstages.analysis.published import published_folder

    return None if published is None else published_folder(published)


def _write(output: Path, table: pd.DataFrame, page: str) -> None:
    from kvstages.files.atomic import write_table, write_text

    if output.suffix != ".html":
        raise ValueError(f"{output}: a table's output ends in .html; the .csv is written beside it")
    write_table(output.with_suffix(".csv"), table)
    write_text(output, page)
