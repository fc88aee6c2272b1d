"""Options that several stages share, and progress on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)
OUTPUT = click.Path(dir_okay=False, path_type=Path)

model = click.option(
    "--model", type=click.Path(exists=True, path_type=Path), required=True, help="Weights, from the stage convert."
)
windows = click.option("--windows", type=INPUT, required=True, help="Token windows, from the stage windows.")
window = click.option("--window", required=True, help="Name of the window to use, such as calibration.")
tokens = click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Positions of the cache counted in bytes.",
)
compute_dtype = click.option(
    "--compute-dtype",
    type=click.Choice(["float32", "bfloat16", "float64"]),
    default="float32",
    show_default=True,
    help="Dtype of weights and activations. Unquantized heads are stored in BF16 in any case.",
)
calibration = click.option(
    "--calibration",
    type=INPUT,
    help="What quantizer schemes need to know of the model, from the stage calibrate: the means of keys and values, "
    "and their largest magnitudes. Without it schemes may use the keys' biases.",
)
device = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto takes CUDA where there is one.",
)
threads = click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="CPU threads. Sums may differ in their last digits between thread counts.",
)
memory = click.option(
    "--memory-mb",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="Memory for one pass through the model; blocks that do not fit follow in further passes.",
)
execution = click.option(
    "--execution",
    type=click.Choice(["one-pass", "token-by-token"]),
    default="one-pass",
    show_default=True,
    help="All positions of a block in one pass, or token by token through the packed cache.",
)


@contextmanager
def progress(label: str) -> Iterator[Callable[[float], None]]:
    """A progress bar on standard error, as a function of the share done; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    with click.progressbar(length=1000, label=label, file=sys.stderr) as bar:
        yield lambda done: bar.update(int(done * 1000) - bar.pos)
