"""What an adaptation did: each arm against its control and against the original model, as a difference of differences.

The *effect* on a measure is [arm quantized − arm BF16] − [control quantized − control BF16]: what quantization adds to
it under the arm, less what it adds under the control. It is paired by blocks, and its interval covers other seeds and
other documents (``stats.crossed``). For KL from the original model the effect is still mixed with the drift of
training; ``own`` compares each model with its own BF16 cache, where BF16 is 0 and no drift is left.
Axes: S seeds, B blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstages.analysis.arms import arm_and_seed
from kvstages.analysis.entries import Input
from kvstages.files.read import read_columns, read_record
from kvstages.stats.crossed import crossed_mean

if TYPE_CHECKING:
    import pandas as pd

    from kvstages.stats.bootstrap import Estimate

# Files that the figure and the table of these numbers read.
INPUTS = {
    "evaluations": Input("adapted_evaluation_files", "ARM/seed-SEED/evaluation.csv", several=True),
    "records": Input("training_record_files", "FILE", "training.json of an adapted model.", several=True),
}
ORIGINAL, DENSE = "original", "bf16"
METRICS = ["mean_kl", "agreement", "own_kl", "own_agreement", "cross_entropy"]
NAMES = ["weights_dtype", "order", "cache", "policy"]
NUMBERS = ["steps", "learning_rate", "beta", "tokens_seen"]
CHANGES = ["changed_share", "relative_change", "mean_change", "largest_change"]
# What is compared: which measure, and whether the BF16 cache's is taken off, or is what is compared.
EFFECTS = {
    "kl_effect": ("mean_kl", "added"),
    "own_effect": ("own_kl", "added"),
    "entropy_effect": ("cross_entropy", "added"),
    "kl_difference": ("mean_kl", "quantized"),
    "entropy_difference": ("cross_entropy", "quantized"),
    "drift_difference": ("mean_kl", "dense"),
    "dense_entropy_difference": ("cross_entropy", "dense"),
}
LESS, MORE, UNKNOWN = "less", "more", "not established"


@dataclass(frozen=True)
class Model:
    """An arm's models: ``metrics`` {policy: {metric: [S, B]}}, seeds in their order, and the records of training (none
    of the original model)."""

    seeds: list[int]
    metrics: dict[str, dict[str, np.ndarray]]
    records: list[Mapping[str, Any]]

    def part(self, metric: str, policy: str, kind: str) -> np.ndarray:
        """A metric [S, B] of a policy, of the BF16 cache, or of the policy less that of the BF16 cache."""
        quantized, dense = (self.metrics[name][metric] for name in (policy, DENSE))
        return {"quantized": quantized, "dense": dense, "added": quantized - dense}[kind]

    def setting(self, name: str) -> Any:
        return self.records[0][name] if self.records else None

    def change(self, name: str) -> float | None:
        """Mean over the seeds of a figure of how far the weights moved."""
        return float(np.mean([record[name] for record in self.records])) if self.records else None


def read_models(
    evaluations: Sequence[Path], records: Sequence[Path]
) -> tuple[dict[str, Model], list[str] | None, pd.DataFrame]:
    """The arms by name in the order given, the document of each block, and the rows of the first table.

    ValueError where tables hold other policies or blocks than the first, or the original model's is missing.
    """
    keys = ["arm", "control", *NAMES, *NUMBERS, *CHANGES]
    of_training = {arm_and_seed(path): read_record(path, keys) for path in records}
    texts = ["policy", "window", "execution", "compute_dtype"]
    first: pd.DataFrame | None = None
    found: dict[str, dict[int, dict[str, dict[str, np.ndarray]]]] = {}
    for path in evaluations:
        table = read_columns(path, ["block", *METRICS], [*texts, "document"])
        if first is None:
            first = table
        same = ["policy", "block", "window"]
        if len(table) != len(first) or not (table[same].values == first[same].values).all():
            raise ValueError(f"{path}: other policies or blocks than {evaluations[0]}, expected the same")
        arm, seed = arm_and_seed(path)
        found.setdefault(arm, {})[seed] = {
            policy: {name: rows[name].to_numpy() for name in METRICS}
            for policy, rows in table.groupby("policy", sort=False)
        }
    if first is None or ORIGINAL not in found or DENSE not in found[ORIGINAL][min(found[ORIGINAL])]:
        raise ValueError("adapted models without the original one, or without the policy bf16: expected both")
    models = {}
    for arm, seeds in found.items():
        order = sorted(seeds)
        policies = next(iter(seeds.values()))
        metrics = {
            policy: {name: np.stack([seeds[seed][policy][name] for seed in order]) for name in METRICS}
            for policy in policies
        }
        missing = [seed for seed in order if arm != ORIGINAL and (arm, seed) not in of_training]
        if missing:
            raise ValueError(f"arm {arm}, seed {missing[0]}: no training.json, expected one for each adapted model")
        models[arm] = Model(order, metrics, [of_training[arm, seed] for seed in order if arm != ORIGINAL])
    rows = first[first["policy"] == first["policy"].iloc[0]]
    documents = None if rows["document"].isna().any() else list(rows["document"])
    return models, documents, first


def effects(models: Mapping[str, Model], documents: Sequence[str] | None) -> pd.DataFrame:
    """Rows by arm, what it is compared with (its control, then the original model) and quantized policy.

    Of each of ``EFFECTS`` the value, the ends of its 95 % interval over seeds and documents (blocks where documents are
    not known), and what both models have of each measure. ``removed`` and ``own_removed`` are the shares of what
    quantization adds to the KL that the arm has less of; ``finding`` says what the interval of ``kl_effect`` says.
    """
    import pandas as pd

    rows = []
    for arm, model in models.items():
        if arm == ORIGINAL:
            continue
        control = model.setting("control")
        for against in [*([control] if control else []), ORIGINAL]:
            if against not in models:
                raise ValueError(f"arm {arm}: compared with {against}, which is not among {', '.join(models)}")
            rows += [
                _row(arm, model, against, models[against], policy, documents)
                for policy in model.metrics
                if policy != DENSE
            ]
    return pd.DataFrame(rows)


def _row(
    arm: str, model: Model, against: str, other: Model, policy: str, documents: Sequence[str] | None
) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": arm, "against": against, "policy": policy, "seeds": len(model.seeds)}
    for prefix, each in (("", model), ("against_", other)):
        row |= {f"{prefix}{name}": float(each.metrics[policy][name].mean()) for name in METRICS}
        row |= {
            f"{prefix}bf16_{name}": float(each.metrics[DENSE][name].mean()) for name in ("mean_kl", "cross_entropy")
        }
    for name, (metric, kind) in EFFECTS.items():
        estimate = difference(model, other, metric, policy, kind, documents)
        row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    added = row["against_mean_kl"] - row["against_bf16_mean_kl"]
    row["removed"] = -row["kl_effect"] / added if added > 0 else None
    row["own_removed"] = -row["own_effect"] / row["against_own_kl"] if row["against_own_kl"] > 0 else None
    row["finding"] = LESS if row["kl_effect_high"] < 0 else MORE if row["kl_effect_low"] > 0 else UNKNOWN
    row |= {name: model.setting(name) for name in NAMES[:-1]}
    row |= {"trained_policy": model.setting("policy") or None}
    row |= {name: model.setting(name) for name in NUMBERS}
    return row | {name: model.change(name) for name in CHANGES}


def difference(
    model: Model, other: Model, metric: str, policy: str, kind: str, documents: Sequence[str] | None
) -> Estimate:
    """Mean of arm minus control over seeds and blocks, and its interval.

    Models of the same seeds are paired by them; a control in which nothing is drawn has one model for all seeds.
    ValueError where both have several seeds, and not the same.
    """
    if len(other.seeds) > 1 and len(model.seeds) > 1 and other.seeds != model.seeds:
        raise ValueError(f"seeds {model.seeds} against seeds {other.seeds}, expected the same or a single one")
    return crossed_mean(model.part(metric, policy, kind) - other.part(metric, policy, kind), documents)


def trained_for(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that the sentence speaks of: arms against their control, at the first policy and at that which they were
    trained for."""
    first = table["policy"].iloc[0]
    own = (table["policy"] == table["trained_policy"]) | (table["policy"] == first)
    return table[(table["against"] != ORIGINAL) & own]


def sentence(table: pd.DataFrame) -> str:
    """One sentence that says what the intervals of ``kl_effect`` say, of each arm against its control; empty where no
    arm has one. It follows from ``finding`` alone."""
    rows = trained_for(table)
    if not len(rows):
        return ""
    verbs = {LESS: "lowers", MORE: "raises", UNKNOWN: "has no established effect on"}
    parts = []
    for finding, verb in verbs.items():
        those = [
            f"{row.arm} at {row.policy} ({_signed(row.kl_effect)} nats [{_signed(row.kl_effect_low)}, "
            f"{_signed(row.kl_effect_high)}])"
            for row in rows[rows["finding"] == finding].itertuples()
        ]
        if those:
            what = "it" if parts else "what quantization adds to the KL"
            parts.append(f"{verb} {what} for {_and(those)}")
    return f"Beside a control of the same steps, training with the cache's noise or quantizer {'; '.join(parts)}."


def _signed(value: float) -> str:
    return f"{value:+.2g}".replace("-", "−")


def _and(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
