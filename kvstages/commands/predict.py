"""``kvstages predict``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options


@click.command("predict")
@click.argument("sweeps", type=options.INPUT, nargs=-1, required=True)
@options.model
@click.option("--projections", type=options.INPUT, required=True, help="From the stage gradients.")
@click.option(
    "--policies",
    type=options.INPUT,
    multiple=True,
    required=True,
    help="Set of policies, from the stage policy-set. May be given more than once.",
)
@click.option(
    "--joint",
    type=options.INPUT,
    required=True,
    help="The same policies measured on the window of the projections, from the stage evaluate-set.",
)
@click.option("--output", type=options.OUTPUT, required=True, help="CSV file to write.")
def command(
    sweeps: tuple[Path, ...],
    model: Path,
    projections: Path,
    policies: tuple[Path, ...],
    joint: Path,
    output: Path,
) -> None:
    """Predict the joint KL of policies: by sums of their units' scores, and with the interactions of all units.

    SWEEPS are the sweeps of all layers; the proxy by measured scores comes from them. Writes a row for each policy and
    block: every prediction (nats) beside the measured joint KL. All are on the window of the sensitivities.

    Example: kvstages predict sweep/float32/layer-*.csv --model model.safetensors
    --projections gradients/projections.safetensors --policies frontier/policy-set.json --joint gradients/joint.csv
    --output gradients/predictions.csv
    """
    from kvstages.analysis.joint_table import read_joint
    from kvstages.analysis.prediction import predictions, unit_scores
    from kvstages.files.atomic import write_table
    from kvstages.models.identity import read_identity
    from kvstages.policies.record import read_policies
    from kvstages.scores.projections import read_projections

    chosen = read_policies(policies, read_identity(model))
    write_table(output, predictions(read_projections(projections), unit_scores(sweeps), chosen, read_joint(joint)))
