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
@options.measuring
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
    execution: str,
    compute_dtype: str,
    device: str,
    threads: int,
    memory_mb: int,
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
    from kvstages.measure.calibration import calibrated
    from kvstages.measure.execution import check_memory, least_bytes, state_bytes
    from kvstages.measure.policy_set import measure
    from kvstages.measure.reference import EXACT, ComputedLogits, read_reference
    from kvstages.measure.setting import Setting, prepare
    from kvstages.models.identity import read_identity
    from kvstages.models.load import open_decoder
    from kvstages.policies.record import read_policies
    from kvstages.study.windows import load_window, window_documents

    setting = Setting(execution, compute_dtype)
    place = prepare(device, threads)
    record = {**setting.as_dict(), "device": place.type, "threads": threads, "memory_mb": memory_mb, "window": window}
    stored = None if reference is None else read_reference(reference, record)
    exact = None if truth is None else read_reference(truth, EXACT | {"window": window})
    decoder = calibrated(open_decoder(model, setting.dtype, place).pack(), calibration)
    every = read_policies(policies, read_identity(model))
    unknown = sorted(set(without) - {policy["recipe"] for policy in every})
    if unknown:
        raise ValueError(f"--without {unknown[0]}: no such recipe in {', '.join(map(str, policies))}")
    chosen = [policy for policy in every if policy["recipe"] not in without]
    tokens = load_window(windows, window, decoder.shape).to(place)
    logits = ComputedLogits(decoder, tokens, setting) if stored is None else stored
    block = state_bytes(decoder, tokens.shape[1], execution)
    check_memory(least_bytes(decoder, block), memory_mb << 20)
    with options.progress("measure") as report:
        table = measure(decoder, tokens, chosen, logits, setting, memory_mb << 20, report, exact)
    rows = len(table["policy"])
    documents = window_documents(windows, window) or [""] * len(tokens)
    table["document"] = [documents[block] for block in table["block"]]
    measured = {key: [value] * rows for key, value in {"window": window, **setting.as_dict()}.items()}
    write_table(output, table | measured, [] if exact is not None else ["truth_kl"])
