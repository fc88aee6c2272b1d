"""What schemes need to know of a model; and a model with large key biases, which nothing but an offset rescues."""

from __future__ import annotations

import pytest
import torch
from models import random_model, random_tokens

from kvstages.cache.one_pass import BlockCache
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.rounding import storage_rounding
from kvstages.files.atomic import write_tensors
from kvstages.measure.calibration import calibrate, calibrated, read_contexts, write_contexts
from kvstages.measure.execution import dense_grid, window_logits
from kvstages.measure.setting import Setting

MEMORY = 1 << 30


def biased_model():
    """A decoder whose keys have a few large biases in every layer, as those of some families have.

    Attention hardly feels them: without rotary embedding a constant in every key adds the same to every score."""
    model = random_model(3, 4, 16, vocab=40)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for block in model.blocks:
            channels = torch.randperm(64, generator=generator)[:12]
            block.K.bias[channels] += 60 * torch.randn(12, generator=generator)
    return model


def mean_kl(model, tokens, name: str) -> float:
    """Mean KL(policy || reference) of a precision everywhere."""
    setting = Setting("one-pass", "float32")
    reference, own = (
        torch.cat([logits for _, logits in window_logits(model, tokens, grid, setting, MEMORY)])
        .double()
        .log_softmax(dim=-1)
        for grid in (dense_grid(model), PrecisionGrid.uniform(3, 4, name))
    )
    return float((own.exp() * (own - reference)).sum(dim=-1).mean())


def test_large_key_biases_break_integers_rotated_or_not_and_an_offset_rescues_them():
    tokens = random_tokens(6, 24, vocab=40)
    healthy, biased = random_model(3, 4, 16, vocab=40), biased_model()
    biased.calibrated = calibrate(biased, random_tokens(6, 24, vocab=40, seed=9), MEMORY)
    before = mean_kl(healthy, tokens, "int4")
    for name in ("int4", "rotated4", "lloyd4-hadamard+mse"):
        assert mean_kl(biased, tokens, name) > 10 * before
    # At the same bytes a token; the bias needs no calibration, the mean other text.
    for name in ("int4-k.mean", "int4-k.bias", "lloyd4-k.mean+hadamard+mse", "centred4", "debiased4"):
        assert mean_kl(biased, tokens, name) < 2 * before
    assert mean_kl(biased, tokens, "int8") > 20 * mean_kl(biased, tokens, "int8-k.bias")


def test_a_model_that_was_not_calibrated_knows_its_biases():
    model, tokens = biased_model(), random_tokens(2, 8, vocab=40)
    assert torch.equal(model.contexts[1, "k"].bias, model.blocks[1].K.bias.view(4, 16))
    assert mean_kl(model, tokens, "debiased4") < 0.1 * mean_kl(model, tokens, "int4")
    with pytest.raises(ValueError, match="layer 0, keys in centred4: the mean is not known"):
        mean_kl(model, tokens, "centred4")


def test_means_and_magnitudes_are_those_of_what_the_reference_stores():
    model, tokens = random_model(2, 2, 8), random_tokens(5, 12)
    kept = {}

    class Kept(BlockCache):
        def update(self, keys, values, layer):
            kept[layer] = [storage_rounding(x, layer, 0) for x in (keys, values)]
            return super().update(keys, values, layer)

    model(tokens, Kept(dense_grid(model)))
    contexts = calibrate(model, tokens, MEMORY)
    for layer, both in kept.items():
        for side, x in zip("kv", both, strict=True):
            found = contexts[layer, side]
            assert torch.allclose(found.mean, x[:, :, 4:].mean(dim=(0, 2)), atol=1e-6)
            assert torch.equal(found.maximum, x.abs().max().expand(2))
    # A few blocks at a time give the same.
    sliced = calibrate(model, tokens, 1)
    assert all(torch.allclose(sliced[key].mean, contexts[key].mean, atol=1e-6) for key in contexts)


def test_a_calibration_is_read_back_and_belongs_to_its_model(tmp_path):
    model = random_model(2, 2, 8)
    path = tmp_path / "calibration.safetensors"
    contexts = calibrate(model, random_tokens(2, 12), MEMORY)
    write_contexts(path, contexts, "calibration")
    found = read_contexts(path)
    for key, context in contexts.items():
        assert torch.equal(found[key].mean, context.mean) and torch.equal(found[key].maximum, context.maximum)
        assert found[key].rotary is None
        assert (found[key].bias is None) == (key[1] == "v")
    first = path.read_bytes()
    write_contexts(path, contexts, "calibration")
    assert path.read_bytes() == first
    assert calibrated(model, None).calibrated is None
    assert torch.equal(calibrated(model, path).contexts[1, "k"].mean, contexts[1, "k"].mean)
    with pytest.raises(ValueError, match=r"n.safetensors: layers, heads and width \(2, 2, 8\), .* \(3, 2, 8\)"):
        calibrated(random_model(3, 2, 8), path)
    write_tensors(path, {"logits": torch.zeros(2)})
    with pytest.raises(ValueError, match="tensors logits, expected a file of the stage calibrate"):
        read_contexts(path)


def test_a_rotary_embedding_is_kept_with_the_calibration(tmp_path):
    from kvstages.cache.offsets import Context, Rotary

    frequencies = torch.tensor([1.0, 0.1], dtype=torch.float64)
    vector = torch.ones(2, 5)
    contexts = {
        (0, "k"): Context(vector, None, torch.ones(2), Rotary(frequencies, True, 1.25)),
        (0, "v"): Context(vector, None, torch.ones(2)),
    }
    write_contexts(tmp_path / "c.safetensors", contexts, "calibration")
    found = read_contexts(tmp_path / "c.safetensors")
    assert torch.equal(found[0, "k"].rotary.frequencies, frequencies) and found[0, "v"].rotary is None
    assert (found[0, "k"].rotary.interleaved, found[0, "k"].rotary.factor) == (True, 1.25)
