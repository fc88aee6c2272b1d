"""The frontier: joint held-out KL against bytes, a line for each family of policies, with the uniform ones beside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.analysis.joint_table import UNIFORM, read_joint, with_figures
from kvstages.figures.labels import place_labels
from kvstages.figures.storage_axis import storage_axis
from kvstages.figures.style import legend_columns, line_style
from kvstages.figures.zero_strip import ZeroStrip

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=11,
    title="Frontier",
    inputs={
        "frontier": Input("frontier_files", "joint.csv"),
    },
)

COLUMNS = ["recipe", "policy", "total_bytes", "bf16_bytes", "mean_kl", "mean_kl_low", "mean_kl_high"]


def numbers(frontier: Path) -> pd.DataFrame:
    """Bytes, joint KL (nats) and its interval of each policy: families in the order of the file, by falling bytes."""
    import pandas as pd

    table = with_figures(read_joint(frontier)).rename(columns={"bytes": "total_bytes"})
    families = [
        table[table["recipe"] == recipe].sort_values("total_bytes", ascending=False, kind="stable")
        for recipe in dict.fromkeys(table["recipe"])
    ]
    return pd.concat(families, ignore_index=True)[COLUMNS]


def draw(table: pd.DataFrame) -> Figure:
    """A line and a bar from end to end of each interval; uniform policies as named squares, a KL of 0 in the strip."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 5.0), layout="constrained")
    axes = figure.subplots()
    scale = ZeroStrip(axes, "y", table[["mean_kl", "mean_kl_low", "mean_kl_high"]].to_numpy().ravel())
    storage_axis(axes, table)
    families = [recipe for recipe in dict.fromkeys(table["recipe"]) if recipe != UNIFORM]
    drawn = []
    for index, recipe in enumerate(families):
        own = table[table["recipe"] == recipe]
        x = own["total_bytes"] / 1024
        low, middle, high = (scale.place(own[name]) for name in ("mean_kl_low", "mean_kl", "mean_kl_high"))
        look = line_style(index)
        axes.plot(x, middle, **look, lw=1.2, markersize=4, label=recipe, zorder=3)
        axes.vlines(x, low, high, color=look["color"], lw=0.9, zorder=2)
        drawn += _along(x.to_numpy(), middle)
    uniform = table[table["recipe"] == UNIFORM]
    x = uniform["total_bytes"] / 1024
    low, middle, high = (scale.place(uniform[name]) for name in ("mean_kl_low", "mean_kl", "mean_kl_high"))
    axes.vlines(x, low, high, color="#1b1b1b", lw=1.2, zorder=4)
    axes.plot(x, middle, "s", color="white", markeredgecolor="#1b1b1b", mew=1.4, markersize=7, label=UNIFORM, zorder=5)
    axes.set_ylabel("mean held-out KL, 95 % interval (nats)")
    figure.suptitle("Frontier: joint KL of each family of policies", x=0.01, ha="left")
    figure.legend(loc="outside lower center", ncols=legend_columns([*families, UNIFORM]), handlelength=4)
    labels = [(policy.upper(), *place) for policy, *place in zip(uniform["policy"], x, middle, strict=True)]
    place_labels(axes, labels, drawn + [(x, y) for _, x, y in labels])
    return figure


def _along(x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
    """Points close together on the line through (x, y) on a logarithmic axis, which labels avoid."""
    import numpy as np

    places = np.linspace(0, len(x) - 1, 20 * len(x))
    steps = np.arange(len(x))
    return list(zip(np.interp(places, steps, x), 10 ** np.interp(places, steps, np.log10(y)), strict=True))
