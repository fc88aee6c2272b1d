"""Accuracy of scores from gradients: rank correlation and ratio to measured scores, by number of probes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstages.cache.precision_grid import PARTS
from kvstages.files.read import read_columns
from kvstages.scores.projections import Projections, read_projections
from kvstages.stats.bootstrap import medians
from kvstages.stats.correlation import rank_correlation, rank_correlations

if TYPE_CHECKING:
    import pandas as pd

KEY = ["layer", "head", "part", "precision"]
FEWEST_PROBES = 4
ACCURACY_COLUMNS = [
    "part", "precision", "probes", "units", "rank_correlation", "rank_correlation_low", "rank_correlation_high",
    "median_ratio", "median_ratio_low", "median_ratio_high", "p5_ratio", "p95_ratio", "probe_error"
]  # fmt: skip
RESAMPLES = 2000
# Scores from gradients part from measured ones below this rank correlation, or outside this range of the median ratio.
LEAST_CORRELATION, RATIOS = 0.9, (0.8, 1.25)


def scores(measured: Path, estimated: Path) -> pd.DataFrame:
    """Measured and estimated KL (nats) of each unit and precision that both sensitivity tables have, and the ratio.

    Units whose measured score is not above 0 are left out: they have no ratio. ValueError where the tables have no unit
    and precision in common.
    """
    own = read_columns(measured, ["layer", "head", "mean_kl", "below_floor"], ["part", "precision"])
    other = read_columns(estimated, ["layer", "head", "mean_kl", "standard_error"], ["part", "precision"])
    own = own.rename(columns={"mean_kl": "measured_kl"})
    other = other.rename(columns={"mean_kl": "estimated_kl"})
    table = own.merge(other, on=KEY, how="inner", validate="one_to_one")
    if table.empty:
        raise ValueError(f"{estimated}: no units and precisions in common with {measured}")
    table = table[table["measured_kl"] > 0].reset_index(drop=True)
    table = table.assign(ratio=table["estimated_kl"] / table["measured_kl"])
    return table[["part", "precision", "layer", "head", "measured_kl", "estimated_kl", "standard_error", "below_floor",
                  "ratio"]]  # fmt: skip


def accuracy(measured: Path, projections: Path) -> pd.DataFrame:
    """One row for each part, precision and number of probes (4, 8, ... and all), by sub-sampling the probes.

    Disjoint groups of so many probes make scores each: the rank correlation with the measured scores is the mean over
    the groups, quantiles of the ratio estimated / measured are over units and groups. Units below their floor, and
    those whose measured score is not above 0, do not count. ``probe_error``: relative standard error of a score that
    comes from the probes alone, on the same text; the median over the units. Rows of all probes have 95 % intervals of
    the rank correlation and of the median ratio, bootstrap over units. ValueError where the tables do not fit.
    """
    import pandas as pd

    found = read_projections(projections)
    table = read_columns(measured, ["layer", "head", "mean_kl", "below_floor"], ["part", "precision"])
    counts = [2**power for power in range(2, 32) if FEWEST_PROBES <= 2**power < len(found.values)]
    rows = []
    for part in PARTS:
        for index, precision in enumerate(found.precisions):
            own = table[(table["part"] == part) & (table["precision"] == precision) & (table["below_floor"] == 0)]
            own = own[own["mean_kl"] > 0]
            if len(own) < 3:
                continue
            layers, heads, kl = (own[name].to_numpy() for name in ("layer", "head", "mean_kl"))
            if layers.max() >= len(found.shape) or heads.max() >= found.heads:
                raise ValueError(f"{measured}: scores of another shape than {projections}")
            units = layers.astype(int), heads.astype(int)
            spread = probe_error(found, part)[..., index][units]
            for count in [*counts, len(found.values)]:
                groups = [
                    found.some(slice(start, start + count)).kl(part).mean(axis=0)[..., index][units]
                    for start in range(0, len(found.values) - count + 1, count)
                ]
                low, middle, high = np.quantile(np.stack(groups) / kl, [0.05, 0.5, 0.95])
                intervals = unit_intervals(groups[0], kl) if count == len(found.values) else {}
                rows.append(
                    {
                        **intervals,
                        "part": part,
                        "precision": precision,
                        "probes": count,
                        "units": len(own),
                        "rank_correlation": float(np.mean([rank_correlation(group, kl) for group in groups])),
                        "median_ratio": float(middle),
                        "p5_ratio": float(low),
                        "p95_ratio": float(high),
                        "probe_error": float(np.median(spread) / np.sqrt(count)),
                    }
                )
    return pd.DataFrame(rows, columns=ACCURACY_COLUMNS)


def unit_intervals(estimated: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    """95 % intervals of rank correlation and median ratio of scores [units], units drawn with replacement."""
    drawn = np.random.default_rng(0).integers(len(measured), size=(RESAMPLES, len(measured)))
    values = {
        "rank_correlation": rank_correlations(estimated[drawn], measured[drawn]),
        "median_ratio": medians(estimated[drawn] / measured[drawn]),
    }
    return {
        f"{name}_{end}": float(np.quantile(found, share))
        for name, found in values.items()
        for end, share in (("low", 0.025), ("high", 0.975))
    }


def parting(table: pd.DataFrame) -> list[str]:
    """The parts and precisions, such as ``kv int4``, at which scores from all probes part from measured ones."""
    own = table[table["probes"] == table["probes"].max()]
    apart = (own["rank_correlation"] < LEAST_CORRELATION) | ~own["median_ratio"].between(*RATIOS)
    return [f"{row.part} {row.precision}" for row in own[apart].itertuples()]


def probe_error(found: Projections, part: str) -> np.ndarray:
    """Relative standard error of a score by one probe a block, from the probes alone: [L, H, R]; NaN for one probe."""
    squares = np.square(found.parts(part))
    if len(squares) < 2:
        return np.full(squares.shape[2:], np.nan)
    mean = squares.mean(axis=(0, 1))
    error = np.sqrt(squares.var(axis=0, ddof=1).sum(axis=0)) / squares.shape[1]
    return np.divide(error, mean, out=np.zeros_like(mean), where=mean > 0)
