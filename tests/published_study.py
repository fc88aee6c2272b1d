"""A study's result files, made of the published figures in the project's formats; what was not published is made up.

Made up, with a fixed seed where random: the floors, positions.csv, intervals and errors, KL in reverse, Δp, the
percentiles that were not published, the control arm, the curves of the later seeds, and the comparison.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from gappy import write_gappy
from made_up import write_comparison, write_continuations, write_domains, write_export, write_screening

from kvstages.analysis.prediction import PREDICTION_COLUMNS, PREDICTORS
from kvstages.analysis.published import (
    SHIPPED,
    published_adaptation,
    published_policies,
    published_sensitivities,
    published_validation,
)
from kvstages.cache.precision_grid import PARTS, PrecisionGrid, average_payload_bits, byte_record, tensor_counts
from kvstages.files.atomic import write_json, write_tensors
from kvstages.policies.names import split_policy
from kvstages.scores.projections import TENSOR, Projections, record_of, sensitivity_columns
from kvstages.stats.summary import summarise

PUBLISHED = SHIPPED / "gpt2-nano"
MEASURED = {"execution": "token-by-token", "compute_dtype": "bfloat16"}
SENSITIVITY = Path("scores", "measured-bfloat16.csv")
BLOCKS, POSITIONS = 32, 64
# 38 of the published INT8 scores and 11 of the INT4 scores lie below.
FLOOR = 6e-5
HEAD_WIDTH = 64
BYTES_PER_HEAD = {"bf16": 64 * 256, "int8": 64 * 132, "int4": 64 * 68}


def write_study(folder: Path, layers: int = 12, heads: int = 8, budgets: tuple[str, ...] | None = None) -> Path:
    """Write sensitivity/, policies/ and adaptation/ of the first layers and heads, and comparison/ and frontier/.

    Returns ``folder``.
    """
    scores = {
        precision: np.array(grid)[:layers, :heads] for precision, grid in published_sensitivities(PUBLISHED).items()
    }
    rows = [
        {"layer": layer, "head": head, "part": "kv", "precision": precision,
         "mean_kl": float(scores[precision][layer, head]), "standard_error": 1e-6, "blocks": 8, "floor_kl": FLOOR,
         "bf16_step_kl": 2 * FLOOR, "below_floor": int(scores[precision][layer, head] < FLOOR),
         "reconstruction_error": 1e-5, "source": SENSITIVITY.stem, **MEASURED}
        for layer in range(layers) for head in range(heads) for precision in ("int8", "int4")
    ]  # fmt: skip
    write_gappy(folder / SENSITIVITY, pd.DataFrame(rows))
    validation = published_validation(PUBLISHED)
    policies = published_policies(PUBLISHED)
    for number, (policy, metrics) in enumerate(validation.items()):
        if budgets is None or split_policy(policy)[1] in (None, *budgets):
            _write_policy(folder / "policies" / policy, policy, policies[policy], metrics, scores, number)
    adaptation = published_adaptation(PUBLISHED)
    for seed, adapted in adaptation.items():
        # Without noise nothing is random, so the control has the first seed only.
        for arm, control in (("published", "published-control"), ("published-control", ""))[: 2 if seed == 1337 else 1]:
            place = folder / "adaptation" / arm / f"seed-{seed}"
            curve = pd.DataFrame(adaptation[1337]["curve"]).assign(gradient_norm=1.0)
            curve["kl"] *= np.random.default_rng(seed).uniform(0.9, 1.1, len(curve))
            if not control:
                curve["kl"] = np.linspace(0, 1e-5, len(curve))
            write_gappy(place / "curve.csv", curve)
            write_adapted(place, arm, control, adapted["policies"], seed)
    original = {policy: validation[policy] for policy in ("greedy-0.01", "bf16")}
    write_adapted(folder / "adaptation" / "original" / "seed-0", "", "", original, 0)
    write_grid(folder / "adaptation" / "published")
    write_comparison(folder)
    write_export(folder)
    write_continuations(folder)
    write_domains(folder)
    write_gradients(folder, scores)
    write_screening(folder / "screening")
    return folder


def write_adapted(place: Path, arm: str, control: str, policies: dict[str, dict], seed: int) -> None:
    """evaluation.csv of published means, and training.json: made up are single blocks and what a control has."""
    parts = []
    for policy, metrics in policies.items():
        random = np.random.default_rng([seed, len(arm)])
        around = random.lognormal(-0.02, 0.2, BLOCKS)
        part = pd.DataFrame({"policy": policy, "block": np.arange(BLOCKS), "mean_kl": metrics["mean_kl"] * around})
        part["agreement"] = metrics["agreement"]
        dense = policy == "bf16"
        part["own_kl"] = 0.0 if dense else part["mean_kl"]
        part["own_agreement"] = 1.0 if dense else metrics["agreement"]
        part["cross_entropy"] = metrics["cross_entropy"]
        parts.append(part.assign(document=[f"text-{block // 2}" for block in range(BLOCKS)]))
    table = pd.concat(parts).assign(window="validation", **MEASURED)
    write_gappy(place / "evaluation.csv", table)
    if arm:
        write_json(place / "training.json", {
            "arm": arm, "control": control, "weights_dtype": "bfloat16", "order": "sequential",
            "cache": "noise" if control else "exact",
            "policy": "int4" if control else "", "steps": 50, "learning_rate": 1e-6, "beta": 1.0, "weight_decay": 0.01,
            "clip": 1.0, "batch": 4, "seed": seed, "window": "adaptation", "tokens_seen": 12800, "weights": 44_000_000,
            "changed_share": 0.013, "relative_change": 1e-5, "mean_change": 1e-7, "largest_change": 1e-4,
        })  # fmt: skip


def write_grid(place: Path) -> None:
    """settings.csv, made up: two numbers of steps, the second chosen."""
    rows = [
        {"learning_rate": rate, "beta": 1.0, "steps": steps, "mean_kl": kl, "agreement": 0.98, "own_kl": kl,
         "own_agreement": 0.98, "cross_entropy": 2.7, "bf16_mean_kl": 1e-4, "bf16_cross_entropy": 2.69,
         "policy": "int4", "window": "reserved", "seed": 1337, "chosen": int(steps == 100)}
        for rate, steps, kl in ((0.0, 0, 0.003), (1e-6, 50, 0.002), (1e-6, 100, 0.001))
    ]  # fmt: skip
    write_gappy(place / "settings.csv", pd.DataFrame(rows))


def adapted_arguments(study: Path) -> list[str]:
    """Inputs of the table and the figure of what adaptation did."""
    records = sorted(map(str, study.glob("adaptation/*/*/training.json")))
    return [
        *sorted(map(str, study.glob("adaptation/*/*/evaluation.csv"))),
        *(word for path in records for word in ("--records", path)),
    ]


def write_gradients(folder: Path, scores: dict[str, np.ndarray]) -> None:
    """Scores from gradients around the published ones, their projections, and predictions of the frontier."""
    random = np.random.default_rng(0)
    size = np.sqrt(64 * np.stack(list(scores.values()), axis=-1))
    values = random.normal(size=(8, 4, len(size), 2 * size.shape[1], 2)) * np.concatenate((size, size), axis=1)
    found = Projections(values, tuple(scores), 64)
    error = {(part, precision): np.full((*size.shape[:2], 4), 1e-5) for part in PARTS for precision in scores}
    write_gappy(folder / "scores" / "gradients.csv", sensitivity_columns(found, error))
    write_tensors(
        folder / "gradients" / "projections.safetensors", {TENSOR: values}, record_of(found.precisions, 64, "w")
    )
    joint = pd.read_csv(folder / "frontier" / "joint.csv")
    joint = joint[joint["block"] < 4].rename(columns={"mean_kl": "joint_kl"})
    for name in PREDICTORS:
        joint[name] = joint["joint_kl"] * random.lognormal(0.0, 0.2, len(joint))
    write_gappy(folder / "gradients" / "predictions.csv", joint[PREDICTION_COLUMNS])


def figure_arguments(name: str, study: Path) -> list[str]:
    """Inputs of a figure, as the workflow gives them."""
    every = sorted(map(str, study.glob("policies/*/evaluation.json")))
    greedy = sorted(map(str, study.glob("policies/greedy-*/policy.json")))
    return {
        **comparison_arguments(study),
        "floor": [str(study / SENSITIVITY)],
        "sensitivity": [str(study / SENSITIVITY)],
        "gradients": [
            str(study / SENSITIVITY),
            "--estimated",
            str(study / "scores" / "gradients.csv"),
        ],
        "generation": [str(study / "generation" / "continuations.csv")],
        "allocation": greedy,
        "greedy-path": greedy,
        "storage-kl": every,
        "kl-by-position": every,
        "kl-distribution": every,
        "adaptation-curves": sorted(map(str, study.glob("adaptation/*/*/curve.csv"))),
        "adaptation": adapted_arguments(study),
    }[name]


def comparison_arguments(study: Path) -> dict[str, list[str]]:
    """Inputs of the figures, and of the tables, of a comparison."""
    own = sorted(map(str, study.glob("comparison/*/joint.csv")))
    every = [path for one in own for path in (one, one.replace("joint.csv", "bfloat16/joint.csv"))]
    frontier = [str(study / "frontier" / place / "joint.csv") for place in (".", "bfloat16")]
    return {
        "equal-bytes": every,
        "frontier": frontier,
        "frontier-reduction": frontier,
        "proxy-joint": [*own, frontier[0]],
        "screening": screening_arguments(study / "screening"),
        "domains": sorted(map(str, study.glob("domains/*/*/joint.csv"))),
    }


def screening_arguments(folder: Path) -> list[str]:
    """Inputs of the figure and of the table of quantizer schemes."""
    files = {"--policies": "policies.json", "--scores": "scores.csv"}
    return [
        str(folder / "joint.csv"),
        *(word for option, name in files.items() for word in (option, str(folder / name))),
    ]


def table_arguments(name: str, study: Path) -> list[str]:
    """Inputs of a table, as the workflow gives them."""
    return {
        **comparison_arguments(study),
        "results": sorted(map(str, study.glob("policies/*/evaluation.json"))),
        "divergence": sorted(map(str, study.glob("policies/*/evaluation.json"))),
        "adaptation": adapted_arguments(study),
        "adaptation-settings": sorted(map(str, study.glob("adaptation/*/settings.csv"))),
        "gradients": [
            str(study / SENSITIVITY),
            "--projections", str(study / "gradients" / "projections.safetensors"),
        ],
        "prediction": [
            str(study / "gradients" / "predictions.csv"), "--held-out", str(study / "frontier" / "joint.csv"),
        ],
        "second-order": [str(study / "screening" / "checks.csv")],
        "engines": [str(study / "export" / "joint.csv")],
        "generation": [str(study / "generation" / "continuations.csv")],
        "sensitivity-summary": [
            *(str(study / "policies" / policy / "evaluation.json") for policy in ("int8", "int4")),
            "--sensitivity", str(study / SENSITIVITY),
        ],
    }[name]  # fmt: skip


def _write_policy(place: Path, policy: str, published: dict, metrics: dict, scores: dict, number: int) -> None:
    layers, heads = scores["int8"].shape
    precisions = [list(layer[:heads]) for layer in published["precisions"].keys[:layers]]
    grid = PrecisionGrid(precisions, precisions)
    sizes = byte_record(grid, (HEAD_WIDTH, HEAD_WIDTH), POSITIONS)
    compression = sizes["bf16"] / sizes["total"]
    allocator, text = split_policy(policy)
    budget = None if text is None else float(text)
    steps = _greedy_steps(scores, budget) if budget is not None else _greedy_steps(scores, -1.0)
    write_gappy(place / "steps.csv", steps)
    write_json(place / "policy.json", {
        "policy": policy, "allocator": allocator, "sensitivity": "published", "unit": "head",
        "budget": budget, "budget_in": None if budget is None else "nats", "seed": None,
        "precisions": {"keys": precisions, "values": precisions},
        "tensors": tensor_counts(grid), "proxy": published["proxy"], "proxy_steps": len(steps),
        "average_payload_bits": average_payload_bits(grid, (HEAD_WIDTH, HEAD_WIDTH)), "tokens": POSITIONS,
        "bytes": sizes, "compression": compression,
    })  # fmt: skip
    record = _evaluation(policy, metrics, published["proxy"])
    record |= {"total_bytes": sizes["total"], "bf16_bytes": sizes["bf16"], "compression": compression}
    write_json(place / "evaluation.json", record)
    random = np.random.default_rng(0 if policy not in ("bf16", "int8", "greedy-0.01") else number + 1)
    kl = metrics["mean_kl"] * random.lognormal(-0.5, 1.0, (BLOCKS, POSITIONS)) * np.linspace(0.3, 1.5, POSITIONS)
    kl[:, 0] = 0.0
    table = pd.DataFrame({
        "block": np.repeat(np.arange(BLOCKS), POSITIONS), "position": np.tile(np.arange(POSITIONS), BLOCKS),
        "kl": kl.ravel(), "reverse_kl": kl.ravel(), "agrees": 1, "cross_entropy": 2.7, "reference_cross_entropy": 2.7,
        "delta_p": 0.01, "logit_deviation": 0.1,
    })  # fmt: skip
    write_gappy(place / "positions.csv", table)


def _evaluation(policy: str, metrics: dict, proxy: float | None) -> dict:
    """An evaluation.json of published metrics; what was not published is made up."""
    known = {key: value for key, value in metrics.items() if key != "tokens_per_second"}
    return _made_up_figures(metrics["mean_kl"]) | known | {
        "policy": policy, "window": "validation", **MEASURED, "device": "cpu", "threads": 1,
        "sequences": BLOCKS, "positions": BLOCKS * POSITIONS, "targets": BLOCKS * (POSITIONS - 1),
        "mean_kl_low": metrics["mean_kl"] * 0.92, "mean_kl_high": metrics["mean_kl"] * 1.09,
        "agreement_low": metrics["agreement"] * 0.99, "agreement_high": min(1.0, metrics["agreement"] * 1.005),
        "reference_cross_entropy": 2.744030029054672, "proxy": proxy, "tokens_per_cache": 64,
        "reconstruction_bytes": 4096,
    }  # fmt: skip


@cache
def _made_up_figures(mean_kl: float) -> dict[str, float]:
    random = np.random.default_rng(0)
    kl = mean_kl * random.lognormal(-0.5, 1.0, (BLOCKS, POSITIONS))
    reference = random.gamma(2.0, 1.37, (BLOCKS, POSITIONS))
    own = np.abs(reference + np.sqrt(mean_kl) * random.normal(size=reference.shape))
    own[:, -1] = reference[:, -1] = np.nan
    return summarise({
        "kl": kl, "reverse_kl": 1.1 * kl, "agrees": random.random(kl.shape) > mean_kl, "logit_deviation": kl,
        "cross_entropy": own, "reference_cross_entropy": reference, "delta_p": np.exp(-own) - np.exp(-reference),
    })  # fmt: skip


def _greedy_steps(scores: dict, budget: float) -> pd.DataFrame:
    """steps.csv of the greedy allocator (docs/method.md, "Allocation"), written as plainly as possible."""
    layers, heads = scores["int8"].shape
    cells = [(layer, head) for layer in range(layers) for head in range(heads)]
    state, proxy = dict.fromkeys(cells, "bf16"), 0.0
    total = BYTES_PER_HEAD["bf16"] * len(cells)
    steps = []
    while True:
        moves = []
        for cell in cells:
            if state[cell] == "bf16":
                moves.append((scores["int8"][cell], "bf16", "int8", cell))
            elif state[cell] == "int8":
                moves.append((max(scores["int4"][cell] - scores["int8"][cell], 0.0), "int8", "int4", cell))
        fitting = [move for move in moves if proxy + move[0] <= budget]
        if not fitting:
            break
        added, old, new, cell = min(
            fitting, key=lambda move: (move[0] / (BYTES_PER_HEAD[move[1]] - BYTES_PER_HEAD[move[2]]), move[3])
        )
        saved = BYTES_PER_HEAD[old] - BYTES_PER_HEAD[new]
        state[cell], proxy, total = new, proxy + added, total - saved
        steps.append((len(steps) + 1, *cell, "kv", old, new, float(added), saved, proxy, total))
    columns = ["step", "layer", "head", "part", "from", "to", "added_kl", "bytes_saved", "proxy", "bytes"]
    return pd.DataFrame(steps, columns=columns)
