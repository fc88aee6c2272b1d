"""Additivity of single-unit scores: the proxy of many policies against their joint KL.

The proxy is a sum of scores on the calibration window, each measured with everything else in BF16; the joint KL is
measured on the held-out window. A ratio of 1 at every size would say that the changes add up and the windows agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.analysis.entries import Input
from kvstages.analysis.joint_table import RANDOM, read_joint
from kvstages.stats.bootstrap import percentile_interval, resampled_means
from kvstages.stats.correlation import rank_correlation, rank_correlations

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

# Files that the figure and the table of these numbers read.
INPUTS = {"tables": Input("joint_files", "joint.csv", several=True)}
# Fewer policies than this have no correlation worth the name.
FEWEST = 3
FIGURES = [
    "policies", "smallest_proxy", "largest_proxy", "rank_correlation", "rank_correlation_low", "rank_correlation_high",
    "median_ratio", "p5_ratio", "p95_ratio",
]  # fmt: skip


@dataclass(frozen=True)
class Additivity:
    """Policies with a proxy and a joint KL above 0, each once.

    ``policies`` [P]: sensitivity, set (the folder of the joint.csv), recipe, allocator, policy, proxy, mean_kl and
    ratio (mean_kl / proxy); the source with most policies first. ``kl``: nats by block [P, B].
    """

    policies: pd.DataFrame
    kl: np.ndarray


def additivity(tables: Sequence[Path]) -> Additivity:
    """The policies of several joint.csv; ValueError where these differ in how they were measured or in their blocks.

    All BF16 is left out, because it has neither proxy nor KL. Policies equal in source, bytes, proxy and KL count once.
    """
    import numpy as np
    import pandas as pd

    parts, kl, settings = [], [], {}
    for path in tables:
        joint = read_joint(path)
        measured = joint.metrics["mean_kl"]
        for setting in joint.policies[["window", "execution", "compute_dtype"]].itertuples(index=False, name=None):
            settings.setdefault((*setting, measured.shape[1]), path)
        parts.append(joint.policies.assign(set=path.absolute().parent.name, mean_kl=measured.mean(axis=1)))
        kl.append(measured)
    if len(settings) > 1:
        (one, first), (other, second) = list(settings.items())[:2]
        raise ValueError(f"{second}: measured on {_said(other)}, but {first} on {_said(one)}")
    policies, measured = pd.concat(parts, ignore_index=True), np.concatenate(kl)
    known = (policies["proxy"] > 0) & (policies["mean_kl"] > 0)
    known &= ~policies.duplicated(["sensitivity", "bytes", "proxy", "mean_kl"])
    policies = policies.assign(ratio=policies["mean_kl"] / policies["proxy"].where(known))
    sources = policies.loc[known, "sensitivity"].value_counts(sort=True).index.tolist()
    kept = policies[known].sort_values("sensitivity", key=lambda names: names.map(sources.index), kind="stable")
    columns = ["sensitivity", "set", "recipe", "allocator", "policy", "proxy", "mean_kl", "ratio"]
    return Additivity(kept[columns].reset_index(drop=True), measured[kept.index])


def summarise(found: Additivity) -> pd.DataFrame:
    """One row for all policies of a source, then one for each decade of their proxies, from the smallest, then one for
    the random policies of each set: these have equal bytes, so only the scores tell them apart.

    ``rank_correlation`` is Spearman's, of proxy and joint KL, with its 95 % interval from a bootstrap over blocks (the
    proxies stay as they are); empty below ``FEWEST`` policies. The ratio's quantiles are over the policies.
    """
    import numpy as np
    import pandas as pd

    if found.policies.empty:
        return pd.DataFrame(columns=["sensitivity", "proxies", *FIGURES])
    drawn = np.stack(resampled_means(*found.kl), axis=1)
    decades = np.floor(np.log10(found.policies["proxy"])).astype(int)
    rows = []
    for source, own in found.policies.groupby("sensitivity", sort=False):
        groups = [("all", own.index)]
        groups += [(decade, own.index[decades[own.index] == decade]) for decade in sorted(set(decades[own.index]))]
        random = own[own["recipe"] == RANDOM]
        groups += [(f"random, {name}", same.index) for name, same in random.groupby("set", sort=False)]
        rows += [
            {
                "sensitivity": source,
                "proxies": _decade(decade),
                **_row(found.policies.loc[index], drawn.take(index, axis=1)),
            }
            for decade, index in groups
        ]
    return pd.DataFrame(rows)


def _row(policies: pd.DataFrame, drawn: np.ndarray) -> dict[str, Any]:
    """Figures of some policies, from their rows and their joint KL over resampled blocks [RESAMPLES, P]."""
    proxy, ratio = policies["proxy"].to_numpy(), policies["ratio"]
    correlation = low = high = None
    if len(policies) >= FEWEST:
        correlation = rank_correlation(proxy, policies["mean_kl"].to_numpy())
        low, high = percentile_interval(rank_correlations(proxy, drawn))
    low5, middle, high95 = ratio.quantile([0.05, 0.5, 0.95])
    return {
        "policies": len(policies),
        "smallest_proxy": proxy.min(),
        "largest_proxy": proxy.max(),
        "rank_correlation": correlation,
        "rank_correlation_low": low,
        "rank_correlation_high": high,
        "median_ratio": middle,
        "p5_ratio": low5,
        "p95_ratio": high95,
    }


def _decade(exponent: int | str) -> str:
    """A decade of the proxy as it is written; what is a text already stays one."""
    return exponent if isinstance(exponent, str) else f"{10.0**exponent:.0e} to {10.0 ** (exponent + 1):.0e}"


def _said(setting: tuple[object, ...]) -> str:
    window, execution, dtype, blocks = setting
    return f"{blocks} blocks of {window} ({execution}, {dtype})"
