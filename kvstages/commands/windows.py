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
    metavar="NAME=START:END|NAME=documents:N,blocks:B,seed:S[,block:T][,of:PATTERN|PATTERN]",
    help="A window: its name and its positions in the shard, the end not included; or how many blocks of how many "
    "documents are drawn, the seed, and perhaps tokens a block of its own, and names of the documents to draw from, "
    "with * for any letters. Repeat; positions in order.",
)
@click.option(
    "--cut",
    "lengths",
    type=click.IntRange(min=2),
    multiple=True,
    help="Cut every window again into blocks of so many tokens, NAME-LENGTH, and write those alone. Repeat.",
)
@click.option(
    "--documents",
    type=click.Path(path_type=Path),
    help="Documents of the shard (JSON), needed where one is drawn from.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="Record of the stage tokenize: every block starts with the special tokens that it names.",
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="The windows.safetensors to write.")
@click.option("--places", type=click.Path(path_type=Path), required=True, help="The windows.csv to write.")
def command(
    shard: Path,
    model: Path,
    block: int,
    windows: tuple[str, ...],
    lengths: tuple[int, ...],
    documents: Path | None,
    tokenizer: Path | None,
    output: Path,
    places: Path,
) -> None:
    """Cut the token windows of a study out of a shard.

    Reads the ids of each window, and no others. Writes OUTPUT: for each window one int64 tensor [blocks, block], and a
    record of where each block came from; and PLACES, a table with the document and first position of every block. A
    window is a run of positions, cut in order without overlap, or drawn from documents: whole blocks, as many of each
    document as of the others, and no document in two windows. With --cut the same tokens are cut into blocks of each
    length.

    Refuses windows that are out of order, overlap, are empty, are not a multiple of the block or run past the shard,
    draws for which too few documents are long enough, blocks longer than the model's context, and token ids at or above
    its vocabulary.

    \b
    Example:
      kvstages windows --shard resources/demo/shard/held-out.bin --model resources/demo/model.safetensors \\
          --block 64 --window calibration=0:512 --window validation=8192:10240 \\
          --output results/demo/windows.safetensors --places results/demo/windows.csv
    """
    from kvstages.files.atomic import write_table, write_tensors
    from kvstages.models.config import read_shape
    from kvstages.study.windows import (
        check_lengths,
        cut_shorter,
        cut_windows,
        parse_windows,
        read_prefix,
        window_record,
        window_table,
    )

    prefix = [] if tokenizer is None else read_prefix(tokenizer)
    shape = read_shape(model)
    check_lengths(lengths, shape, prefix)
    cut = cut_windows(shard, parse_windows(list(windows)), block, shape, documents, prefix)
    if lengths:
        cut = cut_shorter(cut, lengths, prefix)
    write_table(places, window_table(cut))
    write_tensors(output, {name: own.tokens for name, own in cut.items()}, window_record(cut, block))
