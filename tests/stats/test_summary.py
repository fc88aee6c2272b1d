"""A policy's figures from its positions, by hand, and the ways in which they cannot be computed."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from kvstages.stats.summary import summarise


def metrics(blocks: int = 4, length: int = 5) -> dict[str, np.ndarray]:
    """Made-up position metrics [B, T]."""
    random = np.random.default_rng(2)
    own, reference = random.gamma(2.0, 1.0, (2, blocks, length))
    own[:, -1] = reference[:, -1] = np.nan
    kl = random.exponential(size=(blocks, length))
    return {
        "kl": kl, "reverse_kl": 2 * kl, "agrees": random.random(kl.shape) > 0.4, "logit_deviation": kl + 1,
        "cross_entropy": own, "reference_cross_entropy": reference, "delta_p": np.exp(-own) - np.exp(-reference),
    }  # fmt: skip


def test_figures_by_hand():
    positions = metrics()
    figures = summarise(positions)
    kl, delta = positions["kl"], positions["delta_p"][:, :-1]
    assert (figures["sequences"], figures["positions"], figures["targets"]) == (4, 20, 16)
    assert figures["mean_kl"] == pytest.approx(kl.mean()) and figures["mean_reverse_kl"] == pytest.approx(2 * kl.mean())
    assert figures["mean_kl_error"] == pytest.approx(kl.mean(axis=1).std(ddof=1) / 2)
    for name, percent in (("p99_9", 99.9), ("p99", 99), ("p95", 95), ("p90", 90), ("p50", 50), ("p10", 10), ("p5", 5),
                          ("p1", 1), ("p0_1", 0.1), ("max", 100), ("min", 0)):  # fmt: skip
        assert figures[f"{name}_kl"] == pytest.approx(np.percentile(kl, percent))
        assert figures[f"{name}_reverse_kl"] == pytest.approx(np.percentile(2 * kl, percent))
        assert figures[f"{name}_delta_p"] == pytest.approx(np.percentile(delta, percent))
    assert figures["mean_delta_p"] == pytest.approx(delta.mean())
    assert figures["rms_delta_p"] == pytest.approx(math.sqrt((delta**2).mean()))
    square = (delta**2).mean(axis=1)
    assert figures["rms_delta_p_error"] == pytest.approx(square.std(ddof=1) / 2 / (2 * math.sqrt(square.mean())))
    assert figures["agreement"] == pytest.approx(positions["agrees"].mean())
    assert figures["max_logit_deviation"] == kl.max() + 1
    first = [list(~row).index(True) for row in positions["agrees"] if not row.all()]
    assert figures["first_disagreement_mean"] == np.mean(first)
    assert figures["sequences_with_disagreement"] == len(first) > 0


def test_perplexities_are_paired():
    positions = metrics()
    figures = summarise(positions)
    own, reference = positions["cross_entropy"][:, :-1], positions["reference_cross_entropy"][:, :-1]
    ratio, gaps = math.exp(own.mean() - reference.mean()), (own - reference).mean(axis=1)
    assert figures["perplexity"] == pytest.approx(math.exp(own.mean()))
    assert figures["perplexity_ratio"] == pytest.approx(ratio)
    assert figures["perplexity_ratio"] == pytest.approx(figures["perplexity"] / figures["reference_perplexity"])
    assert figures["log_perplexity_ratio_error"] == pytest.approx(gaps.std(ddof=1) / 2)
    assert figures["perplexity_ratio_error"] == pytest.approx(ratio * gaps.std(ddof=1) / 2)
    assert figures["perplexity_difference"] == pytest.approx(figures["perplexity"] - figures["reference_perplexity"])
    assert figures["cross_entropy_correlation"] == pytest.approx(np.corrcoef(own.ravel(), reference.ravel())[0, 1])
    own[:], reference[:] = reference + 0.1, reference.copy()
    figures = summarise(positions)
    for end in ("", "_low", "_high"):
        assert figures[f"perplexity_ratio{end}"] == pytest.approx(math.exp(0.1))
        assert figures[f"log_perplexity_ratio{end}"] == pytest.approx(0.1)
    assert figures["perplexity_high"] > 1.1 * figures["perplexity"]
    difference = math.exp(0.1) - 1
    assert figures["perplexity_difference_error"] == pytest.approx(difference * figures["reference_perplexity_error"])
    assert figures["perplexity_difference_low"] == pytest.approx(difference * figures["reference_perplexity_low"])


@pytest.mark.parametrize("name", ["mean_kl", "mean_reverse_kl", "agreement", "perplexity", "reference_perplexity",
                                  "perplexity_difference", "mean_delta_p", "rms_delta_p"])  # fmt: skip
def test_intervals_hold_their_figure(name):
    figures = summarise(metrics(12, 20))
    assert figures[f"{name}_low"] < figures[name] < figures[f"{name}_high"]
    width = figures[f"{name}_high"] - figures[f"{name}_low"]
    assert 2.5 < width / figures[f"{name}_error"] < 4.5


def test_a_policy_that_changes_nothing():
    positions = metrics()
    for name in ("kl", "reverse_kl", "logit_deviation", "delta_p"):
        positions[name] = positions[name] * 0
    positions["agrees"][:], positions["cross_entropy"] = True, positions["reference_cross_entropy"]
    figures = summarise(positions)
    assert figures["first_disagreement_mean"] is None and figures["sequences_with_disagreement"] == 0
    assert figures["perplexity_ratio"] == figures["agreement"] == 1
    assert figures["perplexity_difference"] == 0 == figures["perplexity_difference_high"]
    assert figures["cross_entropy_correlation"] == pytest.approx(1)
    for name in ("mean_kl", "mean_kl_error", "mean_kl_high", "max_reverse_kl", "rms_delta_p", "rms_delta_p_error"):
        assert figures[name] == 0


def test_a_single_block_has_no_error_and_is_still_json():
    figures = summarise(metrics(1))
    assert all((value is None) == name.endswith("_error") for name, value in figures.items())
    json.dumps(figures, allow_nan=False)


def test_what_is_no_number_is_named():
    positions = metrics()
    positions["kl"][2, 3] = math.nan
    with pytest.raises(ValueError, match="kl is nan in block 2, position 3, expected a finite number"):
        summarise(positions)
    positions = metrics()
    positions["delta_p"][1, 0] = math.nan
    with pytest.raises(ValueError, match="delta_p is nan in block 1, position 0"):
        summarise(positions)
    positions = metrics()
    positions["reference_cross_entropy"] += 800
    with pytest.raises(ValueError, match=r"reference_cross_entropy: 80\d\.\d nats, a perplexity that FP64 cannot hold"):
        summarise(positions)
