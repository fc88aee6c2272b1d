"""Training curves of the adaptation, by arm and seed: cross entropy, and KL to the frozen reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.arms import arm_and_seed
from kvstages.analysis.entries import Entry, Input
from kvstages.figures.style import legend_below, line_style
from kvstages.figures.zero_strip import ZeroStrip
from kvstages.files.read import read_columns

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=7,
    title="Adaptation, training curves",
    inputs={
        "curves": Input("curve_files", "ARM/seed-SEED/curve.csv", several=True),
    },
)


def numbers(curves: Sequence[Path]) -> pd.DataFrame:
    """Cross entropy and KL (nats) at each step of each ARM/seed-SEED/curve.csv, arms in the order given."""
    import pandas as pd

    parts = []
    for path in curves:
        arm, seed = arm_and_seed(path)
        curve = read_columns(path, ["step", "cross_entropy", "kl"])
        curve.insert(0, "arm", arm)
        curve.insert(1, "seed", seed)
        parts.append(curve)
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def draw(table: pd.DataFrame) -> Figure:
    """Two panels over the steps; a line and shade for each arm, a marker for each seed."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(6.8, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    scale = ZeroStrip(lower, "y", table["kl"])
    arms, seeds = list(dict.fromkeys(table["arm"])), list(dict.fromkeys(table["seed"]))
    for (arm, seed), part in table.groupby(["arm", "seed"], sort=False):
        look = {**line_style(arms.index(arm)), "marker": line_style(seeds.index(seed))["marker"]}
        start, every = 2 * seeds.index(seed) + arms.index(arm), max(1, len(part) // 8)
        for axes, values in ((upper, part["cross_entropy"]), (lower, scale.place(part["kl"]))):
            axes.plot(part["step"], values, **look, lw=1.1, markersize=4, markevery=(start % every, every))
    upper.set_ylabel("cross entropy (nats per token)")
    lower.set_ylabel("KL(student || original) (nats)")
    lower.set_xlabel("training step")
    lower.xaxis.get_major_locator().set_params(integer=True)
    handles = [
        Line2D([], [], **{**line_style(index), "marker": ""}, label=f"arm {arm}") for index, arm in enumerate(arms)
    ] + [
        Line2D([], [], color="0.3", linestyle="", marker=line_style(index)["marker"], label=f"seed {seed}")
        for index, seed in enumerate(seeds)
    ]
    figure.suptitle("Adaptation: training curves on the adaptation window", x=0.01, ha="left")
    legend_below(figure, handles, [handle.get_label() for handle in handles], handlelength=3)
    return figure
