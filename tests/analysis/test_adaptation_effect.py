"""Differences of differences: worked by hand, what the sentence says, coverage of a simulated effect, bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from gappy import write_gappy

from kvstages.analysis.adaptation_effect import (
    DENSE,
    EFFECTS,
    LESS,
    METRICS,
    MORE,
    ORIGINAL,
    UNKNOWN,
    Model,
    difference,
    effects,
    read_models,
    sentence,
)
from kvstages.files.atomic import write_json

RECORD = {
    "arm": "a", "control": "c", "weights_dtype": "float32", "order": "shuffled", "cache": "straight-through",
    "policy": "int3", "steps": 5, "learning_rate": 1e-4, "beta": 1.0, "tokens_seen": 100, "changed_share": 0.5,
    "relative_change": 0.1, "mean_change": 0.1, "largest_change": 1.0,
}  # fmt: skip
LABELS = [f"text-{block // 2}" for block in range(32)]


def model(quantized: np.ndarray, dense: np.ndarray, **record: object) -> Model:
    """KL [S, B] under int3 and BF16; everything else is the same."""
    metrics = {
        policy: {name: kl if name in ("mean_kl", "own_kl") else np.ones_like(kl) for name in METRICS}
        for policy, kl in (("int3", quantized), (DENSE, dense))
    }
    return Model(list(range(len(quantized))), metrics, [{**RECORD, **record}] * len(quantized))


def test_by_hand():
    shape = (1, 4)
    models = {
        ORIGINAL: Model([0], model(np.full(shape, 0.5), np.zeros(shape)).metrics, []),
        "c": model(np.full(shape, 0.6), np.full(shape, 0.2), control="", cache="exact", policy=""),
        "a": model(np.full(shape, 0.4), np.full(shape, 0.1)),
    }
    table = effects(models, None).set_index(["arm", "against"])
    row = table.loc[("a", "c")]
    # (0.4 − 0.1) − (0.6 − 0.2), a quarter of what quantization adds to the control.
    assert row["kl_effect"] == pytest.approx(-0.1) and row["removed"] == pytest.approx(0.25)
    assert row["kl_difference"] == pytest.approx(-0.2) and row["drift_difference"] == pytest.approx(-0.1)
    assert table.loc[("a", ORIGINAL), "kl_effect"] == pytest.approx(-0.2)
    assert ("c", ORIGINAL) in table.index and len(table) == 3 and row["finding"] == LESS


def simulated(random: np.random.Generator, effect: float, seeds: int = 5, paired: bool = False) -> dict[str, Model]:
    """An arm whose quantized KL is less by ``effect``, with parts of seeds, documents and both, and a common drift.

    ``paired``: the control has the same seeds, and each seed's order moves both alike."""
    documents = np.repeat(random.normal(0.0, 0.3, 16), 2)
    both = random.lognormal(-1.0, 0.5, (1, 32))
    noise = 0.02 * random.normal(size=(seeds, 1)) + 0.05 * random.normal(size=(seeds, 32))
    drift = random.lognormal(-3.0, 0.3, (seeds, 32))
    quantized = both + drift + noise + effect * (1 + documents)
    order = 0.1 * random.normal(size=(seeds, 1)) if paired else np.zeros((1, 1))
    control = both + order + 0.02 * random.normal(size=(len(order), 32))
    return {
        ORIGINAL: Model([0], model(both, 0 * both).metrics, []),
        "a": model(quantized + order, drift),
        "c": model(control, 0 * control, control=""),
    }


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize(("effect", "paired"), [(0.0, False), (-0.1, False), (-0.1, True)])
def test_the_interval_holds_a_simulated_effect(effect, paired):
    random, held, trials = np.random.default_rng(1), 0, 400
    metric, kind = EFFECTS["kl_effect"]
    for _ in range(trials):
        models = simulated(random, effect, paired=paired)
        estimate = difference(models["a"], models["c"], metric, "int3", kind, LABELS)
        held += estimate.low <= effect <= estimate.high
    # 95 % less three standard errors.
    assert held / trials >= 0.915


@pytest.mark.parametrize(("effect", "finding"), [(-0.2, LESS), (0.0, UNKNOWN), (0.2, MORE)])
def test_the_sentence_follows_from_the_interval(effect, finding):
    table = effects(simulated(np.random.default_rng(3), effect), LABELS)
    assert table["finding"].iloc[0] == finding
    said = sentence(table)
    verb = {LESS: "lowers", MORE: "raises", UNKNOWN: "has no established effect on"}[finding]
    assert f"training with the cache's noise or quantizer {verb} what quantization adds to the KL for a at int3" in said
    assert said.count("a at int3") == 1 and said.endswith(".")
    assert sentence(table[table["against"] == ORIGINAL]) == ""


def test_what_a_seed_does_to_arm_and_control_alike_leaves_no_trace():
    random = np.random.default_rng(5)
    control = random.lognormal(size=(5, 32))
    models = {
        ORIGINAL: Model([0], model(control[:1], 0 * control[:1]).metrics, []),
        "a": model(control - 0.1, 0 * control),
        "c": model(control, 0 * control, control=""),
    }
    row = effects(models, LABELS).iloc[0]
    assert [row["kl_effect"], row["kl_effect_low"], row["kl_effect_high"]] == pytest.approx([-0.1] * 3)
    models["c"] = Model([7, *models["c"].seeds[1:]], models["c"].metrics, models["c"].records)
    with pytest.raises(ValueError, match="expected the same or a single one"):
        effects(models, LABELS)


def test_no_effect_of_measuring_the_same_model_twice():
    same = simulated(np.random.default_rng(4), 0.0)["c"]
    table = effects({ORIGINAL: same, "c": same, "a": Model(same.seeds, same.metrics, [RECORD])}, LABELS)
    assert (table["kl_effect"] == 0).all() and (table["finding"] == UNKNOWN).all()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for arm, seed in ((ORIGINAL, 0), ("a", 7)):
        rows = [
            {"policy": policy, "block": block, **dict.fromkeys(METRICS, 0.5), "document": None, "window": "validation",
             "execution": "one-pass", "compute_dtype": "float32"}
            for policy in ("int3", DENSE) for block in range(4)
        ]  # fmt: skip
        write_gappy(tmp_path / arm / f"seed-{seed}" / "evaluation.csv", pd.DataFrame(rows))
    write_json(tmp_path / "a" / "seed-7" / "training.json", {**RECORD, "control": ""})
    return tmp_path


def test_files_are_read_without_documents(folder):
    models, documents, first = read_models(*given(folder))
    assert list(models) == [ORIGINAL, "a"] and documents is None and len(first) == 8
    assert models["a"].seeds == [7] and models["a"].metrics["int3"]["mean_kl"].shape == (1, 4)


def given(folder: Path) -> tuple[list[Path], list[Path]]:
    return [folder / ORIGINAL / "seed-0/evaluation.csv", folder / "a/seed-7/evaluation.csv"], sorted(
        folder.glob("*/*/training.json")
    )


def test_what_is_missing_or_differs_is_named(folder):
    evaluations, records = given(folder)
    with pytest.raises(ValueError, match=r"arm a, seed 7: no training\.json"):
        read_models(evaluations, [])
    with pytest.raises(ValueError, match="without the original one"):
        read_models(evaluations[1:], records)
    write_gappy(evaluations[1], pd.read_csv(evaluations[1]).iloc[:-1])
    with pytest.raises(ValueError, match=r"a/seed-7/evaluation\.csv: other policies or blocks than"):
        read_models(evaluations, records)
    write_json(records[0], {**RECORD, "control": "nobody"})
    models = {ORIGINAL: model(np.ones((1, 4)), np.ones((1, 4))), "a": model(np.ones((1, 4)), np.ones((1, 4)))}
    with pytest.raises(ValueError, match="arm a: compared with c, which is not among original, a"):
        effects(models, None)
