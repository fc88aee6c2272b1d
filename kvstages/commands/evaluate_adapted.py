"""``kvstages evaluate-adapted``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options, training_options
from kvstages.commands.measuring import Measuring, measuring
from kvstages.commands.opening import opened


@click.command("evaluate-adapted")
@options.model
@options.windows
@options.window
@click.option(
    "--policy",
    "policies",
    type=training_options.PolicyOrPrecision(),
    multiple=True,
    required=True,
    metavar="POLICY",
    help="Policy (a file, or the precision of a uniform one). Repeat.",
)
@click.option("--reference", type=options.INPUT, required=True, help="Logits of the original model.")
@options.calibration
@measuring
@click.option("--output", type=options.OUTPUT, required=True, help="CSV file to write.")
def command(
    model: Path,
    windows: Path,
    window: str,
    policies: tuple[str, ...],
    reference: Path,
    calibration: Path | None,
    how: Measuring,
    output: Path,
) -> None:
    """Measure an adapted model under several policies, against the original model and against itself.

    Writes one row for each policy and block: mean KL to the original model with a BF16 cache and agreement with it, the
    same to this model's own BF16 cache, and cross entropy. The reference must have been computed in the same way.

    Example: kvstages evaluate-adapted --model adapted.safetensors --windows windows.safetensors --window validation
    --policy bf16 --policy int3 --reference reference/validation.safetensors --output evaluation.csv
    """
    from kvstages.files.atomic import write_table
    from kvstages.measure.adapted import columns, evaluate_adapted
    from kvstages.measure.execution import check_memory, state_bytes
    from kvstages.measure.reference import read_reference
    from kvstages.models.identity import read_identity
    from kvstages.study.windows import load_window

    record = how.record(window)
    logits = read_reference(reference, record)
    decoder = opened(how, model, calibration)
    identity = read_identity(model)
    names, grids = zip(*(training_options.named_grid(policy, identity) for policy in policies), strict=True)
    repeated = [name for index, name in enumerate(names) if name in names[:index]]
    if repeated:
        raise ValueError(f"--policy: {repeated[0]} is given twice")
    tokens = load_window(windows, window, decoder.shape).to(how.place)
    block = state_bytes(decoder, tokens.shape[1], how.setting.execution)
    check_memory(decoder, block, how.memory)
    with options.progress("evaluate-adapted") as report:
        means = evaluate_adapted(decoder, tokens, grids, logits, how.setting, how.memory, report)
    write_table(output, how.by_block(columns(means, names), windows, window))
