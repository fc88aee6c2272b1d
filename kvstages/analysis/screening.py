"""Quantizer schemes beside each other: what each costs in bits and in KL, and the most that allocation could add.

Reads what a screening measured (screening/joint.csv), what it meant to measure (screening/policies.json) and the scores
that its allocations are of (screening/scores.csv).

The *ceiling* of any allocation: with KL falling as 4^-b a unit's score is c · 4^-b, and the best bits for units of
scores c_u at a given mean give every unit the same KL. Against the same bits for all that is the arithmetic over the
geometric mean of the scores, in KL (the gain of transform coding: Jayant and Noll, Digital Coding of Waveforms, 1984).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.analysis.entries import Input
from kvstages.analysis.joint_table import ENDS, Joint, compared, read_joint, with_figures
from kvstages.cache.precision_grid import PrecisionGrid, policy_bits
from kvstages.cache.precisions import bits_of
from kvstages.cache.schemes import SIDES, precision
from kvstages.files.read import read_columns, read_record
from kvstages.policies.screening import BOTH, KEYS, PUBLISHED, PUBLISHED_SCHEME, RECOMMENDED, VALUES, at_bits
from kvstages.stats.bootstrap import ratio_of_means

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

# Files that the figure and the table of these numbers read.
INPUTS = {
    "joint": Input("screening_joint_files", "joint.csv"),
    "policies": Input("screening_policy_files", "policies.json", "What was to be measured."),
    "scores": Input("screening_score_files", "scores.csv", "The scores that the policies are of."),
}
PARTS = {BOTH: "kv", KEYS: "k", VALUES: "v"}
COLUMNS = [
    "recipe", "policy", "budget", "scheme", "part", "payload_bits", "bits", "bits_at_end", "bytes", "proxy",
    "mean_kl", *(f"mean_kl{end}" for end in ENDS), "agreement", *(f"agreement{end}" for end in ENDS),
    "baseline", "times_less", *(f"times_less{end}" for end in ENDS), "ceiling",
]  # fmt: skip


def screening(joint_path: Path, policies_path: Path, scores_path: Path) -> tuple[Joint, pd.DataFrame]:
    """What was measured, and a row for each policy (``COLUMNS``), in the order of the set.

    ``bits``: mean over the decoding steps of a block, scales and exact tokens counted, of what is quantized;
    ``bits_at_end``: everything that a cache stores at the end of a block, of keys and values. ``times_less``: KL of the
    baseline over that of the policy. ValueError where a policy was not measured, or a file is not of a screening.
    """
    import pandas as pd

    joint = read_joint(joint_path)
    record = read_record(policies_path, ["policies", "recommended", "tokens", "model"])
    widths = record["model"]["key_width"], record["model"]["value_width"]
    measured = with_figures(joint).set_index("policy", drop=False)
    scores = read_columns(scores_path, ["mean_kl"], ["part", "precision"])
    chosen = {f"{RECOMMENDED}-{each['budget']}": each["scheme"] for each in record["recommended"]}
    budgets = {
        f"{recipe}-{each['budget']}": each["budget"] for recipe in _recipes(record) for each in record["recommended"]
    }
    rows = []
    for policy in record["policies"]:
        name, recipe = policy["policy"], policy["recipe"]
        if name not in measured.index:
            raise ValueError(f"{joint_path}: policy {name} is missing, expected those of {policies_path}")
        own = measured.loc[name]
        grid = PrecisionGrid.of_record(policy["precisions"])
        part = PARTS.get(recipe, "kv")
        scheme = name.removesuffix(f"-{recipe}") if recipe in PARTS else chosen.get(name, PUBLISHED_SCHEME)
        base = baseline(name, recipe, scheme, budgets.get(name))
        elements = own["bf16_bytes"] / 2
        rows.append(
            {
                "recipe": recipe,
                "policy": name,
                "budget": budgets.get(name),
                "scheme": scheme,
                "part": part,
                "payload_bits": bits_of(scheme) if recipe in PARTS else policy["average_payload_bits"],
                "bits": policy_bits(grid, widths, record["tokens"], sides=part),
                "bits_at_end": 8 * own["bytes"] / elements,
                **{column: own[column] for column in COLUMNS if column in own and column not in ("recipe", "policy")},
                "baseline": base,
                **_times_less(joint, name, base),
                "ceiling": ceiling(scores, scheme, part) if recipe in PARTS else None,
            }
        )
    return joint, pd.DataFrame(rows)[COLUMNS]


def baseline(policy: str, recipe: str, scheme: str, budget: str | None) -> str | None:
    """The policy that one is compared with: the published recipe's of the same budget; the published quantizer's of the
    same number of bits, on the same part. None for those themselves."""
    if budget is not None:
        found = f"{PUBLISHED}-{budget}"
    else:
        (name,) = at_bits(PUBLISHED_SCHEME, [precision(scheme).bits])
        found = name if recipe == BOTH else f"{name}-{recipe}"
    return None if found == policy else found


def ceiling(scores: pd.DataFrame, scheme: str, part: str) -> float | None:
    """Arithmetic over geometric mean of the scores of keys and values apart, of one precision; None for scores of 0."""
    sides = [side for side in SIDES if side in part]
    own = scores[(scores["precision"] == scheme) & scores["part"].isin(sides)]["mean_kl"]
    if own.empty or own.min() <= 0:
        return None
    return float(own.mean() / math.exp(own.map(math.log).mean()))


def _times_less(joint: Joint, policy: str, base: str | None) -> dict[str, float | None]:
    names = joint.policies["policy"].tolist()
    own, other = (joint.metrics["mean_kl"][names.index(name)] if name in names else None for name in (policy, base))
    return compared("times_less", ratio_of_means, other, own, joint.documents)


def _recipes(record: dict[str, Any]) -> Sequence[str]:
    return list(dict.fromkeys(policy["recipe"] for policy in record["policies"]))


def documents_of(joint: Joint) -> int:
    """How many documents the blocks are of, 0 where that is not known."""
    return len(set(joint.documents or []))


def blocks_of(joint: Joint) -> int:
    values: np.ndarray = joint.metrics["mean_kl"]
    return values.shape[1]
