"""Metrics against their definitions, written out."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstages.measure.metrics import (
    CLOSE,
    _close_divergence,
    argmax,
    divergence,
    divergences_and_normalizer,
    normalizer,
    position_metrics,
    target_logits,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_argmax_is_the_first_of_the_largest(dtype):
    logits = torch.randint(-3, 3, (4, 50, 7), generator=torch.Generator().manual_seed(0)).to(dtype)
    first = [row.index(max(row)) for row in logits.flatten(0, 1).tolist()]
    assert argmax(logits.requires_grad_()).flatten().tolist() == first


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


def test_logits_that_a_gradient_flows_to_are_measured_too():
    logits = torch.randn(2, 9, requires_grad=True)
    for measured in (divergence(logits, torch.zeros(2, 9)), normalizer(logits).total):
        assert not measured.requires_grad and measured.shape == (2,)


def exact_divergence(logits, reference):
    """D(p ‖ q) of each row with 50 digits, as floats: the logits are taken as the exact numbers that they are."""
    result = []
    with localcontext() as context:
        context.prec, context.Emin, context.Emax = 50, -(10**6), 10**6
        for own, other in zip(logits.double().tolist(), reference.double().tolist(), strict=True):
            a, b = ([Decimal(value) - Decimal(max(row)) for value in row] for row in (own, other))
            weights = [value.exp() for value in a]
            total, other_total = sum(weights), sum(value.exp() for value in b)
            gap = sum(weight * (x - y) for weight, x, y in zip(weights, a, b, strict=True)) / total
            result.append(float(gap - (total / other_total).ln()))
    return np.array(result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.5, 4.0, 12.0])
def test_error_of_the_divergence(dtype, scale):
    """KL of about 1e-9 to 1e-15, where INT8's smallest scores lie; and larger ones to a few roundings."""
    generator = torch.Generator().manual_seed(5)
    for spread, tolerance in ((5e-5, 1e-15), (0.05, 1e-15), (3.0, 2e-14)):
        reference = (scale * torch.randn(4, 100, generator=generator)).to(dtype)
        logits = (reference + spread * torch.randn(4, 100, generator=generator)).to(dtype)
        if dtype == torch.bfloat16 and spread < 1e-3:
            # One BF16 step in a few logits: the smallest change that there is.
            logits[:, :3] = (reference.view(torch.int16) + 1).view(dtype)[:, :3]
        error = np.abs(divergence(logits, reference).numpy() - exact_divergence(logits, reference))
        assert error.max() < tolerance, (spread, error.max())


@settings(deadline=None, max_examples=200)
@given(
    width=st.integers(2, 60),
    changed=st.integers(1, 60),
    scale=st.sampled_from([0.0, 0.5, 8.0, 60.0, 800.0]),
    ulps=st.integers(1, 2**20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_a_divergence_is_never_negative_and_right_however_small(width, changed, scale, ulps, dtype, seed):
    """Neighbouring logits: the KL goes down to 1e-17 and below, and is known to nine digits all the same."""
    generator = torch.Generator().manual_seed(seed)
    reference = (scale * torch.randn(1, width, generator=generator)).to(dtype)
    integer = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    logits = reference.clone()
    moved = slice(0, min(changed, width))
    logits[:, moved] = (
        reference[:, moved].view(integer) ^ (1 + (ulps - 1) % (2**20 if dtype == torch.float32 else 4))
    ).view(dtype)
    measured, expected = divergence(logits, reference).numpy(), exact_divergence(logits, reference)
    assert (measured >= 0).all()
    assert np.allclose(measured, expected, rtol=1e-6, atol=1e-40)
    if (expected < CLOSE / 2).all():
        assert np.allclose(measured, expected, rtol=1e-9, atol=1e-40)
    assert (measured > 0).all() or (expected < 1e-40).all()


def test_logits_that_differ_by_a_constant_are_one_distribution():
    logits = torch.tensor([[1.0, 2.0, -3.0], [0.5, 0.25, 8.0]])
    assert divergence(logits, logits + 4).tolist() == [0, 0]


def test_both_formulas_agree_where_one_hands_over_to_the_other():
    generator = torch.Generator().manual_seed(0)
    reference = 3 * torch.randn(200, 64, generator=generator, dtype=torch.float64)
    logits = reference + 1e-4 * torch.randn(200, 64, generator=generator, dtype=torch.float64)
    measured = divergence(logits, reference)
    assert (measured < CLOSE).any() and (measured > CLOSE).any()
    assert torch.allclose(
        measured, _close_divergence(logits, reference, torch.empty(4, 200, 64, dtype=torch.float64)), rtol=1e-6, atol=0
    )


def test_a_token_that_the_policy_rules_out_is_no_overflow():
    """Its weight is below FP64 and the ratio of its probabilities above: the product is the reference's probability."""
    logits, reference = torch.tensor([[0.0, -800.0], [0.0, -20.0]]).unsqueeze(1)
    assert divergence(logits, reference).item() == pytest.approx(math.log1p(math.exp(-20)), rel=1e-9)


def test_one_exponential_gives_the_divergences_and_the_cross_entropy():
    logits, reference, truth = torch.randn(3, 3, 5, 40, generator=torch.Generator().manual_seed(0)).unbind()
    tokens = torch.randint(40, (3, 5), generator=torch.Generator().manual_seed(1))
    found, own = divergences_and_normalizer(logits, [(each, normalizer(each)) for each in (reference, truth)])
    for kl, other in zip(found, (reference, truth), strict=True):
        assert torch.equal(kl, divergence(logits, other))
    expected = -torch.log_softmax(logits.double(), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(own.cross_entropy(target_logits(logits, tokens)), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_logits_are_too_large(dtype):
    """Rows that leave FP64's exponent, in either or both; equal ones still measure 0."""
    rows = [
        ([2e4, 0.0, -2e4], [-2e4, 0.0, 2e4]),
        ([1e4, 1e4 + 64, 1e4 - 64], [-1e4, -1e4 + 64, -1e4 - 128]),
        ([-900.0, -901.0, -902.0], [1.0, 0.0, -1.0]),
        ([3e38, -3e38, 0.0], [-3e38, 3e38, 0.0]),
        ([3e38, 0.0, -3e38], [3e38, 0.0, 1.0]),
        ([700.0, -700.0, 0.0], [-700.0, 700.0, 0.0]),
        ([1.0, -800.0, -3e38], [1.0, 2.0, -3e38]),
    ]
    logits, reference = (torch.tensor(side, dtype=torch.float64).to(dtype) for side in zip(*rows, strict=True))
    measured = divergence(logits, reference)
    assert torch.isfinite(measured).all()
    assert np.allclose(measured, exact_divergence(logits, reference), rtol=1e-14, atol=1e-15)
    assert torch.equal(divergence(logits, logits.clone()), torch.zeros(len(rows), dtype=torch.float64))
    measured = position_metrics(logits, reference, torch.zeros(len(rows), dtype=torch.long))
    expected = torch.log_softmax(logits.double(), -1)[:, 0]
    assert np.allclose(measured["cross_entropy"], -expected, rtol=1e-15, atol=1e-15)
    assert all(np.isfinite(values).all() for values in measured.values())


def test_the_largest_doubles_give_a_number_too():
    logits = torch.tensor([[1.7e308, -1.7e308, 0.0], [-1.7e308, 0.0, 0.0]], dtype=torch.float64)
    assert divergence(logits, logits.flip(1)).tolist() == [1.7e308, 8.5e307]


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, 80.0, -500.0, 720.0, -1e4, 1e4, 3e38, -3e38]), min_size=4, max_size=4))
def test_a_row_is_measured_the_same_beside_any_other(values):
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 2, 3, generator=generator).unbind()
    alone = divergence(logits[:1], reference[:1])
    logits[1, :2], reference[1, :2] = torch.tensor(values).view(2, 2).unbind()
    both = divergence(logits, reference)
    assert torch.equal(both[:1], alone)
    assert np.allclose(both, exact_divergence(logits, reference), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("width", "chunk"), [(100, 250), (40_000, 40_000)])
def test_chunks_of_rows_do_not_change_a_bit(width, chunk, monkeypatch):
    """Nor do threads that share a row: long rows come one at a time, and torch would split a single one."""
    logits, reference = torch.randn(2, 5, width).unbind()
    monkeypatch.setattr("kvstages.measure.metrics.CHUNK_ELEMENTS", {"cpu": 10 * width})
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = divergence(logits, reference), normalizer(logits).total
        monkeypatch.setattr("kvstages.measure.metrics.CHUNK_ELEMENTS", {"cpu": chunk})
        parts = divergence(logits, reference), normalizer(logits).total
        given = divergence(logits, reference, normalizer(reference))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    assert torch.equal(given, whole[0])


def test_a_sure_prediction_costs_nothing_and_never_less():
    logits = torch.zeros(200, 4)
    logits[:, 1] = torch.linspace(20, 90, 200)
    entropy = position_metrics(logits, logits, torch.ones(200, dtype=torch.long))["cross_entropy"]
    assert (entropy >= 0).all() and entropy[0] == pytest.approx(3 * math.exp(-20)) and entropy[-1] == 0


def test_position_metrics_by_hand():
    reference = torch.tensor([[[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [[0.0, 0.0, 3.0], [1.0, 0.0, 0.0]]])
    logits = reference.clone()
    logits[0, 0] = torch.tensor([1.0, 0.0, 0.0])
    logits[0, 1] = torch.tensor([1.5, 1.0, 0.0])
    following = torch.tensor([[0, -1], [1, -1]])
    metrics = position_metrics(logits, reference, following)
    assert metrics["agrees"].tolist() == [[True, False], [True, True]]
    assert metrics["logit_deviation"].tolist() == [[1.0, 1.5], [0, 0]]
    own, other = math.e / (math.e + 2), math.e**2 / (math.e**2 + 2)
    assert metrics["cross_entropy"][0, 0] == pytest.approx(-math.log(own))
    assert metrics["reference_cross_entropy"][0, 0] == pytest.approx(-math.log(other))
    assert metrics["delta_p"][0, 0] == pytest.approx(own - other) and metrics["delta_p"][1, 0] == 0
    for name in ("cross_entropy", "reference_cross_entropy", "delta_p"):
        assert np.isnan(metrics[name]).tolist() == [[False, True], [False, True]]
    rest, others = (1 - own) / 2, (1 - other) / 2
    assert metrics["kl"][0, 0] == pytest.approx(own * math.log(own / other) + 2 * rest * math.log(rest / others))
    assert metrics["reverse_kl"][0, 0] == pytest.approx(
        other * math.log(other / own) + 2 * others * math.log(others / rest)
    )
    assert metrics["kl"][1].tolist() == metrics["reverse_kl"][1].tolist() == [0, 0]
