"""Metrics against their definitions, written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstages.metrics import block_interval, divergence, log_normaliser, position_metrics, summarise


@settings(deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 40),
    spread=st.sampled_from([1e-6, 1e-3, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 999),
)
def test_divergence_is_the_kl_of_softmaxes_in_fp64(rows, width, spread, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    reference = (torch.randn(rows, width, generator=generator) * 5).to(dtype)
    logits = (reference + spread * torch.randn(rows, width, generator=generator)).to(dtype)
    before = logits.clone()
    log_p, log_q = torch.log_softmax(logits.double(), -1), torch.log_softmax(reference.double(), -1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert torch.allclose(divergence(logits, reference), expected, rtol=1e-9, atol=1e-13)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equal_logits_diverge_by_exactly_nothing(dtype):
    logits = (torch.randn(7, 11, 301) * 8).to(dtype)
    assert torch.equal(divergence(logits, logits.clone()), torch.zeros(7, 11, dtype=torch.float64))


def test_chunks_of_rows_do_not_change_a_bit(monkeypatch):
    logits, reference = torch.randn(30, 100), torch.randn(30, 100)
    whole = divergence(logits, reference), log_normaliser(logits)
    monkeypatch.setattr("kvstages.metrics.CHUNK_ELEMENTS", {"cpu": 250})
    assert torch.equal(divergence(logits, reference), whole[0]) and torch.equal(log_normaliser(logits), whole[1])


def test_position_metrics_and_their_summary_by_hand():
    reference = torch.tensor([[[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [[0.0, 0.0, 3.0], [1.0, 0.0, 0.0]]])
    logits = reference.clone()
    logits[0, 1] = torch.tensor([1.5, 1.0, 0.0])
    tokens = torch.tensor([[0, 1], [2, 0]])
    metrics = position_metrics(logits, reference, tokens)
    assert metrics["agrees"].tolist() == [[True, False], [True, True]]
    assert metrics["logit_deviation"].tolist() == [[0, 1.5], [0, 0]]
    assert metrics["cross_entropy"][0, 0] == pytest.approx(math.log(math.e**2 + 2) - 0)
    assert np.isnan(metrics["cross_entropy"][:, -1]).all()
    summary = summarise(metrics)
    assert summary["positions"] == 4 and summary["sequences"] == 2 and summary["targets"] == 2
    assert summary["agreement"] == 0.75
    assert summary["sequences_with_disagreement"] == 1 and summary["first_disagreement_mean"] == 1.0
    assert summary["max_logit_deviation"] == 1.5
    assert summary["max_kl"] == metrics["kl"][0, 1] == pytest.approx(4 * summary["mean_kl"])
    assert summary["perplexity"] == pytest.approx(math.exp(summary["cross_entropy"]))
    assert summary["cross_entropy"] == summary["reference_cross_entropy"]


def test_where_all_agree_there_is_no_first_disagreement():
    logits = torch.randn(2, 3, 5)
    summary = summarise(position_metrics(logits, logits, torch.zeros(2, 3, dtype=torch.long)))
    assert summary["first_disagreement_mean"] is None and summary["sequences_with_disagreement"] == 0
    assert summary["mean_kl"] == 0 == summary["mean_kl_high"] and summary["agreement"] == 1


def test_the_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        low, high = block_interval(1.0 + rng.normal(size=(32, 1)) + 0.1 * rng.normal(size=(32, 8)))
        covered += low <= 1.0 <= high
    assert 175 <= covered <= 199
