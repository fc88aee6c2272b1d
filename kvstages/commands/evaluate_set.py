"""``kvstages evaluate-set``."""

from __future__ import annotations

from pathlib import Path

import click

from kvstages.commands import options


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
    "--reference", type=options.INPUT, required=True, help="Logits to compare with, from the stage reference."
)
@options.calibration
@options.measuring
@click.option("--output", type=options.OUTPUT, required=True, help="CSV file to write.")
def command(
    model: Path,
    windows: Path,
    window: str,
    policies: tuple[Path, ...],
    reference: Path,
    calibration: Path | None,
    execution: str,
    compute_dtype: str,
    device: str,
    threads: int,
    memory_mb: int,
    output: Path,
) -> None:
    """Measure a set of policies jointly on a window, all against one reference.

    Writes one row for each policy and block: mean KL(policy || reference) in nats, agreement of the argmaxes, cross
    entropy, and the recipe, bytes and proxy of the policy. The reference must have been computed in the same way.

    Example: kvstages evaluate-set --model model.safetensors --windows windows.safetensors --window validation
    --policies policy-set.json --reference reference/validation.safetensors --output joint.csv
    """
    from kvstages.files.atomic import write_table
    from kvstages.measure.calibration import calibrated
    from kvstages.measure.evaluation import read_reference
    from kvstages.measure.policy_set import measure
    from kvstages.measure.setting import Setting, prepare
    from kvstages.models.checkpoints import load_model
    from kvstages.policies.record import read_policies
    from kvstages.study.windows import load_window

    setting = Setting(execution, compute_dtype)
    place = prepare(device, threads)
    record = {**setting.as_dict(), "device": place.type, "threads": threads, "memory_mb": memory_mb, "window": window}
    logits = read_reference(reference, record)
    decoder = calibrated(load_model(model, setting.dtype, place).pack(), calibration)
    chosen = read_policies(policies, decoder.config)
    tokens = load_window(windows, window, decoder.config).to(place)
    with options.progress("measure") as report:
        table = measure(decoder, tokens, chosen, logits, setting, memory_mb << 20, report)
    rows = len(table["policy"])
    write_table(output, table | {key: [value] * rows for key, value in {"window": window, **setting.as_dict()}.items()})
