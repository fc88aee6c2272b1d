"""Along the frontier: how much less KL than the published recipe each family has at the same bytes; a panel for each
arithmetic, and for each by what is beyond the FP32 model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry
from kvstages.analysis.frontier import INPUTS, reductions
from kvstages.analysis.joint_table import ARITHMETIC, UNIFORM
from kvstages.figures.labels import Point, place_labels
from kvstages.figures.style import legend_below, line_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=14,
    title="Less KL than the published recipe",
    inputs=INPUTS,
)

COLUMNS = ["panel", "recipe", "policy", "limit", "bf16_bytes", "reduction", "reduction_low", "reduction_high", "over"]
MEASURES = {"kl_reduction": "KL", "excess_reduction": "excess KL"}
# Reductions below this are cut off: a family that is many times worse says no more at its true place.
LEAST = -1.0


def numbers(frontier: Sequence[Path]) -> pd.DataFrame:
    """Reduction against the published recipe's policy of the same limit, and its interval, of each policy that has one.

    The interval is over documents where these are known (``over``), else over blocks. Panels: KL by arithmetic, then
    excess KL by arithmetic; families in the order of the file, by falling limit.
    """
    import pandas as pd

    table = reductions(frontier)
    parts = []
    for measure, said in MEASURES.items():
        for dtype in dict.fromkeys(table["compute_dtype"]):
            own = table[(table["compute_dtype"] == dtype) & table[measure].notna()]
            by_document = own[f"{measure}_documents_low"].notna().all() and len(own)
            ends = ("_documents_low", "_documents_high") if by_document else ("_low", "_high")
            columns = {"reduction": measure, "reduction_low": measure + ends[0], "reduction_high": measure + ends[1]}
            named = own.assign(
                panel=f"{said}, {ARITHMETIC[dtype]}",
                over="documents" if by_document else "blocks",
                **{name: own[column] for name, column in columns.items()},
            )
            parts.append(named)
    return pd.concat(parts, ignore_index=True)[COLUMNS]


def draw(table: pd.DataFrame) -> Figure:
    """Panels two in a row: a line for each family, a bar for each interval, the published recipe as the line at 0."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(table["panel"]))
    families = [recipe for recipe in dict.fromkeys(table["recipe"]) if recipe != UNIFORM]
    rows = max(1, -(-len(panels) // 2))
    figure = Figure(figsize=(10.0, 1.0 + 3.4 * rows), layout="constrained")
    figure.suptitle("Less KL than the published recipe at the same bytes", x=0.01, ha="left")
    grid = list(figure.subplots(rows, 2, squeeze=False).flat)
    named = []
    for axes, panel in zip(grid, panels, strict=False):
        named.append((axes, *_panel(axes, table[table["panel"] == panel], families)))
        axes.set_title(panel)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    handles = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    legend_below(figure, handles.values(), handles)
    place_labels(figure, named)
    return figure


def _panel(
    axes: Axes, table: pd.DataFrame, families: Sequence[str]
) -> tuple[list[tuple[str, float, float]], list[Point]]:
    """Draw a panel; its labels, and the points that they avoid."""
    from matplotlib.ticker import PercentFormatter

    axes.axhline(0, color="#1b1b1b", lw=1.0, zorder=1)
    drawn = []
    for index, recipe in [*enumerate(families), (-1, UNIFORM)]:
        own = table[table["recipe"] == recipe]
        if own.empty:
            continue
        x = own["limit"] / 1024
        low, middle, high = (own[f"reduction{end}"].clip(lower=LEAST) for end in ("_low", "", "_high"))
        if recipe == UNIFORM:
            look = {"color": "#1b1b1b", "marker": "s", "linestyle": "none", "markerfacecolor": "white"}
        else:
            look = line_style(index)
        axes.plot(x, middle, **look, label=recipe, zorder=3)
        axes.vlines(x, low, high, color=look["color"], lw=0.9, zorder=2)
        drawn += list(zip(x, middle, strict=True))
    uniform = table[table["recipe"] == UNIFORM]
    places = zip(uniform["limit"] / 1024, uniform["reduction"].clip(lower=LEAST), strict=True)
    axes.set_ylim(LEAST - 0.05, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("cache of one block, batch 1: payload plus scales (KiB)")
    axes.set_ylabel(f"less, 95 % interval over {table['over'].iloc[0]}")
    return [(name.upper(), *at) for name, at in zip(uniform["policy"], places, strict=True)], drawn
