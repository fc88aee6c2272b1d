"""The sweep against plain interventions, and against itself cut in other ways."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import random_model, random_tokens
from plain_cache import PlainCache

from kvstages.cache.interventions import read_back
from kvstages.cache.one_pass import DenseBlockCache
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.measure.execution import dense_grid
from kvstages.measure.metrics import divergence
from kvstages.measure.setting import Setting
from kvstages.measure.sweep import relative_error, sweep_layer
from kvstages.scores.columns import SCORED, changes

MEMORY = 1 << 30
CHANGES = (("kv", "int8"), ("kv", "int4"))


def sweep(model, tokens, layer, setting, memory=MEMORY, wanted=CHANGES, base=None) -> torch.Tensor:
    """[changes, H, B]."""
    found = sweep_layer(model, tokens, layer, wanted, setting, memory, base=base)
    return torch.stack([found.kl[change] for change in wanted])


@pytest.fixture(scope="module")
def study():
    """A decoder, tokens, and what one token at a time gives with the plain cache: a function of a policy's grid to its
    mean KL [B] against the unquantized reference. It is run once for each grid."""
    model, tokens = random_model(3, 2, 5, dtype=torch.float64), random_tokens(3, 9)

    def run(cache: PlainCache) -> torch.Tensor:
        return torch.cat([model(token, cache) for token in tokens.split(1, dim=1)], dim=1)

    reference = PlainCache(dense_grid(model))
    expected = run(reference)

    @cache
    def plain(grid: PrecisionGrid) -> torch.Tensor:
        return divergence(run(PlainCache(grid, reference)), expected).mean(dim=1)

    return model, tokens, plain


def changed(base: PrecisionGrid, layer: int, head: int, part: str, precision: str) -> PrecisionGrid:
    """A policy with one head of a layer changed, or all of them."""
    sides = [[list(row) for row in rows] for rows in (base.keys, base.values)]
    for side, rows in zip("kv", sides, strict=True):
        if part == "layer":
            rows[layer] = [precision] * len(rows[layer])
        elif side in part:
            rows[layer][head] = precision
    return PrecisionGrid(*(tuple(map(tuple, rows)) for rows in sides))


@pytest.mark.parametrize("execution", ["one-pass", "token-by-token"])
@pytest.mark.parametrize("layer", [0, 2])
def test_the_sweep_measures_what_plain_interventions_do(study, execution, layer):
    model, tokens, plain = study
    wanted = changes(SCORED, ("int8", "int3"))
    found = sweep_layer(model, tokens, layer, wanted, Setting(execution, "float64"), MEMORY).kl
    for part, precision in wanted:
        assert len(found[part, precision]) == (1 if part == "layer" else 2)
        for head, kl in enumerate(found[part, precision]):
            expected = plain(changed(dense_grid(model), layer, head, part, precision))
            assert torch.allclose(kl, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("execution", ["one-pass", "token-by-token"])
def test_around_a_policy_the_sweep_measures_what_plain_interventions_do(study, execution):
    model, tokens, plain = study
    base = PrecisionGrid(
        (("int4", "int8"), ("bf16", "int2"), ("int8",) * 2), (("bf16", "int8"), ("int3", "int4"), ("int4",) * 2)
    )
    wanted = (("kv", "int4"), ("k", "bf16"), ("v", "int2"), ("layer", "int4"))
    found = sweep_layer(model, tokens, 1, wanted, Setting(execution, "float64"), MEMORY, base=base)
    assert found.base_kl.min() > 0
    for part, precision in wanted:
        for head, kl in enumerate(found.kl[part, precision]):
            assert torch.allclose(kl, plain(changed(base, 1, head, part, precision)), rtol=1e-6, atol=0)
    # A change that the policy has already changes nothing: exactly the base's KL.
    unchanged = sweep_layer(model, tokens, 1, (("k", "int2"),), Setting(execution, "float64"), MEMORY, base=base)
    assert torch.equal(unchanged.kl["k", "int2"][1], unchanged.base_kl)


# Every pair of an execution, an arithmetic and a memory.
@pytest.mark.parametrize(
    ("execution", "dtype", "memory"),
    [
        ("one-pass", "float32", MEMORY),
        ("token-by-token", "float32", 1),
        ("one-pass", "bfloat16", 1),
        ("token-by-token", "bfloat16", MEMORY),
        ("one-pass", "float64", MEMORY),
        ("token-by-token", "float64", 1),
    ],
)
def test_an_intervention_that_changes_nothing_measures_exactly_zero(execution, dtype, memory):
    setting = Setting(execution, dtype)
    model, tokens = random_model(dtype=setting.dtype), random_tokens(2, 6)
    for layer in range(3):
        found = sweep_layer(model, tokens, layer, [(part, "bf16") for part in SCORED], setting, memory)
        for part in SCORED:
            assert found.kl[part, "bf16"].abs().max() == 0 == found.error[part, "bf16"].abs().max()
        assert found.base_kl.abs().max() == 0


@pytest.mark.parametrize("execution", ["one-pass", "token-by-token"])
def test_the_floor_is_what_the_smallest_change_does_and_lies_far_below_int8_in_fp32(execution):
    model, tokens = random_model(4, 2, 16), random_tokens(4, 16)
    wanted = (("kv", "int8"), ("kv", "compute-step"), ("kv", "bf16-step"))
    int8, floor, step = sweep(model, tokens, 1, Setting(execution, "float32"), wanted=wanted)
    assert 0 < floor.mean() < 1e-4 * int8.mean() and floor.mean() < 1e-4 * step.mean()
    model = random_model(4, 2, 16, dtype=torch.bfloat16)
    int8, floor, step = sweep(model, tokens, 1, Setting(execution, "bfloat16"), wanted=wanted)
    assert torch.equal(floor, step) and floor.mean() > 0.1 * int8.mean()


def reconstruction_error(both, part, name):
    return relative_error(read_back(both, name, 0) - both, both, part)


def test_the_reconstruction_error_of_a_hand_worked_example():
    """INT2 keeps the largest of two values and rounds the other to 0: off by 0.25 of 1.25, and by 1 of 10."""
    both = torch.tensor([[[[1.0, 0.5]], [[-3.0, 1.0]]]])
    for part, expected in (("k", 0.2), ("v", 0.1), ("kv", 0.3), ("layer", 0.3)):
        assert reconstruction_error(both, part, "int2").tolist() == [[pytest.approx(expected, rel=1e-12)]]
    assert reconstruction_error(torch.zeros(1, 2, 1, 2), "kv", "int2").tolist() == [[0.0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sweep_tells_the_reconstruction_error_of_what_the_cache_stores(dtype):
    setting = Setting("one-pass", dtype)
    model, tokens = random_model(3, 2, 9, dtype=setting.dtype), random_tokens(3, 12)
    found = sweep_layer(model, tokens, 1, [("kv", "int4")], setting, MEMORY).error["kv", "int4"]
    x = model.run_layers(model.embed(tokens), DenseBlockCache(), last=1)
    stored = torch.cat(model.blocks[1].projections(x)[1:], dim=1).to(torch.bfloat16).to(setting.dtype)
    assert torch.allclose(found, reconstruction_error(stored, "kv", "int4"), rtol=1e-9)


@settings(deadline=None, max_examples=25)
@given(
    execution=st.sampled_from(["one-pass", "token-by-token"]),
    blocks=st.integers(1, 5),
    length=st.integers(2, 10),
    heads=st.integers(1, 3),
    head_dim=st.integers(2, 9),
    memory=st.sampled_from([1, 60_000, 300_000]),
    seed=st.integers(0, 50),
)
def test_splitting_for_memory_changes_nothing(execution, blocks, length, heads, head_dim, memory, seed):
    model, tokens = random_model(2, heads, head_dim, seed=seed), random_tokens(blocks, length, seed=seed)
    setting = Setting(execution, "float32")
    whole, split = sweep(model, tokens, 0, setting), sweep(model, tokens, 0, setting, memory)
    assert (whole - split).abs().max() < 1e-6


@pytest.mark.parametrize("execution", ["one-pass", "token-by-token"])
def test_one_block_at_a_time_equals_all_together(execution):
    model, tokens = random_model(), random_tokens(4, 12)
    setting = Setting(execution, "float32")
    together = sweep(model, tokens, 1, setting)
    apart = torch.cat([sweep(model, tokens[block : block + 1], 1, setting) for block in range(4)], dim=2)
    assert (together - apart).abs().max() < 1e-6


def test_trials_apart_equal_trials_together():
    model, tokens = random_model(), random_tokens()
    setting = Setting("one-pass", "float32")
    together = sweep(model, tokens, 1, setting)
    apart = torch.cat([sweep(model, tokens, 1, setting, wanted=(change,)) for change in CHANGES])
    assert torch.equal(together, apart)


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="layer 3: the model has layers 0 to 2"):
        sweep(random_model(), random_tokens(), 3, Setting("one-pass", "float32"))


def test_progress_ends_at_one():
    told = []
    setting = Setting("token-by-token", "float32")
    sweep_layer(random_model(), random_tokens(), 0, CHANGES, setting, 1, told.append)
    assert told == sorted(told) and told[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("execution", ["one-pass", "token-by-token"])
@pytest.mark.parametrize("memory", [MEMORY, 150_000])
def test_what_lies_below_the_layer_is_run_once_for_all_interventions(monkeypatch, execution, memory):
    model, tokens = random_model(4, 2, 8), random_tokens(3, 12)
    rows = []
    original = type(model.blocks[0]).projections
    monkeypatch.setattr(
        type(model.blocks[0]),
        "projections",
        lambda block, x: rows.append(x.shape[0] * x.shape[1]) or original(block, x),
    )
    sweep(model, tokens, 2, Setting(execution, "float32"), memory)
    interventions = 1 + 2 * 2
    # A pass over all layers records the rounding; in one-pass it is the one that gives what lies below, too.
    recorded, below, intervened, above = 4, 2 if execution == "token-by-token" else 0, 1, 1
    # The last group may be filled up with the base; nothing else is run twice but what the recording needs.
    needed = tokens.numel() * (recorded + below + intervened + interventions * above)
    assert needed <= sum(rows) <= needed + tokens.numel() * interventions
