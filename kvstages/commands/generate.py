"""``kvstages generate``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import click

from kvstages.commands import options


@click.command("generate")
@options.model
@options.windows
@click.option("--window", default="validation", show_default=True, help="Window whose blocks begin with prompts.")
@click.option(
    "--policy", "policies", type=options.INPUT, multiple=True, required=True, help="Policy, from allocate. Repeat."
)
@click.option("--prompts", type=click.IntRange(min=1), required=True, help="Prompts, of evenly spaced blocks.")
@click.option("--tokens", type=click.IntRange(min=1), required=True, help="Tokens to continue with.")
@click.option(
    "--prompt",
    type=click.IntRange(min=1),
    help="Tokens of each prompt, the first of its block. Without it all but the last tokens.",
)
@options.calibration
@options.compute_dtype
@options.device
@options.threads
@options.memory
@click.option("--output", type=options.OUTPUT, required=True, help="CSV file to write.")
def command(
    model: Path,
    windows: Path,
    window: str,
    policies: tuple[Path, ...],
    prompts: int,
    tokens: int,
    prompt: int | None,
    calibration: Path | None,
    compute_dtype: str,
    device: str,
    threads: int,
    memory_mb: int,
    output: Path,
) -> None:
    """Continue held-out prompts greedily under policies, and compare with the unquantized cache's continuations.

    Writes a row for each policy, prefill and prompt: how many tokens are the same before the first that is not. The
    control is the unquantized cache again, with another number of prompts at once: nothing but the order of sums.

    Example: kvstages generate --model model.safetensors --windows windows.safetensors --policy policy.json
    --prompts 16 --tokens 32 --output continuations.csv
    """
    from kvstages.files.atomic import write_table
    from kvstages.measure.calibration import calibrated
    from kvstages.measure.execution import blocks_per_pass, dense_grid
    from kvstages.measure.generation import PREFILLS, continued, same_tokens
    from kvstages.measure.setting import DTYPES, prepare
    from kvstages.models.identity import read_identity
    from kvstages.models.load import open_decoder
    from kvstages.policies.record import check_policy, read_policy
    from kvstages.study.windows import load_window, window_documents

    place = prepare(device, threads)
    decoder = calibrated(open_decoder(model, DTYPES[compute_dtype], place).pack(), calibration)
    blocks = load_window(windows, window, decoder.shape)
    length = prompt or blocks.shape[1] - tokens
    if prompts > len(blocks) or not 1 <= length <= blocks.shape[1] - tokens:
        of = "" if prompt is None else f" of {prompt} tokens"
        raise ValueError(
            f"{windows}: {prompts} prompts{of} and {tokens} tokens after each, but {window} has {len(blocks)} blocks "
            f"of {blocks.shape[1]} tokens"
        )
    identity = read_identity(model)
    records = [read_policy(path, identity) for path in policies]
    grids = {record["policy"]: check_policy(record, decoder.shape) for record in records}
    documents = window_documents(windows, window) or [""] * len(blocks)
    chosen = [index * len(blocks) // prompts for index in range(prompts)]
    begun = blocks[chosen, :length].to(place)
    together = blocks_per_pass(decoder, prompts, length + tokens, "token-by-token", memory_mb << 20)
    runs = {name: (grid, together) for name, grid in grids.items()}
    # A single prompt at once can only be joined by another.
    runs["bf16"] = dense_grid(decoder), max(1, together // 4) if together > 1 else min(2, prompts)
    rows = []
    with options.progress("generate") as report:
        for done, prefill in enumerate(PREFILLS):
            # Policies may coincide: equal ones are run once.
            run = cache(lambda grid, count, prefill=prefill: continued(decoder, begun, grid, tokens, prefill, count))
            reference = run(dense_grid(decoder), together)
            for index, (name, (grid, count)) in enumerate(runs.items()):
                same = same_tokens(run(grid, count), reference).tolist()
                rows += [
                    (name, prefill, count, block, documents[block], length, tokens, own, compute_dtype)
                    for block, own in zip(chosen, same, strict=True)
                ]
                report((done + (index + 1) / len(runs)) / len(PREFILLS))
    names = ("policy", "prefill", "together", "block", "document", "prompt_tokens", "tokens", "same", "compute_dtype")
    write_table(output, {name: [row[index] for row in rows] for index, name in enumerate(names)})
