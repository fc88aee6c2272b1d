"""The frontier: joint held-out KL against bytes, a line for each family of policies, with the uniform ones beside; a
panel for each arithmetic, and one for what is beyond the FP32 model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry
from kvstages.analysis.frontier import INPUTS
from kvstages.analysis.joint_table import ARITHMETIC, UNIFORM, read_joint
from kvstages.figures.labels import Point, place_labels
from kvstages.figures.storage_axis import storage_axis
from kvstages.figures.style import legend_below, line_style
from kvstages.figures.zero_strip import ZeroStrip
from kvstages.stats.bootstrap import block_interval

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=11,
    title="Frontier",
    inputs=INPUTS,
)

COLUMNS = ["panel", "recipe", "policy", "total_bytes", "bf16_bytes", "kl", "kl_low", "kl_high"]


def numbers(frontier: Sequence[Path]) -> pd.DataFrame:
    """Bytes, KL (nats) and its interval of each policy: panels, families in the order of the file, by falling bytes.

    A panel is a measure: the joint KL in the arithmetic of each joint.csv, then the excess KL in that of the last.
    """
    import pandas as pd

    joints = [read_joint(path) for path in frontier]
    measures = [("KL", joint, joint.metrics["mean_kl"]) for joint in joints]
    if (excess := joints[-1].excess()) is not None:
        measures.append(("excess KL", joints[-1], excess))
    parts = []
    for said, joint, values in measures:
        table = joint.policies.rename(columns={"bytes": "total_bytes"})
        table["panel"] = f"{said}, {ARITHMETIC[table['compute_dtype'].iloc[0]]}"
        table[["kl", "kl_low", "kl_high"]] = [(own.mean(), *block_interval(own)) for own in values]
        parts += [
            table[table["recipe"] == recipe].sort_values("total_bytes", ascending=False, kind="stable")
            for recipe in dict.fromkeys(table["recipe"])
        ]
    return pd.concat(parts, ignore_index=True)[COLUMNS]


def draw(table: pd.DataFrame) -> Figure:
    """Panels one above the other: a line for each family and a bar from end to end of each interval; uniform policies
    as named squares. A KL of 0, and an excess that is not above 0, lies in the strip."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(table["panel"]))
    families = [recipe for recipe in dict.fromkeys(table["recipe"]) if recipe != UNIFORM]
    figure = Figure(figsize=(7.2, 0.8 + 4.2 * len(panels)), layout="constrained")
    named = []
    with rc_context({"axes.titley": None}):  # titles stand above the axis of compressions, wherever that ends
        for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False).flat, panels, strict=True):
            named.append((axes, *_panel(axes, table[table["panel"] == panel], families)))
            axes.set_title(panel)
    figure.suptitle("Frontier: KL of each family of policies", x=0.01, ha="left")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    legend_below(figure, handles, labels, handlelength=4)
    place_labels(figure, named)
    return figure


def _panel(
    axes: Axes, table: pd.DataFrame, families: Sequence[str]
) -> tuple[list[tuple[str, float, float]], list[Point]]:
    """Draw a panel; its labels, and the points that they avoid."""
    scale = ZeroStrip(axes, "y", table[["kl", "kl_low", "kl_high"]].to_numpy().ravel())
    storage_axis(axes, table)
    drawn = []
    for index, recipe in enumerate(families):
        own = table[table["recipe"] == recipe]
        if own.empty:
            continue
        x = own["total_bytes"] / 1024
        low, middle, high = (scale.place(own[name]) for name in ("kl_low", "kl", "kl_high"))
        look = line_style(index)
        axes.plot(x, middle, **look, lw=1.2, markersize=4, label=recipe, zorder=3)
        axes.vlines(x, low, high, color=look["color"], lw=0.9, zorder=2)
        drawn += _along(x.to_numpy(), middle)
    uniform = table[table["recipe"] == UNIFORM]
    x = uniform["total_bytes"] / 1024
    low, middle, high = (scale.place(uniform[name]) for name in ("kl_low", "kl", "kl_high"))
    axes.vlines(x, low, high, color="#1b1b1b", lw=1.2, zorder=4)
    axes.plot(x, middle, "s", color="white", markeredgecolor="#1b1b1b", mew=1.4, markersize=7, label=UNIFORM, zorder=5)
    axes.set_ylabel("mean held-out KL, 95 % interval (nats)")
    labels = [(policy.upper(), *place) for policy, *place in zip(uniform["policy"], x, middle, strict=True)]
    return labels, drawn + [(x, y) for _, x, y in labels]


def _along(x: np.ndarray, y: np.ndarray) -> list[Point]:
    """Points close together on the line through (x, y) on a logarithmic axis, which labels avoid."""
    import numpy as np

    places = np.linspace(0, len(x) - 1, 20 * len(x))
    steps = np.arange(len(x))
    return list(zip(np.interp(places, steps, x), 10 ** np.interp(places, steps, np.log10(y)), strict=True))
