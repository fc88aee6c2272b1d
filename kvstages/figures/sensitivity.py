"""Heat maps of the single-head sensitivities, layer x head, one map a precision, each on its own logarithmic scale."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.records import read_columns

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def numbers(sensitivity: Path) -> pd.DataFrame:
    """Mean KL (nats) of each head and precision of a sensitivity.csv; ValueError where the grid has holes."""
    table = read_columns(sensitivity, ["layer", "head", "mean_kl"], ["precision"])
    for precision, part in table.groupby("precision", sort=False):
        layers, heads = part["layer"].max() + 1, part["head"].max() + 1
        found = len(part[["layer", "head"]].drop_duplicates())
        if found != layers * heads or found != len(part):
            raise ValueError(
                f"{sensitivity}: {precision} has {len(part)} rows for {found} heads, "
                f"expected one for each of {layers} x {heads}"
            )
    return table


def draw(table: pd.DataFrame) -> Figure:
    """A map for each precision, side by side, each cell with its mean KL in the unit that the title gives."""
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatterSciNotation

    layers, heads = int(table["layer"].max()) + 1, int(table["head"].max()) + 1
    precisions = list(dict.fromkeys(table["precision"]))
    # Lightness falls steadily along this map, so it reads the same in grey.
    shades = LinearSegmentedColormap.from_list("shades", ["#f7fafc", "#b7cfe0", "#5d8fb8", "#1f4e79", "#08203a"])
    cell_width, cell_height = max(0.34, 2.9 / heads), max(0.25, 1.7 / layers)
    figure = Figure(
        figsize=(
            max(7.0, len(precisions) * (heads * min(cell_width, 0.9) + 1.25)),
            layers * min(cell_height, 0.6) + 1.25,
        ),
        layout="constrained",
    )
    figure.suptitle("Sensitivity: mean calibration KL with one head quantized, all others in BF16", x=0.01, ha="left")
    for axes, precision in zip(figure.subplots(1, len(precisions), squeeze=False)[0], precisions, strict=True):
        grid = np.full((layers, heads), np.nan)
        part = table[table["precision"] == precision]
        grid[part["layer"].astype(int), part["head"].astype(int)] = part["mean_kl"]
        positive = grid[grid > 0]
        low, high = (positive.min(), positive.max()) if positive.size else (1e-3, 1e-2)
        norm = LogNorm(low, high if high > low else low * 10)
        exponent = int(np.floor(np.log10(np.median(positive)))) if positive.size else 0
        axes.pcolormesh(
            norm(np.where(grid > 0, grid, low)).filled(), cmap=shades, vmin=0, vmax=1, edgecolors="w", lw=0.6
        )
        for (layer, head), value in np.ndenumerate(grid):
            red, green, blue, _ = shades(float(norm(value)) if value > 0 else 0.0)
            # Relative luminance 0.18 is where black and white text have the same contrast (WCAG).
            dark = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.18
            axes.text(
                head + 0.5, layer + 0.5, _cell(value / 10.0**exponent), ha="center", va="center", fontsize=6.5,
                color="white" if dark else "black",
            )  # fmt: skip
        axes.set_title(f"{precision.upper()} (cells: $10^{{{exponent}}}$ nats)")
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        axes.set_xticks(np.arange(heads) + 0.5, np.arange(heads))
        axes.set_yticks(np.arange(layers) + 0.5, np.arange(layers))
        axes.tick_params(length=0)
        axes.invert_yaxis()
        axes.grid(False)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(ScalarMappable(norm, shades), ax=axes, pad=0.02, aspect=max(8, 2 * layers))
        bar.set_label("mean KL (nats, log scale)")
        bar.outline.set_visible(False)
        bar.ax.yaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(1.5, 0.6)))
        bar.ax.tick_params(labelsize=7, which="both")
    return figure


def _cell(value: float) -> str:
    """Two or three digits that fit a cell."""
    if value <= 0:
        return "0" if value == 0 else "<0"
    if value >= 999.5 or value < 0.005:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
