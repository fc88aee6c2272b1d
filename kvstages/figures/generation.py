"""Generated text: how long greedy continuations stay those of the unquantized cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry
from kvstages.analysis.survival import CONTROL, INPUTS, read_runs, survival
from kvstages.figures.policies import coinciding
from kvstages.figures.style import legend_below, line_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=16,
    title="Generated text",
    inputs=INPUTS,
)


def numbers(continuations: Path) -> pd.DataFrame:
    """Share of prompts whose continuation is still the reference's after each token, with its interval."""
    import pandas as pd

    rows = [
        {"prefill": run.prefill, "policy": run.policy, "tokens": count, "share": share.value,
         "share_low": share.low, "share_high": share.high}
        for run in read_runs(continuations)
        for count, share in survival(run)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame) -> Figure:
    """A panel for each prefill, a step line for each policy, with its interval as a band; the control is grey."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    prefills = list(dict.fromkeys(table["prefill"]))
    panels = figure.subplots(1, len(prefills), sharey=True, squeeze=False)[0]
    lines: dict[str, object] = {}
    styles: dict[str, dict[str, object]] = {}
    for axes, prefill in zip(panels, prefills, strict=True):
        own = table[table["prefill"] == prefill].drop(columns="prefill")
        control = own[own["policy"] == CONTROL]
        lines["BF16, other batch"] = axes.plot(control["tokens"], control["share"], color="0.6", linewidth=3, zorder=1)[
            0
        ]
        for label, part in coinciding(own[own["policy"] != CONTROL]):
            # Policies that coincide in one panel alone have other labels in the next: each label has its own style.
            look = styles.setdefault(label, {**line_style(len(styles)), "marker": None})
            lines[label] = axes.plot(part["tokens"], part["share"], **look)[0]
            axes.fill_between(
                part["tokens"], part["share_low"], part["share_high"], color=look["color"], alpha=0.12, linewidth=0
            )
        axes.set(title=f"prefill {prefill}", xlabel="generated tokens", ylim=(-0.03, 1.03))
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylabel("share of prompts with the same text so far")
    legend_below(figure, lines.values(), lines, handlelength=4)
    return figure
