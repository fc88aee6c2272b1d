"""``kvstages figure NAME``."""

from __future__ import annotations

from pathlib import Path

import click

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
output_option = click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The figure, NAME.svg; NAME.png and the plotted numbers, NAME.csv, are written beside it.",
)


@click.group("figure", context_settings={"show_default": True})
def command() -> None:
    """Draw one figure: SVG, PNG and the plotted numbers as CSV.

    The same inputs give the same bytes. One policy is one folder: where a figure asks for a policy's record, it also
    reads the table that lies beside it.

    Example: kvstages figure sensitivity --sensitivity scores/measured-float32.csv --output figures/sensitivity.svg
    """


@command.command("sensitivity")
@click.option("--sensitivity", type=FILE, required=True, help="A gathered sensitivity table.")
@output_option
def sensitivity_command(sensitivity: Path, output: Path) -> None:
    """Heat maps of the single-head scores. Layer by head, one map a precision; scores below their floor marked."""
    from kvstages.figures.sensitivity import draw, numbers
    from kvstages.figures.style import write_figure

    write_figure(output, numbers(sensitivity), draw)


@command.command("allocation")
@click.argument("policies", metavar="POLICY.json...", type=FILE, nargs=-1, required=True)
@output_option
def allocation_command(policies: tuple[Path, ...], output: Path) -> None:
    """Map of the precisions of each head. One map for each policy given; those that coincide share one."""
    from kvstages.figures.allocation import draw, numbers
    from kvstages.figures.style import write_figure

    write_figure(output, numbers(policies), draw)


@command.command("greedy-path")
@click.argument("policies", metavar="POLICY.json...", type=FILE, nargs=-1, required=True)
@output_option
def greedy_path_command(policies: tuple[Path, ...], output: Path) -> None:
    """Proxy against bytes, step by step. A line for each greedy policy given; reads the steps.csv beside each."""
    from kvstages.figures.greedy_path import draw, numbers
    from kvstages.figures.style import write_figure

    write_figure(output, numbers(policies), draw)


@command.command("storage-kl")
@click.argument("evaluations", metavar="EVALUATION.json...", type=FILE, nargs=-1, required=True)
@output_option
def storage_kl_command(evaluations: tuple[Path, ...], output: Path) -> None:
    """Held-out KL against cache bytes. A point with its 95 % interval for each policy given."""
    from kvstages.figures.storage_kl import draw, numbers
    from kvstages.figures.style import write_figure

    write_figure(output, numbers(evaluations), draw)


@command.command("kl-by-position")
@click.argument("evaluations", metavar="EVALUATION.json...", type=FILE, nargs=-1, required=True)
@output_option
def kl_by_position_command(evaluations: tuple[Path, ...], output: Path) -> None:
    """Mean KL at each position. A line for each policy given; reads the positions.csv beside each."""
    from kvstages.figures.kl_by_position import draw, numbers
    from kvstages.figures.style import write_figure

    write_figure(output, numbers(evaluations), draw)


@command.command("kl-distribution")
@click.argument("evaluations", metavar="EVALUATION.json...", type=FILE, nargs=-1, required=True)
@output_option
def kl_distribution_command(evaluations: tuple[Path, ...], output: Path) -> None:
    """Share of positions above each KL. A line for each policy given; reads the positions.csv beside each."""
    from kvstages.figures.kl_distribution import draw, numbers
    from kvstages.figures.style import write_figure

    write_figure(output, numbers(evaluations), draw)


@command.command("adaptation-curves")
@click.argument("curves", metavar="ARM/seed-SEED/curve.csv...", type=FILE, nargs=-1, required=True)
@output_option
def adaptation_curves_command(curves: tuple[Path, ...], output: Path) -> None:
    """Cross entropy and KL in training. The folder of each curve tells its arm and seed."""
    from kvstages.figures.adaptation_curves import draw, numbers
    from kvstages.figures.style import write_figure

    write_figure(output, numbers(curves), draw)


@command.command("adaptation")
@click.argument("adapted", metavar="ARM/seed-SEED/POLICY/evaluation.json...", type=FILE, nargs=-1, required=True)
@click.option("--original", type=FILE, multiple=True, required=True, help="The same policy, original model. Repeat.")
@output_option
def adaptation_command(adapted: tuple[Path, ...], original: tuple[Path, ...], output: Path) -> None:
    """Held-out KL before and after. The folder of each evaluation tells its arm and seed."""
    from kvstages.figures.adaptation import draw, numbers
    from kvstages.figures.style import write_figure

    write_figure(output, numbers(original, adapted), draw)


@command.command("floor")
@click.argument("sensitivities", metavar="SENSITIVITY.csv...", type=FILE, nargs=-1, required=True)
@output_option
def floor_command(sensitivities: tuple[Path, ...], output: Path) -> None:
    """Scores and their floor by layer. A panel for each gathered sensitivity table given."""
    from kvstages.figures.floor import draw, numbers
    from kvstages.figures.style import write_figure

    write_figure(output, numbers(sensitivities), draw)


@command.command("equal-bytes")
@click.argument("comparisons", metavar="BUDGET/joint.csv...", type=FILE, nargs=-1, required=True)
@output_option
def equal_bytes_command(comparisons: tuple[Path, ...], output: Path) -> None:
    """Joint KL of recipes at equal bytes. A panel for each comparison given; its folder tells the budget, and the
    policy-set.json beside it where the random policies lie.
    """
    from kvstages.figures.equal_bytes import draw, numbers
    from kvstages.figures.style import write_figure

    write_figure(output, numbers(comparisons), draw)


@command.command("frontier")
@click.argument("frontier", metavar="joint.csv", type=FILE)
@output_option
def frontier_command(frontier: Path, output: Path) -> None:
    """Joint KL against bytes. A line for each family of policies, the uniform ones beside."""
    from kvstages.figures.frontier import draw, numbers
    from kvstages.figures.style import write_figure

    write_figure(output, numbers(frontier), draw)


@command.command("proxy-joint")
@click.argument("tables", metavar="joint.csv...", type=FILE, nargs=-1, required=True)
@output_option
def proxy_joint_command(tables: tuple[Path, ...], output: Path) -> None:
    """Proxy against joint KL. All policies of the tables given, by the source of their scores."""
    from kvstages.figures.proxy_joint import draw, numbers
    from kvstages.figures.style import write_figure

    write_figure(output, numbers(tables), draw)


@command.command("gradients")
@click.option("--measured", type=FILE, required=True, help="Sensitivity table of measured scores.")
@click.option("--estimated", type=FILE, required=True, help="Sensitivity table of the stage gradients.")
@output_option
def gradients_command(measured: Path, estimated: Path, output: Path) -> None:
    """Scores from gradients against measured ones. A point for each unit and precision, and the ratio of the two."""
    from kvstages.figures.gradients import draw, numbers
    from kvstages.figures.style import write_figure

    write_figure(output, numbers(measured, estimated), draw)
