"""The greedy path: the calibration proxy against the cache's bytes, step by step, with every budget and its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.figures.labels import place_labels
from kvstages.figures.policies import coinciding
from kvstages.figures.storage_axis import storage_axis
from kvstages.figures.style import line_style
from kvstages.figures.zero_strip import ZeroStrip
from kvstages.files.read import read_columns, read_record
from kvstages.policies.budgets import DENSE_BITS
from kvstages.policies.names import policy_order, split_policy

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=3,
    title="Greedy path",
    inputs={
        "policies": Input("greedy_policy_files", "POLICY.json", several=True),
    },
    beside=("greedy_step_files",),
)


def numbers(policies: Sequence[Path]) -> pd.DataFrame:
    """Proxy and bytes after each step of each greedy policy.json and the steps.csv beside it; step 0 is all BF16."""
    import pandas as pd

    paths = []
    for path in policies:
        record = read_record(path, ["policy", "allocator", "budget", "budget_in", "bytes", "tokens"])
        if record["allocator"] != "greedy":
            raise ValueError(f"{path}: policy {record['policy']} is {record['allocator']}, expected a greedy policy")
        steps = read_columns(Path(path).parent / "steps.csv", ["step", "proxy", "bytes"])
        full = record["bytes"]["bf16"]
        start = pd.DataFrame({"step": [0], "proxy": [0.0], "bytes": [full]})
        steps = pd.concat([start, steps]) if len(steps) else start
        steps = steps.rename(columns={"bytes": "total_bytes"})
        steps.insert(0, "policy", record["policy"])
        steps.insert(1, "budget", record["budget"])
        steps.insert(2, "budget_in", record["budget_in"])
        paths.append(steps.assign(bf16_bytes=full, tokens_per_cache=record["tokens"]))
    paths.sort(key=lambda steps: policy_order(steps["policy"].iloc[0]))
    return pd.concat(paths, ignore_index=True) if paths else pd.DataFrame()


def draw(table: pd.DataFrame) -> Figure:
    """A line for each path, a mark where each ends, and a dotted line at each budget: of nats across, of bytes up."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 4.3), layout="constrained")
    axes = figure.subplots()
    limits = table.groupby(["policy", "budget_in"], sort=False)["budget"].first()
    budgets, sizes, bits = (limits[limits.index.get_level_values(1) == kind] for kind in ("nats", "bytes", "bits"))
    sizes = [*sizes, *(bits * table["bf16_bytes"].max() / DENSE_BITS)]
    budgets.index = budgets.index.get_level_values(0)
    scale = ZeroStrip(axes, "y", [*table["proxy"], *budgets[budgets > 0]])
    storage_axis(axes, table)
    labels = []
    # Paths share their first steps, and larger budgets go further: drawn from the longest, each stays visible.
    for index, (label, steps) in reversed(list(enumerate(coinciding(table.drop(columns=["budget", "budget_in"]))))):
        look = line_style(index)
        x, y = steps["total_bytes"] / 1024, scale.place(steps["proxy"])
        axes.plot(x, y, color=look["color"], linestyle=look["linestyle"], lw=1.5)
        axes.plot(
            x.iloc[-1], y[-1], look["marker"], color=look["color"], markeredgecolor="white", markersize=7, zorder=4
        )
        labels.append((f"end of {label}", x.iloc[-1], y[-1]))
    right = axes.get_xlim()[1]
    for budget in budgets:
        axes.axhline(scale.place([budget])[0], color="0.45", lw=0.7, linestyle=(0, (1, 2)), zorder=1)
    for size in sizes:
        axes.axvline(size / 1024, color="0.45", lw=0.7, linestyle=(0, (1, 2)), zorder=1)
    for level, text in _budget_labels(budgets, scale, axes):
        axes.text(right, level, f" {text}", va="center", ha="left", fontsize=7.5, color="0.25")
    axes.set_ylabel("calibration proxy: sum of single-head KL (nats)")
    figure.suptitle("The greedy path: proxy against storage (a proxy, not a bound)", x=0.01, ha="left")
    drawn = list(zip(table["total_bytes"] / 1024, scale.place(table["proxy"]), strict=True))
    place_labels(figure, [(axes, labels, drawn)])
    return figure


def _budget_labels(budgets: pd.Series, scale: ZeroStrip, axes: object) -> list[tuple[float, str]]:
    """Labels of the budgets beside their lines; budgets that are too close share a line of text."""
    import math

    low, high = (math.log10(limit) for limit in axes.get_ylim())
    labels: list[tuple[float, str]] = []
    for policy, budget in sorted(budgets.items(), key=lambda item: item[1]):
        text, level = split_policy(policy)[1], float(scale.place([budget])[0])
        if labels and math.log10(level) - math.log10(labels[-1][0]) < 0.04 * (high - low):
            labels[-1] = (labels[-1][0], f"{labels[-1][1]}, {text}")
        else:
            labels.append((level, f"budget {text}" if not labels else text))
    return labels
