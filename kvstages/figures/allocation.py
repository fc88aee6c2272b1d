"""The allocation map: the precision that a policy gives each head, as shade and as bits written in the cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import bits_of, by_size, check
from kvstages.figures.policies import coinciding
from kvstages.figures.shades import ink, shade
from kvstages.figures.style import legend_below
from kvstages.files.read import read_record
from kvstages.policies.names import policy_order

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=2,
    title="Allocation of each budget",
    inputs={
        "policies": Input("allocated_policy_files", "POLICY.json", several=True),
    },
)


def numbers(policies: Sequence[Path]) -> pd.DataFrame:
    """Precision of each head's keys and values in each policy.json; ValueError on a precision that is not known."""
    import pandas as pd

    rows = []
    for path in policies:
        record = read_record(path, ["policy", "precisions"])
        try:
            grid = PrecisionGrid.of_record(record["precisions"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        for layer, heads in enumerate(zip(grid.keys, grid.values, strict=True)):
            for head, pair in enumerate(zip(*heads, strict=True)):
                for precision in pair:
                    try:
                        check(precision)
                    except ValueError as error:
                        raise ValueError(f"{path}: layer {layer}, head {head}: {error}") from None
                rows.append((record["policy"], layer, head, *pair))
    rows.sort(key=lambda row: (policy_order(row[0]), *row[1:3]))
    return pd.DataFrame(rows, columns=["policy", "layer", "head", "keys", "values"])


def draw(table: pd.DataFrame) -> Figure:
    """A map for each different allocation; policies that give the same one share a map.

    A cell in which keys and values differ is halved, keys left: 8|4.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    groups = coinciding(table)
    layers, heads = int(table["layer"].max()) + 1, int(table["head"].max()) + 1
    split = bool((table["keys"] != table["values"]).any())
    rows = -(-len(groups) // max(1, 16 // heads + 1))
    columns = -(-len(groups) // rows)
    width, height = max(heads * (0.36 if split else 0.28), 2.2), max(layers * 0.2, 0.8)
    figure = Figure(figsize=(max(4.8, columns * (width + 0.6)), rows * (height + 0.85) + 0.75), layout="constrained")
    figure.suptitle(
        "Allocation: bits of each head's keys | values" if split else "Allocation: bits of each head's keys and values",
        x=0.01, ha="left",
    )  # fmt: skip
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for (label, part), axes in zip(groups, panels, strict=False):
        _map(axes, part, label, layers, heads)
    for axes in panels:
        axes.set_visible(False)
    used = {*table["keys"], *table["values"]}
    handles = [
        Patch(facecolor=shade(name), edgecolor="0.4", lw=0.5, label=f"{bits_of(name)}  {name.upper()}")
        for name in by_size(used)
    ]
    legend_below(figure, handles, [handle.get_label() for handle in handles])
    return figure


def _map(axes: Axes, table: pd.DataFrame, label: str, layers: int, heads: int) -> None:
    import textwrap

    import numpy as np
    from matplotlib.patches import Rectangle

    for row in table.itertuples():
        sides = [(row.keys, 0.0, 1.0)]
        if row.keys != row.values:
            sides = [(row.keys, 0.0, 0.5), (row.values, 0.5, 0.5)]
        for precision, left, width in sides:
            place = (row.head + left, row.layer)
            axes.add_artist(Rectangle(place, width, 1, facecolor=shade(precision), edgecolor="0.6", lw=0.4))
            axes.text(
                place[0] + width / 2, row.layer + 0.5, bits_of(precision), ha="center", va="center_baseline",
                fontsize=6.5 if len(sides) == 1 else 5.5, color=ink(shade(precision)), in_layout=False,
            )  # fmt: skip
        if len(sides) == 2:
            # Wider than the lines between halves: a head stays one cell.
            axes.add_artist(Rectangle((row.head, row.layer), 1, 1, fill=False, edgecolor="0.25", lw=0.7, zorder=2))
    lines = [*textwrap.wrap(label, 32), *(line for text in _counts(table) for line in textwrap.wrap(text, 46))]
    axes.set_title("\n".join(lines), fontsize=8, linespacing=1.35)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    axes.set_xticks(np.arange(heads) + 0.5, np.arange(heads))
    axes.set_yticks(np.arange(layers) + 0.5, np.arange(layers))
    axes.tick_params(length=0, labelsize=7)
    axes.set_xlim(0, heads)
    axes.set_ylim(layers, 0)
    axes.grid(False)
    axes.spines[:].set_visible(False)


def _counts(table: pd.DataFrame) -> list[str]:
    """Heads of each precision, or keys and values apart where they differ anywhere; a number stays with its name."""

    def count(side: str) -> str:
        counts = table[side].value_counts()
        return ", ".join(f"{counts[name]}\N{NO-BREAK SPACE}{name.upper()}" for name in by_size(counts.index))

    if (table["keys"] == table["values"]).all():
        return [count("keys")]
    return [f"{side}: {count(side)}" for side in ("keys", "values")]
