"""KL by position in the block: it shows whether the KL grows with the quantized past."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.figures.policies import coinciding
from kvstages.figures.style import legend_below, line_style
from kvstages.figures.zero_strip import ZeroStrip
from kvstages.files.read import read_columns, read_record
from kvstages.policies.names import policy_order

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=5,
    title="KL by position",
    inputs={
        "evaluations": Input("evaluation_files", "EVALUATION.json", several=True),
    },
    beside=("position_files",),
)


def numbers(evaluations: Sequence[Path]) -> pd.DataFrame:
    """Mean KL (nats) over the blocks at each position, from the positions.csv beside each evaluation.json."""
    import pandas as pd

    parts = []
    for path in evaluations:
        policy = read_record(path, ["policy"])["policy"]
        positions = read_columns(Path(path).parent / "positions.csv", ["block", "position", "kl"])
        mean = positions.groupby("position", as_index=False)["kl"].mean().rename(columns={"kl": "mean_kl"})
        mean.insert(0, "policy", policy)
        parts.append(mean)
    parts.sort(key=lambda part: policy_order(part["policy"].iloc[0]) if len(part) else (0, 0.0))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def draw(table: pd.DataFrame) -> Figure:
    """A line for each policy, or for policies that coincide; a KL of 0 is in the grey strip."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.8, 4.1), layout="constrained")
    axes = figure.subplots()
    scale = ZeroStrip(axes, "y", table["mean_kl"])
    groups = coinciding(table)
    last = int(table["position"].max())
    for index, (label, part) in enumerate(groups):
        axes.plot(
            part["position"], scale.place(part["mean_kl"]), label=label, **line_style(index),
            markevery=(index % 4, max(1, len(part) // 12)), markersize=4,
        )  # fmt: skip
    axes.set_xlim(-0.015 * max(last, 1), 1.015 * max(last, 1))
    axes.set_xlabel("position in the block (tokens before it in the cache)")
    axes.set_ylabel("KL, mean over blocks (nats)")
    axes.xaxis.get_major_locator().set_params(integer=True, steps=[1, 2, 4, 8, 10])
    figure.suptitle("KL by position in the block", x=0.01, ha="left")
    legend_below(figure, *axes.get_legend_handles_labels(), handlelength=4)
    return figure
