"""The allocation map: the precision that a policy gives each head, as shade and as bits written in the cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.figures.policies import coinciding
from kvstages.quantizer import BITS
from kvstages.records import policy_order, read_record

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SHADES = {"bf16": "#1f3d5c", "int8": "#86aac9", "int4": "#edf2f6"}


def numbers(policies: Sequence[Path]) -> pd.DataFrame:
    """Precision of each head in each policy.json; ValueError on a precision that is not known."""
    import pandas as pd

    rows = []
    for path in policies:
        record = read_record(path, ["policy", "precisions"])
        for layer, precisions in enumerate(record["precisions"]):
            for head, precision in enumerate(precisions):
                if precision not in BITS:
                    raise ValueError(
                        f"{path}: layer {layer}, head {head}: precision {precision!r}, expected {list(BITS)}"
                    )
                rows.append((record["policy"], layer, head, precision))
    rows.sort(key=lambda row: (policy_order(row[0]), *row[1:3]))
    return pd.DataFrame(rows, columns=["policy", "layer", "head", "precision"])


def draw(table: pd.DataFrame) -> Figure:
    """A map for each different allocation; policies that give the same one share a map."""
    import textwrap

    import numpy as np
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    groups = coinciding(table)
    layers, heads = int(table["layer"].max()) + 1, int(table["head"].max()) + 1
    rows = -(-len(groups) // max(1, 16 // heads + 1))
    columns = -(-len(groups) // rows)
    width, height = max(heads * 0.28, 2.2), max(layers * 0.2, 0.8)
    figure = Figure(figsize=(max(4.8, columns * (width + 0.6)), rows * (height + 0.85) + 0.75), layout="constrained")
    figure.suptitle("Allocation: bits of each head's keys and values", x=0.01, ha="left")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    names = list(BITS)
    for (label, part), axes in zip(groups, panels, strict=False):
        grid = np.zeros((layers, heads))
        for row in part.itertuples():
            grid[row.layer, row.head] = names.index(row.precision)
            axes.text(
                row.head + 0.5, row.layer + 0.5, BITS[row.precision], ha="center", va="center_baseline", fontsize=6.5,
                color="white" if row.precision == "bf16" else "black",
            )  # fmt: skip
        shades = ListedColormap([SHADES[name] for name in names])
        axes.pcolormesh(grid, cmap=shades, vmin=-0.5, vmax=len(names) - 0.5, edgecolors="0.6", lw=0.4)
        counts = part["precision"].value_counts()
        count = ", ".join(f"{counts[name]} {name.upper()}" for name in names if name in counts)
        axes.set_title(f"{textwrap.fill(label, 32)}\n{count}", fontsize=8, linespacing=1.35)
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        axes.set_xticks(np.arange(heads) + 0.5, np.arange(heads))
        axes.set_yticks(np.arange(layers) + 0.5, np.arange(layers))
        axes.tick_params(length=0, labelsize=7)
        axes.invert_yaxis()
        axes.grid(False)
        axes.spines[:].set_visible(False)
    for axes in panels:
        axes.set_visible(False)
    handles = [
        Patch(facecolor=SHADES[name], edgecolor="0.4", lw=0.5, label=f"{BITS[name]}  {name.upper()}") for name in names
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles))
    return figure
