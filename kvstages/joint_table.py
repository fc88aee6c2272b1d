"""Tables of many policies measured jointly on the same blocks: joint.csv, a row for each policy and block.

results/{study}/comparison/{budget}/joint.csv holds the recipes that are compared at equal bytes; the folder names the
budget. results/{study}/frontier/joint.csv holds families of policies of different bytes. Axes: P policies, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.records import read_columns

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

# What a policy is, the same in all of its rows.
TEXTS = [
    "policy", "recipe", "allocator", "sensitivity", "unit", "precisions", "execution", "compute_dtype", "window"
]  # fmt: skip
COUNTS = ["bytes", "bf16_bytes", "tokens_per_cache"]
# What was measured on each block: means over its positions; cross entropy over its targets.
METRICS = ["mean_kl", "agreement", "cross_entropy"]
COLUMNS = ["policy", "recipe", "allocator", "sensitivity", "unit", "precisions", "bytes", "bf16_bytes",
           "tokens_per_cache", "proxy", "block", *METRICS, "execution", "compute_dtype", "window"]  # fmt: skip

PUBLISHED, RANDOM, UNIFORM = "published", "random", "uniform"


@dataclass(frozen=True)
class Joint:
    """Policies that were measured on the same blocks.

    ``policies``: one row each [P], with the columns of ``TEXTS`` and ``COUNTS`` and proxy (nats; NaN if none).
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
    import numpy as np

    table = read_columns(path, [*COUNTS, "block", *METRICS], TEXTS, ["proxy"])
    if table.empty:
        raise ValueError(f"{path}: no policies, only a header")
    described = table[[*TEXTS, *COUNTS, "proxy"]].drop_duplicates()
    changing = described[described.duplicated("policy")]
    if len(changing):
        raise ValueError(f"{path}: policy {changing['policy'].iloc[0]} is not the same in all of its rows")
    blocks = np.unique(table["block"])
    for policy, own in table.groupby("policy", sort=False):
        if sorted(own["block"]) != blocks.tolist():
            raise ValueError(
                f"{path}: policy {policy} has {len(own)} rows, expected one for each of {len(blocks)} blocks"
            )
    metrics = {
        name: table.pivot(index="policy", columns="block", values=name).loc[described["policy"]].to_numpy()
        for name in METRICS
    }
    return Joint(described.reset_index(drop=True), metrics)


def read_comparison(path: Path) -> tuple[str, Joint]:
    """Budget (the name of the folder) and policies of a comparison at equal bytes.

    ValueError unless it has the recipe published, and one policy of every recipe but random.
    """
    joint = read_joint(path)
    recipes = joint.policies["recipe"]
    if PUBLISHED not in set(recipes):
        raise ValueError(f"{path}: no recipe {PUBLISHED}; found {', '.join(dict.fromkeys(recipes))}")
    several = recipes[(recipes != RANDOM) & recipes.duplicated()]
    if len(several):
        raise ValueError(f"{path}: several policies of the recipe {several.iloc[0]}, expected one")
    return path.absolute().parent.name, joint
