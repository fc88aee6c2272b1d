"""Recipes at equal bytes: the joint KL of each with its interval, its difference from the published recipe paired over
the same blocks, and its place among random policies of the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.analysis.joint_table import PUBLISHED, RANDOM, Joint, read_comparison
from kvstages.files.read import read_record
from kvstages.stats.bootstrap import block_interval, mcnemar_counts, paired_difference, relative_reduction

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

# Of a recipe's policies, the same in all.
COPIED = ["allocator", "sensitivity", "unit", "precisions"]
# Where the joint KL of the random policies lies: name of the column to quantile.
SPREAD = {"lowest_kl": 0.0, "p5_kl": 0.05, "p50_kl": 0.5, "p95_kl": 0.95, "highest_kl": 1.0}


def equal_bytes(comparisons: Sequence[Path]) -> pd.DataFrame:
    """One row for each budget and recipe of joint.csv files, budgets in the order given, the least joint KL first.

    A recipe's figures are those of its policy; of random ones the mean over all of them, and ``SPREAD`` over the
    policies. ``kl_reduction`` is 1 − joint KL / that of the published recipe at that budget, above 0 is better; like
    ``agreement_difference`` (recipe − published) it is paired over blocks; ``agreement_p`` is McNemar's, of the
    latter. ``random_less_kl``: the share of the random policies whose joint KL is less; ``drawn_less_proxy``: of all
    that were drawn, those whose proxy is less (from the policy-set.json beside joint.csv, empty where their table
    cannot score the policy). Intervals: 95 %, bootstrap over blocks.
    """
    import pandas as pd

    rows = []
    for path in comparisons:
        budget, joint = read_comparison(path)
        below = _drawn_less_proxy(path.parent / "policy-set.json")
        kl = joint.metrics["mean_kl"]
        random = kl[joint.rows(RANDOM)].mean(axis=1)
        recipes = dict.fromkeys(joint.policies["recipe"])
        found = [{"budget": budget, **_row(recipe, joint, random, below)} for recipe in recipes]
        rows += sorted(found, key=lambda row: row["mean_kl"])
    return pd.DataFrame(rows)


def _drawn_less_proxy(path: Path) -> dict[str, float]:
    """Policy to the share of all random policies drawn (measured or not) whose proxy is less."""
    draws = read_record(path, ["draws"])["draws"]
    return {policy: place["share_below"] for spread in draws for policy, place in spread["policies"].items()}


def _row(recipe: str, joint: Joint, random: np.ndarray, below: dict[str, float]) -> dict[str, Any]:
    import numpy as np

    own, base = joint.rows(recipe), joint.rows(PUBLISHED)[0]
    policies, metrics = joint.policies.iloc[own], joint.metrics
    kl, agreement, cross_entropy, alone, first_alone = (metrics[name][own].mean(axis=0) for name in metrics)
    other = recipe != PUBLISHED
    # Against a KL of 0 (a budget that leaves all in BF16) there is nothing to reduce.
    reducible = other and (metrics["mean_kl"][base] > 0).all()
    spread = [None] * len(SPREAD)
    if recipe == RANDOM:
        spread = np.quantile(random, list(SPREAD.values()))
    return {
        "recipe": recipe,
        **{name: policies[name].iloc[0] for name in COPIED},
        "policies": len(own),
        "bytes": policies["bytes"].mean(),
        "compression": (policies["bf16_bytes"] / policies["bytes"]).mean(),
        "proxy": policies["proxy"].mean(),
        "blocks": len(kl),
        **_interval("mean_kl", kl.mean(), *block_interval(kl)),
        **_interval("kl_reduction", *(relative_reduction(kl, metrics["mean_kl"][base]) if reducible else [None] * 3)),
        **_interval("agreement", agreement.mean(), *block_interval(agreement)),
        **_interval(
            "agreement_difference",
            *(paired_difference(agreement, metrics["agreement"][base]) if other else [None] * 3),
        ),
        "agreement_p": mcnemar_counts(int(alone.sum()), int(first_alone.sum())) if other and recipe != RANDOM else None,
        "cross_entropy": cross_entropy.mean(),
        "random_less_kl": float((random < kl.mean()).mean()) if len(random) and recipe != RANDOM else None,
        "drawn_less_proxy": below.get(policies["policy"].iloc[0]) if recipe != RANDOM else None,
        **dict(zip(SPREAD, spread, strict=True)),
    }


def _interval(name: str, value: float | None, low: float | None, high: float | None) -> dict[str, float | None]:
    return {name: value, f"{name}_low": low, f"{name}_high": high}
