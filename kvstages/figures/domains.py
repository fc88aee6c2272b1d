"""Calibration on one text against calibration on another: a map of what calibrating elsewhere costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.domains import INPUTS, Place, read_domains
from kvstages.analysis.entries import Entry
from kvstages.analysis.number_text import nats
from kvstages.figures.shades import ink

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=17,
    title="Calibrated here, measured there",
    inputs=INPUTS,
)

COLUMNS = [
    *("budget", "calibrated_domain", "calibrated_length", "domain", "length", "kl", "ratio", "ratio_low", "ratio_high")
]
# From a ratio below 1 to one above it; both ends are as dark in grey.
SHADES = ["#1f4e79", "#8fb3d1", "#ffffff", "#e0a878", "#8a4010"]
# The scale goes at least so far from 1, either way: less is hardly a difference.
LEAST = 1.25


def numbers(joints: Sequence[Path]) -> pd.DataFrame:
    """Mean KL (nats) of each policy in each place, and its ratio to that of the place's own policy, with the interval
    over documents where there is one everywhere, else over blocks."""
    _, table = read_domains(joints)
    ratios = table[table["ratio_low"].notna()]
    if ratios["ratio_documents_low"].notna().all():
        table = table.assign(ratio_low=table["ratio_documents_low"], ratio_high=table["ratio_documents_high"])
    return table.rename(columns={"mean_kl": "kl"})[COLUMNS]


def draw(table: pd.DataFrame) -> Figure:
    """A map for each budget: rows are where a policy was calibrated, columns where it was measured."""
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

    budgets = list(dict.fromkeys(table["budget"]))
    count = len(_places(table, ""))
    figure = Figure(
        figsize=(max(7.0, 1.35 * count + 2.6), len(budgets) * (0.62 * count + 0.95) + 0.6), layout="constrained"
    )
    figure.suptitle("Calibrated here, measured there: what other text or other blocks cost", x=0.01, ha="left")
    known = np.log(table["ratio"].dropna())
    reach = max(LEAST, float(np.exp(known.abs().max())) if len(known) else LEAST)
    norm, shades = LogNorm(1 / reach, reach), LinearSegmentedColormap.from_list("ratios", SHADES)
    panels = figure.subplots(len(budgets), 1, squeeze=False)[:, 0]
    for axes, budget in zip(panels, budgets, strict=True):
        _map(axes, table[table["budget"] == budget], lambda ratio: shades(norm(ratio)))
        axes.set_title(f"policies of {budget}")
    bar = figure.colorbar(ScalarMappable(norm, shades), ax=list(panels), pad=0.02, aspect=20)
    bar.set_label("KL over that of calibrating\nwhere it is measured (log scale)")
    bar.ax.yaxis.set_major_locator(FixedLocator([1 / reach, reach**-0.5, 1, reach**0.5, reach]))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(FormatStrFormatter("%.2f"))
    bar.outline.set_visible(False)
    return figure


def _map(axes: Axes, table: pd.DataFrame, shade: Callable[[float], tuple[float, ...]]) -> None:
    """One budget's cells, each with its ratio, the interval of that, and the KL."""
    made, here = _places(table, "calibrated_"), _places(table, "")
    for row in table.to_dict("records"):
        across = here.index((row["domain"], row["length"]))
        down = made.index((row["calibrated_domain"], row["calibrated_length"]))
        known = row["ratio"] == row["ratio"]
        colour = shade(row["ratio"]) if known else "0.9"
        axes.fill_between([across, across + 1], down, down + 1, color=colour, lw=0)
        text = {"ha": "center", "va": "center", "color": ink(colour)}
        own = (row["domain"], row["length"]) == (row["calibrated_domain"], row["calibrated_length"])
        ratio = "1" if own else f"{row['ratio']:.2f}" if known else "–"
        axes.text(across + 0.5, down + 0.28, ratio, fontsize=9, fontweight="bold", **text)
        if row["ratio_low"] == row["ratio_low"]:
            between = f"[{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"
            axes.text(across + 0.5, down + 0.55, between, fontsize=7, **text)
        axes.text(across + 0.5, down + 0.8, f"{nats(row['kl'])} nats", fontsize=7, **text)
    axes.set_xlim(0, len(here))
    axes.set_ylim(len(made), 0)
    axes.set_xticks([index + 0.5 for index in range(len(here))], [_label(place) for place in here])
    axes.set_yticks([index + 0.5 for index in range(len(made))], [_label(place) for place in made])
    axes.set_xlabel("measured on")
    axes.set_ylabel("calibrated on")
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)


def _places(table: pd.DataFrame, of: str) -> list[Place]:
    """Where policies were measured, or calibrated, in the order of the table."""
    names = table[[f"{of}domain", f"{of}length"]].drop_duplicates().sort_values([f"{of}domain", f"{of}length"])
    return [Place(*row) for row in names.itertuples(index=False)]


def _label(place: Place) -> str:
    return f"{place.domain}\nblocks of {place.length}"
