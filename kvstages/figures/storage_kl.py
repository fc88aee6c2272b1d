"""Storage against KL: cache bytes and joint held-out KL of every policy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.figures.labels import place_labels
from kvstages.figures.policies import coinciding
from kvstages.figures.storage_axis import storage_axis
from kvstages.figures.style import legend_below
from kvstages.figures.zero_strip import ZeroStrip
from kvstages.files.read import read_record
from kvstages.policies.names import ALLOCATORS as NAMES
from kvstages.policies.names import policy_order

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=4,
    title="Storage against KL",
    inputs={
        "evaluations": Input("evaluation_files", "EVALUATION.json", several=True),
    },
)

COLUMNS = ["policy", "total_bytes", "bf16_bytes", "tokens_per_cache", "mean_kl", "mean_kl_low", "mean_kl_high"]

# Marks of the allocators. All have one shade, because only the place matters.
MARKS = dict(zip(("uniform", *NAMES), itertools.cycle("soD^vPX<>"), strict=False))
ALLOCATORS = {
    allocator: {
        "marker": marker,
        "linestyle": "",
        "color": "#1b1b1b",
        "markerfacecolor": "#1b1b1b" if allocator == "uniform" else "white",
        "markersize": 4.5,
    }
    for allocator, marker in MARKS.items()
}


def numbers(evaluations: Sequence[Path]) -> pd.DataFrame:
    """Bytes, mean KL (nats) and its 95 % interval of each evaluation.json."""
    import pandas as pd

    records = [read_record(path, COLUMNS, COLUMNS[1:]) for path in evaluations]
    records.sort(key=lambda record: policy_order(record["policy"]))
    return pd.DataFrame([[record[column] for column in COLUMNS] for record in records], columns=COLUMNS)


def draw(table: pd.DataFrame) -> Figure:
    """One point for each policy, or for policies that coincide; a KL of 0 is in the grey strip."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 4.1), layout="constrained")
    axes = figure.subplots()
    scale = ZeroStrip(axes, "y", table[["mean_kl", "mean_kl_low", "mean_kl_high"]].to_numpy().ravel())
    labels, avoid = [], []
    for label, part in coinciding(table):
        row = part.iloc[0]
        x = row["total_bytes"] / 1024
        low, y, high = scale.place([row["mean_kl_low"], row["mean_kl"], row["mean_kl_high"]])
        look = ALLOCATORS[_allocator(label)]
        # Caps wider than the mark: an interval shorter than the mark still shows.
        axes.errorbar(x, y, [[y - low], [high - y]], color="0.25", elinewidth=1.0, capsize=4.5, capthick=0.8, zorder=2)
        axes.plot(x, y, **look, zorder=3)
        labels.append((label, x, y))
        avoid += [(x, low), (x, y), (x, high)]
    used = {_allocator(label) for label, _ in coinciding(table)}
    for allocator, look in ALLOCATORS.items():
        if allocator in used:
            axes.plot([], [], **look, label="uniform" if allocator == "uniform" else f"{allocator}, by budget")
    storage_axis(axes, table)
    axes.set_ylabel("mean held-out KL(policy || reference)\nwith 95 % interval (nats)")
    figure.suptitle("Storage against KL", x=0.01, ha="left")
    legend_below(figure, *axes.get_legend_handles_labels())
    place_labels(figure, [(axes, labels, avoid)])
    return figure


def _allocator(label: str) -> str:
    """Allocator of the first policy that a label names."""
    first = label.split()[0]
    return first if first in ALLOCATORS else "uniform"
