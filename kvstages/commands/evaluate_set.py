"""``kvstages evaluate-set``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options
from kvstages.commands.measuring import Measuring, measuring
from kvstages.commands.opening import opened


@click.command("evaluate-set")
@options.model
@options.windows
@options.window
@click.option(
    "--policies",
    type=options.INPUT,
    multiple=True,
    required=True,
    help="Set of policies, from the stages policy-set and refine. May be given more than once.",
)
@click.option(
    "--reference",
    type=options.INPUT,
    help="Logits to compare with, from the stage reference; without it the same ones are computed here and not kept.",
)
@click.option(
    "--truth",
    type=options.INPUT,
    help="Logits of the same window from the stage reference with --exact-cache: adds the KL from them.",
)
@click.option("--without", "without", multiple=True, metavar="RECIPE", help="A recipe not to measure. Repeat.")
@options.calibration
@measuring
@click.option("--output", type=options.OUTPUT, required=True, help="CSV file to write.")
def command(
    model: Path,
    windows: Path,
    window: str,
    policies: tuple[Path, ...],
    reference: Path | None,
    truth: Path | None,
    without: tuple[str, ...],
    calibration: Path | None,
    how: Measuring,
    output: Path,
) -> None:
    """Measure a set of policies jointly on a window, all against the unquantized cache.

    Writes one row for each policy and block: mean KL(policy || reference) in nats, KL(policy || truth) where a truth is
    given, agreement of the argmaxes, cross entropy, the document of the block, and the recipe, bytes and proxy of the
    policy. A reference that is given must have been computed in the same way.

    Example: kvstages evaluate-set --model model.safetensors --windows windows.safetensors --window validation
    --policies policy-set.json --reference reference/validation.safetensors --output joint.csv
    """
    from kvstages.files.atomic import write_table
    from kvstages.measure.execution import check_memory, state_bytes
    from kvstages.measure.policy_set import measure
    from kvstages.measure.reference import EXACT, ComputedLogits, read_reference
    from kvstages.models.identity import read_identity
    from kvstages.policies.record import read_policies
    from kvstages.study.windows import load_window

    stored = None if reference is None else read_reference(reference, how.record(window))
    exact = None if truth is None else read_reference(truth, EXACT | {"window": window})
    decoder = opened(how, model, calibration)
    every = read_policies(policies, read_identity(model))
    unknown = sorted(set(without) - {policy["recipe"] for policy in every})
    if unknown:
        raise ValueError(f"--without {unknown[0]}: no such recipe in {', '.join(map(str, policies))}")
    chosen = [policy for policy in every if policy["recipe"] not in without]
    tokens = load_window(windows, window, decoder.shape).to(how.place)
    logits = ComputedLogits(decoder, tokens, how.setting) if stored is None else stored
    block = state_bytes(decoder, tokens.shape[1], how.setting.execution)
    check_memory(decoder, block, how.memory)
    with options.progress("measure") as report:
        table = measure(decoder, tokens, chosen, logits, how.setting, how.memory, report, exact)
    write_table(output, how.by_block(table, windows, window), [] if exact is not None else ["truth_kl"])
