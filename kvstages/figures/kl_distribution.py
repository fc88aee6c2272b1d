"""Distribution of the KL over positions: the share that reaches each value (complementary cumulative distribution)."""

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
    number=6,
    title="Distribution of the KL",
    inputs={
        "evaluations": Input("evaluation_files", "EVALUATION.json", several=True),
    },
    beside=("position_files",),
)

# Ranks drawn of a distribution: close enough that no eye sees the gaps, few enough for a light file at any window.
RANKS = 300


def numbers(evaluations: Sequence[Path]) -> pd.DataFrame:
    """Points of each distribution, from the positions.csv beside each evaluation.json.

    A row says that ``share`` of all positions (position 0 included) have at least this ``kl`` (nats). The ranks are
    spread evenly on the logarithmic axis of shares, from the largest KL to the smallest.
    """
    import numpy as np
    import pandas as pd

    parts = []
    for path in evaluations:
        policy = read_record(path, ["policy"])["policy"]
        kl = np.sort(read_columns(Path(path).parent / "positions.csv", ["kl"])["kl"].to_numpy())[::-1]
        if not kl.size:
            continue
        ranks = np.unique(np.round(np.geomspace(1, kl.size, RANKS)).astype(int))
        parts.append(pd.DataFrame({"policy": policy, "kl": kl[ranks - 1], "share": ranks / kl.size}))
    parts.sort(key=lambda part: policy_order(part["policy"].iloc[0]))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def draw(table: pd.DataFrame) -> Figure:
    """A falling line for each policy, or for policies that coincide; shares 0.5, 0.05 and 0.01 are the percentiles."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(6.8, 4.1), layout="constrained")
    axes = figure.subplots()
    scale = ZeroStrip(axes, "x", table["kl"])
    groups = coinciding(table)
    smallest = table["share"].min()
    for index, (label, part) in enumerate(groups):
        axes.plot(
            scale.place(part["kl"]), part["share"], label=label, **line_style(index),
            markevery=(7 * index, 40), markersize=4,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(smallest / 1.3, 1.3)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    for share, name in ((0.5, "p50"), (0.05, "p95"), (0.01, "p99")):
        if share > smallest:
            axes.axhline(share, color="0.45", lw=0.7, linestyle=(0, (1, 2)))
            axes.text(1.005, share, name, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5, color="0.25")
    axes.set_xlabel("KL of one position (nats)")
    axes.set_ylabel("positions with at least this KL")
    figure.suptitle("Distribution of the KL over positions", x=0.01, ha="left")
    legend_below(figure, *axes.get_legend_handles_labels(), handlelength=4)
    return figure
