"""Tables of many policies measured jointly on the same blocks, read: joint.csv, a row for each policy and block.

results/{study}/comparison/{budget}/joint.csv holds the recipes that are compared at equal bytes; the folder names the
budget. results/{study}/frontier/joint.csv holds families of policies of different bytes. What was measured in another
arithmetic lies in a folder of its name beside them (comparison/{budget}/bfloat16/joint.csv).
Axes: P policies, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.files.read import read_columns
from kvstages.stats.bootstrap import (
    FEWEST_DOCUMENTS,
    Estimate,
    block_interval,
    document_count,
    document_interval,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

# What a policy is, the same in all of its rows.
TEXTS = [
    "policy", "recipe", "allocator", "sensitivity", "unit", "precisions", "window", "execution", "compute_dtype"
]  # fmt: skip
SIZES = ["bytes", "bf16_bytes", "limit", "proxy"]
# What was measured on each block: means over its positions; cross entropy over its targets. The last two count
# positions where, of this policy and the first of its table, only one has the reference's argmax.
METRICS = ["mean_kl", "agreement", "cross_entropy", "agrees_alone", "first_agrees_alone"]
# KL from the FP32 model that stores its keys and values exactly; not measured everywhere.
TRUTH = "truth_kl"

PUBLISHED, RANDOM, UNIFORM, DENSE = "published", "random", "uniform", "bf16"
# Arithmetics, and how they are said.
ARITHMETIC = {"float32": "FP32", "bfloat16": "BF16", "float64": "FP64"}
# What follows a figure's name: its interval over blocks, and over documents.
ENDS = ("_low", "_high", "_documents_low", "_documents_high")


@dataclass(frozen=True)
class Joint:
    """Policies that were measured on the same blocks.

    ``policies``: one row each [P], with the columns ``TEXTS`` and ``SIZES`` (bytes of one cache, proxy in nats).
    ``metrics``: {name: [P, B]} for each of ``METRICS`` and, where it was measured, ``TRUTH``; KL and cross entropy in
    nats. ``documents``: the document of each block [B], None where the blocks were not drawn from documents.
    """

    policies: pd.DataFrame
    metrics: dict[str, np.ndarray]
    documents: list[str] | None = None

    def excess(self) -> np.ndarray | None:
        """KL from the FP32 model beyond what the unquantized cache costs in the same arithmetic: nats [P, B].

        That is ``truth_kl`` of each policy less that of the policy bf16 on the same block. It may be negative. None
        where it was not measured.
        """
        import numpy as np

        dense = np.flatnonzero(self.policies["policy"] == DENSE)
        if TRUTH not in self.metrics or not len(dense):
            return None
        return self.metrics[TRUTH] - self.metrics[TRUTH][dense[0]]

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
    import pandas as pd

    table = read_columns(path, [*SIZES, "block", *METRICS], [*TEXTS, "document"], [TRUTH])
    if table.empty:
        raise ValueError(f"{path}: no policies, only a header")
    policies = table[[*TEXTS, *SIZES]].drop_duplicates().reset_index(drop=True)
    changing = policies[policies.duplicated("policy")]
    if len(changing):
        raise ValueError(f"{path}: policy {changing['policy'].iloc[0]} is not the same in all of its rows")
    place, _ = pd.factorize(table["policy"])
    column, blocks = pd.factorize(table["block"], sort=True)
    shape = len(policies), len(blocks)
    counts = np.bincount(place * len(blocks) + column, minlength=len(policies) * len(blocks)).reshape(shape)
    wrong = np.flatnonzero((counts != 1).any(axis=1))
    if len(wrong):
        raise ValueError(
            f"{path}: policy {policies['policy'][wrong[0]]} has {counts[wrong[0]].sum()} rows, "
            f"expected one for each of {len(blocks)} blocks"
        )
    order = np.lexsort((column, place))
    measured = [*METRICS, *([TRUTH] if table[TRUTH].notna().all() else [])]
    metrics = {name: table[name].to_numpy()[order].reshape(shape) for name in measured}
    return Joint(policies, metrics, _documents(path, table))


def _documents(path: Path, table: pd.DataFrame) -> list[str] | None:
    """The document of each block; ValueError where a block has none and others do, or policies differ in it."""
    found = table[["block", "document"]].drop_duplicates().sort_values("block")
    if found["document"].isna().all():
        return None
    if found["document"].isna().any() or found["block"].duplicated().any():
        raise ValueError(f"{path}: blocks without a document of their own, expected one for each block or for none")
    return found["document"].tolist()


def read_comparison(path: Path) -> tuple[str, Joint]:
    """Budget (the name of the folder, or of the one around that of an arithmetic) and policies of a comparison at
    equal bytes.

    ValueError unless the first policy, which the others' agreement was counted against, is the published recipe's, and
    every recipe but random and uniform has one policy.
    """
    joint = read_joint(path)
    recipes = joint.policies["recipe"]
    if recipes.iloc[0] != PUBLISHED:
        raise ValueError(f"{path}: the first policy is of the recipe {recipes.iloc[0]}, expected {PUBLISHED}")
    several = recipes[~recipes.isin([RANDOM, UNIFORM]) & recipes.duplicated()]
    if len(several):
        raise ValueError(f"{path}: several policies of the recipe {several.iloc[0]}, expected one")
    folder = path.absolute().parent
    return (folder.parent if folder.name in ARITHMETIC else folder).name, joint


def figures(name: str, values: np.ndarray | None, documents: Sequence[str] | None) -> dict[str, float | None]:
    """A mean over blocks [B] as columns: NAME, NAME_low and NAME_high (95 % interval over blocks), NAME_documents_low
    and NAME_documents_high (over documents, None where there are too few); all None where ``values`` is."""
    if values is None:
        return interval(name, None)
    ends = block_interval(values), document_interval(values, documents)
    return interval(name, (float(values.mean()), *ends[0]), ends[1])


def interval(
    name: str, estimate: Sequence[float] | None, by_document: Sequence[float | None] | None = None
) -> dict[str, float | None]:
    """Columns of an estimate (value, low, high) and of its interval over documents; None where there is none."""
    value, low, high = (None, None, None) if estimate is None else estimate
    documents_low, documents_high = by_document or (None, None)
    columns = [name, *(f"{name}{end}" for end in ENDS)]
    return dict(zip(columns, (value, low, high, documents_low, documents_high), strict=True))


def compared(
    name: str,
    statistic: Callable[..., Estimate],
    first: np.ndarray | None,
    second: np.ndarray | None,
    documents: Sequence[str] | None,
) -> dict[str, float | None]:
    """``interval`` of a paired statistic of two policies' blocks [B]; None where one was not measured, or where the
    statistic is a ratio to what may be 0."""
    if first is None or second is None:
        return interval(name, None)
    try:
        estimate = statistic(first, second)
    except ValueError:
        return interval(name, None)
    if document_count(documents) < FEWEST_DOCUMENTS:
        return interval(name, estimate)
    return interval(name, estimate, statistic(first, second, documents=documents)[1:])


def with_figures(joint: Joint) -> pd.DataFrame:
    """The policies, with mean KL, excess KL and agreement over the blocks, their intervals (``figures``), and cross
    entropy."""
    import pandas as pd

    excess = joint.excess()
    rows = [
        {
            **figures("mean_kl", joint.metrics["mean_kl"][place], joint.documents),
            **figures("excess_kl", None if excess is None else excess[place], joint.documents),
            **figures("agreement", joint.metrics["agreement"][place], joint.documents),
            "cross_entropy": float(joint.metrics["cross_entropy"][place].mean()),
        }
        for place in range(len(joint.policies))
    ]
    table = joint.policies.assign(compression=joint.policies["bf16_bytes"] / joint.policies["bytes"])
    return pd.concat([table, pd.DataFrame(rows)], axis=1)
