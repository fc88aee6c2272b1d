"""Adaptation: noise and straight-through caches, the batches, the loss, the arms."""

from __future__ import annotations

import itertools

import pytest
import torch
from models import all_logits, random_model, random_tokens
from torch import nn

from kvstages.cache.one_pass import BlockCache
from kvstages.cache.packed import PackedCache
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import MAX_CODES
from kvstages.measure import adaptation
from kvstages.measure.adaptation import (
    NOISE,
    NONE,
    STRAIGHT_THROUGH,
    Arm,
    adapt,
    change,
    losses,
    training_cache,
)
from kvstages.measure.adapted import evaluate_adapted
from kvstages.measure.frozen import Frozen, batches, ordered_batches, shared
from kvstages.measure.metrics import divergence
from kvstages.measure.setting import Setting
from kvstages.measure.training_caches import NoiseCache, StraightThroughCache

MEMORY = 1 << 30
LAYERS, HEADS = random_model().shape.layers, random_model().shape.heads


def uniform(precision: str) -> PrecisionGrid:
    return PrecisionGrid.uniform(LAYERS, HEADS, precision)


def arm(cache: str | None = None, precision: str = "int4", **other: float) -> Arm:
    settings = {
        "steps": 6, "batch": 2, "learning_rate": 1e-3, "weight_decay": 0.01, "clip": 1.0, "beta": 1.0, **other
    }  # fmt: skip
    return Arm(cache, None if cache is None else uniform(precision), **settings)


def train(model, tokens, settings, seed=0, memory=MEMORY, frozen=None, **more):
    frozen = frozen or Frozen(random_model(dtype=model.dtype), tokens, settings.batch, memory)
    return adapt(model, tokens, settings, seed, frozen, memory, **more)


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("precision", MAX_CODES)
def test_the_noise_is_uniform_within_half_a_step_and_fresh(precision):
    keys, values = torch.randn(2, 4, 3, 50, 16)
    cache = NoiseCache(PrecisionGrid.uniform(1, 3, precision), torch.Generator().manual_seed(0))
    found = cache.update(keys, values, 0)
    for x, noisy in zip((keys, values), found, strict=True):
        share = (noisy - x) * 2 * MAX_CODES[precision] / x.abs().amax(dim=-1, keepdim=True)
        assert share.abs().max() <= 1 + 1e-4 and share.abs().max() > 0.99
        assert abs(float(share.mean())) < 0.02 and float(share.var()) == pytest.approx(1 / 3, rel=0.03)
    assert not torch.equal(found[0] - keys, found[1] - values)
    assert not torch.equal(cache.update(keys, values, 0)[0], found[0])


def test_the_noise_follows_each_heads_precision_of_keys_and_of_values():
    grid = PrecisionGrid.of_record({"keys": [["int8", "bf16"]], "values": [["int2", "int4"]]})
    keys, values = torch.randn(2, 4, 2, 50, 16)
    found = NoiseCache(grid, torch.Generator().manual_seed(0)).update(keys, values, 0)
    for x, noisy, codes in zip((keys, values), found, ((127, None), (1, 7)), strict=True):
        for head, code in enumerate(codes):
            moved = (noisy - x)[:, head] / x[:, head].abs().amax(dim=-1, keepdim=True)
            half = 0.0 if code is None else 1 / (2 * code)
            assert float(moved.abs().max()) == pytest.approx(half, rel=0.02)
            assert abs(float(moved.mean())) <= 0.05 * half


def test_noise_imitates_published_precisions_only():
    with pytest.raises(
        ValueError, match=r"noise like rotated4: expected a policy of bf16, int8, int4, int3, int2 alon"
    ):
        NoiseCache(uniform("rotated4"), torch.Generator())


@pytest.mark.parametrize("precision", ["int4", "int2", "rotated3", "debiased2"])
def test_the_straight_through_forward_pass_is_the_one_pass_cache_and_the_packed_ones_reconstruction(precision):
    model = random_model()
    width = model.shape.key_width
    grid = PrecisionGrid.of_record({"keys": [[precision, "bf16"]] * 2, "values": [["int3", precision]] * 2})
    both = torch.randn(2, 3, HEADS, 8, width)
    found = StraightThroughCache(model, grid).update(*both, 0)
    for own, other in zip(found, BlockCache(grid, contexts=model.contexts).update(*both, 0), strict=True):
        assert torch.equal(own, other)
    packed = PackedCache(grid, 3, width, torch.float32, 8, contexts=model.contexts)
    read = [packed.update(both[0][:, :, t : t + 1], both[1][:, :, t : t + 1], 0) for t in range(8)]
    for side, own in enumerate(found):
        past, exact = own.chunk(2, dim=2)
        # What the last step reads of the past, and its own key and value.
        assert torch.equal(past[:, :, :7], read[-1][side][:, :, :7])
        assert torch.equal(exact[:, :, 7:], read[-1][side][:, :, 7:])


def test_straight_through_gradients_take_rounding_for_the_identity():
    keys, values = torch.randn(2, 1, HEADS, 5, random_model().shape.key_width)
    keys.requires_grad_()
    seen, _ = StraightThroughCache(random_model(), uniform("int2")).update(keys, values, 0)
    weight = torch.randn_like(seen)
    (seen * weight).sum().backward()
    past, own = weight.chunk(2, dim=2)
    assert torch.equal(keys.grad, past + own)


class Replayed:
    """A training cache whose changes of keys and values are recorded once, and from then on added as constants."""

    def __init__(self, cache):
        self.cache, self.added = cache, {}

    def update(self, keys, values, layer):
        if layer not in self.added:
            found = self.cache.update(keys, values, layer)
            both = zip(found, (keys, values), strict=True)
            self.added[layer] = [(seen - x.repeat(1, 1, seen.shape[2] // x.shape[2], 1)).detach() for seen, x in both]
            return found
        both = zip(self.added[layer], (keys, values), strict=True)
        return tuple(added + x.repeat(1, 1, added.shape[2] // x.shape[2], 1) for added, x in both)

    def __getattr__(self, name):
        return getattr(self.cache, name)


@pytest.mark.parametrize("cache", [None, NOISE, STRAIGHT_THROUGH])
def test_gradients_are_those_of_finite_differences(cache, monkeypatch):
    """In FP64, on a weight of each kind. What noise or rounding adds counts as a constant, so it is one here."""
    model, tokens = random_model(dtype=torch.float64), random_tokens(2)
    reference = Frozen(random_model(dtype=torch.float64, seed=5), tokens, 2, MEMORY)
    settings = arm(cache, "int3", steps=1, learning_rate=0.0, weight_decay=0.0, clip=1e9)
    replayed = Replayed(training_cache(model, settings, torch.Generator().manual_seed(1)))
    monkeypatch.setattr(adaptation, "training_cache", lambda *given: replayed)
    gradients: dict[str, torch.Tensor] = {}

    seen: dict[str, torch.Tensor] = {}
    step_of = adaptation.AdamW.step

    def look(optimizer):
        seen.update((name, parameter.grad.clone()) for name, parameter in model.named_parameters())
        step_of(optimizer)

    monkeypatch.setattr(adaptation.AdamW, "step", look)

    def loss(kept: dict | None = None) -> float:
        (step,) = train(model, tokens, settings, frozen=reference)
        if kept is not None:
            kept |= seen
        return step["loss"]

    loss(gradients)
    for name in ("blocks.0.K.weight", "blocks.1.V.bias", "blocks.2.mlp.0.weight", "lm_head.weight"):
        flat, at = model.get_parameter(name).data.view(-1), int(gradients[name].abs().argmax())
        kept, size = float(flat[at]), 3e-3
        flat[at] = kept + size
        above = loss()
        flat[at] = kept - size
        below = loss()
        flat[at] = kept
        # Losses are summed in FP32.
        assert (above - below) / (2 * size) == pytest.approx(float(gradients[name].view(-1)[at]), rel=0.01)


def test_the_published_arm_is_a_plain_loop_bit_for_bit():
    """Three steps in BF16 as they were published: PyTorch's own optimizer and functions, the reference run along."""
    tokens, bits = random_tokens(5), torch.bfloat16
    student, plain, reference = (random_model(dtype=bits) for _ in range(3))
    train(student, tokens, arm(NOISE, steps=3, learning_rate=1e-2), 1337)

    class Noise:
        def update(self, keys, values, layer):
            return self.noisy(keys), self.noisy(values)

        def noisy(self, x):
            half = x.detach().abs().amax(-1, keepdim=True) / 14
            return x + half * (torch.rand(x.shape, generator=generator) * 2 - 1).to(x.dtype)

        def mask(self, new, layer):
            return torch.ones(new, new, dtype=torch.bool).tril()

        def seen(self, layer=0):
            return 0

    generator = torch.Generator().manual_seed(1337)
    plain.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01, fused=False, foreach=False)
    for rows in ([0, 1], [2, 3], [4, 0]):
        batch = tokens[rows]
        with torch.no_grad():
            log_q = reference(batch).float().log_softmax(-1)
        log_p = plain(batch, Noise()).float().log_softmax(-1)
        entropy = nn.functional.nll_loss(log_p[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        distance = (log_p.exp() * (log_p - log_q)).sum(-1).sum()
        optimizer.zero_grad()
        (entropy / batch[:, 1:].numel() + distance / batch.numel()).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    assert torch.equal(weights(student), weights(plain))
    assert not torch.equal(weights(student), weights(reference))


def test_batches_go_in_order_and_round_the_window():
    assert list(itertools.islice(ordered_batches(6, 4), 4)) == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5], [0, 1, 2, 3]]


def test_one_pass_over_the_published_window_is_14_steps():
    seen = [block for batch in itertools.islice(ordered_batches(56, 4), 14) for block in batch]
    assert seen == list(range(56))


@pytest.mark.parametrize(("blocks", "batch"), [(56, 4), (6, 4)])
def test_a_shuffled_round_has_every_batch_once_in_an_order_of_its_seed(blocks, batch):
    whole = batches(blocks, batch)
    first, again, other = (
        list(itertools.islice(ordered_batches(blocks, batch, seed), 3 * len(whole))) for seed in (1, 1, 2)
    )
    rounds = [first[start : start + len(whole)] for start in range(0, len(first), len(whole))]
    assert all(sorted(each) == sorted(whole) for each in rounds)
    assert first == again and first != other and first != 3 * whole
    if len(whole) > 3:
        assert rounds[0] != rounds[1] != rounds[2]


def test_the_loss_is_cross_entropy_and_kl():
    logits, reference = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    tokens = torch.randint(7, (2, 5))
    following = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=NONE)
    cross_entropy, kl = losses(logits, following, torch.log_softmax(reference, -1))
    log_p = torch.log_softmax(logits, -1)
    by_hand = -torch.stack([log_p[b, t, tokens[b, t + 1]] for b in range(2) for t in range(4)]).mean()
    assert float(cross_entropy) / 8 == pytest.approx(float(by_hand), rel=1e-5)
    assert float(kl) / 10 == pytest.approx(float(divergence(logits, reference).mean()), rel=1e-5)


def test_a_seed_gives_the_same_weights_and_another_seed_others():
    tokens = random_tokens(5)
    found = []
    for seed in (1, 1, 2):
        model = random_model()
        found.append((train(model, tokens, arm(NOISE), seed), weights(model)))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][1], found[2][1])
    assert len(found[0][0]) == 6 and set(found[0][0][0]) == {"loss", "cross_entropy", "kl", "gradient_norm"}


@pytest.mark.parametrize("cache", [None, STRAIGHT_THROUGH])
def test_without_noise_a_seed_draws_the_order_of_a_shuffled_arm_and_nothing_else(cache):
    found = []
    for shuffled, seed in ((False, 1), (False, 2), (True, 1), (True, 1), (True, 2)):
        model = random_model()
        train(model, random_tokens(5), arm(cache, shuffled=shuffled), seed)
        found.append(weights(model))
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[2]) and not torch.equal(found[3], found[4])


def test_arms_of_one_seed_take_the_same_blocks_at_each_step():
    """Told from the cross entropy of models that do not move, which differs from batch to batch."""
    still = {"learning_rate": 0.0, "weight_decay": 0.0, "shuffled": True, "steps": 10}
    tokens = random_tokens(10)
    curves = [
        [step["cross_entropy"] for step in train(random_model(), tokens, arm(cache, "int8", **still), 4)]
        for cache in (None, NOISE, STRAIGHT_THROUGH)
    ]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=0.01)
    assert max(curves[0]) > 1.05 * min(curves[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_student_that_has_not_moved_and_hears_no_noise_is_the_reference_exactly(dtype):
    for batch in (1, 2, 3):
        still = arm(batch=batch, learning_rate=0.0, weight_decay=0.0)
        assert [step["kl"] for step in train(random_model(dtype=dtype), random_tokens(4), still)] == [0.0] * 6


def test_training_lowers_the_loss():
    tokens = random_tokens(4)
    settings = arm(steps=30, batch=4, learning_rate=3e-3, weight_decay=0.0, beta=0.0)
    control = train(random_model(), tokens, settings)
    assert control[-1]["loss"] < control[0]["loss"] - 0.1
    noise = train(random_model(), tokens, arm(NOISE, steps=1, batch=4))
    assert noise[0]["kl"] > 1e-6
    assert noise[0]["loss"] == pytest.approx(noise[0]["cross_entropy"] + noise[0]["kl"], rel=1e-6)


def test_straight_through_training_takes_away_what_the_quantizer_adds():
    """On the training blocks themselves, where a gradient that points elsewhere would not."""
    tokens = random_tokens(4)
    settings = arm(STRAIGHT_THROUGH, "int2", steps=40, batch=4, learning_rate=3e-3, weight_decay=0.0, beta=30.0)
    curve = train(random_model(), tokens, settings)
    assert curve[-1]["kl"] < 0.7 * curve[0]["kl"]


@pytest.mark.parametrize("cache", [None, NOISE, STRAIGHT_THROUGH])
def test_a_loss_that_blows_up_is_an_error_that_names_the_step(cache):
    with pytest.raises(ValueError, match=r"^adaptation, seed 7, step [1-9]\d*: .*; lower the learning rate$"):
        train(random_model(), random_tokens(4), arm(cache, steps=50, learning_rate=1e30), 7)


@pytest.mark.parametrize("cache", [None, NOISE, STRAIGHT_THROUGH])
def test_slices_of_positions_train_alike(cache):
    # A rounding of the quantizer that falls the other way makes a step of its own: one step, then.
    tokens, settings = random_tokens(4), arm(cache, steps=1 if cache == STRAIGHT_THROUGH else 6)
    curves, moved = [], []
    for memory in (MEMORY, 20_000, 1):
        model = random_model()
        curves.append(train(model, tokens, settings, 3, memory))
        moved.append(weights(model))
    for curve, weight in zip(curves[1:], moved[1:], strict=True):
        # Single weights whose gradient is 0 but for rounding may go either way.
        assert (weight - moved[0]).abs().mean() < 1e-5
        for step, other in zip(curve, curves[0], strict=True):
            assert step == pytest.approx(other, rel=1e-3, abs=1e-6)


def test_measuring_between_the_steps_changes_nothing():
    tokens, model = random_tokens(4), random_model()
    measured = train(model, tokens, arm(NOISE), 3, after=lambda step: model(tokens))
    assert measured == train(random_model(), tokens, arm(NOISE), 3)


def test_one_reference_serves_all_arms_of_a_dtype():
    made = []

    def make() -> Frozen:
        made.append(Frozen(random_model(), random_tokens(4), 2, MEMORY))
        return made[-1]

    first = shared("a", make)
    assert shared("a", make) is first and len(made) == 1
    shared("b", make), shared("c", make)
    # Of references that are not asked for again two at most are kept.
    assert shared("a", make) is not first


def test_the_change_of_weights():
    before, model = random_model(), random_model()
    with torch.no_grad():
        model.lm_head.bias[:3] += torch.tensor([1.0, -2.0, 4.0])
    found = change(model, before)
    count = weights(model).numel()
    assert found["weights"] == count and found["changed_share"] == 3 / count
    assert found["mean_change"] == pytest.approx(7 / count) and found["largest_change"] == pytest.approx(4.0)
    assert found["relative_change"] == pytest.approx(21**0.5 / float(weights(before).norm()), rel=1e-5)


def test_policies_that_coincide_are_measured_alike_and_bf16_is_its_own_reference():
    model, tokens = random_model(), random_tokens(3)
    grids = [uniform(name) for name in ("int2", "bf16", "int4", "bf16", "int2")]
    setting = Setting("one-pass", "float32")
    found = evaluate_adapted(
        model, tokens, grids, all_logits(random_model(seed=5), tokens, grids[1], setting), setting, MEMORY
    )
    assert torch.equal(found[0], found[4]) and torch.equal(found[1], found[3])
    own_kl, own_agreement = found[1, :, 2], found[1, :, 3]
    assert (own_kl == 0).all() and (own_agreement == 1).all() and (found[1, :, 0] > 0).all()
    assert not torch.equal(found[0], found[2])
