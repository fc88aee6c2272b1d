"""The scheme that a model is advised to be stored with: by evidence on the model at hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import random_model, random_tokens

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.measure.calibration import calibrate
from kvstages.measure.gradients import window_projections
from kvstages.measure.screening import SCHEMES, advise
from kvstages.policies.budgets import Budget


@pytest.fixture(scope="module")
def tokens():
    return random_tokens(2, 16)


def biased_model(size: float):
    """A small model whose keys have a bias of that size on every channel."""
    model = random_model(2, 2, 16)
    for block in model.blocks:
        block.K.bias.data += size * torch.randn(block.K.bias.shape, generator=torch.Generator().manual_seed(3))
    return model


def test_large_key_biases_call_for_an_offset(tokens):
    advice = advise(biased_model(30.0), tokens, "5.5bits", probes=4)
    assert advice.choice.scheme in ("centred4", "debiased4", "lloyd4-k.mean+hadamard+mse+e4m3+first1")
    best = advice.choice.proxies[advice.choice.scheme]
    # What engines do, with or without a rotation, has a proxy beyond any use.
    assert all(advice.choice.proxies[name] > 5 * best for name in ("int4", "rotated4", "lloyd4-hadamard+mse"))
    assert advice.reasons[0].startswith(advice.choice.scheme)


def test_advice_is_a_policy_of_the_budget_and_its_proxy_is_the_sum_of_scores(tokens):
    model = random_model(2, 2, 16)
    choice = advise(model, tokens, "5.5bits", probes=4).choice
    grid = PrecisionGrid.of_record(choice.policy["precisions"])
    dense = choice.policy["bytes"]["bf16"]
    assert choice.policy["bytes"]["total"] <= Budget(5.5, "bits").of_cache(dense).amount
    model.calibrated = calibrate(model, tokens, 1 << 30)
    names = sorted({*grid.flat()} - {"bf16"})
    values, _ = window_projections(model, tokens, names, 4, 1 << 30)
    own = 0.0
    for side, rows in ((slice(0, 2), grid.keys), (slice(2, 4), grid.values)):
        for layer, row in enumerate(rows):
            for head, name in enumerate(row):
                if name != "bf16":
                    a = values[:, :, layer, side][:, :, head, names.index(name)].numpy()
                    own += float(np.square(a).mean() / (2 * tokens.shape[1]))
    assert choice.policy["proxy"] == pytest.approx(own, rel=1e-6)
    assert set(choice.proxies) == set(SCHEMES)
