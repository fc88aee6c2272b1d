"""Recipes at equal bytes: the joint KL of each with its interval, its difference from the published recipe paired over
the same blocks, and its place among random policies of the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.joint_table import PUBLISHED, RANDOM, Joint, read_comparison
from kvstages.statistics import block_interval, paired_difference, relative_reduction

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

COPIED = ["allocator", "sensitivity", "unit", "precisions"]
SPREAD = {"lowest_kl": 0.0, "p5_kl": 0.05, "p50_kl": 0.5, "p95_kl": 0.95, "highest_kl": 1.0}


def equal_bytes(comparisons: Sequence[Path]) -> pd.DataFrame:
    """One row for each budget and recipe, budgets in the order given, the least joint KL first.

    A recipe's figures are those of its policy; of random ones the mean over all of them, and ``SPREAD`` over the policies.
    ``kl_reduction`` is 1 − joint KL / that of the published recipe at that budget, above 0 is better; like
    ``agreement_difference`` (recipe − published) it is paired over blocks. ``random_better`` is the share of the random
    policies whose joint KL is less. Intervals: 95 %, bootstrap over blocks.
    """
    import pandas as pd

    rows = []
    for path in comparisons:
        budget, joint = read_comparison(path)
        kl = joint.metrics["mean_kl"]
        random = kl[joint.rows(RANDOM)].mean(axis=1)
        found = [_row(budget, recipe, joint, random) for recipe in dict.fromkeys(joint.policies["recipe"])]
        rows += sorted(found, key=lambda row: row["mean_kl"])
    return pd.DataFrame(rows)


def _row(budget: str, recipe: str, joint: Joint, random: np.ndarray) -> dict[str, Any]:
    import numpy as np

    own = joint.rows(recipe)
    base = joint.rows(PUBLISHED)[0]
    policies = joint.policies.iloc[own]
    kl, agreement, cross_entropy = (
        joint.metrics[name][own].mean(axis=0) for name in ("mean_kl", "agreement", "cross_entropy")
    )
    over_policies = joint.metrics["mean_kl"][own].mean(axis=1)
    theirs = joint.metrics["mean_kl"][base]
    row = {"budget": budget, "recipe": recipe, **{name: policies[name].iloc[0] for name in COPIED}}
    row |= {
        "policies": len(own),
        "bytes": policies["bytes"].mean(),
        "compression": (policies["bf16_bytes"] / policies["bytes"]).mean(),
        "proxy": policies["proxy"].mean(),
        "blocks": len(kl),
        **_interval("mean_kl", kl.mean(), *block_interval(kl)),
    }
    comparable = recipe != PUBLISHED and (theirs > 0).all()
    row |= _interval("kl_reduction", *(relative_reduction(kl, theirs) if comparable else [None] * 3))
    row |= _interval("agreement", agreement.mean(), *block_interval(agreement))
    compared = [None] * 3
    if recipe != PUBLISHED:
        compared = paired_difference(agreement, joint.metrics["agreement"][base])
    row |= _interval("agreement_difference", *compared)
    row["cross_entropy"] = cross_entropy.mean()
    row["random_better"] = float((random < kl.mean()).mean()) if len(random) and recipe != RANDOM else None
    spread = np.quantile(over_policies, list(SPREAD.values())) if recipe == RANDOM else [None] * len(SPREAD)
    return row | dict(zip(SPREAD, spread, strict=True))


def _interval(name: str, value: float | None, low: float | None, high: float | None) -> dict[str, float | None]:
    return {name: value, f"{name}_low": low, f"{name}_high": high}
