"""Heat maps of the single-head sensitivities, layer x head, one map for each part and precision.

A corner marks a score below its floor: moving each value to its neighbour changes the output more.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.analysis.labels import PART_SUFFIXES
from kvstages.figures.shades import ink
from kvstages.files.read import read_columns
from kvstages.scores.columns import SCORED

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=1,
    title="Sensitivity of each head",
    inputs={
        "sensitivity": Input("own_score_files", "SENSITIVITY.csv"),
    },
)

ONE = {"kv": "one head", "layer": "one layer"}
MARK = "#d1590b"
# A triangle in the upper left of a cell, to the right and up from its corner.
CORNER = [(0, 0), (0.26, 0), (0, -0.42)]


def numbers(sensitivity: Path) -> pd.DataFrame:
    """Scores and floors (nats) of each head and precision of a sensitivity table.

    They are of keys and values together where the table has these, else of both apart, or of whole layers. ValueError
    where the grid has holes.
    """
    table = read_columns(
        sensitivity, ["layer", "head", "mean_kl", "below_floor"], ["source", "part", "precision"], ["floor_kl"]
    )
    if (table["part"] == "kv").any():
        table = table[table["part"] == "kv"]
    for (part, precision), own in table.groupby(["part", "precision"], sort=False):
        layers, heads = own["layer"].max() + 1, own["head"].max() + 1
        found = len(own[["layer", "head"]].drop_duplicates())
        if found != layers * heads or found != len(own):
            raise ValueError(
                f"{sensitivity}: {precision}, part {part}, has {len(own)} rows for {found} heads, "
                f"expected one for each of {layers} x {heads}"
            )
    return table[["source", "part", "precision", "layer", "head", "mean_kl", "floor_kl", "below_floor"]]


def draw(table: pd.DataFrame) -> Figure:
    """Two maps a row: precisions, or keys and values of a precision on the same scale.

    Each cell has its mean KL in the unit that the title gives, and a corner where that lies below its floor.
    """
    from matplotlib.figure import Figure

    layers, heads = int(table["layer"].max()) + 1, int(table["head"].max()) + 1
    parts = [part for part in SCORED if (table["part"] == part).any()]
    precisions = list(dict.fromkeys(table["precision"]))
    columns = len(parts) if len(parts) > 1 else min(2, len(precisions))
    rows = -(-len(precisions) * len(parts) // columns)
    cell_width, cell_height = min(max(0.34, 2.9 / heads), 0.9), min(max(0.25, 1.7 / layers), 0.6)
    figure = Figure(
        figsize=(max(7.0, columns * (heads * cell_width + 1.25)), rows * (layers * cell_height + 0.75) + 0.75),
        layout="constrained",
    )
    one = ONE.get(parts[0], "the keys or values of one head")
    figure.suptitle(f"Sensitivity: mean calibration KL with {one} quantized, all others in BF16", x=0.01, ha="left")
    maps = [(precision, part) for precision in precisions for part in parts]
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (precision, part) in zip(panels, maps, strict=False):
        own = table[(table["precision"] == precision) & (table["part"] == part)]
        _map(axes, own, precision.upper() + PART_SUFFIXES[part], _scale(table.loc[table["precision"] == precision]))
    for axes in panels:
        axes.set_visible(False)
    _legend(figure, table)
    return figure


def _scale(table: pd.DataFrame) -> tuple[float, float]:
    """Smallest and largest positive score of a precision; a decade apart where they are equal."""
    positive = table.loc[table["mean_kl"] > 0, "mean_kl"]
    low, high = (positive.min(), positive.max()) if len(positive) else (1e-3, 1e-2)
    return low, high if high > low else low * 10


def _map(axes: Axes, table: pd.DataFrame, title: str, scale: tuple[float, float]) -> None:
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.ticker import LogFormatterSciNotation

    # Lightness falls steadily along this map, so it reads the same in grey.
    shades = LinearSegmentedColormap.from_list("shades", ["#f7fafc", "#b7cfe0", "#5d8fb8", "#1f4e79", "#08203a"])
    norm = LogNorm(*scale)
    grid, below = _grid(table, "mean_kl"), _grid(table, "below_floor")
    positive = grid[grid > 0]
    exponent = int(np.floor(np.log10(np.median(positive)))) if positive.size else 0
    layers, heads = grid.shape
    whole = (table["part"] == "layer").all()
    shown = norm(np.where(grid > 0, grid, scale[0])).filled()
    axes.pcolormesh(shown, cmap=shades, vmin=0, vmax=1, edgecolors="w", lw=0.6)
    for (layer, head), value in np.ndenumerate(grid):
        colour = ink(shades(float(shown[layer, head])))
        axes.text(
            head + 0.5, layer + 0.5, _cell(value / 10.0**exponent), ha="center", va="center", fontsize=6.5,
            color=colour, in_layout=False,
        )  # fmt: skip
        if below[layer, head]:
            corner = [(head + across, layer - up) for across, up in CORNER]
            axes.fill(*zip(*corner, strict=True), facecolor=MARK, edgecolor="white", lw=0.6)
    axes.set_title(f"{title} (cells: $10^{{{exponent}}}$ nats)")
    axes.set_xlabel("all heads" if whole else "head")
    axes.set_ylabel("layer")
    axes.set_xticks([] if whole else np.arange(heads) + 0.5, [] if whole else np.arange(heads))
    axes.set_yticks(np.arange(layers) + 0.5, np.arange(layers))
    axes.tick_params(length=0)
    axes.set_xlim(0, heads)
    axes.set_ylim(layers, 0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(ScalarMappable(norm, shades), ax=axes, pad=0.02, aspect=max(8, 2 * layers))
    bar.set_label("mean KL (nats, log scale)")
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(1.5, 0.6)))
    bar.ax.tick_params(labelsize=7, which="both")


def _grid(table: pd.DataFrame, column: str) -> np.ndarray:
    """A column of one part and precision by layer and head."""
    return table.pivot(index="layer", columns="head", values=column).to_numpy()


def _legend(figure: Figure, table: pd.DataFrame) -> None:
    """The legend of the corners, or a line that says that there is none; nothing where no floor was measured."""
    from matplotlib.lines import Line2D
    from matplotlib.path import Path as Path2D

    if table["floor_kl"].isna().all():
        return
    count, floors = int(table["below_floor"].sum()), int(table["floor_kl"].notna().sum())
    said = f"below its floor: {count} of {floors} scores (moving each value to its neighbour changes the output more)"
    outline = [(across - 0.13, up + 0.21) for across, up in (*CORNER, CORNER[0])]
    mark = {"marker": Path2D(outline), "color": MARK, "markersize": 11, "linestyle": ""}
    handle = Line2D([], [], **mark) if count else Line2D([], [], linestyle="")
    label = said if count else f"none of {floors} scores lies below its floor"
    figure.legend(handles=[handle], labels=[label], loc="outside lower left", handlelength=1.0 if count else 0)


def _cell(value: float) -> str:
    """Two or three digits that fit a cell."""
    if value <= 0:
        return "0" if value == 0 else "<0"
    if value >= 999.5 or value < 0.005:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
