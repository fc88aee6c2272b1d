"""Parallel and token-by-token execution are one study: equal up to rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import all_logits, random_model, random_tokens
from score_tables import head_table

from kvstages.cache.one_pass import BlockCache
from kvstages.cache.packed import PackedCache
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import BITS, MAX_CODES
from kvstages.cache.quantizer import choose_scale, quantize
from kvstages.measure.execution import blocks_per_pass, dense_grid
from kvstages.measure.metrics import divergence
from kvstages.measure.setting import Setting
from kvstages.measure.sweep import sweep_layer
from kvstages.policies.allocators import greedy
from kvstages.policies.budgets import Budget
from kvstages.scores.columns import changes

MEMORY = 1 << 30
PRECISIONS = tuple(BITS)


@settings(deadline=None, max_examples=40)
@given(
    data=st.data(),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    head_dim=st.integers(2, 9),
    blocks=st.integers(1, 4),
    length=st.integers(1, 12),
)
def test_in_fp64_the_logits_agree_to_rounding(data, layers, heads, head_dim, blocks, length):
    rows = st.lists(
        st.lists(st.sampled_from(PRECISIONS), min_size=heads, max_size=heads), min_size=layers, max_size=layers
    )
    grid = PrecisionGrid(*(tuple(map(tuple, data.draw(rows))) for _ in range(2)))
    seed = data.draw(st.integers(0, 99))
    model = random_model(layers, heads, head_dim, seed=seed, dtype=torch.float64)
    tokens = random_tokens(blocks, length, seed=seed)
    one_pass = all_logits(model, tokens, grid, Setting("one-pass", "float64"))
    token_by_token = all_logits(model, tokens, grid, Setting("token-by-token", "float64"))
    assert (one_pass - token_by_token).abs().max() < 1e-12


@pytest.mark.parametrize("length", [12, 30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_head_that_rounds_nothing_leaves_the_other_layers_path_alone(dtype, length):
    """Position 0 sees only itself, and INT8 in the last layer changes no layer below: the paths are the same."""
    setting = Setting("one-pass", dtype)
    model, tokens = random_model(dtype=setting.dtype), random_tokens(5, length)
    reference = all_logits(model, tokens, dense_grid(model), setting)
    policy = PrecisionGrid.of_heads([["bf16"] * 2, ["bf16"] * 2, ["int8", "bf16"]])
    kl = divergence(all_logits(model, tokens, policy, setting), reference)
    assert kl[:, 0].abs().max() == 0 and kl[:, 1:].max() > 0


@pytest.mark.parametrize("execution", ["one-pass", "token-by-token"])
def test_position_zero_never_changes(execution):
    setting = Setting(execution, "float32")
    model, tokens = random_model(), random_tokens()
    reference = all_logits(model, tokens, dense_grid(model), setting)
    quantized = all_logits(model, tokens, PrecisionGrid.uniform(3, 2, "int4"), setting)
    kl = divergence(quantized, reference)
    assert kl[:, 0].abs().max() < 1e-12 and kl[:, 1:].min() > 0


@pytest.fixture(scope="module")
def both() -> dict[str, dict]:
    """Sensitivities and joint KL of several policies under both executions, FP32, 4 layers × 4 heads."""
    model, tokens = random_model(4, 4, 16, vocab=211, context=48), random_tokens(6, 48, 211)
    found: dict[str, dict] = {}
    for execution in ("one-pass", "token-by-token"):
        setting = Setting(execution, "float32")
        wanted = changes(("kv",), ("int8", "int4"))
        sweeps = [sweep_layer(model, tokens, layer, wanted, setting, MEMORY) for layer in range(4)]
        scores = {p: [sweep.kl["kv", p].mean(dim=1).tolist() for sweep in sweeps] for p in ("int8", "int4")}
        reference = all_logits(model, tokens, dense_grid(model), setting)
        budgets = {share: share * sum(map(sum, scores["int4"])) for share in (0.05, 0.3, 0.7, 1.1)}
        table = head_table(scores, 16, 48)
        policies = {
            share: table.grid(greedy(table, Budget(budget, "nats")).choice) for share, budget in budgets.items()
        }
        policies |= {p: PrecisionGrid.uniform(4, 4, p) for p in ("int8", "int4")}
        kl = {
            name: float(divergence(all_logits(model, tokens, grid, setting), reference).mean())
            for name, grid in policies.items()
        }
        found[execution] = {"scores": scores, "policies": policies, "kl": kl}
    return found


def test_in_fp32_single_head_kl_agrees_to_one_percent_and_the_least_to_two(both):
    # A rounding to BF16 that flips is a larger share of a smaller KL.
    for precision in ("int8", "int4"):
        one_pass = torch.tensor(both["one-pass"]["scores"][precision])
        token_by_token = torch.tensor(both["token-by-token"]["scores"][precision])
        apart, least = (one_pass / token_by_token - 1).abs(), token_by_token < 1e-6
        assert apart[~least].max() < 0.01 and (apart[least] < 0.02).all()


def test_in_fp32_the_mean_kl_of_every_policy_agrees_to_one_percent(both):
    for name, kl in both["token-by-token"]["kl"].items():
        assert both["one-pass"]["kl"][name] == pytest.approx(kl, rel=0.01)


def test_both_executions_allocate_alike(both):
    assert both["one-pass"]["policies"] == both["token-by-token"]["policies"]


class Recording:
    """A cache that remembers the codes of every key and value that passes through it."""

    def __init__(self, cache, levels: int):
        self.cache, self.levels, self.codes = cache, levels, {}

    def update(self, keys, values, layer):
        both = torch.stack((keys, values))
        self.codes.setdefault(layer, []).append(quantize(both, choose_scale(both), self.levels))
        return self.cache.update(keys, values, layer)

    def mask(self, new, layer):
        return self.cache.mask(new, layer)

    def seen(self):
        return self.cache.seen()


class Replaying(PackedCache):
    """A packed cache that gives back another run's reconstructed past and own positions, position by position."""

    def __init__(self, past, *arguments):
        super().__init__(*arguments)
        self.given = past

    def update(self, keys, values, layer):
        start = self.layers[layer].length
        super().update(keys, values, layer)
        block = self.given[layer][0].shape[2] // 2
        rows = [*range(start), block + start]
        return tuple(half[:, :, rows] for half in self.given[layer])


def test_a_few_flipped_codes_are_the_whole_difference_in_fp32():
    """Few codes differ between the executions; with the same reconstructed past the logits agree to FP32 rounding."""
    model, tokens = random_model(4, 4, 16, vocab=211, context=48), random_tokens(6, 48, 211)
    grid = PrecisionGrid.uniform(4, 4, "int8")
    one_pass = Recording(BlockCache(grid), MAX_CODES["int8"])
    seen = {}
    inner = one_pass.cache.update

    def keep(keys, values, layer):
        seen[layer] = inner(keys, values, layer)
        return seen[layer]

    one_pass.cache.update = keep
    reference = model(tokens, one_pass)
    token_by_token = Recording(PackedCache(grid, 6, 16, torch.float32, 48), MAX_CODES["int8"])
    replayed = Replaying(seen, grid, 6, 16, torch.float32, 48)
    steps = [tokens[:, t : t + 1] for t in range(48)]
    apart = torch.cat([model(step, token_by_token) for step in steps], dim=1)
    together = torch.cat([model(step, replayed) for step in steps], dim=1)

    flipped = total = 0
    for layer in range(4):
        codes = torch.cat(token_by_token.codes[layer], dim=3)
        gap = (codes.int() - one_pass.codes[layer][0].int()).abs()
        assert gap.max() <= 1
        flipped, total = flipped + int((gap > 0).sum()), total + gap.numel()
    assert flipped / total < 1e-3
    assert (together - reference).abs().max() < 1e-4
    assert (apart - reference).abs().max() < 0.05


@pytest.mark.parametrize("execution", ["one-pass", "token-by-token"])
def test_memory_splits_the_blocks_but_changes_nothing(execution):
    setting = Setting(execution, "float32")
    model, tokens = random_model(), random_tokens(7, 12)
    grid = PrecisionGrid.of_heads([["int4", "int8"]] * 3)
    whole = all_logits(model, tokens, grid, setting)
    for memory in (1, 60_000):
        assert blocks_per_pass(model, 7, 12, execution, memory) < 7
        assert torch.allclose(all_logits(model, tokens, grid, setting, memory), whole, atol=1e-5)
