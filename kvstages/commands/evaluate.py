"""``kvstages evaluate``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options
from kvstages.commands.measuring import Measuring, measuring
from kvstages.commands.opening import opened


@click.command("evaluate")
@options.model
@options.windows
@options.window
@click.option("--policy", type=options.INPUT, required=True, help="Policy, from the stage allocate.")
@click.option("--reference", type=options.INPUT, required=True, help="Logits, from the stage reference.")
@options.calibration
@measuring
@click.option("--output", type=options.OUTPUT, required=True, help="JSON file to write the figures to.")
@click.option("--positions", type=options.OUTPUT, required=True, help="CSV file to write each position's metrics to.")
def command(
    model: Path,
    windows: Path,
    window: str,
    policy: Path,
    reference: Path,
    calibration: Path | None,
    how: Measuring,
    output: Path,
    positions: Path,
) -> None:
    """Measure a whole policy jointly on a window against the reference.

    Writes KL(policy || reference) and KL(reference || policy), agreement of the argmaxes, cross entropies, perplexities
    and their ratio, and the change of the true next token's probability. Each has its standard error and 95 % bootstrap
    interval over blocks, and percentiles where it has a distribution. Also writes logit deviation, the first
    disagreement, the bytes of one cache, and a table with a row for each position. The reference must have been
    computed in the same way, on the same kind of device.

    Example: kvstages evaluate --model model.safetensors --windows windows.safetensors --window validation
    --policy policy.json --reference reference/validation.safetensors --output evaluation.json --positions positions.csv
    """
    from kvstages.files.atomic import write_json, write_table
    from kvstages.measure.evaluation import evaluate
    from kvstages.measure.execution import check_memory, state_bytes
    from kvstages.measure.reference import read_reference
    from kvstages.models.identity import read_identity
    from kvstages.policies.record import read_policy
    from kvstages.stats.summary import NEXT_TOKEN
    from kvstages.study.windows import load_window

    record = how.record(window)
    logits = read_reference(reference, record)
    decoder = opened(how, model, calibration)
    chosen = read_policy(policy, read_identity(model))
    tokens = load_window(windows, window, decoder.shape).to(how.place)
    block = state_bytes(decoder, tokens.shape[1], how.setting.execution)
    check_memory(decoder, block, how.memory)
    with options.progress(f"evaluate, {policy}") as report:
        figures, table = evaluate(decoder, tokens, chosen, logits, how.setting, how.memory, report)
    write_table(positions, table, NEXT_TOKEN)
    write_json(output, {"policy": chosen["policy"], **record, **figures})
