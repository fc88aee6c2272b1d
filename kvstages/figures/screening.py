"""Quantizer schemes: joint held-out KL against bits, for keys and values together, keys alone and values alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry
from kvstages.analysis.screening import INPUTS, screening
from kvstages.cache.schemes import precision
from kvstages.figures.style import legend_below, line_style
from kvstages.figures.zero_strip import ZeroStrip
from kvstages.policies.screening import BOTH, KEYS, RECOMMENDED, VALUES, at_bits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=15,
    title="Quantizer schemes",
    inputs=INPUTS,
)

PANELS = {BOTH: "keys and values", KEYS: "keys alone", VALUES: "values alone"}
COLUMNS = ["panel", "line", "policy", "bits", "proxy", "kl", "kl_low", "kl_high"]


def numbers(joint: Path, policies: Path, scores: Path) -> pd.DataFrame:
    """Bits, proxy, KL (nats) and its interval of each policy; a line is a scheme at all of its bits, or a recipe."""
    import pandas as pd

    _, table = screening(joint, policies, scores)
    ends = ("_documents_low", "_documents_high") if table["mean_kl_documents_low"].notna().all() else ("_low", "_high")
    table = table.rename(columns={"mean_kl": "kl", f"mean_kl{ends[0]}": "kl_low", f"mean_kl{ends[1]}": "kl_high"})
    if ends[0] != "_low":
        table = table.drop(columns=["mean_kl_low", "mean_kl_high"])
    uniform = table["recipe"].isin(PANELS)
    line = table["recipe"].where(~uniform, table["scheme"].map(lambda name: at_bits(name, [2, 3, 4, 5, 6, 8])[-1]))
    panel = table["recipe"].map(PANELS).where(uniform, PANELS[BOTH])
    parts = [own for _, own in table.assign(panel=panel, line=line).groupby(["panel", "line"], sort=False)]
    return pd.concat([own.sort_values("bits", ascending=False, kind="stable") for own in parts])[COLUMNS]


def draw(table: pd.DataFrame) -> Figure:
    """A panel for each part: a line for each scheme, a bar over each interval, and a cross at each proxy."""
    from matplotlib.figure import Figure

    panels = [name for name in PANELS.values() if name in set(table["panel"])]
    lines = list(dict.fromkeys(table["line"]))
    figure = Figure(figsize=(7.2, 0.8 + 3.6 * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False).flat, panels, strict=True):
        _panel(axes, table[table["panel"] == panel], lines)
        axes.set_title(panel)
    figure.axes[-1].set_xlabel(
        "bits a stored element, mean over the steps of a block (scales and exact tokens included)"
    )
    figure.suptitle("Quantizer schemes: KL by bits", x=0.01, ha="left")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    legend_below(figure, handles, labels, handlelength=4)
    return figure


def _panel(axes: Axes, table: pd.DataFrame, lines: list[str]) -> None:
    scale = ZeroStrip(axes, "y", table[["kl", "kl_low", "kl_high", "proxy"]].to_numpy().ravel())
    for index, name in enumerate(lines):
        own = table[table["line"] == name]
        if own.empty:
            continue
        look = dict(line_style(index))
        low, middle, high = (scale.place(own[end]) for end in ("kl_low", "kl", "kl_high"))
        width = 2.0 if name == RECOMMENDED else 1.2
        axes.plot(own["bits"], middle, **look, lw=width, markersize=4, label=label(name), zorder=3)
        axes.vlines(own["bits"], low, high, color=look["color"], lw=0.9, zorder=2)
        axes.plot(own["bits"], scale.place(own["proxy"]), "x", color=look["color"], markersize=4, mew=0.8, zorder=2)
    axes.set_ylabel("mean held-out KL, 95 % (nats)")


def label(name: str) -> str:
    """A scheme without its bits: centred2 as centred; a recipe as it is."""
    try:
        bits = precision(name).bits
    except ValueError:
        return name
    return name.replace(str(bits), "", 1)
