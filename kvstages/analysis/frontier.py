"""The frontier in bytes: every family of policies against the published recipe at the same byte totals.

A budget in nats of BF16 scores lands on other bytes on another processor; byte totals are the same everywhere. Each
arithmetic that the frontier was measured in has rows of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Input
from kvstages.analysis.joint_table import PUBLISHED, Joint, compared, read_joint, with_figures
from kvstages.stats.bootstrap import relative_reduction

if TYPE_CHECKING:
    import pandas as pd


# Files that the figure and the table of these numbers read.
INPUTS = {"frontier": Input("frontier_files", "joint.csv", several=True)}


def frontier(tables: Sequence[Path]) -> tuple[list[Joint], pd.DataFrame]:
    """The policies of each joint.csv, and one row for each file and policy: files in the order given, families in their
    order, by falling limit.

    ``with_figures`` of each, and ``kl_reduction`` and ``excess_reduction`` against the published recipe's policy of the
    same ``limit`` (see ``equal_bytes``): for a uniform policy that of its own bytes. They are empty for that recipe
    itself, where it has no policy of that limit, and where its KL may be 0.
    """
    joints = [read_joint(path) for path in tables]
    return joints, _beside_reductions(joints, [with_figures(joint) for joint in joints])


def reductions(tables: Sequence[Path]) -> pd.DataFrame:
    """The rows of ``frontier``: only what each policy is, and its two reductions."""
    joints = [read_joint(path) for path in tables]
    return _beside_reductions(joints, [joint.policies for joint in joints])


def _beside_reductions(joints: Sequence[Joint], tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Tables of the same policies, each with these policies' reductions, in the order of ``frontier``."""
    import pandas as pd

    parts = []
    for joint, table in zip(joints, tables, strict=True):
        families = list(dict.fromkeys(table["recipe"]))
        parts.append(
            pd.concat([table, _against_published(joint)], axis=1).sort_values(
                ["recipe", "limit"],
                key=lambda values, order=families: values.map(order.index) if values.name == "recipe" else -values,
                kind="stable",
            )
        )
    return pd.concat(parts, ignore_index=True)


def _against_published(joint: Joint) -> pd.DataFrame:
    """Paired reductions of each policy [P] against the published recipe's of the same limit."""
    import pandas as pd

    published = {int(joint.policies["limit"].iloc[place]): place for place in joint.rows(PUBLISHED)}
    kl, excess = joint.metrics["mean_kl"], joint.excess()
    rows = []
    for place, policy in enumerate(joint.policies.itertuples(index=False)):
        base = None if policy.recipe == PUBLISHED else published.get(int(policy.limit))
        rows.append(
            {
                **compared(
                    "kl_reduction", relative_reduction, kl[place], None if base is None else kl[base], joint.documents
                ),
                **compared(
                    "excess_reduction",
                    relative_reduction,
                    None if excess is None else excess[place],
                    None if excess is None or base is None else excess[base],
                    joint.documents,
                ),
            }
        )
    return pd.DataFrame(rows)
