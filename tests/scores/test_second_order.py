"""Scores from gradients against measured ones: what is sampled, what is off, what is marked and replaced."""

from __future__ import annotations

import math

import pytest
from made_up import scheme_scores
from models import random_model, random_tokens

from kvstages.measure.second_order import measure_units
from kvstages.measure.setting import Setting
from kvstages.measure.sweep import sweep_layer
from kvstages.scores.second_order import (
    KEY,
    Measured,
    check,
    checkable,
    is_off,
    keys_of,
    sample,
    threshold,
)
from kvstages.tables.second_order import make, warnings


@pytest.fixture(scope="module")
def table():
    return scheme_scores()


def test_a_sample_is_even_on_a_logarithmic_axis(table):
    rows = checkable(table, ["int8", "int4", "int2"])
    assert set(rows["part"]) == {"k", "v"} and rows["mean_kl"].is_monotonic_decreasing
    assert rows["mean_kl"].min() >= 1e-4 * rows["mean_kl"].max()
    found = sample(rows, 5)
    assert len(found) == 5
    assert found["mean_kl"].iloc[[0, -1]].tolist() == rows["mean_kl"].iloc[[0, -1]].tolist()
    logs = [math.log(score) for score in found["mean_kl"]]
    even = [logs[0] + (logs[-1] - logs[0]) * step / 4 for step in range(5)]
    # The nearest that there is: no row that was left out is nearer to a place.
    left = rows[~rows.index.isin(found.index)]["mean_kl"].map(math.log)
    for own, place in zip(logs, even, strict=True):
        assert (left - place).abs().min() >= abs(own - place) - 1e-12
    assert len(sample(rows, 1000)) == len(rows)


def test_off_is_beyond_a_factor_and_beyond_the_errors():
    assert is_off(1.0, 0.1, Measured(2.0, 0.1)) and is_off(1.0, 0.1, Measured(0.5, 0.05))
    assert not is_off(1.0, 0.1, Measured(1.4, 0.01)) and not is_off(1.0, 0.6, Measured(2.0, 0.1))
    assert is_off(1.0, math.nan, Measured(2.0, math.nan))


def test_the_threshold_is_where_half_are_off():
    scores = [8.0, 4.0, 2.0, 1.0, 0.5]
    assert threshold(scores, [True, False, True, False, False]) == 2.0
    assert threshold(scores, [False, False, True, False, False]) == math.inf
    assert threshold(scores, [False] * 5) == math.inf


def test_marked_scores_are_measured_and_used(table):
    asked = []

    def measure(keys):
        asked.append(keys)
        own = dict(zip(keys_of(table), table["mean_kl"], strict=True))
        # Twice what the score says, from 0.0001 nats up.
        return {key: Measured(own[key] * (2 if own[key] > 1e-4 else 1), own[key] / 20) for key in keys}

    wanted = ["int8", "int4", "int3", "int2"]
    scores, checks = check(table, wanted, 12, 3, measure)
    # No class of schemes that keep the first token is among them: all of the sample is of the other.
    assert len(asked[0]) == 12 and set(checks["first_exact"]) == {0}
    limit = checks["threshold"].iloc[0]
    beyond = table[table["part"].isin(["k", "v"]) & table["precision"].isin(wanted) & (table["mean_kl"] >= limit)]
    assert limit > 1e-4 and len(beyond) > 3
    # The largest that the sample did not have are measured, and no more.
    more = beyond.sort_values("mean_kl", ascending=False)
    assert asked[1] == [key for key in keys_of(more) if key not in asked[0]][:3]
    assert set(keys_of(checks)) == {*asked[0], *keys_of(beyond)}
    assert checks["measured_kl"].isna().sum() == len(set(keys_of(beyond)) - {*asked[0], *asked[1]})
    before = dict(zip(keys_of(table), table["mean_kl"], strict=True))
    after = dict(zip(keys_of(scores), scores["mean_kl"], strict=True))
    assert set(scores["source"]) == {"gradients-checked"}
    for key in after:
        if key[2] != "kv":
            assert (after[key] != before[key]) == (key in asked[1] or (key in asked[0] and before[key] > 1e-4)), key
    layer, head, _, name = asked[1][0]
    parts = sum(after[layer, head, side, name] - before[layer, head, side, name] for side in "kv")
    assert after[layer, head, "kv", name] == pytest.approx(before[layer, head, "kv", name] + parts)


def test_scores_that_hold_mark_nothing(table):
    own = dict(zip(keys_of(table), table["mean_kl"], strict=True))
    scores, checks = check(
        table, ["int4", "centred4"], 8, 8, lambda keys: {key: Measured(own[key], 0.0) for key in keys}
    )
    assert set(checks["why"]) == {"sample"} and checks["threshold"].isna().all()
    assert checks.groupby("first_exact").size().to_dict() == {0: 4, 1: 4}
    assert scores["mean_kl"].equals(table["mean_kl"])


def test_the_table_warns_where_a_model_leaves_the_regime(table, tmp_path):
    from gappy import write_gappy

    own = dict(zip(keys_of(table), table["mean_kl"], strict=True))
    for factor in (1.0, 3.0):
        measured = lambda keys, factor=factor: {key: Measured(factor * own[key], 0.0) for key in keys}  # noqa: E731
        _, checks = check(table, ["int4"], 8, 0, measured)
        write_gappy(tmp_path / "checks.csv", checks)
        found, page = make(tmp_path / "checks.csv")
        assert ("leaves the second-order regime" in page) == bool(warnings(found)) == (factor > 1)
    assert found["marked"].item() == len(checks) and found["median_ratio"].item() == pytest.approx(3.0)


def test_single_units_are_measured_as_a_sweep_measures_them():
    model, tokens = random_model(2, 2, 8), random_tokens(2, 8)
    setting = Setting("one-pass", "float32")
    keys = [(1, 0, "k", "int4"), (0, 1, "v", "int2"), (1, 1, "k", "int4"), (1, 1, "v", "rotated3")]
    found = measure_units(model, tokens, keys, setting, 1 << 28)
    assert list(KEY) == ["layer", "head", "part", "precision"] and set(found) == set(keys)
    for layer in (0, 1):
        changes = [("k", "int4"), ("v", "int2"), ("v", "rotated3")]
        swept = sweep_layer(model, tokens, layer, changes, setting, 1 << 28)
        for at, head, part, name in keys:
            if at == layer:
                kl = swept.kl[part, name][head]
                assert found[at, head, part, name].kl == pytest.approx(float(kl.mean()), rel=1e-5)
    only = sweep_layer(model, tokens, 1, [("k", "int4")], setting, 1 << 28, only={(1, ("k", "int4"))})
    assert only.kl["k", "int4"][0].isnan().all() and only.kl["k", "int4"][1].isfinite().all()
