"""Predictions of the joint KL of policies that run none of them: plain sums, and sums with interactions.

Three predictions of a policy's mean KL on the calibration window, block by block: the sum of its units' measured scores
(the proxy), the same sum of scores from gradients, and ½ · E[(Σ_u a_u)²] with the interactions of all units, to second
order. Beside them the measured joint KL on the same blocks.

Axes: N policies, B blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstages.analysis.joint_table import RANDOM, Joint, read_joint
from kvstages.cache.precision_grid import PrecisionGrid, sides_of, units
from kvstages.files.read import read_columns
from kvstages.scores.columns import SWEEP_COLUMNS
from kvstages.scores.gather import read_table
from kvstages.scores.projections import Projections
from kvstages.stats.bootstrap import medians, percentile_interval, resampled_means
from kvstages.stats.correlation import centred_ranks, correlations_of_ranks

if TYPE_CHECKING:
    import pandas as pd

OF_POLICY = ["policy", "recipe", "unit", "precisions"]
PREDICTORS = {
    "proxy_kl": "sum of measured scores (the proxy)",
    "additive_kl": "sum of scores from gradients",
    "interaction_kl": "gradients, with interactions",
}
PREDICTION_COLUMNS = [*OF_POLICY, "bytes", "block", *PREDICTORS, "joint_kl"]
# Below this KL the quantization of policies is not what orders them: a joint run in FP32 flips BF16 roundings of its
# own in the keys and values of later layers, which no single score and no gradient counts.
LEAST_KL = 1e-4
SUMMARY_COLUMNS = [
    "window", "set", "predictor", "policies", "rank_correlation", "rank_correlation_low", "rank_correlation_high",
    "median_ratio", "median_ratio_low", "median_ratio_high", "p5_ratio", "p95_ratio",
]  # fmt: skip


def unit_scores(shards: Sequence[Path]) -> pd.DataFrame:
    """KL that each unit and precision adds on each block, from the sweeps of the layers: a row a block, a column for
    each (layer, head, part, precision). ValueError where a sweep lacks blocks of others."""
    import pandas as pd

    table = pd.concat([read_table(shard, SWEEP_COLUMNS) for shard in shards], ignore_index=True)
    table = table.assign(kl=table["mean_kl"] - table["base_kl"])
    found = table.pivot_table(index="block", columns=["layer", "head", "part", "precision"], values="kl")
    if found.isna().any(axis=None):
        raise ValueError("the sweeps of the layers differ in their blocks")
    return found


def proxy(scores: pd.DataFrame, grid: PrecisionGrid, unit: str) -> np.ndarray:
    """Sum of the scores of a policy's units on each block [B]; ValueError names a unit that was not measured."""
    sides = {"k": grid.keys, "v": grid.values}
    wanted = []
    for place in units(len(grid.keys), len(grid.keys[0]), unit):
        precision = sides[sides_of(place.part)[0]][place.layer][place.head]
        if precision != "bf16":
            wanted.append((*place, precision))
    missing = [key for key in wanted if key not in scores.columns]
    if missing:
        layer, head, part, precision = missing[0]
        raise ValueError(f"the sweeps have no score of layer {layer}, head {head}, part {part}, {precision}")
    return scores[wanted].sum(axis=1).to_numpy()


def predictions(
    found: Projections, scores: pd.DataFrame, policies: Sequence[Mapping[str, Any]], joint: Joint
) -> dict[str, list[Any]]:
    """Columns of a table by policy and block: every prediction beside the measured joint KL, in nats.

    ``policies`` are records with the names of ``joint``, which was measured on the window of the projections.
    ValueError where a policy was not measured, or the numbers of blocks differ.
    """
    measured = dict(zip(joint.policies["policy"], joint.metrics["mean_kl"], strict=True))
    blocks = {"projections": found.values.shape[1], "sweeps": len(scores), "joint": joint.metrics["mean_kl"].shape[1]}
    if len(set(blocks.values())) != 1:
        said = ", ".join(f"{count} of the {name}" for name, count in blocks.items())
        raise ValueError(f"blocks of different windows: {said}")
    rows = []
    for policy in policies:
        name, unit = policy["policy"], policy["unit"]
        if name not in measured:
            raise ValueError(f"policy {name}: its joint KL was not measured on the window of the projections")
        grid = PrecisionGrid.of_record(policy["precisions"])
        said = name, policy["recipe"], unit, " ".join(rung for rung in policy["ladder"] if rung != "bf16")
        values = proxy(scores, grid, unit), found.additive_kl(grid, unit), found.joint_kl(grid), measured[name]
        rows += [
            (*said, policy["bytes"]["total"], block, *map(float, row))
            for block, row in enumerate(zip(*values, strict=True))
        ]
    return {name: [row[index] for row in rows] for index, name in enumerate(PREDICTION_COLUMNS)}


def summarise(path: Path, held_out: Sequence[Path]) -> pd.DataFrame:
    """How each prediction orders policies, and its ratio to the joint KL, by window and set of policies.

    ``path``: the table of ``predictions``; ``held_out``: joint.csv files of the same policies on the held-out window.
    Rank correlation is Spearman's, ratios are joint / predicted over the policies; intervals are 95 % bootstrap
    intervals over blocks (those of the calibration window draw prediction and measurement together). All BF16 is left
    out, and so are policies alike in bytes and prediction.
    """
    import pandas as pd

    table = read_columns(path, ["bytes", "block", *PREDICTORS, "joint_kl"], OF_POLICY)
    policies = table.drop_duplicates("policy")[[*OF_POLICY, "bytes"]].reset_index(drop=True)
    columns = [*PREDICTORS, "joint_kl"]
    wide = {name: table.pivot(index="policy", columns="block", values=name) for name in columns}
    drawn = {
        name: np.stack(resampled_means(*own.loc[policies["policy"]].to_numpy()), axis=1) for name, own in wide.items()
    }
    means = {name: own.mean(axis=1).loc[policies["policy"]].to_numpy() for name, own in wide.items()}
    means["held_out_kl"], drawn["held_out_kl"] = _held_out(held_out, policies["policy"])
    policies = policies.assign(**means)
    kept = policies["joint_kl"].gt(0) & ~policies.duplicated(["bytes", *PREDICTORS])
    rows = []
    for window, joint in (("calibration", "joint_kl"), ("validation", "held_out_kl")):
        own = kept & policies[joint].notna()
        above = own & (policies["joint_kl"] >= LEAST_KL)
        sets = {"all": own, "1e-4 nats and more": above}
        for low, name in ((False, "of these, INT8 and INT4"), (True, "of these, INT3 and INT2 too")):
            sets[name] = above & (policies["precisions"].str.contains("int3|int2") == low)
        sets["random, equal bytes"] = own & (policies["recipe"] == RANDOM)
        for said, chosen in sets.items():
            index = np.flatnonzero(chosen)
            if len(index) < 3:
                continue
            known = {"window": window, "set": said, "policies": len(index)}
            rows += [known | row for row in _compared(policies, drawn, joint, index)]
    return pd.DataFrame(rows, columns=SUMMARY_COLUMNS)


def _held_out(paths: Sequence[Path], names: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Mean KL [N] and its values over resampled blocks [RESAMPLES, N] of policies by name; NaN where not measured."""
    found: dict[str, np.ndarray] = {}
    for path in paths:
        joint = read_joint(path)
        found.update(zip(joint.policies["policy"], joint.metrics["mean_kl"], strict=True))
    length = len(next(iter(found.values())))
    kl = np.stack([found.get(name, np.full(length, np.inf)) for name in names])
    drawn = np.stack(resampled_means(*kl), axis=1)
    return np.where(np.isfinite(kl[:, 0]), kl.mean(axis=1), np.nan), drawn


def _compared(
    policies: pd.DataFrame, drawn: Mapping[str, np.ndarray], joint: str, index: np.ndarray
) -> list[dict[str, Any]]:
    """Rank correlation and ratios of each prediction for one window, of some policies."""
    measured, measured_drawn = policies[joint].to_numpy()[index], drawn[joint].take(index, axis=1)
    ranks, ranks_drawn = centred_ranks(measured), centred_ranks(measured_drawn)
    rows = []
    for predictor in PREDICTORS:
        predicted = policies[predictor].to_numpy()[index]
        predicted_drawn = drawn[predictor].take(index, axis=1) if joint == "joint_kl" else predicted
        correlation = correlations_of_ranks(centred_ranks(predicted), ranks)
        correlations = correlations_of_ranks(centred_ranks(predicted_drawn), ranks_drawn)
        low, middle, high = np.quantile(measured / predicted, [0.05, 0.5, 0.95])
        ratios = medians(measured_drawn / predicted_drawn)
        row = {"predictor": predictor, "p5_ratio": float(low), "p95_ratio": float(high)}
        for name, value, values in (("rank_correlation", correlation, correlations), ("median_ratio", middle, ratios)):
            ends = percentile_interval(values)
            row |= {name: float(value), f"{name}_low": ends[0], f"{name}_high": ends[1]}
        rows.append(row)
    return rows
