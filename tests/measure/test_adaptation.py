"""Adaptation: the noise, the batches, the loss and the arms."""

from __future__ import annotations

import itertools

import pytest
import torch
from models import random_model, random_tokens

from kvstages.measure.adaptation import NONE, Arm, NoiseCache, adapt, batches, losses
from kvstages.measure.metrics import divergence

MEMORY = 1 << 30
ARM = Arm(noise_bits=4, steps=6, batch=2, learning_rate=1e-3, weight_decay=0.01, clip=1.0, beta=1.0)


def test_the_noise_is_uniform_within_half_a_step_and_fresh():
    x = torch.randn(4, 3, 50, 16)
    cache = NoiseCache(4, torch.Generator().manual_seed(0))
    keys, values = cache.update(x, x, 0)
    reach = x.abs().amax(dim=-1, keepdim=True) / 14
    share = (keys - x) / reach
    assert share.abs().max() <= 1 + 1e-5 and share.abs().max() > 0.99
    assert abs(float(share.mean())) < 0.01 and float(share.var()) == pytest.approx(1 / 3, rel=0.03)
    assert not torch.equal(keys, values)
    assert not torch.equal(cache.update(x, x, 0)[0], keys)


def test_the_control_adds_nothing():
    x = torch.randn(2, 2, 5, 4)
    assert torch.equal(NoiseCache(None, torch.Generator()).update(x, x, 0)[0], x)


def test_batches_go_in_order_and_round_the_window():
    assert list(itertools.islice(batches(6, 4), 4)) == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5], [0, 1, 2, 3]]


def test_one_pass_over_the_published_window_is_14_steps():
    seen = [block for batch in itertools.islice(batches(56, 4), 14) for block in batch]
    assert seen == list(range(56))


def test_the_loss_is_cross_entropy_and_kl():
    logits, reference = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    tokens = torch.randint(7, (2, 5))
    following = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=NONE)
    cross_entropy, kl = losses(logits, following, reference)
    log_p = torch.log_softmax(logits, -1)
    by_hand = -torch.stack([log_p[b, t, tokens[b, t + 1]] for b in range(2) for t in range(4)]).mean()
    assert float(cross_entropy) / 8 == pytest.approx(float(by_hand), rel=1e-5)
    assert float(kl) / 10 == pytest.approx(float(divergence(logits, reference).mean()), rel=1e-5)


def test_a_seed_gives_the_same_weights_and_another_seed_others():
    tokens = random_tokens(5)
    found = []
    for seed in (1, 1, 2):
        model = random_model()
        curve = adapt(model, tokens, ARM, seed, MEMORY)
        found.append((curve, torch.cat([p.flatten() for p in model.parameters()])))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][1], found[2][1])
    assert len(found[0][0]) == 6 and set(found[0][0][0]) == {"loss", "cross_entropy", "kl", "gradient_norm"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_student_that_has_not_moved_and_hears_no_noise_is_the_reference_exactly(dtype):
    for batch in (1, 2, 3):
        control = adapt(random_model(dtype=dtype), random_tokens(4), Arm(None, 6, batch, 0.0, 0.0, 1.0, 1.0), 0, MEMORY)
        assert [step["kl"] for step in control] == [0.0] * 6


def test_training_lowers_the_loss():
    tokens = random_tokens(4)
    control = adapt(random_model(), tokens, Arm(None, 30, 4, 3e-3, 0.0, 1.0, 0.0), 0, MEMORY)
    assert control[-1]["loss"] < control[0]["loss"] - 0.1
    noise = adapt(random_model(), tokens, Arm(4, 1, 4, 1e-3, 0.0, 1.0, 1.0), 0, MEMORY)
    assert noise[0]["kl"] > 1e-6
    assert noise[0]["loss"] == pytest.approx(noise[0]["cross_entropy"] + noise[0]["kl"], rel=1e-6)


def test_a_loss_that_blows_up_is_an_error():
    tokens = random_tokens(4)
    with pytest.raises(ValueError, match=r"lower the learning rate|NaN or infinity"):
        adapt(random_model(), tokens, Arm(4, 50, 4, 1e30, 0.0, 1.0, 1.0), 0, MEMORY)


@pytest.mark.parametrize("noise_bits", [4, None])
def test_slices_of_positions_train_alike(noise_bits):
    tokens, arm = random_tokens(4), Arm(noise_bits, 6, 2, 1e-3, 0.01, 1.0, 1.0)
    curves, weights = [], []
    for memory in (MEMORY, 20_000, 1):
        model = random_model()
        curves.append(adapt(model, tokens, arm, 3, memory))
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    for curve, weight in zip(curves[1:], weights[1:], strict=True):
        # Single weights whose gradient is 0 but for rounding may go either way.
        assert (weight - weights[0]).abs().mean() < 1e-5
        for step, other in zip(curve, curves[0], strict=True):
            assert step == pytest.approx(other, rel=1e-3, abs=1e-6)
