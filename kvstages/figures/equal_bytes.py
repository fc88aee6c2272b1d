"""Recipes at equal bytes: a panel for each budget and arithmetic, the joint KL of every recipe over that of random
policies, and the uniform policy that fits the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry
from kvstages.analysis.equal_bytes import INPUTS, equal_bytes
from kvstages.analysis.joint_table import ARITHMETIC, PUBLISHED, RANDOM, UNIFORM
from kvstages.figures.shades import RANDOM_POLICIES
from kvstages.figures.style import NothingToDraw, legend_below

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=10,
    title="Recipes at equal bytes",
    inputs=INPUTS,
    beside=("comparison_set_files",),
)

ENDS = ["", "_low", "_high"]
COLUMNS = [
    "budget", "compute_dtype", "bytes", "recipe", "policy", *(f"mean_kl{end}" for end in ENDS),
    *(f"kl_reduction{end}" for end in ENDS),
]  # fmt: skip
INK = "#1b1b1b"
MARKERS = {PUBLISHED: "s", UNIFORM: "D"}


def numbers(comparisons: Sequence[Path]) -> pd.DataFrame:
    """Joint KL (nats), interval and reduction of each recipe but random, then the joint KL of each random policy.

    Of the uniform policies, the largest that takes no more bytes than the published recipe's. Rows by budget and
    arithmetic in the order given, the least KL first.
    """
    import pandas as pd

    joints, recipes = equal_bytes(comparisons)
    parts = []
    of_each = recipes.groupby(["budget", "compute_dtype"], sort=False)
    for joint, ((budget, _), own) in zip(joints, of_each, strict=True):
        policies = joint.policies.assign(mean_kl=joint.metrics["mean_kl"].mean(axis=1), budget=budget)
        limit = own.loc[own["recipe"] == PUBLISHED, "bytes"].iloc[0]
        uniform = own[(own["recipe"] == UNIFORM) & (own["bytes"] <= limit)].nlargest(1, "bytes")
        named = own[~own["recipe"].isin([RANDOM, UNIFORM])]
        parts += [
            pd.concat([named, uniform]).sort_values("mean_kl", kind="stable"),
            policies[policies["recipe"] == RANDOM].sort_values("mean_kl", kind="stable"),
        ]
    return pd.concat(parts, ignore_index=True).reindex(columns=COLUMNS)


def draw(table: pd.DataFrame) -> Figure:
    """Recipes as marks with 95 % intervals, the best on top; below them every random policy.

    A mark is filled where the interval of the paired difference from the published recipe does not hold 0.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if not (table["mean_kl"] > 0).any():
        raise NothingToDraw("the joint KL of every policy is 0")
    # Where no policy has a reduction, the columns hold None.
    table = table.astype({f"kl_reduction{end}": float for end in ENDS})
    parts = [part for _, part in table.groupby(["budget", "compute_dtype"], sort=False)]
    columns = min(2, len(parts))
    rows = -(-len(parts) // columns)
    tallest = max(part["recipe"].nunique() for part in parts)
    figure = Figure(figsize=(max(5.6, 5.0 * columns), rows * (0.9 + 0.23 * tallest) + 0.8), layout="constrained")
    figure.suptitle("Recipes at equal bytes: joint held-out KL", x=0.01, ha="left")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for part, axes in zip(parts, panels, strict=False):
        _panel(axes, part)
    for axes in panels:
        axes.set_visible(False)
    mark = {"linestyle": "", "marker": "o", "color": INK, "markersize": 5}
    handles = [
        Line2D([], [], **{**mark, "marker": "s"}, label="published recipe"),
        Line2D([], [], **mark, label="differs from it"),
        Line2D([], [], **mark, markerfacecolor="white", label="no clear difference"),
        Line2D([], [], **{**mark, "marker": "D"}, label="uniform, fewer bytes"),
    ]
    if (table["recipe"] == RANDOM).any():
        handles.append(
            Patch(facecolor=RANDOM_POLICIES, alpha=0.25, label="random policies: middle 90 %, line at the median")
        )
    legend_below(figure, handles, [handle.get_label() for handle in handles], columnspacing=1.4)
    return figure


def _panel(axes: Axes, table: pd.DataFrame) -> None:
    import numpy as np

    named, random = table[table["recipe"] != RANDOM], table[table["recipe"] == RANDOM]
    rows = list(named.itertuples())
    labels = [
        f"uniform {row.policy.upper()}, {row.bytes / 1024:,.0f} KiB" if row.recipe == UNIFORM else row.recipe
        for row in rows
    ]
    if len(random):
        low, middle, high = np.quantile(random["mean_kl"], [0.05, 0.5, 0.95])
        axes.axvspan(low, high, color=RANDOM_POLICIES, alpha=0.25, lw=0, zorder=0)
        axes.axvline(middle, color=RANDOM_POLICIES, lw=1.2, zorder=1)
        # The offsets follow the order of the values, so every point shows and nothing is random.
        offsets = 0.28 * (np.arange(len(random)) * 0.618 % 1 * 2 - 1)
        axes.plot(random["mean_kl"], len(rows) + offsets, "o", color=RANDOM_POLICIES, markersize=2.2, alpha=0.8, mew=0)
        labels.append(f"random ({len(random)})")
    for place, row in enumerate(rows):
        published = row.recipe == PUBLISHED
        full = published or row.kl_reduction_low > 0 or row.kl_reduction_high < 0
        axes.plot([row.mean_kl_low, row.mean_kl_high], [place, place], color=INK, lw=1.1, zorder=2)
        axes.plot(
            row.mean_kl, place, MARKERS.get(row.recipe, "o"), color=INK, markerfacecolor=INK if full else "white",
            markersize=5, zorder=3,
        )  # fmt: skip
        if published:
            axes.axvline(row.mean_kl, color=INK, lw=0.8, linestyle=(0, (1, 2)), zorder=1)
        elif row.kl_reduction == row.kl_reduction:
            change = round(-100 * row.kl_reduction)
            said = f"{change:+d} %".replace("-", "−") if change else "0 %"
            axes.text(1.01, place, said, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
    axes.set_xscale("log")
    _ticks(axes, table[["mean_kl", "mean_kl_low", "mean_kl_high"]].stack())
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    base = next(row for row in rows if row.recipe == PUBLISHED)
    axes.set_title(f"budget {base.budget}: {base.bytes / 1024:,.0f} KiB, {ARITHMETIC[base.compute_dtype]}")
    axes.set_xlabel("mean KL, 95 % interval (nats); right: change against published")


def _ticks(axes: Axes, values: pd.Series) -> None:
    """Plain numbers at 1, 2 and 5 of each decade, so that an axis of less than two decades can be read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if values.max() < 30 * values.min():
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
