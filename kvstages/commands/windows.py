"""``kvstages windows``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("windows")
@click.option("--shard", type=click.Path(path_type=Path), required=True, help="Token shard to cut.")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    required=True,
    help="model.safetensors whose vocabulary and context the blocks must fit; only its header is read.",
)
@click.option("--block", type=int, required=True, help="Tokens a block; each block is one sequence with its own cache.")
@click.option(
    "--window",
    "windows",
    multiple=True,
    required=True,
    metavar="NAME=START:END",
    help="A window: its name and its positions in the shard, the end not included. Repeat in order of position.",
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="The windows.safetensors to write.")
def command(shard: Path, model: Path, block: int, windows: tuple[str, ...], output: Path) -> None:
    """Cut the token windows of a study out of a shard.

    Reads the ids of each window, and no others. Writes OUTPUT: for each window one int64 tensor [blocks, block], cut
    in order without overlap, and a record of the block and the positions.

    Refuses windows that are out of order, overlap, are empty, are not a multiple of the block or run past the shard,
    blocks longer than the model's context, and token ids at or above its vocabulary.

    \b
    Example:
      kvstages windows --shard resources/demo/shard/held-out.bin --model resources/demo/model.safetensors \\
          --block 64 --window calibration=0:512 --window validation=8192:10240 \\
          --output results/demo/windows.safetensors
    """
    from kvstages.files.atomic import write_tensors
    from kvstages.models.config import read_config
    from kvstages.study.windows import cut_windows, parse_windows

    positions = parse_windows(list(windows))
    blocks = cut_windows(shard, positions, block, read_config(model))
    write_tensors(output, blocks, {"block": block, "windows": {name: list(ends) for name, ends in positions.items()}})
