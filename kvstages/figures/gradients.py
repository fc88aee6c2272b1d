"""Scores from gradients against measured ones, and their ratio: they show where the second order holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.analysis.gradient_accuracy import scores
from kvstages.analysis.labels import PART_LABELS
from kvstages.cache.precision_grid import PARTS
from kvstages.cache.precisions import QUANTIZED, by_size
from kvstages.figures.style import NothingToDraw, legend_below, line_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=13,
    title="Scores from gradients",
    inputs={
        "measured": Input("checked_score_files", "MEASURED.csv"),
        "estimated": Input("gradient_score_files", "FILE", "Sensitivity table of the stage gradients."),
    },
)


def numbers(measured: Path, estimated: Path) -> pd.DataFrame:
    """Measured and estimated KL (nats) of each unit and precision, and their ratio (``gradient_accuracy.scores``)."""
    return scores(measured, estimated)


def draw(table: pd.DataFrame) -> Figure:
    """A column for each part of a head: estimated over measured score above, their ratio below; marks by precision."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    shown = table[table["estimated_kl"] > 0]
    if shown.empty:
        raise NothingToDraw("no score from gradients is above 0")
    # The published quantizer's keep their marks, whatever else there is.
    precisions = [*QUANTIZED, *by_size({*shown["precision"]} - {*QUANTIZED})]
    parts = [part for part in PARTS if (table["part"] == part).any()]
    figure = Figure(figsize=(max(5.0, 0.9 + 2.9 * len(parts)), 5.8), layout="constrained")
    figure.suptitle("Scores from gradients against measured scores", x=0.01, ha="left")
    upper, lower = figure.subplots(2, len(parts), sharex=True, sharey="row", squeeze=False, height_ratios=[3, 2])
    values = shown[["measured_kl", "estimated_kl"]]
    ends = [values.min(axis=None) / 1.5, values.max(axis=None) * 1.5]
    for above, below, part in zip(upper, lower, parts, strict=True):
        own = shown[shown["part"] == part]
        above.plot(ends, ends, color="0.45", lw=0.9, linestyle=(0, (4, 3)), zorder=1)
        below.axhline(1, color="0.45", lw=0.9, linestyle=(0, (4, 3)), zorder=1)
        for index, precision in enumerate(precisions):
            marks = own[own["precision"] == precision]
            look = {**line_style(index), "linestyle": "", "markersize": 3.2, "markerfacecolor": "none", "mew": 0.7}
            if len(marks):
                above.plot(marks["measured_kl"], marks["estimated_kl"], **look, label=precision.upper())
                below.plot(marks["measured_kl"], marks["ratio"], **look)
        above.set_title(PART_LABELS[part])
        for axes in (above, below):
            axes.set_xscale("log")
            axes.set_yscale("log")
        below.set_xlabel("measured KL (nats)")
    upper[0].set_ylabel("estimated KL (nats)")
    lower[0].set_ylabel("estimated / measured")
    lower[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    lower[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    lower[0].yaxis.set_minor_formatter(NullFormatter())
    handles = {label: mark for axes in upper for mark, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    legend_below(figure, handles.values(), handles)
    return figure
