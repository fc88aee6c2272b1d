"""Rounding to 16 bits before the cache, and the reference's rounding shared by its interventions."""

from __future__ import annotations

import pytest
import torch
from models import random_model, random_tokens

from kvstages.cache.one_pass import DenseBlockCache
from kvstages.cache.rounding import RecordedRounding, SharedRounding, storage_rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_comes_out_of_its_own_rounding_errors_as_bf16(dtype):
    both = torch.randn(3, 4, 7, 5, dtype=dtype) * 10.0 ** torch.randint(-5, 5, (3, 4, 7, 5))
    recorded = RecordedRounding(0)
    stored = recorded(both, 0, 0)
    assert torch.equal(stored, both.to(torch.bfloat16).to(dtype)) and recorded.stored is stored
    assert torch.equal(SharedRounding(recorded.errors)(both, 0, 0), stored)


def test_every_variant_gets_the_errors_of_its_block_and_position():
    both = torch.randn(3, 4, 7, 5)
    recorded = RecordedRounding(1)
    recorded(both, 2, 0)
    shared = SharedRounding(recorded.errors, same=1)
    interventions = torch.randn(2, 3, 4, 2, 5)
    found = shared(interventions.flatten(0, 1), 2, 3).unflatten(0, (2, 3))
    error = both.to(torch.bfloat16).float() - both
    assert torch.equal(found, interventions + error[:, :, 3:5])
    # Up to the layer that is the same the interventions are the reference: rounded by themselves.
    assert torch.equal(shared(both, 1, 0), storage_rounding(both, 1, 0))


def test_a_small_change_flips_no_rounding_of_later_layers():
    """Rounded anew, later layers' keys and values move by whole BF16 steps or not at all; shared, by what they do."""
    model, tokens = random_model(4, 2, 16), random_tokens()
    x = model.embed(tokens)
    change = 1e-4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    recorded = RecordedRounding(3)
    model.run_layers(x, DenseBlockCache(rounding=recorded))
    changes = []
    for rounding in (storage_rounding, SharedRounding(recorded.errors)):
        seen = {}

        def keep(both, layer, start, rounding=rounding, seen=seen):
            seen[layer] = rounding(both, layer, start)
            return seen[layer]

        model.run_layers(x + change, DenseBlockCache(rounding=keep))
        changes.append((seen[3] - recorded.stored).abs())
    anew, shared = changes
    assert (anew == 0).float().mean() > 0.5 and anew.max() > 1e-3
    assert (shared == 0).float().mean() < 0.2 and shared.max() < 1e-3
