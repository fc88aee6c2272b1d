"""What adaptation did: the difference in differences of the KL, by policy and arm, with each seed's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.adaptation_effect import INPUTS, ORIGINAL, effects, read_models
from kvstages.analysis.entries import Entry
from kvstages.figures.policies import policies_label
from kvstages.figures.style import line_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FIGURE = Entry(
    number=8,
    title="What adaptation did",
    inputs=INPUTS,
)

# Measure to what is written beside its row of panels.
ROWS = {"kl": "KL to the original", "own": "KL to its own BF16"}


def numbers(evaluations: Sequence[Path], records: Sequence[Path]) -> pd.DataFrame:
    """Effect (nats) on both KLs and its interval, by arm, what it is compared with and policy; and of each seed.

    The rows of a single seed have no interval; the row of all seeds has no seed.
    """
    import pandas as pd

    models, documents, _ = read_models(evaluations, records)
    rows = []
    for row in effects(models, documents).itertuples():
        known = {"arm": row.arm, "against": row.against, "policy": row.policy}
        rows += [
            {**known, "seed": None, "measure": name, "effect": value, "low": low, "high": high}
            for name, value, low, high in (
                ("kl", row.kl_effect, row.kl_effect_low, row.kl_effect_high),
                ("own", row.own_effect, row.own_effect_low, row.own_effect_high),
            )
        ]
        arm, other = models[row.arm], models[row.against]
        for place, seed in enumerate(arm.seeds if len(arm.seeds) > 1 else []):
            for name, metric in (("kl", "mean_kl"), ("own", "own_kl")):
                second = other.part(metric, row.policy, "added")
                second = second[place if len(second) > 1 else 0]
                effect = float((arm.part(metric, row.policy, "added")[place] - second).mean())
                rows.append({**known, "seed": seed, "measure": name, "effect": effect, "low": None, "high": None})
    table = pd.DataFrame(rows, columns=["arm", "against", "policy", "seed", "measure", "effect", "low", "high"])
    return table.astype({"seed": "Int64", "low": float, "high": float})


def draw(table: pd.DataFrame) -> Figure:
    """A row of panels for each KL and a panel for each policy: arms against their control, or, where they have none,
    against the original model (open marks)."""
    from matplotlib.figure import Figure

    policies = list(dict.fromkeys(table["policy"]))
    shown = table[(table["against"] != ORIGINAL) | ~table["arm"].isin(table[table["against"] != ORIGINAL]["arm"])]
    arms = list(dict.fromkeys(shown["arm"]))
    places = {arm: len(arms) - 1 - index for index, arm in enumerate(arms)}
    width = max(5.0, 1.7 + 2.1 * len(policies))
    figure = Figure(figsize=(width, 1.6 + 2 * max(1.0, 0.34 * len(arms))), layout="constrained")
    panels = figure.subplots(len(ROWS), len(policies), squeeze=False, sharey=True)
    for row, (measure, text) in zip(panels, ROWS.items(), strict=True):
        for axes, policy in zip(row, policies, strict=True):
            axes.axvline(0.0, color="0.45", lw=0.8, linestyle=(0, (4, 3)), zorder=1)
            part = shown[(shown["policy"] == policy) & (shown["measure"] == measure)]
            for own in part[part["seed"].notna()].itertuples():
                look = line_style(arms.index(own.arm))
                axes.plot(own.effect, places[own.arm] - 0.22, "|", color=look["color"], markersize=6, zorder=2)
            for own in part[part["seed"].isna()].itertuples():
                color = line_style(arms.index(own.arm))["color"]
                axes.hlines(places[own.arm], own.low, own.high, color=color, lw=1.4)
                face = "white" if own.against == ORIGINAL else color
                axes.plot(own.effect, places[own.arm], "o", color=color, mfc=face, markersize=5, zorder=3)
            axes.set_yticks(range(len(arms)), arms[::-1])
            axes.set_ylim(-0.6, len(arms) - 0.4)
            axes.grid(False, axis="y")
            axes.locator_params(axis="x", nbins=4)
            axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3), useMathText=True)
        row[0].set_ylabel(text)
    for axes, policy in zip(panels[0], policies, strict=True):
        axes.set_title(f"{policies_label([policy])} cache", pad=14)
    figure.supxlabel("effect: (arm − control), (quantized − BF16), nats; left of 0 the training helps", fontsize=9)
    figure.suptitle("Adaptation: what quantization adds to the KL, against the control", x=0.01, ha="left")
    return figure
