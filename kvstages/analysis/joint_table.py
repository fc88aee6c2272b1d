"""Tables of many policies measured jointly on the same blocks, read: joint.csv, a row for each policy and block.

results/{study}/comparison/{budget}/joint.csv holds the recipes that are compared at equal bytes; the folder names the
budget. results/{study}/frontier/joint.csv holds families of policies of different bytes. Axes: P policies, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.files.read import read_columns
from kvstages.stats.bootstrap import block_interval

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

# What a policy is, the same in all of its rows.
TEXTS = [
    "policy", "recipe", "allocator", "sensitivity", "unit", "precisions", "window", "execution", "compute_dtype"
]  # fmt: skip
SIZES = ["bytes", "bf16_bytes", "proxy"]
# What was measured on each block: means over its positions; cross entropy over its targets. The last two count
# positions where, of this policy and the first of its table, only one has the reference's argmax.
METRICS = ["mean_kl", "agreement", "cross_entropy", "agrees_alone", "first_agrees_alone"]

PUBLISHED, RANDOM, UNIFORM = "published", "random", "uniform"


@dataclass(frozen=True)
class Joint:
    """Policies that were measured on the same blocks.

    ``policies``: one row each [P], with the columns ``TEXTS`` and ``SIZES`` (bytes of one cache, proxy in nats).
    ``metrics``: {name: [P, B]} for each of ``METRICS``, KL and cross entropy in nats.
    """

    policies: pd.DataFrame
    metrics: dict[str, np.ndarray]

    def rows(self, recipe: str) -> np.ndarray:
        """Places [n] of a recipe's policies."""
        import numpy as np

        return np.flatnonzero(self.policies["recipe"] == recipe)


def read_joint(path: Path) -> Joint:
    """A joint.csv, policies in the order of the file.

    ValueError names ``path`` and a column that is missing or wrong, a policy that changes from row to row, or one that
    was not measured once on each block.
    """
    table = read_columns(path, [*SIZES, "block", *METRICS], TEXTS)
    if table.empty:
        raise ValueError(f"{path}: no policies, only a header")
    policies = table[[*TEXTS, *SIZES]].drop_duplicates().reset_index(drop=True)
    changing = policies[policies.duplicated("policy")]
    if len(changing):
        raise ValueError(f"{path}: policy {changing['policy'].iloc[0]} is not the same in all of its rows")
    blocks = sorted(table["block"].unique())
    for policy, own in table.groupby("policy", sort=False):
        if sorted(own["block"]) != blocks:
            raise ValueError(
                f"{path}: policy {policy} has {len(own)} rows, expected one for each of {len(blocks)} blocks"
            )
    by_block = {name: table.pivot(index="policy", columns="block", values=name) for name in METRICS}
    return Joint(policies, {name: values.loc[policies["policy"]].to_numpy() for name, values in by_block.items()})


def read_comparison(path: Path) -> tuple[str, Joint]:
    """Budget (the name of the folder) and policies of a comparison at equal bytes.

    ValueError unless the first policy, which the others' agreement was counted against, is the published recipe's, and
    every recipe but random has one policy.
    """
    joint = read_joint(path)
    recipes = joint.policies["recipe"]
    if recipes.iloc[0] != PUBLISHED:
        raise ValueError(f"{path}: the first policy is of the recipe {recipes.iloc[0]}, expected {PUBLISHED}")
    several = recipes[(recipes != RANDOM) & recipes.duplicated()]
    if len(several):
        raise ValueError(f"{path}: several policies of the recipe {several.iloc[0]}, expected one")
    return path.absolute().parent.name, joint


def with_figures(joint: Joint) -> pd.DataFrame:
    """The policies, with mean KL and agreement over the blocks, their 95 % bootstrap intervals, and cross entropy."""
    table = joint.policies.assign(compression=joint.policies["bf16_bytes"] / joint.policies["bytes"])
    for name in ("mean_kl", "agreement"):
        values = joint.metrics[name]
        low, high = zip(*(block_interval(own) for own in values), strict=True)
        table = table.assign(**{name: values.mean(axis=1), f"{name}_low": low, f"{name}_high": high})
    return table.assign(cross_entropy=joint.metrics["cross_entropy"].mean(axis=1))
