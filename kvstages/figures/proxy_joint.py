"""The proxy against the joint KL of every measured policy, and their ratio: they show where scores add up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.additivity import INPUTS, additivity
from kvstages.analysis.entries import Entry
from kvstages.analysis.joint_table import UNIFORM
from kvstages.figures.shades import RANDOM_POLICIES
from kvstages.figures.style import legend_below, line_style
from kvstages.policies.names import ALLOCATORS, AT_RANDOM

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=12,
    title="Proxy against joint KL",
    inputs=INPUTS,
)

# Random policies are many: small and below all others. All are marks without lines.
LOOKS = {
    AT_RANDOM: {"linestyle": "", "marker": "o", "color": RANDOM_POLICIES, "markersize": 2.4, "mew": 0, "zorder": 2}
} | {
    allocator: {
        **line_style(index), "linestyle": "", "markersize": 4.5, "markerfacecolor": "white", "mew": 1.1, "zorder": 3
    }
    for index, allocator in enumerate([UNIFORM, *(name for name in ALLOCATORS if name != AT_RANDOM)])
}  # fmt: skip


def numbers(tables: Sequence[Path]) -> pd.DataFrame:
    """Proxy, joint KL (nats) and their ratio of each policy in the joint.csv files; see ``additivity``."""
    return additivity(tables).policies


def draw(table: pd.DataFrame) -> Figure:
    """A column for each source of scores: joint KL over proxy above, their ratio below; a mark for each allocator."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    sources = list(dict.fromkeys(table["sensitivity"]))
    allocators = [name for name in LOOKS if name in set(table["allocator"])]
    figure = Figure(figsize=(max(5.0, 0.9 + 3.2 * len(sources)), 6.4), layout="constrained")
    figure.suptitle("Proxy against joint KL (a proxy, not a bound)", x=0.01, ha="left")
    upper, lower = figure.subplots(2, len(sources), sharex=True, sharey="row", squeeze=False, height_ratios=[3, 2])
    ends = [
        min(table["proxy"].min(), table["mean_kl"].min()) / 1.5,
        max(table["proxy"].max(), table["mean_kl"].max()) * 1.5,
    ]
    for above, below, source in zip(upper, lower, sources, strict=True):
        own = table[table["sensitivity"] == source]
        above.plot(ends, ends, color="0.45", lw=0.9, linestyle=(0, (4, 3)), zorder=1)
        below.axhline(1, color="0.45", lw=0.9, linestyle=(0, (4, 3)), zorder=1)
        for allocator in allocators:
            part = own[own["allocator"] == allocator]
            for axes, values in ((above, part["mean_kl"]), (below, part["ratio"])):
                axes.plot(part["proxy"], values, **LOOKS[allocator], label=allocator)
        above.set_title(source)
        above.set_yscale("log")
        for axes in (above, below):
            axes.set_xscale("log")
        below.set_yscale("log")
        below.set_xlabel("proxy: sum of single scores (nats)")
    upper[0].set_ylabel("joint held-out KL (nats)")
    lower[0].set_ylabel("joint KL / proxy")
    lower[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    lower[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    lower[0].yaxis.set_minor_formatter(NullFormatter())
    handles = dict(zip(*reversed(upper[0].get_legend_handles_labels()), strict=True))
    legend_below(figure, handles.values(), handles)
    return figure
