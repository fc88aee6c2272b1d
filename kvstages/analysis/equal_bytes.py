"""Recipes at equal bytes, in every arithmetic that they were measured in.

Each has its joint KL with its intervals, its difference from the published recipe paired over the same blocks, and its
place among random policies of the same bytes. Two measures: the KL from the reference (the same arithmetic with an
unquantized cache), and the KL from the FP32 model beyond what the unquantized cache costs (``Joint.excess``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.analysis.entries import Input
from kvstages.analysis.joint_table import (
    PUBLISHED,
    RANDOM,
    UNIFORM,
    Joint,
    compared,
    figures,
    read_comparison,
)
from kvstages.files.read import read_record
from kvstages.stats.bootstrap import mcnemar_counts, paired_difference, relative_reduction

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

# Files that the figure and the table of these numbers read.
INPUTS = {"comparisons": Input("comparison_files", "BUDGET/joint.csv", several=True)}
# Of a recipe's policies, the same in all.
COPIED = ["allocator", "sensitivity", "unit", "precisions"]
# Where the joint KL of the random policies lies: name of the column to quantile.
SPREAD = {"lowest_kl": 0.0, "p5_kl": 0.05, "p50_kl": 0.5, "p95_kl": 0.95, "highest_kl": 1.0}
# Measure to the column of a recipe's rank by it.
RANKS = {"mean_kl": "rank", "excess_kl": "excess_rank"}


def equal_bytes(comparisons: Sequence[Path]) -> tuple[list[Joint], pd.DataFrame]:
    """The policies of each joint.csv, and one row for each file and recipe, files in the order given, the least joint
    KL first.

    A uniform policy has its precision in ``policy`` and takes its own bytes. A recipe's figures are those of its
    policy; of random ones the mean over all of them, and ``SPREAD`` over the policies. ``rank`` is the place among the
    recipes of equal bytes (1 has the least KL; neither random nor uniform policies have one; equal KL, equal rank),
    ``excess_rank`` the same by excess KL. ``kl_reduction`` is 1 − joint KL / that of the published recipe at that
    budget, above 0 is better; ``excess_reduction`` the same of the excess KL; like ``agreement_difference`` (recipe −
    published) they are paired over blocks; ``agreement_p`` is McNemar's, of the latter. ``random_less_kl``: the share
    of the random policies whose joint KL is less; ``drawn_less_proxy``: of all that were drawn, those whose proxy is
    less (from the policy-set.json of the budget, empty where their table cannot score the policy). Intervals: 95 %,
    bootstrap over blocks, and over documents (``_documents_``) where there are enough of them.
    """
    import pandas as pd

    joints, parts = [], []
    for path in comparisons:
        budget, joint = read_comparison(path)
        joints.append(joint)
        below = _drawn_less_proxy(_policy_set(path))
        random = joint.metrics["mean_kl"][joint.rows(RANDOM)].mean(axis=1)
        groups = joint.policies["policy"].where(joint.policies["recipe"] != RANDOM, RANDOM)
        rows = [
            {"budget": budget, **_row(joint, [*own], random, below)}
            for own in groups.groupby(groups, sort=False).groups.values()
        ]
        table = pd.DataFrame(rows)
        ranked = ~table["recipe"].isin([RANDOM, UNIFORM])
        for measure, column in RANKS.items():
            table[column] = table[measure].astype(float).where(ranked).rank(method="min")
        parts.append(table.sort_values("mean_kl", kind="stable"))
    return joints, pd.concat(parts, ignore_index=True)


def _policy_set(path: Path) -> Path:
    """The policy-set.json of a comparison: beside its joint.csv, or above the folder of another arithmetic."""
    beside = path.parent / "policy-set.json"
    return beside if beside.exists() else path.parent.parent / "policy-set.json"


def _drawn_less_proxy(path: Path) -> dict[str, float]:
    """Policy to the share of all random policies drawn (measured or not) whose proxy is less."""
    draws = read_record(path, ["draws"])["draws"]
    return {policy: place["share_below"] for spread in draws for policy, place in spread["policies"].items()}


def _row(joint: Joint, own: list[int], random: np.ndarray, below: dict[str, float]) -> dict[str, Any]:
    """Figures of the policies in the places ``own``: one policy, or all random ones."""
    import numpy as np

    base = joint.rows(PUBLISHED)[0]
    policies, metrics, documents = joint.policies.iloc[own], joint.metrics, joint.documents
    recipe, policy = policies["recipe"].iloc[0], policies["policy"].iloc[0]
    kl, agreement, cross_entropy, alone, first_alone = (
        metrics[name][own].mean(axis=0)
        for name in ("mean_kl", "agreement", "cross_entropy", "agrees_alone", "first_agrees_alone")
    )
    excess = joint.excess()
    own_excess = None if excess is None else excess[own].mean(axis=0)
    is_random, other = recipe == RANDOM, recipe != PUBLISHED
    spread = np.quantile(random, list(SPREAD.values())) if is_random else [None] * len(SPREAD)

    def against_published(values: np.ndarray | None) -> np.ndarray | None:
        return values[base] if other and values is not None else None

    return {
        "compute_dtype": policies["compute_dtype"].iloc[0],
        "recipe": recipe,
        "policy": RANDOM if is_random else policy,
        **{name: policies[name].iloc[0] for name in COPIED},
        "policies": len(own),
        "bytes": policies["bytes"].mean(),
        "compression": (policies["bf16_bytes"] / policies["bytes"]).mean(),
        "proxy": policies["proxy"].mean(),
        "blocks": len(kl),
        "documents": None if documents is None else len(set(documents)),
        **figures("mean_kl", kl, documents),
        **compared("kl_reduction", relative_reduction, kl, against_published(metrics["mean_kl"]), documents),
        **figures("excess_kl", own_excess, documents),
        **compared("excess_reduction", relative_reduction, own_excess, against_published(excess), documents),
        **figures("agreement", agreement, documents),
        **compared(
            "agreement_difference", paired_difference, agreement, against_published(metrics["agreement"]), documents
        ),
        "agreement_p": mcnemar_counts(int(alone.sum()), int(first_alone.sum())) if other and not is_random else None,
        "cross_entropy": cross_entropy.mean(),
        "random_less_kl": float((random < kl.mean()).mean()) if len(random) and not is_random else None,
        "drawn_less_proxy": None if is_random else below.get(policy),
        **dict(zip(SPREAD, spread, strict=True)),
    }
