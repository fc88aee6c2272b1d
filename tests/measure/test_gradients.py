"""Gradients of the whole model against the exact second-order term, and against the measured sweep."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from models import random_model, random_tokens
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvstages.cache.interventions import read_back
from kvstages.cache.one_pass import BlockCache
from kvstages.cache.precision_grid import PARTS, PrecisionGrid
from kvstages.cache.precisions import QUANTIZED
from kvstages.cache.rounding import storage_rounding
from kvstages.cache.schemes import precision
from kvstages.measure.execution import dense_grid
from kvstages.measure.gradients import GradientCache, Scores, Timing, draws, graph_bytes, window_projections
from kvstages.measure.setting import Setting
from kvstages.measure.sweep import sweep_layer
from kvstages.scores.columns import changes
from kvstages.scores.projections import Projections
from kvstages.stats.correlation import rank_correlation

MEMORY = 1 << 30
LAYERS, HEADS = 2, 2
# The relative error of a score by P probes is near √(2 / P).
PROBES = 800
PLAIN = (Timing(),)


def model_and_tokens():
    return random_model(LAYERS, HEADS, 5, vocab=17, dtype=torch.float64), random_tokens(2, 7, vocab=17)


@pytest.fixture(scope="module")
def studied():
    """The decoder, its tokens, what each layer's cache holds of them [L, B, 2H, T, D], and projections of the published
    precisions."""
    model, tokens = model_and_tokens()
    values, _ = window_projections(model, tokens, QUANTIZED, PROBES, MEMORY)
    return model, tokens, stored(model, tokens), Projections(values.numpy(), QUANTIZED, tokens.shape[1])


class Shifted(BlockCache):
    """The reference, with something added to what positions read back that read it as it is stored under a timing:
    {layer: [B, 2H, T, D]}."""

    def __init__(self, model, added, timing=PLAIN[0]):
        super().__init__(dense_grid(model))
        self.added, self.timing = added, timing

    def mask(self, new, layer):
        stored = self.timing.mask(new)
        return torch.cat((stored, torch.ones(new, new, dtype=torch.bool).tril() & ~stored), dim=1)

    def update(self, keys, values, layer):
        both = torch.cat((keys, values), dim=1)
        both = both + (storage_rounding(both, layer, 0) - both).detach()
        seen = torch.cat((both + self.added[layer], both), dim=2)
        return seen[:, : keys.shape[1]], seen[:, keys.shape[1] :]


def stored(model, tokens):
    """What each layer's cache holds: [L, B, 2H, T, D]."""
    cache = GradientCache(model, tokens.device, tokens.shape[1], PLAIN)
    model(tokens, cache)
    return torch.stack(cache.stored)


def second_order(model, tokens, many, timing=PLAIN[0]) -> np.ndarray:
    """½ · δᵀ F δ of each block [n, B], mean over its positions: δ is the derivative of the logits along each of
    ``many`` changes [L, B, 2H, T, D], F the exact diag(q) − q qᵀ."""
    together, scale = torch.cat(many, dim=1), torch.zeros((), dtype=torch.float64, requires_grad=True)
    # Of the fused attention there is no second derivative.
    with sdpa_kernel(SDPBackend.MATH):
        logits = model(tokens.repeat(len(many), 1), Shifted(model, [scale * own for own in together], timing))
    # The derivative of a weighted sum of logits is linear in the weights, and that by a weight is its logit's.
    weights = torch.ones_like(logits, requires_grad=True)
    (along,) = torch.autograd.grad((weights * logits).sum(), scale, create_graph=True)
    (delta,) = torch.autograd.grad(along, weights)
    q = logits.detach().softmax(dim=-1)
    exact = (q * delta.square()).sum(dim=-1) - (q * delta).sum(dim=-1).square()
    return (exact.mean(dim=1) / 2).unflatten(0, (len(many), -1)).numpy()


def change_of(kept, layer, head, part, name):
    """The quantization errors of one unit, and zeros for all others."""
    change = torch.zeros_like(kept)
    for side, row in (("k", head), ("v", HEADS + head)):
        if side in part:
            change[layer][:, row] = read_back(kept[layer], name, layer)[:, row] - kept[layer][:, row]
    return change


def spread(a) -> np.ndarray:
    """Standard error of the mean of ½ · a² / T over the probes a [P, ...]."""
    return np.square(a).std(axis=0, ddof=1) / np.sqrt(len(a))


def test_every_unit_is_unbiased_within_the_spread_of_its_probes(studied):
    model, tokens, kept, found = studied
    units = [*product(range(LAYERS), range(HEADS), enumerate(QUANTIZED))]
    off = []
    for part in PARTS:
        error = spread(found.parts(part)) / (2 * found.tokens)
        changes = [change_of(kept, layer, head, part, name) for layer, head, (_, name) in units]
        for (layer, head, (index, _)), exact in zip(units, second_order(model, tokens, changes), strict=True):
            off.append((found.kl(part)[:, layer, head, index] - exact) / error[:, layer, head, index])
    off = np.concatenate(off)
    # Not one of them beyond what chance gives, and no common bias.
    assert np.abs(off).max() < 5 and 0.4 < np.sqrt(np.mean(off**2)) < 1.8


def test_one_set_of_gradients_scores_schemes_that_store_at_different_times():
    """A group of tokens that shares a scale, or a recent window, is read exactly for some steps: there the error is
    none. Each precision has its own second-order term, from the same passes."""
    model, tokens = model_and_tokens()
    kept = stored(model, tokens)
    names = ("int4", "rotated3", "int3-k.channel2", "int2-first1+recent2")
    values, error = window_projections(model, tokens, names, PROBES, MEMORY)
    found = Projections(values.numpy(), names, tokens.shape[1])
    off = []
    for index, name in enumerate(names):
        for side, part in enumerate("kv"):
            timing = Timing.of(precision(name).method(part))
            spread_of = spread(found.parts(part)) / (2 * found.tokens)
            units = [*product(range(LAYERS), range(HEADS))]
            changes = [change_of(kept, layer, head, part, name) for layer, head in units]
            many = second_order(model, tokens, changes, timing)
            for (layer, head), change, exact in zip(units, changes, many, strict=True):
                off.append((found.kl(part)[:, layer, head, index] - exact) / spread_of[:, layer, head, index])
                row = kept[layer][:, head + side * HEADS]
                wrong = change[layer][:, head + side * HEADS].square().sum((1, 2)) / row.square().sum((1, 2))
                assert torch.allclose(error[part, name][layer, head], wrong)
    off = np.concatenate(off)
    assert np.abs(off).max() < 5 and 0.4 < np.sqrt(np.mean(off**2)) < 1.8


def test_a_scheme_without_delay_has_the_same_projections_whatever_else_is_scored():
    model, tokens = model_and_tokens()
    alone, _ = window_projections(model, tokens, ("int4", "rotated4"), 3, MEMORY)
    beside, _ = window_projections(model, tokens, ("int4", "int4-channel2", "rotated4", "int4-k.recent2"), 3, MEMORY)
    assert torch.allclose(beside[..., [0, 2]], alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("unit", ["head", "keys-values"])
def test_a_policy_with_its_interactions_is_the_exact_second_order_term(studied, unit):
    model, tokens, kept, found = studied
    grid = PrecisionGrid((("int4", "bf16"), ("int8", "int2")), (("int3", "int4"), ("bf16", "int4")))
    change = torch.zeros_like(kept)
    for layer in range(LAYERS):
        for row, name in enumerate(grid.row(layer)):
            change[layer][:, row] = read_back(kept[layer], name, layer)[:, row] - kept[layer][:, row]
    apart = []
    for part in {"head": ("kv",), "keys-values": ("k", "v")}[unit]:
        for layer in range(LAYERS):
            for head in range(HEADS):
                apart.append(torch.zeros_like(change))
                for side, row in (("k", head), ("v", HEADS + head)):
                    if side in part:
                        apart[-1][layer][:, row] = change[layer][:, row]
    exact, *alone = second_order(model, tokens, [change, *apart])
    error = spread(found.of_policy(grid).sum(axis=(2, 3))) / (2 * found.tokens)
    assert (np.abs(found.joint_kl(grid) - exact) < 4 * error).all() and (error < 0.15 * exact).all()
    assert np.allclose(found.additive_kl(grid, unit), sum(alone), rtol=0.2)


def test_the_scores_have_the_covariance_of_the_fisher_matrix():
    logits = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = Scores(logits.repeat(10_000, 1, 1)).draw(draws(10_000, range(1), 3)[:, 0]).flatten(1)
    q = logits[0].softmax(dim=-1)
    expected = torch.block_diag(*(torch.diag(own) - torch.outer(own, own) for own in q))
    assert torch.allclose(drawn.T @ drawn / len(drawn), expected, atol=0.02)


def test_probes_and_blocks_draw_anew_whatever_goes_through_the_model_together():
    logits = torch.randn(1, 9, 30, generator=torch.Generator().manual_seed(0)).repeat(3, 1, 1)
    together = [Scores(logits).draw(each) for each in draws(3, range(3), 9)]
    for block in range(3):
        for probe, each in enumerate(draws(3, range(block, block + 1), 9)):
            assert torch.equal(Scores(logits[:1]).draw(each)[0], together[probe][block])
    drawn = torch.stack(together).flatten(0, 1).flatten(1)
    assert len(drawn.unique(dim=0)) == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_of_the_window_give_the_same_as_all_of_it(dtype):
    model, tokens = random_model(3, 2, 9, dtype=dtype), random_tokens(5, 8)
    one_block = graph_bytes(model, 8, 3, 1)
    told = []
    whole, error = window_projections(model, tokens, QUANTIZED, 3, MEMORY)
    for memory in (1, 4 * one_block):
        sliced, same = window_projections(model, tokens, QUANTIZED, 3, memory, told.append)
        assert torch.allclose(sliced, whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))
        assert all(torch.allclose(same[change], error[change], rtol=1e-4) for change in error)
    assert told == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.4, 0.8, 1.0])


def test_the_reference_is_that_of_a_sweep_and_the_first_position_has_no_effect():
    model, tokens = random_model(3, 2, 9), random_tokens(2, 8)
    cache = GradientCache(model, tokens.device, tokens.shape[1], PLAIN)
    logits = model(tokens, cache)
    assert torch.equal(logits.detach(), model(tokens, BlockCache(dense_grid(model))))
    assert all(torch.equal(both, both.to(torch.bfloat16).float()) for both in cache.stored)
    gradients = torch.autograd.grad(logits[:, :5].sum(), [zero for (zero,) in cache.added])
    # What a position stores is read by later ones only.
    assert all(not gradient[:, :, 4:].any() and gradient[:, :, :4].any() for gradient in gradients)


def test_against_the_measured_sweep_of_a_small_model():
    model, tokens = random_model(3, 4, 8, vocab=40), random_tokens(6, 24, vocab=40)
    values, error = window_projections(model, tokens, QUANTIZED, 64, MEMORY)
    found = Projections(values.numpy(), QUANTIZED, tokens.shape[1])
    setting = Setting("one-pass", "float32")
    sweeps = [sweep_layer(model, tokens, layer, changes(PARTS, QUANTIZED), setting, MEMORY) for layer in range(3)]
    for part in PARTS:
        for index, name in enumerate(QUANTIZED):
            change = part, name
            measured = torch.stack([sweep.kl[change] for sweep in sweeps]).mean(dim=2).flatten().numpy()
            estimated = found.kl(part).mean(axis=0)[..., index].ravel()
            for layer, sweep in enumerate(sweeps):
                assert torch.allclose(error[change][layer], sweep.error[change], rtol=1e-5)
            if name != "int2":
                assert rank_correlation(estimated, measured) > 0.9
                assert np.median(estimated / measured) == pytest.approx(1, abs=0.2)


def test_nan_in_the_keys_is_an_error_that_names_the_layer():
    model, tokens = random_model(2, 2, 4), random_tokens(1, 4)
    with torch.no_grad():
        model.blocks[1].K.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="layer 1, head 0: NaN or infinity in the keys"):
        window_projections(model, tokens, ("int8",), 1, MEMORY)
