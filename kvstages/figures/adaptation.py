"""Adaptation: held-out KL to the original model before and after, by arm and seed, for each cache policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.arms import arm_and_seed
from kvstages.analysis.entries import Entry, Input
from kvstages.figures.policies import policies_label
from kvstages.figures.style import line_style
from kvstages.files.read import read_record
from kvstages.policies.names import policy_order

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=8,
    title="Adaptation, before and after",
    inputs={
        "adapted": Input("adapted_evaluation_files", "ARM/seed-SEED/POLICY/evaluation.json", several=True),
        "original": Input("original_evaluation_files", "FILE", "The same policy, original model.", several=True),
    },
)

COLUMNS = ["policy", "mean_kl", "mean_kl_low", "mean_kl_high"]


def numbers(adapted: Sequence[Path], original: Sequence[Path]) -> pd.DataFrame:
    """Mean KL (nats) and 95 % interval: from evaluation.json files; adapted ones lie in ARM/seed-SEED/POLICY.

    Rows of the original model have the arm "original" and no seed. Quantized caches come first, then BF16.
    """
    import pandas as pd

    rows = [
        ("original", None, *(read_record(path, COLUMNS, COLUMNS[1:])[column] for column in COLUMNS))
        for path in original
    ]
    for path in adapted:
        record = read_record(path, COLUMNS, COLUMNS[1:])
        rows.append((*arm_and_seed(path), *(record[column] for column in COLUMNS)))
    rows.sort(key=lambda row: policy_order(row[2]), reverse=True)
    return pd.DataFrame(rows, columns=["arm", "seed", *COLUMNS]).astype({"seed": "Int64"})


def draw(table: pd.DataFrame) -> Figure:
    """A panel for each cache policy: the original model first, its interval as a band, then each arm's seeds."""
    from matplotlib.figure import Figure

    policies = list(dict.fromkeys(table["policy"]))
    arms = [arm for arm in dict.fromkeys(table["arm"]) if arm != "original"]
    seeds = list(dict.fromkeys(table["seed"].dropna()))
    places = {arm: _places(part["seed"]) for arm, part in table.dropna(subset="seed").groupby("arm", sort=False)}
    width = max(2.9, 0.9 + 0.75 * (len(arms) + 1))
    figure = Figure(figsize=(max(4.8, len(policies) * width + 0.3), 3.8), layout="constrained")
    for axes, policy in zip(figure.subplots(1, len(policies), squeeze=False)[0], policies, strict=True):
        for row in table[table["policy"] == policy].itertuples():
            original = row.arm == "original"
            look = {"marker": "*", "color": "#1b1b1b"} if original else line_style(seeds.index(row.seed))
            x = 0.0 if original else 1 + arms.index(row.arm) + places[row.arm][row.seed]
            if original:
                axes.axhspan(row.mean_kl_low, row.mean_kl_high, color="0.92", lw=0, zorder=0)
                axes.axhline(row.mean_kl, color="0.45", lw=0.8, linestyle=(0, (4, 3)), zorder=1)
            axes.vlines(x, row.mean_kl_low, row.mean_kl_high, color=look["color"], lw=1.1)
            axes.plot(
                x, row.mean_kl, look["marker"], color=look["color"], markersize=9 if original else 5.5, zorder=3,
                label=None if original else f"seed {row.seed}",
            )  # fmt: skip
        axes.set_xlim(-0.6, len(arms) + 0.6)
        axes.set_xticks(range(len(arms) + 1), ["original\nmodel", *(f"arm\n{arm}" for arm in arms)])
        axes.grid(False, axis="x")
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
        axes.set_title(f"{policies_label([policy])} cache", pad=16)
    figure.axes[0].set_ylabel("mean held-out KL to the original\nmodel, 95 % interval (nats)")
    figure.suptitle("Adaptation: before and after", x=0.01, ha="left")
    handles = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(5, len(handles)))
    return figure


def _places(seeds: Iterable[int]) -> dict[int, float]:
    """Offset of each seed of one arm from the arm's tick; an arm without noise has a single one, in the middle."""
    seeds = list(dict.fromkeys(seeds))
    return {seed: 0.6 * index / (len(seeds) - 1) - 0.3 if len(seeds) > 1 else 0.0 for index, seed in enumerate(seeds)}
