"""Scores and their floors by layer, one panel for each source: they show which scores measure the quantizer.

The floor is the KL of moving each stored value to the neighbouring value of the compute dtype. One BF16 step moves it
to the neighbouring BF16 value, which is what an unquantized cache resolves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.analysis.labels import PART_SUFFIXES
from kvstages.cache.precisions import by_size
from kvstages.figures.style import legend_below, line_style
from kvstages.figures.zero_strip import ZeroStrip
from kvstages.files.read import read_columns
from kvstages.scores.columns import BF16_STEP, SCORED

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=9,
    title="Scores and their floor",
    inputs={
        "sensitivities": Input("measured_score_files", "SENSITIVITY.csv", several=True),
    },
)

FLOOR = "floor"
CONTROLS = (FLOOR, BF16_STEP)
KEY = ["source", "part", "level", "layer"]
# Sums of FP64 leave less than this of a KL of 0, and floors of FP32 are far below what other figures round off.
ROUND_OFF = 1e-17


def numbers(sensitivities: Sequence[Path]) -> pd.DataFrame:
    """Median, smallest and largest KL (nats) over the heads of each layer: of each precision, then of the two controls.

    Rows by source in the order given, part, level (a precision, floor, bf16-step) and layer.
    """
    import pandas as pd

    tables = []
    for path in sensitivities:
        table = read_columns(
            path, ["layer", "head", "mean_kl"], ["source", "part", "precision"], ["floor_kl", "bf16_step_kl"]
        )
        # Every precision of a head and part has the same controls in its row: one row is enough.
        controls = table.drop_duplicates(["layer", "head", "part"])
        levels = pd.concat(
            [
                table.rename(columns={"precision": "level", "mean_kl": "kl"}),
                controls.assign(level=FLOOR, kl=controls["floor_kl"]),
                controls.assign(level=BF16_STEP, kl=controls["bf16_step_kl"]),
            ]
        ).dropna(subset="kl")
        tables.append(
            levels.groupby(KEY, sort=False)["kl"]
            .agg(median_kl="median", lowest_kl="min", highest_kl="max", heads="size")
            .reset_index()
        )
    order = in_order(level for table in tables for level in table["level"])
    ranks = {"part": SCORED.index, "level": order.index}
    ordered = [
        table.sort_values(KEY, key=lambda values: values.map(ranks.get(values.name, lambda value: value)))
        for table in tables
    ]
    return pd.concat(ordered, ignore_index=True)


def in_order(levels: Iterable[str]) -> list[str]:
    """The precisions among some levels by their size, then the controls."""
    found = set(levels)
    return [*by_size(found - {*CONTROLS}), *(level for level in CONTROLS if level in found)]


def draw(table: pd.DataFrame) -> Figure:
    """Panels by source (across) and part (down) on one scale; bands run from the smallest to the largest head."""
    from matplotlib.figure import Figure

    sources, parts = (list(dict.fromkeys(table[name])) for name in ("source", "part"))
    levels = in_order(table["level"])
    figure = Figure(figsize=(max(5.2, 0.8 + 3.3 * len(sources)), 1.3 + 2.7 * len(parts)), layout="constrained")
    figure.suptitle("Scores of single heads, and their floor", x=0.01, ha="left")
    panels = figure.subplots(len(parts), len(sources), sharex=True, sharey=True, squeeze=False)
    for row, part in zip(panels, parts, strict=True):
        for axes, source in zip(row, sources, strict=True):
            scale = ZeroStrip(axes, "y", table[["lowest_kl", "highest_kl"]].to_numpy().ravel(), ROUND_OFF)
            own = table[(table["source"] == source) & (table["part"] == part)]
            # A source that measured whole heads only has no panel of keys, or of values.
            axes.set_visible(len(own) > 0)
            _panel(axes, own, levels, scale)
            axes.set_title(f"{source}{PART_SUFFIXES[part]}")
            axes.xaxis.get_major_locator().set_params(integer=True)
        row[0].set_ylabel("mean calibration KL (nats)")
    for column in panels.T:
        lowest = [axes for axes in column if axes.get_visible()][-1]
        lowest.set_xlabel("layer of the head")
        lowest.tick_params(labelbottom=True)
    handles = {}
    for axes in panels.flat:
        handles.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    legend_below(figure, handles.values(), handles, handlelength=3.5)
    return figure


def _panel(axes: Axes, table: pd.DataFrame, levels: list[str], scale: ZeroStrip) -> None:
    for index, level in enumerate(levels):
        own = table[table["level"] == level]
        if own.empty:
            continue
        low, middle, high = (scale.place(own[f"{name}_kl"]) for name in ("lowest", "median", "highest"))
        if level == FLOOR:
            # Wide and pale, so that a score on its floor shows as a line inside it; hatched where nothing is known.
            below = {"facecolor": "0.96", "edgecolor": "0.85", "hatch": "///", "lw": 0, "zorder": 0}
            axes.fill_between(own["layer"], axes.get_ylim()[0], middle, **below)
            axes.plot(own["layer"], middle, color="0.7", lw=5, label="floor: neighbouring values", zorder=1)
            continue
        look = {"color": "0.35", "linestyle": (0, (1, 1.5)), "lw": 1.6} if level == BF16_STEP else line_style(index)
        axes.fill_between(own["layer"], low, high, facecolor=look["color"], alpha=0.16, lw=0)
        axes.plot(
            own["layer"], middle, **look, markersize=3.5, label="one BF16 step" if level == BF16_STEP else level.upper()
        )
