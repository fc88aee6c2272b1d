"""Calibration on one text against calibration on another, read from what policies did on each text.

A *place* is a domain (texts of one kind) in blocks of one length. Every place has made a policy of each budget from its
own scores, and every policy was measured on the validation window of every place. What calibrating elsewhere costs is
the KL of a policy over that of the policy which was made in the place where both are measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstages.analysis.entries import Input
from kvstages.analysis.joint_table import ENDS, Joint, compared, figures, interval, read_joint
from kvstages.policies.budgets import BITS, Budget
from kvstages.stats.bootstrap import document_count, ratio_of_means

if TYPE_CHECKING:
    import pandas as pd

# Files that the figure and the table of these numbers read.
INPUTS = {"joints": Input("domain_joint_files", "JOINT.csv", several=True)}
WINDOW = "validation-"
COLUMNS = [
    "budget", "bytes", "bits", "calibrated_domain", "calibrated_length", "domain", "length", "blocks", "documents",
    "mean_kl", *(f"mean_kl{end}" for end in ENDS), "ratio", *(f"ratio{end}" for end in ENDS),
]  # fmt: skip


class Place(NamedTuple):
    """A domain, and tokens of its blocks."""

    domain: str
    length: int

    @classmethod
    def parse(cls, text: str) -> Place:
        """From DOMAIN-LENGTH; ValueError on another text."""
        domain, _, length = text.rpartition("-")
        if not domain or not length.isdecimal():
            raise ValueError(f"{text!r}, expected DOMAIN-LENGTH, such as letters-64")
        return cls(domain, int(length))

    def __str__(self) -> str:
        return f"{self.domain}, blocks of {self.length}"


def read_domains(paths: Sequence[Path]) -> tuple[list[Joint], pd.DataFrame]:
    """What was measured in each place, and a row for each budget, policy and place (``COLUMNS``).

    ``ratio``: mean KL of the policy over that of the one made in this place, paired over the blocks; of that one itself
    1, without an interval. Sorted. ValueError names the file that is not of the stage evaluate-set on a domain, and a
    place without a policy of its own.
    """
    import pandas as pd

    read = [(path, read_joint(path)) for path in paths]
    rows = [row for path, joint in read for row in _rows(path, joint)]
    order = ["budget", "domain", "length", "calibrated_domain", "calibrated_length"]
    table = pd.DataFrame(rows)[COLUMNS].sort_values(order, key=_by_bits, kind="stable", ignore_index=True)
    return [joint for _, joint in read], table


def _rows(path: Path, joint: Joint) -> list[dict[str, Any]]:
    """The rows of the policies that were measured in one place."""
    policies = joint.policies.to_dict("records")
    try:
        here = Place.parse(policies[0]["window"].removeprefix(WINDOW))
        places = [Place.parse(policy["sensitivity"]) for policy in policies]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    budgets = [policy["policy"].removeprefix(f"{policy['sensitivity']}-") for policy in policies]
    for policy, budget in zip(policies, budgets, strict=True):
        if not re.fullmatch(BITS, budget):
            raise ValueError(f"{path}: policy {policy['policy']}, expected {policy['sensitivity']}-BUDGET, as -5bits")
    kl = joint.metrics["mean_kl"]
    known = dict(zip(zip(budgets, places, strict=True), kl, strict=True))
    rows = []
    for policy, budget, made, values in zip(policies, budgets, places, kl, strict=True):
        if (budget, here) not in known:
            raise ValueError(f"{path}: no policy of {budget} that was calibrated on {here}")
        ratio = compared("ratio", ratio_of_means, values, known[budget, here], joint.documents)
        rows.append(
            {
                "budget": budget,
                "bytes": policy["bytes"],
                "bits": 16 * policy["bytes"] / policy["bf16_bytes"],
                "calibrated_domain": made.domain,
                "calibrated_length": made.length,
                "domain": here.domain,
                "length": here.length,
                "blocks": len(values),
                "documents": document_count(joint.documents),
                **figures("mean_kl", values, joint.documents),
                **(interval("ratio", (1.0, None, None)) if made == here else ratio),
            }
        )
    return rows


def _by_bits(column: pd.Series) -> pd.Series:
    return column.map(lambda budget: Budget.parse(budget).amount) if column.name == "budget" else column
